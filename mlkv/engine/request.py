"""A request and its life."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

from mlkv.errors import MLKVError

FinishReason = Literal["stop", "length", "aborted"]


class RequestError(MLKVError, ValueError):
    """A request this deployment cannot serve; the message names what about it. Nothing was changed."""


@dataclass(frozen=True)
class SamplingParams:
    """How a request is answered. Decoding is greedy.

    Attributes:
        max_new_tokens: at most this many; fewer when a stop token comes or the context ends.
        stop_ids: tokens that end the answer (they are part of it).
        forced: these tokens are taken instead of the model's choice, one after the other (teacher forcing).
        no_load: compute every token of the prompt, as prompt log-probabilities need it.
        no_offload: do not store the KV, for instance because a sample of the same prompt already does.
    """

    max_new_tokens: int = 64
    stop_ids: tuple[int, ...] = ()
    forced: tuple[int, ...] | None = None
    no_load: bool = False
    no_offload: bool = False


class State(Enum):
    WAITING = "waiting"  # holds nothing
    ASKED = "asked"  # lookup under way; holds the pages of the prefix the device has
    ANSWERED = "answered"  # hit known, holds the same; waits for pages
    LOADING = "loading"  # holds all pages of the prompt, of which some are being written by a load
    RUNNING = "running"  # in the batch
    FINISHED = "finished"


@dataclass
class Request:
    """One request. `num_computed` tokens at the front have valid KV in the pages of `table`."""

    request_id: str
    params: SamplingParams
    order: int
    prompt_tokens: int
    max_tokens: int
    arrival_s: float
    buffer: npt.NDArray[np.int64]
    num_tokens: int
    state: State = State.WAITING
    attempt: int = 0
    table: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_registered_pages: int = 0
    asked_device_tokens: int = 0
    hit_tokens: int = 0
    device_tokens: int = 0
    host_tokens: int = 0
    num_preemptions: int = 0
    first_token_s: float | None = None
    logits: list[torch.Tensor] = field(default_factory=list)

    @classmethod
    def create(
        cls,
        request_id: str,
        tokens: Sequence[int] | npt.NDArray[np.integer],
        params: SamplingParams,
        *,
        order: int,
        max_tokens: int,
        arrival_s: float,
    ) -> Request:
        """`max_tokens` bounds prompt and answer together."""
        buffer = np.empty(max_tokens, np.int64)
        buffer[: len(tokens)] = tokens
        return cls(request_id, params, order, len(tokens), max_tokens, arrival_s, buffer, len(tokens))

    @property
    def cache_id(self) -> str:
        """Name of this attempt in the cache: after a preemption the old one may still have a copy in flight."""
        return f"{self.request_id}#{self.attempt}"

    @property
    def tokens(self) -> npt.NDArray[np.int64]:
        """Prompt and answer so far."""
        return self.buffer[: self.num_tokens]

    @property
    def num_generated(self) -> int:
        return self.num_tokens - self.prompt_tokens

    def slots(self, stop: int, page_tokens: int) -> npt.NDArray[np.int64]:
        """Device slots of tokens [0, stop)."""
        pages = np.array(self.table[: -(-stop // page_tokens)], np.int64)
        return (pages[:, None] * page_tokens + np.arange(page_tokens)).reshape(-1)[:stop]

    def append(self, token: int) -> FinishReason | None:
        """Take the next token of the answer; says whether it was the last."""
        if self.params.forced is not None:
            token = self.params.forced[self.num_generated]
        self.buffer[self.num_tokens] = token
        self.num_tokens += 1
        if token in self.params.stop_ids and self.params.forced is None:
            return "stop"
        return "length" if self.num_tokens == self.max_tokens else None


@dataclass(frozen=True)
class Finished:
    """A request's answer and what it took.

    Attributes:
        device_tokens, host_tokens, computed_tokens: where the KV of the prompt came from; they add up to it.
        arrival_s, first_token_s, finish_s: on this rank's `time.perf_counter`.
        logits: float32 `[vocab_size]` for each generated token, where the engine records them.
    """

    request_id: str
    tokens: tuple[int, ...]
    reason: FinishReason
    prompt_tokens: int
    device_tokens: int
    host_tokens: int
    computed_tokens: int
    num_preemptions: int
    arrival_s: float
    first_token_s: float | None
    finish_s: float
    logits: tuple[torch.Tensor, ...]

    @classmethod
    def of(cls, request: Request, reason: FinishReason, finish_s: float) -> Finished:
        return cls(
            request.request_id,
            tuple(request.tokens[request.prompt_tokens :].tolist()),
            reason,
            request.prompt_tokens,
            request.device_tokens,
            request.host_tokens,
            request.prompt_tokens - request.device_tokens - request.host_tokens,
            request.num_preemptions,
            request.arrival_s,
            request.first_token_s,
            finish_s,
            tuple(request.logits),
        )
