"""A rank with a small KV pool and a cache, for tests: every KV element says which token, layer and head it is of.

The value of an element depends on the tokens of the whole prefix, as real KV does, so that pages of another
prefix, head, layer or position are told apart.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import torch

from mlkv import (
    Failure,
    Hit,
    KVLayout,
    KVPool,
    MLKVConfig,
    MultiLevelCache,
    RankSlice,
    Replica,
    StepResult,
    page_keys,
)

PAGE_TOKENS = 4
NUM_LAYERS = 2
HEAD_DIM = 4
POISON = -12345.0


def layout_of(num_kv_heads: int, page_tokens: int = PAGE_TOKENS) -> KVLayout:
    return KVLayout.gqa(
        num_layers=NUM_LAYERS,
        num_kv_heads=num_kv_heads,
        head_dim=HEAD_DIM,
        dtype=torch.float32,
        page_tokens=page_tokens,
    )


def kv_of(tokens: Sequence[int], num_kv_heads: int) -> torch.Tensor:
    """float32 `[tokens, layers, 2, heads, dim]`: the one right KV of this prefix."""
    rows = []
    digest = b""
    for token in tokens:
        digest = blake2b(digest + int(token).to_bytes(8, "little"), digest_size=3).digest()
        rows.append(float(int.from_bytes(digest, "little")))
    base = torch.tensor(rows, dtype=torch.float64).view(-1, 1, 1, 1, 1)
    place = torch.arange(NUM_LAYERS * 2 * num_kv_heads * HEAD_DIM, dtype=torch.float64)
    place = place.view(1, NUM_LAYERS, 2, num_kv_heads, HEAD_DIM)
    return (base + place / 1024.0).to(torch.float32)


@dataclass
class Seen:
    """Everything the steps of a rank reported, by request."""

    hits: dict[str, Hit] = field(default_factory=dict)
    loaded: dict[str, int] = field(default_factory=dict)
    failed: dict[str, Failure] = field(default_factory=dict)
    released: list[str] = field(default_factory=list)
    offloaded: dict[str, int] = field(default_factory=dict)
    unstored: dict[str, Failure] = field(default_factory=dict)

    def add(self, step: StepResult) -> None:
        self.hits.update(step.hits)
        self.loaded.update(step.loaded)
        self.failed.update(step.failed)
        self.released += step.released
        self.offloaded.update(step.offloaded)
        self.unstored.update(step.unstored)


class Rank:
    """One rank: pool, cache, and the agreed step results."""

    def __init__(
        self,
        replica: Replica,
        *,
        num_kv_heads: int = 2,
        num_slots: int = 256,
        host_pages: int = 64,
        **settings: Any,
    ) -> None:
        self.replica = replica
        self.layout = layout_of(num_kv_heads)
        self.slice = RankSlice.of_rank(num_kv_heads, replica.size, replica.rank)
        local = RankSlice.local_kv_heads(num_kv_heads, replica.size)
        shape = (num_slots, local, HEAD_DIM)
        self.k = [torch.full(shape, POISON) for _ in range(NUM_LAYERS)]
        self.v = [torch.full(shape, POISON) for _ in range(NUM_LAYERS)]
        settings.setdefault("model", "test")
        settings.setdefault("store", {}).setdefault("host_bytes", host_pages * self.layout.page_bytes)
        settings.setdefault("agree", {"deadline_s": 20.0})
        self.config = MLKVConfig(page_tokens=PAGE_TOKENS, **settings)
        self.pool = KVPool.from_layers(self.layout, k=self.k, v=self.v)
        self.cache = MultiLevelCache(self.config, self.layout, self.pool, replica)
        self.seen = Seen()

    def compute(self, tokens: Sequence[int], slots: torch.Tensor, start: int = 0) -> None:
        """What the model would do: write the KV of tokens[start:] into their slots."""
        kv = kv_of(tokens, self.layout.num_kv_heads)[start:]
        heads = slice(self.slice.head_start, self.slice.head_start + self.slice.num_heads)
        for layer in range(NUM_LAYERS):
            for plane, tensors in enumerate((self.k, self.v)):
                tensors[layer][slots[start:], : self.slice.num_heads] = kv[:, layer, plane, heads]

    def wrong_tokens(self, tokens: Sequence[int], slots: torch.Tensor) -> list[int]:
        """Positions of tokens whose KV in these slots is not the right one."""
        kv = kv_of(tokens, self.layout.num_kv_heads)
        heads = slice(self.slice.head_start, self.slice.head_start + self.slice.num_heads)
        wrong = torch.zeros(len(tokens), dtype=torch.bool)
        for layer in range(NUM_LAYERS):
            for plane, tensors in enumerate((self.k, self.v)):
                mine = tensors[layer][slots, : self.slice.num_heads]
                wrong |= (mine != kv[:, layer, plane, heads]).flatten(1).any(1)
        return wrong.nonzero().flatten().tolist()

    def poison(self) -> None:
        for tensor in (*self.k, *self.v):
            tensor.fill_(POISON)

    def step(self) -> StepResult:
        result = self.cache.step()
        self.seen.add(result)
        return result

    def step_until(self, done: Callable[[], bool], what: str, deadline_s: float = 15.0) -> None:
        """Step until `done`, which must depend on agreed data only, so that all ranks step alike."""
        end = time.monotonic() + deadline_s
        while not done():
            if time.monotonic() > end:
                raise AssertionError(f"rank {self.replica.rank}: {what} did not happen; seen {self.seen}")
            self.step()
            time.sleep(0.0002)  # an engine computes here; a bare loop would starve the copying threads of the GIL

    def store(self, request_id: str, tokens: Sequence[int], slots: torch.Tensor) -> None:
        """Offload and wait until everybody can read it (or it is known that not)."""
        self.cache.offload(request_id, tokens, slots)
        self.step_until(
            lambda: request_id in self.seen.offloaded or request_id in self.seen.unstored, f"offload {request_id}"
        )

    def ask(self, request_id: str, tokens: Sequence[int], **options: Any) -> Hit:
        self.seen.hits.pop(request_id, None)
        self.cache.lookup(request_id, tokens, **options)
        self.step_until(lambda: request_id in self.seen.hits, f"lookup {request_id}")
        return self.seen.hits[request_id]

    def fetch(self, request_id: str, tokens: Sequence[int], slots: torch.Tensor) -> int:
        """Look up and load into the slots of `tokens`; the number of tokens that are valid then."""
        hit = self.ask(request_id, tokens)
        if not hit.num_tokens:
            return 0
        self.cache.load(request_id, slots[hit.start : hit.num_tokens])
        self.step_until(
            lambda: request_id in self.seen.loaded or request_id in self.seen.failed, f"load {request_id}"
        )
        if request_id in self.seen.failed:
            return self.seen.failed[request_id].num_tokens
        return self.seen.loaded[request_id]

    def drain(self) -> None:
        self.step_until(lambda: self.cache.pending == 0, "everything in flight to end")

    def check_conserved(self) -> None:
        """No page, lease or reservation is lost, by the owner's own books. Call when nothing is in flight."""
        if not self.replica.is_master:
            return  # only the master's connection orders the question behind what it has given back
        report = self.cache.audit()
        # What lower tiers still write is leased until it is there, whatever engines do.
        give_up_at = time.monotonic() + 10.0
        while report.tiers and report.leases and time.monotonic() < give_up_at:
            time.sleep(0.005)
            report = self.cache.audit()
        assert report.problem == ""
        assert report.free + report.reserved + report.ready + report.quarantined == report.num_pages
        assert (report.leases, report.reservations, report.reserved, report.quarantined) == (0, 0, 0, 0), report

    def keys(self, tokens: Sequence[int]) -> bytes:
        return page_keys(tokens, PAGE_TOKENS, self.cache.namespace.root())


def tokens_of(length: int, seed: int = 0) -> list[int]:
    return [(seed * 7919 + 31 * i + 1) % 50021 for i in range(length)]


def slots_of(start: int, length: int) -> torch.Tensor:
    return torch.arange(start, start + length, dtype=torch.int64)
