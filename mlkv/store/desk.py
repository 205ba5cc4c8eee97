"""What people's tools ask the owner for: namespaces, lists of pages, pins, pages of lower tiers as they are.

Checking bytes is left to the tools, which map the pool as well: the owner would keep everybody waiting.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from mlkv.errors import StoreError
from mlkv.store import wire, wire_tools
from mlkv.store.chains import split_keys
from mlkv.store.epochs import Epochs, Namespace
from mlkv.store.grants import Reservation
from mlkv.store.index import Index
from mlkv.store.pins import Pins
from mlkv.store.pool import HostPool
from mlkv.store.quotas import Quotas
from mlkv.store.tiers.calls import Answer
from mlkv.store.tiers.runner import TierRunner
from mlkv.store.wire_tools import MAX_FETCHED_PAGES, MAX_LISTED_PAGES, NamespaceEntry

MAX_TIER_KEYS: Final = 4096
"""Keys of a tier that are listed at once."""

_POOL_SHARE: Final = 8
"""Pages of tiers that are looked at take at most one page in so many of the pool, for each request."""


class Desk:
    """Answers tools. Nothing here is on the path of an engine.

    Args:
        take: reserves that many pages, or fewer, under keys that nobody can find.
    """

    def __init__(
        self,
        index: Index,
        pool: HostPool | None,
        runners: Sequence[TierRunner],
        pins: Pins,
        epochs: Epochs,
        quotas: Quotas | None,
        take: Callable[[int], Reservation],
    ) -> None:
        self._index = index
        self._pool = pool
        self._take = take
        self._runners = {runner.name: runner for runner in runners}
        self._pins = pins
        self._epochs = epochs
        self._quotas = quotas

    def handle(self, request: wire.ToolRequest) -> wire.Reply:
        """Answer at once. Raises StoreError, with nothing changed, to refuse."""
        match request:
            case wire_tools.Namespaces():
                return wire_tools.NamespaceList([self._describe(known) for known in self._epochs.all()])
            case wire_tools.ListPages():
                return self._list_pages(request)
            case wire_tools.Pin():
                if request.is_chain:
                    self._pins.pin_chain(request.keys)
                else:
                    self._pins.pin_key(request.keys)
            case wire_tools.Unpin():
                self._pins.unpin(request.keys)
            case wire_tools.Forget():
                self._runner(request.tier).delete(split_keys(request.keys))
                return wire.Done()
        return self._pins.report()

    def list_tier(self, request: wire_tools.ListTier, answer: Callable[[wire.Reply], None]) -> None:
        """Answer when the tier has. Raises StoreError if it cannot be asked."""

        def listed(found: Answer) -> None:
            if found.error:
                answer(wire.Failed(f"tier {request.tier}: {found.error}"))
            else:
                answer(wire_tools.TierKeys(b"".join(found.keys)))

        limit = min(max(request.limit, 1), MAX_TIER_KEYS)
        if not self._runner(request.tier).scan(request.after, limit, listed):
            raise StoreError(f"tier {request.tier} is out of order, or has too much to do; see mlkv stats")

    def fetch(
        self, request: wire_tools.Fetch, answer: Callable[[wire.Reply], None], lend: Callable[[int], bool]
    ) -> None:
        """Answer when the tier has read the pages, and `lend` the reservation in which they are to who asked.

        Raises StoreError if the tier or the pool cannot take it.
        """
        keys = split_keys(request.keys)
        if not 1 <= len(keys) <= self.max_fetched_pages:
            raise StoreError(
                f"between 1 and {self.max_fetched_pages} pages can be fetched at once, not {len(keys)}"
            )
        runner, pool = self._runner(request.tier), self._pool
        assert pool is not None, "a store with tiers has its pool"
        reserved = self._take(len(keys))
        if len(reserved.pages) < len(keys):
            self._give_back(reserved)
            raise StoreError("the pool has no room now: nearly all of its pages are in use")
        told: list[Answer] = []

        def answered(found: Answer) -> None:
            told.append(found)
            if found.error:
                answer(wire.Failed(f"tier {request.tier}: {found.error}"))

        def returned() -> None:
            found = told[0]
            if found.error or not lend(reserved.id):
                self._give_back(reserved)
            else:
                answer(wire_tools.Fetched(reserved.id, wire.page_bytes_of(reserved.pages), found.good.tobytes()))

        views = [pool.page(page) for page in reserved.pages.tolist()]
        if not runner.read(keys, views, answered, returned):
            self._give_back(reserved)
            raise StoreError(f"tier {request.tier} is out of order, or has too much to do; see mlkv stats")

    @property
    def max_fetched_pages(self) -> int:
        return max(1, min(MAX_FETCHED_PAGES, self._index.num_pages // _POOL_SHARE))

    def _describe(self, namespace: Namespace) -> NamespaceEntry:
        entry = NamespaceEntry(namespace.fingerprint, namespace.model, namespace.page_tokens, namespace.epoch)
        if self._quotas is None:
            return entry
        share = self._quotas.share_of(namespace)
        return msgspec.structs.replace(entry, num_pages=share.num_pages, limit_pages=share.limit_pages)

    def _give_back(self, reserved: Reservation) -> None:
        if reserved.id:
            self._index.cancel(reserved.id)

    def _list_pages(self, request: wire_tools.ListPages) -> wire_tools.PageList:
        limit = min(max(request.limit, 1), MAX_LISTED_PAGES)
        pages, keys, generations, states = self._index.entries(max(request.start, 0), limit)
        following = int(pages[-1]) + 1 if len(pages) == limit else -1
        return wire_tools.PageList(
            wire.page_bytes_of(pages), keys, wire.generation_bytes_of(generations), states.tobytes(), following
        )

    def _runner(self, tier: str) -> TierRunner:
        runner = self._runners.get(tier)
        if runner is None:
            raise StoreError(f"this store has no tier {tier!r}; it has: {', '.join(self._runners) or 'none'}")
        return runner
