"""Replays a trace against an eviction policy, and says what the best possible policy would reach.

The figure is the share of all blocks that are part of a leading cached run: what need not be computed.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from mlkv.bench.traces import Trace
from mlkv.store.index import Index
from mlkv.store.policy import POLICIES, PolicyName

_SMALL_GAP: Final = 1e-3
"""Below this nothing is left to gain over LRU, and the share of it that is closed says nothing."""


@dataclass(frozen=True)
class Comparison:
    """Hit rates on one trace: of each policy at each capacity, and what bounds them."""

    trace: str
    capacities: tuple[int, ...]
    rates: dict[PolicyName, tuple[float, ...]]
    clairvoyant: tuple[float, ...]
    infinite: float

    def gain(self, policy: PolicyName) -> list[float]:
        """Hit rate of a policy relative to that of LRU, at each capacity; there must be a replay of LRU."""
        return [
            rate / lru if lru else math.inf
            for rate, lru in zip(self.rates[policy], self.rates["lru"], strict=True)
        ]

    def closed(self, policy: PolicyName) -> list[float | None]:
        """Which share of the way from LRU to the clairvoyant bound a policy goes; None where there is no way."""
        columns = zip(self.rates[policy], self.rates["lru"], self.clairvoyant, strict=True)
        return [None if best - lru < _SMALL_GAP else (rate - lru) / (best - lru) for rate, lru, best in columns]

    def table(self) -> str:
        """For people."""
        lines = [f"{self.trace:32}" + "".join(f"{capacity:>10}" for capacity in self.capacities)]
        for policy, rates in self.rates.items():
            lines.append(_row(policy, [f"{rate:.4f}" for rate in rates]))
            if policy != "lru" and "lru" in self.rates:
                closed = ["-" if share is None else f"{share:.0%}" for share in self.closed(policy)]
                lines.append(_row("  relative to lru", [f"{gain - 1:+.1%}" for gain in self.gain(policy)]))
                lines.append(_row("  of the gap to the bound", closed))
        lines.append(_row("clairvoyant bound", [f"{rate:.4f}" for rate in self.clairvoyant]))
        lines.append(_row("infinite cache", [f"{self.infinite:.4f}"] * len(self.capacities)))
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        """For `--json`."""
        return {
            "trace": self.trace,
            "capacities": list(self.capacities),
            "rates": {policy: list(rates) for policy, rates in self.rates.items()},
            "clairvoyant": list(self.clairvoyant),
            "infinite": self.infinite,
        }


def _row(name: str, cells: Sequence[str]) -> str:
    return f"{name:32}" + "".join(f"{cell:>10}" for cell in cells)


def compare(trace: Trace, capacities: Sequence[int], policies: Sequence[PolicyName]) -> Comparison:
    """Replay a trace against policies at several capacities, in blocks."""
    return Comparison(
        trace=trace.name,
        capacities=tuple(capacities),
        rates={policy: tuple(replay(trace, policy, capacity) for capacity in capacities) for policy in policies},
        clairvoyant=tuple(clairvoyant(trace, capacity) for capacity in capacities),
        infinite=infinite(trace),
    )


def replay(trace: Trace, policy: PolicyName, capacity: int) -> float:
    """Hit rate of a policy of `mlkv.store.policy.POLICIES` in a pool of `capacity` blocks.

    Each request is what an engine does with an idle store: look the prompt up, load it, store the rest. All of it
    goes through the index, with the calls that the owner process makes of it.
    """
    index = Index(capacity, POLICIES[policy](capacity))
    num_hits = 0
    for request in trace.requests:
        lease = index.match(request.keys, len(request.blocks))
        if lease.id:
            num_hits += len(lease.pages)
            index.release([lease.id])
        writing = index.reserve(request.keys)
        if writing.id:
            index.commit(writing.id, len(writing.pages))
    return num_hits / trace.num_blocks


def infinite(trace: Trace) -> float:
    """Hit rate of a pool that holds everything."""
    return 1.0 - len({block for request in trace.requests for block in request.blocks}) / trace.num_blocks


def clairvoyant(trace: Trace, capacity: int) -> float:
    """Hit rate that no policy can exceed in a pool of `capacity` blocks (Belady).

    After each request it keeps those blocks, of the ones it had and the request's, that are asked for soonest. A
    block is asked for whenever one below it is, so with ties broken for the prefix what it keeps is always
    made of whole prefixes, and no choice among such sets is better.
    """
    next_uses = _next_uses(trace)
    next_use: dict[int, float] = {}  # of the blocks in the pool
    latest: list[tuple[float, int, int]] = []  # (-next use, -depth, block); old entries are recognised by next_use
    num_hits = 0
    for request, uses in zip(trace.requests, next_uses, strict=True):
        num_hits += next((i for i, one in enumerate(request.blocks) if one not in next_use), len(request.blocks))
        for depth, (block, use) in enumerate(zip(request.blocks, uses, strict=True)):
            next_use[block] = use
            heapq.heappush(latest, (-use, -depth, block))
        while len(next_use) > capacity:
            use, _, block = heapq.heappop(latest)
            if next_use.get(block) == -use:
                del next_use[block]
    return num_hits / trace.num_blocks


def _next_uses(trace: Trace) -> list[list[float]]:
    """For each block of each request, the number of the next request that asks for it; infinity if none does."""
    upcoming: dict[int, int] = {}
    uses: list[list[float]] = []
    for number in range(len(trace.requests) - 1, -1, -1):
        blocks = trace.requests[number].blocks
        uses.append([upcoming.get(block, math.inf) for block in blocks])
        upcoming.update(dict.fromkeys(blocks, number))
    return uses[::-1]
