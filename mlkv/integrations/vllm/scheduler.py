"""The scheduler's half: which of vLLM's requests look up, load and store what, and when.

It calls the facade and is told what steps agreed; where copying happens is not its concern. Everything here
depends only on vLLM's scheduling and on agreed results, so under torchrun, where every rank has a scheduler of its
own, all of them do the same.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from mlkv import Hit, MultiLevelCache, StepResult
from mlkv.integrations.vllm.settings import Settings

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

log = logging.getLogger(__name__)

_FIRST_NAP_S = 0.0001
_LONGEST_NAP_S = 0.001  # and the longest that a request which arrives meanwhile waits


class _Look(Enum):
    NOT_YET = auto()
    ASKED = auto()
    HIT = auto()
    LOADING = auto()
    DONE = auto()  # missed, loaded, not worth it, or failed once


@dataclass
class _Tracked:
    """A request of vLLM's and what is in flight for it.

    Attributes:
        name: how the facade knows it. A count, because vLLM's ids have a random part that differs between ranks.
        bypasses: goes without the cache: it has no token ids to make keys of, or asks not to read what is cached.
        computed: tokens on the device when it looked up.
        load_blocks: those that the load in flight fills.
        loaded_tokens: by its first load.
        stored_tokens: from the front, known to be stored or on their way.
        valid_tokens: set between a failed load and vLLM's taking notice: from here on the KV is not to be trusted.
        stale: some of its KV is from before the cache was cleared.
    """

    request: Request
    name: str
    bypasses: bool
    look: _Look = _Look.NOT_YET
    computed: int = 0
    hit: Hit = field(default_factory=lambda: Hit(0))
    load_blocks: list[int] = field(default_factory=list)
    loaded_tokens: int = 0
    stored_tokens: int = 0
    load_failed: bool = False
    valid_tokens: int | None = None
    stale: bool = False


@dataclass
class _Store:
    """Tokens to store, and the blocks that keep their KV until it has been read."""

    name: str
    tokens: np.ndarray[Any, np.dtype[np.int64]]
    blocks: list[int]
    options: dict[str, Any]


@dataclass
class Outcome:
    """What a step means for vLLM.

    Attributes:
        received: ids of requests whose load is over, whether it went well or not.
        bad_blocks: blocks that do not hold what was to be loaded into them.
    """

    received: set[str] = field(default_factory=set)
    bad_blocks: set[int] = field(default_factory=set)

    def __bool__(self) -> bool:
        """Whether there is anything to tell vLLM."""
        return bool(self.received or self.bad_blocks)

    def plus(self, other: Outcome) -> Outcome:
        return Outcome(self.received | other.received, self.bad_blocks | other.bad_blocks)


NO_OUTCOME = Outcome()
"""Of steps that have agreed nothing; only to be read."""


class SchedulerSide:
    """One for each scheduler. `cache` must be set before the first step.

    Attributes:
        computes: whether the step planned last runs the model.
        loads, stores: planned, and not started. While they are empty, there is nothing to start.
    """

    cache: MultiLevelCache

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._page_tokens = settings.layout.page_tokens
        self._block_tokens = settings.block_tokens
        self._manager: KVCacheManager | None = None
        self._tracked: dict[str, _Tracked] = {}  # by vLLM's id
        self._by_name: dict[str, _Tracked] = {}  # those with a lookup or load in flight
        self._aborted: dict[str, str] = {}  # name -> vLLM's id, loads whose request is gone
        self._prefilling: dict[str, _Tracked] = {}  # prompts that are not stored yet
        self.loads: list[tuple[str, torch.Tensor]] = []
        self.stores: list[_Store] = []
        self._held: dict[str, list[int]] = {}  # store -> blocks kept for it
        self._num_requests = 0
        self._num_stores = 0
        self.load_ids: dict[int, tuple[str, list[int]]] = {}  # loads started since `take_load_ids`
        self.computes = True
        self._nap_s = _FIRST_NAP_S

    def bind(self, manager: KVCacheManager) -> None:
        self._manager = manager

    @property
    def num_live(self) -> int:
        """Requests that vLLM has not finished."""
        return len(self._tracked)

    @property
    def busy(self) -> bool:
        """Whether steps are needed although vLLM has no request left."""
        return bool(self.stores) or self.cache.pending > 0

    @property
    def holds_blocks(self) -> bool:
        return bool(self._held)

    # -- what vLLM's scheduler tells -----------------------------------------------------------------------

    def on_new_request(self, request: Request) -> None:
        self._num_requests += 1
        bypasses = request.prompt_embeds is not None or request.skip_reading_prefix_cache
        self._tracked[request.request_id] = _Tracked(request, str(self._num_requests), bypasses)

    def matched_tokens(self, request: Request, computed: int) -> int | None:
        """Tokens beyond `computed` that can be loaded; None while that is not known."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None or tracked.bypasses or not self._settings.loads:
            return 0
        if tracked.look is _Look.HIT and tracked.hit.start > computed:
            # Blocks that the device had are gone, and the hit does not bring them.
            self._forget_hit(tracked)
            tracked.look = _Look.NOT_YET
        if tracked.look is _Look.NOT_YET:
            tracked.computed = computed
            tracked.look = _Look.ASKED
            self._by_name[tracked.name] = tracked
            tokens = request.all_token_ids[: request.num_tokens]
            self.cache.lookup(tracked.name, tokens, device_tokens=computed, **_options(request))
            return None
        if tracked.look is _Look.ASKED:
            return None
        if tracked.look is _Look.HIT:
            gain = tracked.hit.num_tokens - computed
            if gain > 0:
                return gain
            self._forget_hit(tracked)
        return 0

    def allocated(self, request: Request, blocks: KVCacheBlocks, num_external: int) -> None:
        """vLLM gave the request blocks, `num_external` tokens of which are to be loaded."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            return
        if request.num_computed_tokens == 0:
            tracked.stale = tracked.bypasses
        tracked.valid_tokens = None
        if num_external and tracked.look is _Look.HIT:
            (ids,) = blocks.get_block_ids()
            computed = tracked.hit.num_tokens - num_external
            slots = self._slots(ids, tracked.hit.num_tokens)
            slots[:computed] = -1
            self.loads.append((tracked.name, torch.from_numpy(slots[tracked.hit.start :])))
            first = computed // self._block_tokens
            tracked.load_blocks = ids[first : tracked.hit.num_tokens // self._block_tokens]
            tracked.computed = computed
            tracked.look = _Look.LOADING
            return
        self._forget_hit(tracked)
        # From here it runs; should it be preempted, it may look up again.
        tracked.look = _Look.DONE if tracked.load_failed else _Look.NOT_YET
        if self._settings.stores and not tracked.stale:
            self._prefilling[request.request_id] = tracked

    def scheduled(self, output: SchedulerOutput) -> None:
        """A step was planned; prompts that it completes will be stored."""
        self.computes = bool(output.num_scheduled_tokens)
        if not self._prefilling:
            return
        done = []
        for request_id, tracked in self._prefilling.items():
            scheduled = output.num_scheduled_tokens.get(request_id, 0)
            request = tracked.request
            if scheduled and request.num_computed_tokens + scheduled >= request.num_prompt_tokens:
                self._store(tracked, request.num_prompt_tokens)
                done.append(request_id)
        for request_id in done:
            del self._prefilling[request_id]

    def finished(self, request: Request, block_ids: Sequence[int]) -> int:
        """vLLM ends the request, for whatever reason, and frees its blocks right after this.

        Returns how many of its tokens were loaded rather than computed, the first time it ran.
        """
        tracked = self._tracked.pop(request.request_id, None)
        if tracked is None:
            return 0
        self._prefilling.pop(request.request_id, None)
        if tracked.look is _Look.LOADING:
            # vLLM keeps the blocks until it is told that the load is over.
            self.loads = [load for load in self.loads if load[0] != tracked.name]
            self._by_name.pop(tracked.name)
            self._aborted[tracked.name] = request.request_id
            self.cache.abort(tracked.name)
            return 0
        self._forget_hit(tracked)
        # The newest token was sampled but not run through the model, so it has no KV.
        num_tokens = min(request.num_computed_tokens, request.num_tokens - 1)
        if tracked.valid_tokens is not None:
            num_tokens = min(num_tokens, tracked.valid_tokens)
        if self._settings.stores and not tracked.stale:
            self._store(tracked, min(num_tokens, len(block_ids) * self._block_tokens), block_ids)
        return tracked.loaded_tokens

    def clear(self) -> None:
        """Forget what is cached, in every tier. What running requests have computed so far will not be stored.

        vLLM calls this after an update of the weights, in each of its engines.
        """
        for tracked in self._tracked.values():
            if tracked.look in (_Look.ASKED, _Look.HIT):
                self._forget_hit(tracked)
                tracked.look = _Look.NOT_YET
            tracked.stale = tracked.stale or tracked.request.num_computed_tokens > 0
            tracked.stored_tokens = 0
        self._prefilling = {key: tracked for key, tracked in self._prefilling.items() if not tracked.stale}
        for store in self.stores:
            self._release(store.name)
        self.stores = []
        self.cache.invalidate()

    # -- calls of the facade, and what became of them ------------------------------------------------------

    def start_loads(self) -> None:
        """Start what was planned. Where the copying happens, after what the device still does with the blocks."""
        if not self.loads:
            return
        loads, self.loads = self.loads, []
        for name, slots in loads:
            number = self.cache.load(name, slots)
            tracked = self._by_name[name]
            self.load_ids[number] = (tracked.request.request_id, tracked.load_blocks)

    def take_load_ids(self) -> dict[int, tuple[str, list[int]]]:
        """Number of each load started since the last call -> vLLM's request id and the blocks it fills."""
        ids, self.load_ids = self.load_ids, {}
        return ids

    def start_stores(self) -> None:
        """Start what was planned; the model has been launched for the tokens of this step."""
        if not self.stores:
            return
        stores, self.stores = self.stores, []
        for store in stores:
            slots = torch.from_numpy(self._slots(store.blocks, len(store.tokens)))
            self.cache.offload(store.name, store.tokens, slots, **store.options)

    def on_step(self, step: StepResult) -> Outcome:
        """Take what a step agreed."""
        if not step:
            return NO_OUTCOME
        self._nap_s = _FIRST_NAP_S
        outcome = Outcome()
        for name, hit in step.hits.items():
            tracked = self._by_name.get(name)
            if tracked is None:
                continue
            tracked.hit = hit
            tracked.look = _Look.HIT if hit.num_tokens else _Look.DONE
            if not hit.num_tokens:
                del self._by_name[name]
        for name, num_tokens in step.loaded.items():
            self._end_load(name, num_tokens, outcome)
        for name, failure in step.failed.items():
            tracked = self._by_name[name]
            request_id = tracked.request.request_id
            log.warning("load of request %s failed, the rest is recomputed: %s", request_id, failure.reason)
            tracked.load_failed = True
            tracked.valid_tokens = failure.num_tokens
            self._end_load(name, failure.num_tokens, outcome)
        for name in step.released:
            if name in self._aborted:
                outcome.received.add(self._aborted.pop(name))
            else:
                self._release(name)
        return outcome

    def rest(self) -> None:
        """After a step that has computed nothing and told nothing: sleep, if something is in flight.

        Else vLLM's engine steps as fast as it can while its requests wait for their loads, and a thread that
        copies waits 5 ms (`sys.getswitchinterval`) for the interpreter after each of its operations. On CPU a load
        of 960 tokens of 30 layers took 14 s so. Ranks that agree come to the same conclusion.
        """
        if self.cache.pending:
            time.sleep(self._nap_s)
            self._nap_s = min(2 * self._nap_s, _LONGEST_NAP_S)

    def _end_load(self, name: str, num_tokens: int, outcome: Outcome) -> None:
        tracked = self._by_name.pop(name)
        tracked.look = _Look.DONE
        tracked.stored_tokens = num_tokens
        if not tracked.loaded_tokens:
            tracked.loaded_tokens = max(0, num_tokens - tracked.computed)
        outcome.received.add(tracked.request.request_id)
        good = max(0, num_tokens - tracked.computed) // self._block_tokens
        outcome.bad_blocks.update(tracked.load_blocks[good:])
        tracked.load_blocks = []

    def _forget_hit(self, tracked: _Tracked) -> None:
        if tracked.look in (_Look.ASKED, _Look.HIT):
            self.cache.decline(tracked.name)
            del self._by_name[tracked.name]
            tracked.look = _Look.DONE

    # -- storing -------------------------------------------------------------------------------------------

    def _store(self, tracked: _Tracked, num_tokens: int, block_ids: Sequence[int] | None = None) -> None:
        num_tokens -= num_tokens % self._page_tokens
        if num_tokens <= tracked.stored_tokens:
            return
        tracked.stored_tokens = num_tokens
        request = tracked.request
        manager = self._manager
        assert manager is not None
        if block_ids is None:
            (block_ids,) = manager.get_block_ids(request.request_id)
        blocks = list(block_ids[: num_tokens // self._block_tokens])
        self._num_stores += 1
        name = f"{tracked.name}/{self._num_stores}"
        # Its own reference keeps the blocks from being given to others, whether the request goes on, ends or is
        # preempted before they have been read.
        manager.block_pool.touch([manager.block_pool.blocks[block] for block in blocks])
        self._held[name] = blocks
        tokens = np.asarray(request.all_token_ids[:num_tokens], dtype=np.int64)
        self.stores.append(_Store(name, tokens, blocks, _options(request)))

    def _release(self, name: str) -> None:
        blocks = self._held.pop(name, None)
        if blocks is None:
            return
        assert self._manager is not None
        pool = self._manager.block_pool
        pool.free_blocks([pool.blocks[block] for block in reversed(blocks)])

    def _slots(self, blocks: Sequence[int], num_tokens: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        starts = np.asarray(blocks, dtype=np.int64)[: -(-num_tokens // self._block_tokens)] * self._block_tokens
        return (starts[:, None] + np.arange(self._block_tokens)).reshape(-1)[:num_tokens]


def _options(request: Request) -> dict[str, Any]:
    """What the KV of a request depends on besides its tokens."""
    options: dict[str, Any] = {}
    if request.cache_salt:
        options["salt"] = request.cache_salt
    if request.lora_request is not None:
        options["adapter"] = f"{request.lora_request.lora_name}@{request.lora_request.lora_path}"
    if request.mm_features:
        options["media"] = [f"{item.identifier}@{item.mm_position.offset}" for item in request.mm_features]
    return options
