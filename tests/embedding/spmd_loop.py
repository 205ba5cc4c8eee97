"""A minimal engine of the SPMD kind: every rank runs the same loop over the same requests. See docs/embedding.md.

The methods of `HostCache` have the names that LightLLM gives to the four moments at which such a loop deals with
a CPU cache. Each is a few lines on the facade; the loop around them is a scheduler in miniature.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Protocol

import torch

from mlkv import MultiLevelCache, StepResult

NAP_S = 0.0005


@dataclass
class Request:
    """One request of the loop. `slots[i]` is where the KV of `tokens[i]` lies or will lie."""

    name: str
    tokens: list[int]
    num_new: int
    slots: torch.Tensor
    num_ready: int = 0  # tokens from the front whose KV is in its slots
    asked: bool = False
    loading: bool = False

    @property
    def may_run(self) -> bool:
        return self.asked and not self.loading


class Model(Protocol):
    """The forward pass: writes KV of tokens[start:] into slots[start:], returns the next token."""

    def __call__(self, tokens: list[int], slots: torch.Tensor, start: int) -> int: ...


class HostCache:
    """The four moments. All of them are the same on every rank, because steps are."""

    def __init__(self, cache: MultiLevelCache) -> None:
        self._cache = cache
        self._asked: dict[str, Request] = {}
        self._loading: dict[str, Request] = {}
        self._offloading: dict[str, Request] = {}

    def load_cpu_cache_to_reqs(self, waiting: list[Request]) -> None:
        """Ask for the waiting requests that have not asked; what the answer brings is loaded when it is there."""
        for request in waiting:
            if not request.asked and request.name not in self._asked:
                self._asked[request.name] = request
                self._cache.lookup(request.name, request.tokens)

    def update_cpu_cache_load_task_states(self, step: StepResult) -> None:
        """Start the loads of answered lookups; let requests whose load is over run."""
        for name, hit in step.hits.items():
            request = self._asked.pop(name)
            request.asked = True
            if hit.num_tokens:
                request.loading = True
                self._loading[name] = request
                self._cache.load(name, request.slots[hit.start : hit.num_tokens])
        for name, num_tokens in step.loaded.items():
            self._end_load(name, num_tokens)
        for name, failure in step.failed.items():
            self._end_load(name, failure.num_tokens)  # its good prefix; the rest is computed

    def offload_finished_reqs_to_cpu_cache(self, finished: list[Request]) -> None:
        """Store prompt and answer. The slots stay taken until a step releases them."""
        for request in finished:
            self._offloading[request.name] = request
            self._cache.offload(
                request.name, request.tokens[: request.num_ready], request.slots[: request.num_ready]
            )

    def update_cpu_cache_offload_task_states(self, step: StepResult) -> list[Request]:
        """Requests whose slots may be given to others now."""
        return [self._offloading.pop(name) for name in step.released if name in self._offloading]

    @property
    def idle(self) -> bool:
        return not (self._asked or self._loading or self._offloading)

    def _end_load(self, name: str, num_tokens: int) -> None:
        request = self._loading.pop(name)
        request.loading = False
        request.num_ready = num_tokens


@dataclass
class Loop:
    """Admits when slots are free, computes one token of each running request an iteration, stores the finished."""

    cache: MultiLevelCache
    model: Model
    num_slots: int
    waiting: deque[tuple[str, list[int], int]] = field(default_factory=deque)
    admitted: list[Request] = field(default_factory=list)
    answers: dict[str, list[int]] = field(default_factory=dict)
    num_computed: int = 0

    def __post_init__(self) -> None:
        self._host = HostCache(self.cache)
        self._free = list(range(self.num_slots))

    @property
    def done(self) -> bool:
        return not (self.waiting or self.admitted) and self._host.idle

    def iterate(self) -> None:
        """One iteration, with exactly one step of the cache in it."""
        self._admit()
        self._host.load_cpu_cache_to_reqs(self.admitted)
        step = self.cache.step()
        self._host.update_cpu_cache_load_task_states(step)
        for request in self._host.update_cpu_cache_offload_task_states(step):
            self._free += request.slots.tolist()
        runnable = [request for request in self.admitted if request.may_run]
        if not runnable and not self._host.idle:
            time.sleep(NAP_S)  # else the copying threads would hardly get the interpreter
        finished = [request for request in runnable if self._run(request)]
        self.admitted = [request for request in self.admitted if request not in finished]
        self._host.offload_finished_reqs_to_cpu_cache(finished)

    def _admit(self) -> None:
        while self.waiting:
            name, prompt, num_new = self.waiting[0]
            need = len(prompt) + num_new
            if need > len(self._free):
                return
            self.waiting.popleft()
            slots, self._free = self._free[:need], self._free[need:]
            self.admitted.append(Request(name, list(prompt), num_new, torch.tensor(slots)))

    def _run(self, request: Request) -> bool:
        """Compute what is missing and one token more. True when the answer is complete."""
        token = self.model(request.tokens, request.slots, request.num_ready)
        self.num_computed += len(request.tokens) - request.num_ready
        request.num_ready = len(request.tokens)
        request.tokens.append(token)
        request.num_new -= 1
        if request.num_new:
            return False
        self.answers[request.name] = request.tokens
        return True
