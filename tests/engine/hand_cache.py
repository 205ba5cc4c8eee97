"""A facade that does only what the test says, step by step, and checks the contract of the calls it gets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from mlkv import Failure, Hit, StepResult


@dataclass
class Lookup:
    tokens: list[int]
    device_tokens: int
    hit_tokens: int | None = None


@dataclass
class HandCache:
    """`busy_slots` are the slots that a transfer may still touch."""

    page_tokens: int
    lookups: dict[str, Lookup] = field(default_factory=dict)
    loads: dict[str, list[int]] = field(default_factory=dict)
    offloads: dict[str, list[int]] = field(default_factory=dict)
    aborted: dict[str, list[int]] = field(default_factory=dict)
    declined: list[str] = field(default_factory=list)
    result: StepResult = field(default_factory=StepResult)

    # -- what the engine calls

    def lookup(self, request_id: str, tokens: Sequence[int], *, device_tokens: int = 0) -> None:
        assert request_id not in self.lookups
        assert request_id not in self.loads
        assert device_tokens % self.page_tokens == 0
        assert device_tokens < len(tokens)
        self.lookups[request_id] = Lookup([int(t) for t in tokens], device_tokens)

    def load(self, request_id: str, slots: torch.Tensor) -> None:
        lookup = self.lookups.pop(request_id)
        assert lookup.hit_tokens is not None
        assert slots.dtype == torch.int64
        assert len(slots) == lookup.hit_tokens - lookup.device_tokens
        self.loads[request_id] = slots.tolist()

    def decline(self, request_id: str) -> None:
        del self.lookups[request_id]
        self.declined.append(request_id)

    def offload(self, request_id: str, tokens: Sequence[int], slots: torch.Tensor) -> None:
        assert request_id not in self.offloads
        assert len(tokens) == len(slots)
        assert len(tokens) % self.page_tokens == 0
        self.offloads[request_id] = slots.tolist()

    def abort(self, request_id: str) -> None:
        self.aborted[request_id] = self.loads.pop(request_id)

    def step(self) -> StepResult:
        result, self.result = self.result, StepResult()
        return result

    # -- what the test decides

    @property
    def busy_slots(self) -> set[int]:
        groups = (*self.loads.values(), *self.offloads.values(), *self.aborted.values())
        return {slot for group in groups for slot in group if slot >= 0}

    def answer(self, request_id: str, num_tokens: int) -> None:
        lookup = self.lookups[request_id]
        assert num_tokens <= len(lookup.tokens) - 1
        if num_tokens > lookup.device_tokens:
            lookup.hit_tokens = num_tokens
        else:
            num_tokens = 0
            del self.lookups[request_id]
        self.result.hits[request_id] = Hit(num_tokens, lookup.device_tokens)

    def end_load(self, request_id: str, num_tokens: int, *, failed: bool = False) -> None:
        del self.loads[request_id]
        if failed:
            self.result.failed[request_id] = Failure(num_tokens, "as the test says")
        else:
            self.result.loaded[request_id] = num_tokens

    def release(self, request_id: str) -> None:
        if self.aborted.pop(request_id, None) is None:
            del self.offloads[request_id]
        self.result.released.append(request_id)


def slots_of(pages: Sequence[int], page_tokens: int) -> set[int]:
    return {int(p) * page_tokens + i for p in pages for i in np.arange(page_tokens)}
