"""Replays a trace against an eviction policy, and says what the best possible policy would reach.

The figure is the share of all blocks that are part of a leading cached run: what need not be computed.
"""

from __future__ import annotations

import heapq
import math

from mlkv.bench.traces import Trace
from mlkv.store.index import Index
from mlkv.store.policy import POLICIES, PolicyName


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
