"""What the store's index costs, beside a plain dict with an OrderedDict for the order of use, in one run.

Both hold the same full pool and serve the same requests: batches of new pages for which old ones are evicted,
their publication, matches and the release of what was matched; and a match of one very long chain. Times are those
of the process on its processor, medians over many calls, so that what else runs on the machine counts little.
"""

from __future__ import annotations

import gc
import json
import platform
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

import numpy as np

from mlkv.errors import MLKVError
from mlkv.store.index import KEY_BYTES, Index
from mlkv.store.policy import DEFAULT_POLICY, POLICIES, PolicyName

LONG_CHAIN: Final = 16_384
"""Pages: a context of a million tokens in pages of 64."""

BATCH: Final = 512
SHORT_BATCH: Final = 32
_BATCHES: Final = 400
_LONG_MATCHES: Final = 30
_MIN_PAGES: Final = 4 * LONG_CHAIN

_Result = TypeVar("_Result")


class _Store(Protocol):
    """What is measured, in the words of the index. Grants are passed back as they came."""

    def reserve(self, keys: bytes) -> Any: ...

    def commit(self, grant: Any) -> None: ...

    def match(self, keys: bytes) -> Any: ...

    def release(self, grant: Any) -> None: ...


class _Indexed:
    def __init__(self, num_pages: int, policy: PolicyName) -> None:
        self.index = Index(num_pages, POLICIES[policy](num_pages))

    def reserve(self, keys: bytes) -> Any:
        return self.index.reserve(keys)

    def commit(self, grant: Any) -> None:
        self.index.commit(grant.id, len(grant.pages))

    def match(self, keys: bytes) -> Any:
        return self.index.match(keys, len(keys) // KEY_BYTES)

    def release(self, grant: Any) -> None:
        self.index.release([grant.id])


class _Plain:
    """The usual way: a dict from keys to pages, an OrderedDict in order of use, a count of pins for each page."""

    def __init__(self, num_pages: int) -> None:
        self._page_of: dict[bytes, int] = {}
        self._order: OrderedDict[bytes, None] = OrderedDict()
        self._pins = [0] * num_pages
        self._free = list(range(num_pages))

    def reserve(self, keys: bytes) -> Any:
        grant = []
        for key in _split(keys):
            if key in self._page_of:
                continue
            while not self._free:
                victim = next(iter(self._order))
                del self._order[victim]
                page = self._page_of.pop(victim)
                if self._pins[page]:
                    raise MLKVError("the benchmark pinned what it evicts")
                self._free.append(page)
            page = self._free.pop()
            self._pins[page] = 1
            grant.append((key, page))
        return grant

    def commit(self, grant: Any) -> None:
        for key, page in reversed(grant):  # suffixes leave first
            self._page_of[key] = page
            self._order[key] = None
            self._pins[page] = 0

    def match(self, keys: bytes) -> Any:
        grant = []
        for key in _split(keys):
            page = self._page_of.get(key)
            if page is None:
                break
            self._pins[page] += 1
            grant.append((key, page))
        for key, _ in reversed(grant):
            self._order.move_to_end(key)
        return grant

    def release(self, grant: Any) -> None:
        for _, page in grant:
            self._pins[page] -= 1


@dataclass
class _Times:
    """CPU seconds of each call."""

    calls: dict[str, list[float]] = field(default_factory=dict)

    def timed(self, name: str, call: Callable[[Any], _Result], argument: Any) -> _Result:
        begin = time.thread_time_ns()
        result = call(argument)
        self.calls.setdefault(name, []).append((time.thread_time_ns() - begin) * 1e-9)
        return result


def run(num_pages: int, policy: PolicyName = DEFAULT_POLICY) -> dict[str, Any]:
    """Measure a pool of `num_pages`. Returns what `--json` writes. Raises MLKVError for one that is too small."""
    if num_pages < _MIN_PAGES:
        raise MLKVError(f"the benchmark of the store needs a pool of {_MIN_PAGES} pages or more, not {num_pages}")
    indexed = _Indexed(num_pages, policy)
    return {
        "machine": platform.platform(),
        "pages": num_pages,
        "policy": policy,
        "bytes_per_page": indexed.index.num_bytes / num_pages,
        "index": _measure(indexed, num_pages),
        "plain": _measure(_Plain(num_pages), num_pages),
    }


def _measure(store: _Store, num_pages: int) -> dict[str, Any]:
    """Fill the pool, then measure it while it is full."""
    chance = np.random.default_rng(0)
    times = _Times()
    long_chain = chance.bytes(LONG_CHAIN * KEY_BYTES)
    for _ in range(num_pages // BATCH + 1):
        keys = chance.bytes(BATCH * KEY_BYTES)
        store.commit(times.timed("fill", store.reserve, keys))
    store.commit(store.reserve(long_chain))
    gc.collect()
    for _ in range(_LONG_MATCHES):
        store.release(times.timed("match_long", store.match, long_chain))
    for length in (BATCH, SHORT_BATCH):
        for keys in _batches(chance, length):
            grant = times.timed(f"reserve_{length}", store.reserve, keys)
            times.timed(f"commit_{length}", store.commit, grant)
            lease = times.timed(f"match_{length}", store.match, keys)
            times.timed(f"release_{length}", store.release, lease)
    rates = {
        name: int(name.rpartition("_")[2]) / float(np.median(calls))
        for name, calls in times.calls.items()
        if name not in ("fill", "match_long")
    }
    return {
        "match_long_s": float(np.median(times.calls["match_long"])),
        "pages_per_s": rates,
        "longest_call_s": max(max(calls) for calls in times.calls.values()),
    }


def _batches(chance: np.random.Generator, length: int) -> Iterator[bytes]:
    for _ in range(_BATCHES):
        yield chance.bytes(length * KEY_BYTES)


def _split(keys: bytes) -> list[bytes]:
    return [keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)]


def report(result: dict[str, Any]) -> str:
    """The result as a table for people."""
    index, plain = result["index"], result["plain"]
    lines = [
        f"index of {result['pages']} pages, policy {result['policy']}: "
        f"{result['bytes_per_page']:.0f} bytes a page; times of the processor",
        f"{'':28}{'index':>14}{'dict':>14}{'ratio':>8}",
        _row(f"match {LONG_CHAIN} keys, ms", 1e3 * index["match_long_s"], 1e3 * plain["match_long_s"], True),
    ]
    for name, rate in index["pages_per_s"].items():
        operation, _, length = name.rpartition("_")
        what = f"{'reserve + evict' if operation == 'reserve' else operation}, {length} pages"
        lines.append(_row(f"{what}, M/s", 1e-6 * rate, 1e-6 * plain["pages_per_s"][name], False))
    lines.append(_row("longest call, ms", 1e3 * index["longest_call_s"], 1e3 * plain["longest_call_s"], True))
    return "\n".join(lines)


def _row(what: str, index: float, plain: float, lower_is_better: bool) -> str:
    ratio = plain / index if lower_is_better else index / plain
    return f"{what:28}{index:14.3f}{plain:14.3f}{ratio:7.1f}x"


def write(result: dict[str, Any], path: Path) -> None:
    """Raises MLKVError when the file cannot be written."""
    try:
        path.write_text(json.dumps(result, indent=2) + "\n")
    except OSError as error:
        raise MLKVError(f"cannot write {path}: {error.strerror}") from None
