"""Matches that wait for lower tiers, each with an end of its own waiting."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from mlkv.store.grants import Lease
from mlkv.store.index import KEY_BYTES, Index
from mlkv.store.promotion import Promoter, Promotion

MAX_WAITING: Final = 4096
"""Lookups that may wait at once; more are answered at once with what the host has."""


@dataclass(eq=False)
class Lookup:
    """One match on its way.

    Attributes:
        owner: whose it is, for `forget`.
        keys: the chain, cut to what was asked for.
        lease: the best prefix so far; held, so that it is still there when the answer goes out.
        give_up_at: when the best prefix is the answer.
        answer: called once with the lease, unless the lookup was forgotten.
    """

    owner: object
    keys: bytes
    lease: Lease
    give_up_at: float
    answer: Callable[[Lease], None]
    promotion: Promotion | None = None
    tried_from: int = -1
    is_over: bool = False

    @property
    def num_keys(self) -> int:
        return len(self.keys) // KEY_BYTES


class Lookups:
    """Leases the longest prefix of a chain, after lower tiers had their time to extend it."""

    def __init__(self, index: Index, promoter: Promoter) -> None:
        self._index = index
        self._promoter = promoter
        self._waiting: dict[Lookup, None] = {}

    def match(
        self, owner: object, keys: bytes, limit: int, give_up_at: float | None, answer: Callable[[Lease], None]
    ) -> None:
        """Find a chain. `answer` is called at once if no tier can add to it, else later from `expire` or a tier.

        With `give_up_at` None it is called at once in any case; what tiers bring is for later lookups.
        Raises StoreError for a malformed request.
        """
        lease = self._index.match(keys, limit)
        lookup = Lookup(owner, keys[: limit * KEY_BYTES], lease, give_up_at or 0.0, answer)
        self._waiting[lookup] = None
        self._advance(lookup)
        if give_up_at is None or len(self._waiting) > MAX_WAITING:
            self._end(lookup)

    def expire(self, now: float) -> None:
        """Answer what has waited long enough."""
        for lookup in [waiting for waiting in self._waiting if now >= waiting.give_up_at]:
            self._extend(lookup)
            self._end(lookup)

    @property
    def due_at(self) -> float | None:
        """When `expire` has something to do."""
        return min((lookup.give_up_at for lookup in self._waiting), default=None)

    def forget(self, owner: object) -> None:
        """Whoever asked does not want the answers any more."""
        for lookup in [waiting for waiting in self._waiting if waiting.owner == owner]:
            self._drop(lookup)
            if lookup.lease.id:
                self._index.release([lookup.lease.id])

    def _progress(self, lookup: Lookup) -> None:
        if not lookup.is_over:
            self._extend(lookup)
            self._advance(lookup)

    def _extend(self, lookup: Lookup) -> None:
        """Lease what is readable now, before the shorter lease is given back."""
        old = lookup.lease
        lookup.lease = self._index.match(lookup.keys, lookup.num_keys, is_use=False)
        if old.id:
            self._index.release([old.id])

    def _advance(self, lookup: Lookup) -> None:
        """Wait for the tiers if they may bring more, else answer."""
        promotion = self._find_promotion(lookup)
        if promotion is None:
            self._end(lookup)
        elif promotion is not lookup.promotion:
            lookup.promotion = promotion
            promotion.on_progress.append(lambda: self._progress(lookup))

    def _find_promotion(self, lookup: Lookup) -> Promotion | None:
        num_pages = len(lookup.lease.pages)
        if num_pages == lookup.num_keys:
            return None
        promotion = self._promoter.under_way(lookup.keys[num_pages * KEY_BYTES : (num_pages + 1) * KEY_BYTES])
        if promotion is not None:
            return promotion
        if lookup.lease.num_coming or num_pages <= lookup.tried_from:
            return None  # an engine is just writing what follows; or the tiers were asked
        if lookup.promotion is not None and lookup.promotion.keys.startswith(lookup.keys):
            return None  # all of it was asked for
        lookup.tried_from = num_pages
        return self._promoter.promote(lookup.keys, num_pages)

    def _end(self, lookup: Lookup) -> None:
        if not lookup.is_over:
            self._drop(lookup)
            lookup.answer(lookup.lease)

    def _drop(self, lookup: Lookup) -> None:
        lookup.is_over = True
        del self._waiting[lookup]
