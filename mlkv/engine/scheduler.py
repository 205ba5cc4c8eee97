"""Which requests compute how many tokens in a step, and when their KV is loaded and stored.

Every rank runs this code for itself and must come to the same decisions, so it uses only what is equal on all of
them: the calls it gets, the tokens, and the cache's agreed step results. No clock, no free memory, no set order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from mlkv.engine.pages import DevicePages
from mlkv.engine.request import FinishReason, Request, State

if TYPE_CHECKING:
    from mlkv import MultiLevelCache, StepResult


class Scheduler:
    """Continuous batching with chunked prefill, first come first served.

    A request arrives, asks the cache for its prefix, gets pages for its prompt, loads what the cache has and the
    device lacks, joins the batch, and stores its KV when it ends. Those that wait for an answer or a load hold up
    nobody. When decoding runs out of pages the youngest request gives up its own and starts again later.
    """

    def __init__(
        self,
        pages: DevicePages,
        cache: MultiLevelCache | None,
        *,
        max_batch_tokens: int = 512,
        max_running: int = 64,
        max_lookups: int = 8,
    ) -> None:
        """Args:
        max_batch_tokens: tokens computed in a step.
        max_running: requests that hold pages to compute or load at once.
        max_lookups: waiting requests that may hold an answered or open lookup, which pins host pages.
        """
        self.pages, self.cache = pages, cache
        self.max_batch_tokens = max(max_batch_tokens, max_running)  # every running request can decode
        self.max_running, self.max_lookups = max_running, max_lookups
        self.waiting: list[Request] = []  # both lists by order of arrival
        self.active: list[Request] = []  # loading or running
        self._draining: dict[str, list[int]] = {}
        """Pages that a transfer may still touch although their request is done with them, by cache id."""

    @property
    def num_unfinished(self) -> int:
        return len(self.waiting) + len(self.active)

    @property
    def num_draining(self) -> int:
        """Transfers that still hold pages of requests that are gone."""
        return len(self._draining)

    def add(self, request: Request) -> None:
        self.waiting.append(request)

    def abort(self, request_id: str) -> Request | None:
        """End a request in any state. None when there is none of that id (any more)."""
        for request in (*self.waiting, *self.active):
            if request.request_id == request_id:
                self._withdraw(request)
                (self.active if request in self.active else self.waiting).remove(request)
                request.state = State.FINISHED
                return request
        return None

    def apply(self, step: StepResult) -> None:
        """Take in what all ranks agreed on."""
        for cache_id in step.released:
            self.pages.release(self._draining.pop(cache_id, []))
        open_requests = {r.cache_id: r for r in (*self.waiting, *self.active)}
        for cache_id, hit in step.hits.items():
            request = open_requests.get(cache_id)
            if request is not None and request.state is State.ASKED:
                request.state, request.hit_tokens = State.ANSWERED, hit.num_tokens
        ends = step.loaded | {cache_id: failure.num_tokens for cache_id, failure in step.failed.items()}
        for cache_id, num_tokens in ends.items():
            request = open_requests.get(cache_id)
            if request is not None and request.state is State.LOADING:
                self._load_ended(request, num_tokens)

    def schedule(self) -> list[tuple[Request, int]]:
        """The next step's requests and how many tokens each computes; those that compute one token come first."""
        decodes = [r for r in self.active if r.state is State.RUNNING and self._remaining(r) == 1]
        for request in decodes:
            self._grow(request)
        self._ask()
        self._admit()
        running = [r for r in self.active if r.state is State.RUNNING and self._has_pages(r)]
        batch, budget = [], self.max_batch_tokens
        for request in sorted(running, key=lambda r: (self._remaining(r) > 1, r.order)):
            count = min(self._remaining(request), budget)
            if count:
                batch.append((request, count))
                budget -= count
        return sorted(batch, key=lambda item: item[1] > 1)

    def advance(
        self, batch: Sequence[tuple[Request, int]], chosen: Sequence[int]
    ) -> list[tuple[Request, FinishReason]]:
        """Take in a computed step.

        Args:
            chosen: the next token after the last one computed, for each request of the batch.

        Returns: the requests that ended with it.
        """
        ended: list[tuple[Request, FinishReason]] = []
        for (request, count), token in zip(batch, chosen, strict=True):
            request.num_computed += count
            self._register(request)
            if request.num_computed < request.num_tokens:
                continue
            reason = request.append(token)
            if reason is not None:
                self._store(request)
                ended.append((request, reason))
        return ended

    # -- arriving ---------------------------------------------------------------------------------------------

    def _ask(self) -> None:
        for request in self.waiting[: self.max_lookups]:
            if request.state is not State.WAITING:
                continue
            if self.cache is None or request.params.no_load:
                request.state, request.hit_tokens = State.ANSWERED, 0
                continue
            # Held from here on, so that what the load is to continue is still there when it is answered.
            request.table = self.pages.match(request.tokens, request.num_tokens - 1)
            self.pages.hold(request.table)
            request.asked_device_tokens = len(request.table) * self.pages.page_tokens
            self.cache.lookup(request.cache_id, request.tokens, device_tokens=request.asked_device_tokens)
            request.state = State.ASKED

    def _admit(self) -> None:
        for request in list(self.waiting):
            if len(self.active) >= self.max_running:
                return
            if request.state is not State.ANSWERED:
                continue
            admitted = self._take_pages(request)
            while not admitted and not self.active and not self._draining and self._drop_lookup(after=request):
                admitted = self._take_pages(request)
            if not admitted:
                return  # nobody overtakes for pages
            self.waiting.remove(request)
            _insert(self.active, request)
            self._start(request)

    def _take_pages(self, request: Request) -> bool:
        """Complete the table to all pages of the request's tokens. May find more of its prefix on the device."""
        held = len(request.table)
        known = [] if request.params.no_load else self.pages.match(request.tokens, request.num_tokens - 1)
        self.pages.hold(known[held:])
        fresh = self.pages.allocate(self._num_pages(request.num_tokens) - len(known))
        if fresh is None:
            self.pages.release(known[held:])
            return False
        request.table = known + fresh
        request.num_registered_pages = len(known)
        request.num_computed = len(known) * self.pages.page_tokens
        return True

    def _start(self, request: Request) -> None:
        if request.num_generated == 0:
            request.device_tokens, request.host_tokens = request.num_computed, 0
        if request.hit_tokens > request.num_computed:
            assert self.cache is not None
            slots = request.slots(request.hit_tokens, self.pages.page_tokens)
            slots[: request.num_computed] = -1  # valid already, and shared with others who read them
            self.cache.load(request.cache_id, torch.from_numpy(slots[request.asked_device_tokens :]))
            request.state = State.LOADING
            return
        self._decline(request)
        request.state = State.RUNNING

    def _load_ended(self, request: Request, num_tokens: int) -> None:
        """A load is over; a failed one has left a good prefix of `num_tokens`, and the rest is computed."""
        before = request.num_computed
        request.num_computed = max(before, num_tokens // self.pages.page_tokens * self.pages.page_tokens)
        if request.num_generated == 0:
            request.host_tokens = request.num_computed - before
        self._register(request)
        request.state = State.RUNNING

    # -- leaving ----------------------------------------------------------------------------------------------

    def _store(self, request: Request) -> None:
        """The request ended: offload its whole pages. They stay findable on the device while there is room."""
        self.active.remove(request)
        request.state = State.FINISHED
        num_pages = request.num_computed // self.pages.page_tokens
        if self.cache is None or request.params.no_offload or not num_pages:
            self.pages.release(request.table)
        else:
            whole = num_pages * self.pages.page_tokens
            slots = torch.from_numpy(request.slots(whole, self.pages.page_tokens))
            self.cache.offload(request.cache_id, request.tokens[:whole], slots)
            self.pages.release(request.table[num_pages:])
            self._draining[request.cache_id] = request.table[:num_pages]
        request.table = []

    def _withdraw(self, request: Request) -> None:
        """Give back all that a request holds in the cache and on the device."""
        if request.state is State.LOADING:
            assert self.cache is not None
            self.cache.abort(request.cache_id)
            self._draining[request.cache_id] = request.table
        else:
            if request.state in (State.ASKED, State.ANSWERED):
                self._decline(request)
            self.pages.release(request.table)
        request.table = []

    def _decline(self, request: Request) -> None:
        if self.cache is not None and (request.state is State.ASKED or request.hit_tokens):
            self.cache.decline(request.cache_id)

    def _restart(self, request: Request) -> None:
        """Withdraw a request and let it begin again, with the tokens it has."""
        self._withdraw(request)
        request.state = State.WAITING
        request.attempt += 1
        request.num_computed = request.num_registered_pages = 0
        request.hit_tokens = request.asked_device_tokens = 0

    # -- pages ------------------------------------------------------------------------------------------------

    def _grow(self, request: Request) -> None:
        """Get the page for a request's newest token, from whoever came last if need be."""
        while request.state is State.RUNNING and not self._has_pages(request):
            page = self.pages.allocate(1)
            if page is not None:
                request.table += page
            elif not self._drop_lookup(after=request):
                if self._draining:
                    return  # pages are about to come back: sits out this step
                victim = self.active.pop()
                victim.num_preemptions += 1
                self._restart(victim)
                _insert(self.waiting, victim)

    def _drop_lookup(self, after: Request) -> bool:
        """Take back the device pages held by the last waiting request that is not `after`."""
        for request in reversed(self.waiting):
            if request is not after and request.table:
                self._restart(request)
                return True
        return False

    def _register(self, request: Request) -> None:
        full = request.num_computed // self.pages.page_tokens
        self.pages.register(request.tokens, request.table, request.num_registered_pages, full)
        request.num_registered_pages = full

    def _has_pages(self, request: Request) -> bool:
        return len(request.table) >= self._num_pages(request.num_tokens)

    def _num_pages(self, num_tokens: int) -> int:
        return -(-num_tokens // self.pages.page_tokens)

    @staticmethod
    def _remaining(request: Request) -> int:
        return request.num_tokens - request.num_computed


def _insert(requests: list[Request], request: Request) -> None:
    """Keep the list in order of arrival: a request that was preempted keeps its place."""
    at = next((i for i, other in enumerate(requests) if other.order > request.order), len(requests))
    requests.insert(at, request)
