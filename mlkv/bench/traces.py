"""Traces of requests for replays: recorded ones, and a generator of sessions."""

from __future__ import annotations

import heapq
import json
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Final

from mlkv.errors import MLKVError

_KEY_BYTES: Final = 16


@dataclass(frozen=True)
class Request:
    """One request: the blocks of its prompt.

    A block is known by everything before it, so equal numbers mean equal prefixes, and every number but the first
    always has the same one before it.
    """

    blocks: tuple[int, ...]
    keys: bytes
    """A key of 16 bytes for each block."""


@dataclass(frozen=True)
class Trace:
    """Requests in the order of their arrival."""

    name: str
    requests: tuple[Request, ...]

    @property
    def num_blocks(self) -> int:
        """Blocks of all requests together, each as often as it was asked for."""
        return sum(len(request.blocks) for request in self.requests)


def make_trace(name: str, prompts: Iterable[Sequence[int]]) -> Trace:
    """A trace of prompts, given as hashes of their blocks; a hash may stand for a block or for a whole prefix."""
    number_of: dict[tuple[int, int], int] = {}
    keys: list[bytes] = []
    requests: list[Request] = []
    for prompt in prompts:
        blocks: list[int] = []
        before = -1
        for block_hash in prompt:
            before = number_of.setdefault((before, block_hash), len(number_of))
            if before == len(keys):
                keys.append(blake2b(before.to_bytes(8, "little"), digest_size=_KEY_BYTES).digest())
            blocks.append(before)
        requests.append(Request(tuple(blocks), b"".join(keys[block] for block in blocks)))
    return Trace(name, tuple(requests))


def load_trace(path: Path) -> Trace:
    """Read a trace in the format of Mooncake's: JSON lines with `hash_ids`, the hashes of a prompt's blocks, and
    `timestamp` by which they are ordered if all have one.

    Raises MLKVError that names the file and the line.
    """
    rows: list[tuple[float, list[int]]] = []
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    rows.append(_parse(line, f"{path}, line {number}"))
    except (OSError, UnicodeDecodeError) as error:
        raise MLKVError(f"cannot read the trace {path}: {error}") from None
    if not any(hashes for _, hashes in rows):
        raise MLKVError(f"the trace {path} asks for no block at all")
    rows.sort(key=lambda row: row[0])
    return make_trace(path.stem, (hashes for _, hashes in rows))


def _parse(line: str, where: str) -> tuple[float, list[int]]:
    try:
        row = json.loads(line)
        hashes, timestamp = row["hash_ids"], row.get("timestamp", 0)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise MLKVError(f"{where}: not a JSON object with a field hash_ids ({error!r})") from None
    if not isinstance(hashes, list) or not all(type(one) is int for one in hashes):
        raise MLKVError(f"{where}: hash_ids is no list of integers")
    if not isinstance(timestamp, (int, float)):
        raise MLKVError(f"{where}: timestamp is no number")
    return float(timestamp), hashes


def generate_sessions(num_requests: int, seed: int = 0) -> Trace:
    """Users who come, ask, think and ask on, for tests and where no recorded trace is at hand.

    Three of four first prompts begin with one of four system prompts; a session goes on after each turn with a
    probability that grows from 0.3 to 0.9 with the number of its turns, after a time to think of at least a
    quarter of its mean; the last block of a turn is only partly full, so that the next turn does not repeat it.
    """
    return make_trace(f"sessions-{seed}", _sessions(num_requests, random.Random(seed)))


def _sessions(num_requests: int, chance: random.Random) -> Iterator[list[int]]:
    mean_think_s, arrivals_per_s = 60.0, 1.0
    fresh = iter(range(1 << 62))
    system_prompts = [[next(fresh) for _ in range(chance.randint(1, 6))] for _ in range(4)]
    due: list[tuple[float, int, int, list[int]]] = [(0.0, next(fresh), 0, [])]
    for _ in range(num_requests):
        now_s, _, turn, prompt = heapq.heappop(due)
        if turn == 0:
            heapq.heappush(due, (now_s + chance.expovariate(arrivals_per_s), next(fresh), 0, []))
            prompt = list(chance.choice(system_prompts)) if chance.random() < 0.75 else []
        prompt += [next(fresh) for _ in range(1 + int(chance.expovariate(1 / (8 if turn == 0 else 3))))]
        yield [*prompt, next(fresh)]
        if chance.random() < min(0.3 + 0.15 * turn, 0.9):
            think_s = mean_think_s / 4 + chance.expovariate(4 / (3 * mean_think_s))
            heapq.heappush(due, (now_s + think_s, next(fresh), turn + 1, prompt))
