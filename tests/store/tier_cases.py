"""A store above tiers that a test holds by latches, without processes: what the tests of lower tiers share."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from store_helpers import DEADLINE_S, chain, eventually, key

from mlkv.layout import KVLayout
from mlkv.page import PageIdentity, binding, checksum_table, payload_checksum, verify_own_header, write_identity
from mlkv.store import wire
from mlkv.store.index import Index
from mlkv.store.lower import LowerTiers
from mlkv.store.policy import LRU
from mlkv.store.pool import HostPool, create_pool_file
from mlkv.store.service import StoreService
from mlkv.store.tiers.base import ReadOnlyPages, StoredPage, Tier, TierStats, WritablePages
from mlkv.store.tiers.breaker import Breaker
from mlkv.store.tiers.runner import TierRunner
from mlkv.store.writeback import Admission

import torch  # isort: skip

LAYOUT = KVLayout.gqa(num_layers=1, num_kv_heads=2, head_dim=8, dtype=torch.float32, page_tokens=4)
PAGE_BYTES = LAYOUT.page_bytes
NAMESPACE = b"n" * 16
GROUP = b"g"


def make_page(text: str, generation: int, *, parent: bytes | None = None, namespace: bytes = NAMESPACE) -> bytes:
    """The page of the last letter of `text`, as its writer makes it; or one that says something else of itself."""
    page = np.full(PAGE_BYTES, ord(text[-1]) % 251, np.uint8)
    if parent is None:
        parent = key(text[:-1]) if len(text) > 1 else NAMESPACE
    write_identity(page, LAYOUT, PageIdentity(key(text), parent, namespace, generation))
    for head in range(LAYOUT.num_kv_heads):
        start = LAYOUT.head_offset(head)
        total = payload_checksum(page[start : start + LAYOUT.head_bytes]) + binding(key(text), generation, head)
        checksum_table(page, LAYOUT)[head] = total % 2**64
    return page.tobytes()


class LatchTier(Tier):
    """Pages in a dict. Every kind of call can be held, and told to misbehave.

    `faults[kind]` maps the number of a call of that kind, from 1 on (0: every call), to what happens to it: an
    exception to raise, "short" (half of the bytes, and that many pages of the batch, are really moved and the rest
    is told to be missing), or "lie" (an answer of the wrong shape).
    """

    name: ClassVar[str] = "latch"

    def __init__(self, *, concurrency: int = 2, batch_pages: int = 4, deadline_s: float = DEADLINE_S) -> None:
        self.concurrency = concurrency
        self.batch_pages = batch_pages
        self.deadline_s = deadline_s
        self.pages: dict[bytes, bytes] = {}
        self.notes: dict[str, bytes] = {}
        self.faults: dict[str, dict[int, BaseException | str]] = {}
        self.num_calls: dict[str, int] = {}
        self.in_call: list[tuple[str, tuple[bytes, ...]]] = []
        self.is_closed = False
        self._latches: dict[tuple[str, int], threading.Event] = {}
        self._lock = threading.Lock()

    # What a test does

    def put(self, text: str, generation: int = 1) -> None:
        """Have every page of this chain."""
        for end in range(1, len(text) + 1):
            self.pages[key(text[:end])] = make_page(text[:end], generation + end)

    @contextmanager
    def held(self, kind: str, number: int = 0) -> Iterator[Callable[[], None]]:
        """Calls of this kind that begin inside return at its end, or when what is yielded is called.

        `number`: only the call of that number, from 1 on.
        """
        latch = self._latches[kind, number] = threading.Event()
        try:
            yield latch.set
        finally:
            latch.set()
            del self._latches[kind, number]

    def fail(self, kind: str, what: BaseException | str, number: int = 0) -> None:
        self.faults.setdefault(kind, {})[number] = what

    def wait_for(self, kind: str, count: int = 1) -> None:
        """Until so many calls of this kind are running."""
        eventually(lambda: sum(name == kind for name, _ in self.in_call) >= count, f"{count} {kind} run")

    # What the runner does

    @contextmanager
    def _call(self, kind: str, keys: Sequence[bytes] = ()) -> Iterator[BaseException | str | None]:
        with self._lock:
            number = self.num_calls[kind] = self.num_calls.get(kind, 0) + 1
            entry = (kind, tuple(keys))
            self.in_call.append(entry)
            latch = self._latches.get((kind, number)) or self._latches.get((kind, 0))
        try:
            if latch is not None:
                assert latch.wait(2 * DEADLINE_S)
            faults = self.faults.get(kind, {})
            fault = faults.get(number, faults.get(0))
            if isinstance(fault, BaseException):
                raise fault
            yield fault
        finally:
            with self._lock:
                self.in_call.remove(entry)

    def connect(self, pool: memoryview) -> None:
        with self._call("connect"):
            assert len(pool) % PAGE_BYTES == 0

    def contains(self, keys: Sequence[bytes]) -> int:
        with self._call("contains", keys) as fault:
            if fault == "lie":
                return len(keys) + 1
            found = 0
            while found < len(keys) and keys[found] in self.pages:
                found += 1
            return found // 2 if fault == "short" else found

    def read(self, keys: Sequence[bytes], pages: WritablePages) -> NDArray[np.bool_]:
        with self._call("read", keys) as fault:
            good = np.zeros(len(keys), np.bool_)
            whole = len(keys) // 2 if fault == "short" else len(keys)
            for position, (page_key, page) in enumerate(zip(keys, pages, strict=True)):
                data = self.pages.get(page_key)
                if data is None:
                    continue
                length = len(page) if position < whole else len(page) // 2
                page[:length] = data[:length]
                good[position] = position < whole
            return np.ones(len(keys) + 1, np.bool_) if fault == "lie" else good

    def write(self, stored: Sequence[StoredPage], pages: ReadOnlyPages) -> NDArray[np.bool_]:
        with self._call("write", [page.key for page in stored]) as fault:
            good = np.zeros(len(stored), np.bool_)
            whole = len(stored) // 2 if fault == "short" else len(stored)
            for position in range(whole):
                self.pages[stored[position].key] = bytes(pages[position])
                good[position] = True
            return good[:-1] if fault == "lie" else good

    def delete(self, keys: Sequence[bytes]) -> None:
        with self._call("delete", keys):
            for page_key in keys:
                self.pages.pop(page_key, None)

    def clear(self) -> None:
        with self._call("clear"):
            self.pages.clear()

    def scan(self, after: bytes, limit: int) -> list[bytes]:
        return sorted(page_key for page_key in self.pages if page_key > after)[:limit]

    def load_note(self, name: str) -> bytes | None:
        with self._call("load_note"):
            return self.notes.get(name)

    def store_note(self, name: str, value: bytes) -> None:
        with self._call("store_note"):
            self.notes[name] = value

    def stats(self) -> TierStats:
        return TierStats(num_pages=len(self.pages))

    def close(self) -> None:
        self.is_closed = True


class FakeClock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class TieredStore:
    """A service whose only caller is one group, above tiers. Pages are real ones of one namespace."""

    def __init__(
        self,
        num_pages: int,
        tiers: Sequence[Tier],
        *,
        admission: Admission = "write",
        clock: Callable[[], float] = time.monotonic,
        breaker: Callable[[], Breaker] = lambda: Breaker(first_pause_s=0.01, max_pause_s=0.05),
    ) -> None:
        fd = create_pool_file(num_pages, PAGE_BYTES)
        self.pool = HostPool(fd, num_pages, PAGE_BYTES)
        os.close(fd)
        self.tiers = tiers
        self.index = Index(num_pages, LRU(num_pages), first_generation=1 << 40)
        self.runners = [
            TierRunner(tier, self.pool.buffer, PAGE_BYTES, num_pages, breaker=breaker(), clock=clock)
            for tier in tiers
        ]
        self.lower = LowerTiers(self.index, self.pool, self.runners, admission, clock)
        self.service = StoreService(self.index, self.lower)
        self.service.join(GROUP, 1)
        self.clock = clock

    def wait_until_connected(self) -> None:
        self.until(lambda: all(runner.is_usable for runner in self.runners), "the tiers are connected")

    def until(self, condition: Callable[[], bool], what: str) -> None:
        """Do what the owner's loop does until something has come about."""

        def turned() -> bool:
            self.lower.poll()
            return condition()

        eventually(turned, what)

    def ask(self, request: wire.Request) -> wire.Reply:
        reply = self.service.handle(GROUP, request)
        assert self.service.check() == ""
        return reply

    def reserve(self, text: str) -> wire.Reserved:
        reserved = self.ask(wire.Reserve(chain(text)))
        assert isinstance(reserved, wire.Reserved)
        generations = reserved.page_generations.tolist()
        for position, page in enumerate(reserved.page_ids.tolist(), reserved.first):
            self.pool.page(page)[:] = make_page(text[: position + 1], generations[position - reserved.first])
        return reserved

    def store(self, text: str) -> wire.Reserved:
        reserved = self.reserve(text)
        if reserved.reservation:
            self.ask(wire.Commit(reserved.reservation, len(reserved.page_ids)))
        return reserved

    def match_later(self, text: str, wait_s: float = DEADLINE_S, member: int = 1) -> list[wire.Matched]:
        """A match that may wait. Its answer is put into the list that is returned."""
        answers: list[wire.Matched] = []
        request = wire.Match(chain(text), len(text), wait_s)
        self.service.handle_later(GROUP, member, request, answers.append)
        assert self.service.check() == ""
        return answers

    def find(self, text: str, wait_s: float = DEADLINE_S) -> str:
        """The letters of the longest prefix that is found, each page checked; its lease is given back."""
        answers = self.match_later(text, wait_s)
        self.until(lambda: bool(answers), f"a match of {text!r} was answered")
        return self.take(answers[0], text)

    def take(self, matched: wire.Matched, text: str) -> str:
        """The letters of an answer, whose lease is given back. Every page must be what its key names."""
        letters = ""
        for position, (page, generation) in enumerate(
            zip(matched.page_ids.tolist(), matched.page_generations.tolist(), strict=True)
        ):
            header = verify_own_header(np.frombuffer(self.pool.page(page), np.uint8))
            assert header is not None, "a page that is no page was served"
            assert (header.identity.key, header.identity.generation) == (key(text[: position + 1]), generation)
            letters += text[position]
        if matched.lease:
            self.ask(wire.Release([matched.lease]))
        return letters

    def here(self, text: str) -> str:
        """What host memory has of it, without asking tiers."""
        lease = self.index.match(chain(text), len(text))
        if lease.id:
            self.index.release([lease.id])
        return text[: len(lease.pages)]

    def settle(self) -> None:
        """Until nothing is on its way to or from a tier."""

        def is_quiet() -> bool:
            return (
                all(
                    not (state.running or state.queued_loads or state.queued_write_pages or state.hung)
                    for state in (runner.state for runner in self.runners)
                )
                and not self.lower.is_busy
            )

        self.until(is_quiet, "the tiers are quiet")

    def report(self) -> wire.Report:
        report = self.ask(wire.Stats(audit=True))
        assert isinstance(report, wire.Report)
        assert report.free + report.reserved + report.ready + report.quarantined == report.num_pages
        assert report.problem == ""
        return report

    def check_conservation(self) -> None:
        """Once all is quiet: nobody holds a page, and every page can be had."""
        self.settle()
        report = self.report()
        assert (report.reserved, report.quarantined, report.leases, report.reservations) == (0, 0, 0, 0)
        before = self.lower.reports()
        assert all(tier.queued_pages == 0 for tier in before)
        reserved = self.index.reserve(chain("".join(chr(0x4E00 + n) for n in range(self.index.num_pages))))
        assert len(reserved.pages) == self.index.num_pages, "a page is lost"
        self.index.cancel(reserved.id)

    def close(self) -> None:
        assert self.lower.close(DEADLINE_S)
        assert all(tier.is_closed for tier in self.tiers if isinstance(tier, LatchTier))


NewStore = Callable[..., TieredStore]
