"""The loop of one rank: agree with the cache, schedule, compute, take the next tokens."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from mlkv.engine.attention import AttentionBatch
from mlkv.engine.model import LoadedModel
from mlkv.engine.pages import DevicePages
from mlkv.engine.request import Finished, Request, RequestError, SamplingParams
from mlkv.engine.scheduler import Scheduler
from mlkv.errors import ConfigError

if TYPE_CHECKING:
    from mlkv import MultiLevelCache

IDLE_SLEEP_S = 0.0005
"""Pause of a step that computes nothing and waits for the cache: short beside a load, long beside a poll."""

GPU_POOL_SHARE = 0.8
"""Of the device memory that is free once the weights are loaded; the rest is for activations."""


@dataclass(frozen=True)
class Output:
    """A new token of a request, or its end, or (usually at the end) both."""

    request_id: str
    token: int | None
    finished: Finished | None = None


class Engine:
    """Serves requests on one rank of a replica. Its ranks make the same calls in the same order."""

    def __init__(
        self,
        model: LoadedModel,
        pages: DevicePages,
        cache: MultiLevelCache | None,
        *,
        max_batch_tokens: int = 512,
        max_running: int = 64,
        record_logits: bool = False,
    ) -> None:
        """Args:
        model: with a pool (`make_pool`) of as many slots as `pages` has tokens.
        cache: None serves with device-level prefix reuse alone.
        record_logits: keep the logits of every generated token in `Finished.logits` (one rank is enough).
        """
        if model.paged_kv is None or model.paged_kv.num_slots != pages.num_pages * pages.page_tokens:
            raise ConfigError("engine: the model's pool must have as many slots as the device pages have tokens")
        self.model, self.pages, self.cache = model, pages, cache
        self.scheduler = Scheduler(pages, cache, max_batch_tokens=max_batch_tokens, max_running=max_running)
        self.record_logits = record_logits
        self.num_steps = 0
        self._num_added = 0
        self._open: set[str] = set()

    @property
    def num_unfinished(self) -> int:
        """Requests that are not answered yet."""
        return self.scheduler.num_unfinished

    @property
    def idle(self) -> bool:
        """Nothing to answer, and no transfer holds device pages."""
        return not self.scheduler.num_unfinished and not self.scheduler.num_draining

    def add_request(
        self, request_id: str, tokens: Sequence[int] | npt.NDArray[np.integer], params: SamplingParams
    ) -> None:
        """Queue a request.

        Raises RequestError when it cannot be served: empty, not of this vocabulary, longer than the context or
        the device pool, or named like one that is not finished.
        """
        geometry = self.model.geometry
        array = np.asarray(tokens)
        if array.ndim != 1 or not len(array) or array.dtype.kind not in "iu":
            raise RequestError(f"request {request_id}: the prompt must be a row of one or more token ids")
        if int(array.min()) < 0 or int(array.max()) >= geometry.vocab_size:
            raise RequestError(f"request {request_id}: token ids must lie in [0, {geometry.vocab_size})")
        if len(array) >= geometry.context_tokens:
            raise RequestError(
                f"request {request_id}: the prompt has {len(array)} tokens; the model's context of "
                f"{geometry.context_tokens} leaves room for {geometry.context_tokens - 1}"
            )
        new = params.max_new_tokens if params.forced is None else len(params.forced)
        if new < 1:
            raise RequestError(f"request {request_id}: max_new_tokens must be at least 1, got {new}")
        max_tokens = min(len(array) + new, geometry.context_tokens)
        pool_tokens = self.pages.num_pages * self.pages.page_tokens
        if max_tokens > pool_tokens:
            raise RequestError(
                f"request {request_id}: prompt and answer need {max_tokens} tokens, the device pool has "
                f"{pool_tokens}"
            )
        if request_id in self._open:
            raise RequestError(f"request {request_id}: there is an unfinished request of this name")
        self._open.add(request_id)
        request = Request.create(
            request_id, array, params, order=self._num_added, max_tokens=max_tokens, arrival_s=time.perf_counter()
        )
        self._num_added += 1
        self.scheduler.add(request)

    def abort(self, request_id: str) -> Finished | None:
        """End a request in any state; what it has so far, or None when there is none of that name."""
        request = self.scheduler.abort(request_id)
        if request is None:
            return None
        self._open.discard(request_id)
        return Finished.of(request, "aborted", time.perf_counter())

    def step(self) -> list[Output]:
        """One engine step: exactly one cache step, and one forward pass if there is something to compute."""
        self.num_steps += 1
        if self.cache is not None:
            self.scheduler.apply(self.cache.step())
        batch = self.scheduler.schedule()
        if not batch:
            if not self.idle:
                time.sleep(IDLE_SLEEP_S)
            return []
        logits = self._forward(batch)
        ended_rows = [count == request.num_tokens - request.num_computed for request, count in batch]
        chosen = logits.argmax(-1).tolist()
        now = time.perf_counter()
        producing = [request for (request, _), ends in zip(batch, ended_rows, strict=True) if ends]
        for row, request in enumerate(producing):
            if request.first_token_s is None:
                request.first_token_s = now
            if self.record_logits:
                request.logits.append(logits[row].cpu())
        tokens = iter(chosen)
        ended = dict(self._advance(batch, [next(tokens) if ends else -1 for ends in ended_rows], now))
        return [Output(r.request_id, int(r.tokens[-1]), ended.get(r.request_id)) for r in producing]

    def _advance(
        self, batch: list[tuple[Request, int]], chosen: list[int], now: float
    ) -> list[tuple[str, Finished]]:
        ended = []
        for request, reason in self.scheduler.advance(batch, chosen):
            self._open.discard(request.request_id)
            ended.append((request.request_id, Finished.of(request, reason, now)))
        return ended

    def _forward(self, batch: list[tuple[Request, int]]) -> torch.Tensor:
        """Logits `[requests whose last token is computed now, vocab_size]`."""
        device = self.model.device
        tokens, positions, contexts, rows, at = [], [], [], [], 0
        for request, count in batch:
            stop = request.num_computed + count
            tokens.append(request.tokens[request.num_computed : stop])
            positions.append(np.arange(request.num_computed, stop))
            contexts.append(request.slots(stop, self.pages.page_tokens))
            at += count
            if stop == request.num_tokens:
                rows.append(at - 1)
        return self.model.forward(
            torch.from_numpy(np.concatenate(tokens)).to(device),
            torch.from_numpy(np.concatenate(positions)).to(device),
            AttentionBatch.build(contexts, [count for _, count in batch], device),
            torch.tensor(rows, dtype=torch.int64, device=device),
        )


def pool_pages(model: LoadedModel, page_tokens: int, *, memory_bytes: int | None = None) -> int:
    """Pages this rank has room for; the replica's pool has the fewest of any rank (`Replica.min_int`).

    Args:
        memory_bytes: for the pool on this rank. None takes `GPU_POOL_SHARE` of a GPU's free memory, and on a CPU
            room for one full context.
    """
    page_bytes = page_tokens * model.kv_bytes_per_token
    if memory_bytes is None:
        if model.device.type != "cuda":
            return -(-model.geometry.context_tokens // page_tokens)
        free_bytes: Any = torch.cuda.mem_get_info(model.device)[0]
        memory_bytes = int(free_bytes * GPU_POOL_SHARE)
    if memory_bytes < page_bytes:
        raise ConfigError(f"device pool: {memory_bytes} bytes are less than one page of {page_bytes} bytes")
    return memory_bytes // page_bytes
