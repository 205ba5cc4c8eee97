"""Random traffic through the real cache: every KV element says whose it is, so a wrong one is seen.

All ranks draw what to ask from one seed and look only at step results, so they make the same calls. Each rank is
late at times, and its transfers are, by draws of its own.
"""

from __future__ import annotations

import random
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mlkv import KVLayout, KVPool, MLKVConfig, MultiLevelCache, RankSlice, Replica, StepResult

PAGE_TOKENS = 16
NUM_LAYERS = 4
NUM_KV_HEADS = 8
HEAD_DIM = 128

NUM_LANES = 8  # requests at once
LANE_TOKENS = 256  # slots of a lane, and the longest request
NUM_DOCUMENTS = 24
HOST_PAGES = NUM_DOCUMENTS * LANE_TOKENS // PAGE_TOKENS // 2  # half of all documents, so that pages are evicted
ABORT_SHARE = 0.02  # of a lane's steps with something in flight
DECLINE_SHARE = 0.1  # of hits
LATE_SHARE = 0.2  # of a rank's steps come late ...
LATE_S = 0.001  # ... by up to this

FAULTS = "delay=all:0-8ms,fail=all:0.02,corrupt=all/load:0.01"

_POISON = 251.0  # bfloat16 tells whole numbers up to 256 apart; the values of KV are below this one


class DeviceKV:
    """One rank's pool, `[layers, K and V, slots, local heads, dim]` in bfloat16, and the right content of it."""

    def __init__(self, replica: Replica, device: torch.device) -> None:
        self.layout = KVLayout.gqa(
            num_layers=NUM_LAYERS,
            num_kv_heads=NUM_KV_HEADS,
            head_dim=HEAD_DIM,
            dtype=torch.bfloat16,
            page_tokens=PAGE_TOKENS,
        )
        self.part = RankSlice.of_rank(NUM_KV_HEADS, replica.size, replica.rank)
        heads = RankSlice.local_kv_heads(NUM_KV_HEADS, replica.size)
        num_slots = NUM_LANES * LANE_TOKENS
        shape = (NUM_LAYERS, 2, num_slots, heads, HEAD_DIM)
        self._kv = torch.full(shape, _POISON, dtype=torch.bfloat16, device=device)
        self.pool = KVPool.from_layers(self.layout, k=list(self._kv[:, 0]), v=list(self._kv[:, 1]))
        self._num_wrong = torch.zeros((), dtype=torch.int64, device=device)
        heads_here = slice(self.part.head_start, self.part.head_start + self.part.num_heads)
        token = torch.arange(NUM_DOCUMENTS * LANE_TOKENS, device=device).view(1, 1, -1, 1, 1)
        place = torch.arange(NUM_LAYERS * 2 * NUM_KV_HEADS * HEAD_DIM, device=device)
        place = place.view(NUM_LAYERS, 2, 1, NUM_KV_HEADS, HEAD_DIM)[:, :, :, heads_here]
        # By token of all documents, one behind the other. Multipliers that are no multiples of each other.
        self._right = ((token * 8191 + place * 127) % int(_POISON)).to(torch.bfloat16)

    def write(self, document: int, slots: slice, start: int, end: int) -> None:
        """What the model would do: compute the KV of these tokens of a document."""
        self._of(slots, start, end).copy_(self._want(document, start, end))

    def check(self, document: int, slots: slice, start: int, end: int) -> None:
        """Count the tokens whose KV is not theirs; does not wait for the device."""
        wrong = self._of(slots, start, end) != self._want(document, start, end)
        self._num_wrong += wrong.transpose(0, 2).flatten(1).any(1).sum()

    def poison(self, slots: slice) -> None:
        self._kv[:, :, slots].fill_(_POISON)

    @property
    def num_wrong(self) -> int:
        return int(self._num_wrong)

    def _of(self, slots: slice, start: int, end: int) -> torch.Tensor:
        return self._kv[:, :, slots.start + start : slots.start + end, : self.part.num_heads]

    def _want(self, document: int, start: int, end: int) -> torch.Tensor:
        first = document * LANE_TOKENS
        return self._right[:, :, first + start : first + end]


@dataclass
class Lane:
    """A place for one request after another. `phase`: idle, asked, loading, offloading or aborting."""

    slots: slice
    phase: str = "idle"
    request_id: str = ""
    document: int = 0
    num_tokens: int = 0

    @property
    def tokens(self) -> range:
        return range(self.document * LANE_TOKENS, self.document * LANE_TOKENS + self.num_tokens)


class Traffic:
    """One rank's share of it. Collective over the replica: make, step and close it on every rank alike."""

    def __init__(self, replica: Replica, device: torch.device, *, seed: int, agree: dict[str, Any]) -> None:
        self.kv = DeviceKV(replica, device)
        config = MLKVConfig(
            model="traffic",
            page_tokens=PAGE_TOKENS,
            faults=f"{FAULTS},seed={seed}",
            store={"host_bytes": HOST_PAGES * self.kv.layout.page_bytes},
            agree=agree,
        )
        self.cache = MultiLevelCache(config, self.kv.layout, self.kv.pool, replica)
        self._chance = random.Random(seed)
        self._own_chance = random.Random(f"{seed}/{replica.rank}")
        self._lanes = [Lane(slice(at * LANE_TOKENS, (at + 1) * LANE_TOKENS)) for at in range(NUM_LANES)]
        self._lane_of: dict[str, Lane] = {}
        self._num_requests = 0
        self.seen: Counter[str] = Counter()

    def step(self, *, asking: bool = True) -> None:
        """One engine step; `asking`: idle lanes begin new requests."""
        for lane in self._lanes:
            if lane.phase == "idle" and asking:
                self._ask(lane)
            elif lane.phase not in ("idle", "aborting") and self._chance.random() < ABORT_SHARE:
                self.cache.abort(lane.request_id)
                lane.phase = "aborting"
                self.seen["aborted"] += 1
        if self._own_chance.random() < LATE_SHARE:
            time.sleep(self._own_chance.uniform(0, LATE_S))
        self._take(self.cache.step())

    @property
    def drained(self) -> bool:
        """Agreed, so all ranks find it in the same step."""
        return not self.cache.pending and all(lane.phase == "idle" for lane in self._lanes)

    def _ask(self, lane: Lane) -> None:
        lane.request_id = f"request{self._num_requests}"
        lane.document = self._chance.randrange(NUM_DOCUMENTS)
        lane.num_tokens = self._chance.randrange(1, LANE_TOKENS + 1)
        lane.phase = "asked"
        self._num_requests += 1
        self._lane_of[lane.request_id] = lane
        self.cache.lookup(lane.request_id, lane.tokens)

    def _take(self, result: StepResult) -> None:
        for request_id, hit in result.hits.items():
            lane = self._lane_of[request_id]
            self.seen["hits"] += bool(hit.num_tokens)
            if hit.num_tokens and self._chance.random() >= DECLINE_SHARE:
                self.cache.load(request_id, _slots(lane, hit.start, hit.num_tokens))
                lane.phase = "loading"
                continue
            if hit.num_tokens:
                self.cache.decline(request_id)
            self._compute(lane, 0)
        for request_id, num_tokens in result.loaded.items():
            self.seen["loads"] += 1
            self._compute(self._lane_of[request_id], num_tokens)
        for request_id, failure in result.failed.items():
            self.seen["failed loads"] += 1
            self._compute(self._lane_of[request_id], failure.num_tokens)
        self.seen["offloads"] += len(result.offloaded)
        self.seen["failed offloads"] += len(result.unstored)
        for request_id in result.released:
            lane = self._lane_of.pop(request_id)
            self.kv.poison(lane.slots)  # whoever still reads or writes them is found out
            lane.phase = "idle"

    def _compute(self, lane: Lane, num_loaded: int) -> None:
        """Look at what was loaded, compute the rest, store all of it."""
        self.kv.check(lane.document, lane.slots, 0, num_loaded)
        self.seen["loaded tokens"] += num_loaded
        self.kv.write(lane.document, lane.slots, num_loaded, lane.num_tokens)
        self.cache.offload(lane.request_id, lane.tokens, _slots(lane, 0, lane.num_tokens))
        lane.phase = "offloading"


def _slots(lane: Lane, start: int, end: int) -> torch.Tensor:
    return torch.arange(lane.slots.start + start, lane.slots.start + end)
