"""Brings pages of a chain back from lower tiers into the host pool."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from mlkv.page import IDENTITY_BYTES, peek_headers
from mlkv.store.chains import split_keys
from mlkv.store.grants import Reservation
from mlkv.store.index import KEY_BYTES, Index
from mlkv.store.pool import HostPool
from mlkv.store.tiers.calls import Answer
from mlkv.store.tiers.runner import TierRunner

MAX_KEYS: Final = 4096
"""Of one promotion: handling the keys of more would keep the owner from others for milliseconds. A lookup that
wants more asks again where this one ended."""

MAX_PROMOTIONS: Final = 1024
"""Chains that may be on their way up at once. More are misses: every queue is full already."""

_POOL_SHARE: Final = 2
"""Tiers may be filling one page in so many; the others are for what engines write."""

_BATCH_SHARE: Final = 8
"""A batch takes at most one page in so many, so that several fit into a small pool."""


_NO_GENERATIONS: Final[NDArray[np.uint64]] = np.empty(0, np.uint64)

_log = logging.getLogger("mlkv.store")


@dataclass(eq=False)
class _Batch:
    """Pages that a tier is filling, for the keys from `first` on."""

    first: int
    reservation: int
    pages: NDArray[np.int32]
    good: NDArray[np.bool_] | None = None
    """Which of them came; None until the tier has answered."""
    has_failed: bool = False
    has_returned: bool = False
    """The tier does not touch the pages any more."""


@dataclass(eq=False)
class Promotion:
    """One chain on its way up.

    Attributes:
        keys: the chain from its root, as far as it was asked for.
        start: how many of its pages the host had at the beginning.
        end: up to where its pages are readable.
        on_progress: told whenever `end` has grown, and when it is done.
    """

    keys: bytes
    start: int
    end: int
    on_progress: list[Callable[[], None]] = field(default_factory=list)
    is_done: bool = False
    tier: int = 0
    next: int = 0
    """The first page that this tier was not asked to read."""
    found: int = 0
    """Where the part ends that this tier has."""
    batches: deque[_Batch] = field(default_factory=deque)
    is_cut: bool = False
    """There is no room, or somebody else writes the next page: no tier can help."""
    fingerprint: bytes = b""

    @property
    def num_keys(self) -> int:
        return len(self.keys) // KEY_BYTES

    def key(self, position: int) -> bytes:
        return self.keys[position * KEY_BYTES : (position + 1) * KEY_BYTES]


class Promoter:
    """Asks the tiers in their order; what the first of them does not have, or fails to bring, the next may.

    Pages are read in batches, each into a reservation of its own, and published in the order of the chain. Behind
    the first page that does not come nothing is of use, since no page can be found without its prefix.

    Args:
        runners: the tiers, the nearest one first.
        on_reserved: told of every reservation, before anything is read.
        on_published: told pages that can be matched now, and the number of the tier that they are from.
    """

    def __init__(
        self,
        index: Index,
        pool: HostPool,
        runners: Sequence[TierRunner],
        on_reserved: Callable[[Reservation], None],
        on_published: Callable[[NDArray[np.int32], int], None],
    ) -> None:
        self._index = index
        self._pool = pool
        self._runners = runners
        self._on_reserved = on_reserved
        self._on_published = on_published
        self._by_key: dict[bytes, Promotion] = {}  # every key that a promotion was asked for
        self._num_promotions = 0
        self._num_pages = 0  # reserved for batches, hung ones too
        self._max_pages = max(1, index.num_pages // _POOL_SHARE)
        self._max_batch_pages = max(1, index.num_pages // _BATCH_SHARE)
        self.num_bad_headers = [0] * len(runners)
        """Pages that were read whole but are not what their key names, by tier."""

    def under_way(self, key: bytes) -> Promotion | None:
        """The promotion that may bring this page."""
        return self._by_key.get(key)

    def promote(self, keys: bytes, start: int) -> Promotion | None:
        """Bring up keys[start:] of a chain, as far as the tiers have it, at most `MAX_KEYS` of them.

        None if none of the tiers can be asked, or none has any.
        """
        if self._num_promotions >= MAX_PROMOTIONS or not any(runner.is_usable for runner in self._runners):
            return None
        keys = keys[: (start + MAX_KEYS) * KEY_BYTES]
        promotion = Promotion(keys, start, start, next=start, found=start)
        self._num_promotions += 1
        for key in split_keys(keys, start):
            self._by_key.setdefault(key, promotion)
        self._ask(promotion)
        return None if promotion.is_done else promotion

    def _ask(self, promotion: Promotion) -> None:
        """Ask the next tier that listens for what is still missing."""
        while promotion.tier < len(self._runners) and not promotion.is_cut and promotion.end < promotion.num_keys:
            promotion.next = promotion.found = promotion.end
            wanted = split_keys(promotion.keys, promotion.end)
            if self._runners[promotion.tier].contains(wanted, lambda answer: self._found(promotion, answer)):
                return
            promotion.tier += 1
        self._finish(promotion)

    def _found(self, promotion: Promotion, answer: Answer) -> None:
        promotion.found = promotion.end + answer.num_found
        self._go_on(promotion)

    def _go_on(self, promotion: Promotion) -> None:
        """Read what is left of this tier's part, or go on to the next tier."""
        runner = self._runners[promotion.tier]
        while promotion.next < promotion.found and len(promotion.batches) < runner.concurrency:
            if not self._read(promotion, runner):
                break
        if not promotion.batches:
            promotion.tier += 1
            self._ask(promotion)

    def _read(self, promotion: Promotion, runner: TierRunner) -> bool:
        """Have the next batch read. False if that cannot be; then nothing behind it is read either."""
        num_pages = min(
            promotion.found - promotion.next,
            runner.batch_pages,
            self._max_batch_pages,
            self._max_pages - self._num_pages,
        )
        first = promotion.next
        reserved: Reservation | None = None
        if num_pages > 0:
            reserved = self._index.reserve(promotion.keys[: (first + num_pages) * KEY_BYTES], first)
            self._on_reserved(reserved)
        if reserved is None or not reserved.id or reserved.first != first:
            if reserved is not None and reserved.id:
                self._index.cancel(reserved.id)
            promotion.found, promotion.is_cut = first, True
            return False
        promotion.next = first + len(reserved.pages)
        if len(reserved.pages) < num_pages:
            promotion.found, promotion.is_cut = promotion.next, True
        batch = _Batch(first, reserved.id, reserved.pages)
        promotion.batches.append(batch)
        self._num_pages += len(batch.pages)
        keys = split_keys(promotion.keys, first, promotion.next)
        views = [self._pool.page(page) for page in batch.pages.tolist()]
        if runner.read(
            keys,
            views,
            lambda answer: self._answered(promotion, batch, answer),
            lambda: self._returned(promotion, batch),
        ):
            return True
        promotion.batches.pop()
        promotion.found = first
        self._give_back(batch)
        return False

    def _answered(self, promotion: Promotion, batch: _Batch, answer: Answer) -> None:
        batch.good = answer.good
        if answer.error:
            batch.has_failed = True
            # It may never come back: others may write these keys elsewhere meanwhile.
            self._index.disown(batch.reservation)
            if batch in promotion.batches:
                self._settle(promotion)

    def _returned(self, promotion: Promotion, batch: _Batch) -> None:
        batch.has_returned = True
        if batch in promotion.batches:
            self._settle(promotion)
        else:
            self._give_back(batch)

    def _settle(self, promotion: Promotion) -> None:
        """Publish what has come, in the order of the chain, and see how to go on."""
        old_end = promotion.end
        while promotion.batches:
            batch = promotion.batches[0]
            if not batch.has_failed and not batch.has_returned:
                break
            promotion.batches.popleft()
            if batch.has_failed or self._publish(promotion, batch) < len(batch.pages):
                self._abandon(promotion)
        if promotion.end > old_end:
            for tell in promotion.on_progress:
                tell()
        self._go_on(promotion)

    def _publish(self, promotion: Promotion, batch: _Batch) -> int:
        """Put the good front of a batch into the index. Returns its length."""
        generations = self._check(promotion, batch)
        committed = self._index.commit(batch.reservation, len(generations), generations)
        self._num_pages -= len(batch.pages)
        promotion.end += committed.num_good
        if committed.num_good:
            self._on_published(batch.pages[: committed.num_good], promotion.tier)
        return committed.num_good

    def _check(self, promotion: Promotion, batch: _Batch) -> NDArray[np.uint64]:
        """Generations of the leading pages that came whole and say that they are what was asked for.

        The namespace is not known here, but every key is bound to it, and all of a chain is of one. Whether the
        payload is right is for the ranks to see when they load it.
        """
        assert batch.good is not None
        num_came = len(batch.good) if batch.good.all() else int(batch.good.argmin())
        if not num_came:
            return _NO_GENERATIONS
        wanted = promotion.keys[batch.first * KEY_BYTES : (batch.first + num_came) * KEY_BYTES]
        found = peek_headers(self._pool.headers(batch.pages[:num_came], IDENTITY_BYTES))
        if batch.first:
            before = promotion.key(batch.first - 1)
        else:  # the parent of a chain's first page is known to its engine only
            before = found.parents[:KEY_BYTES]
        namespace = promotion.fingerprint or found.fingerprints[:KEY_BYTES]
        is_right = (
            found.is_valid
            & (found.used_bytes <= self._pool.page_bytes)
            & _equal(found.keys, wanted)
            & _equal(found.parents, before + wanted[:-KEY_BYTES])
            & _equal(found.fingerprints, namespace * num_came)
        )
        num_right = num_came if is_right.all() else int(is_right.argmin())
        if num_right:
            promotion.fingerprint = namespace
        if num_right < num_came:
            runner = self._runners[promotion.tier]
            self.num_bad_headers[promotion.tier] += 1
            _log.warning("tier %s: what it has under a key is another page", runner.name)
            runner.delete([promotion.key(batch.first + num_right)])
        return found.generations[:num_right]

    def _abandon(self, promotion: Promotion) -> None:
        """Nothing more of this tier is of use: what it still reads has lost its prefix."""
        promotion.found = promotion.end
        batches, promotion.batches = promotion.batches, deque()
        for batch in batches:
            self._index.disown(batch.reservation)
            if batch.has_returned:
                self._give_back(batch)

    def _give_back(self, batch: _Batch) -> None:
        self._index.cancel(batch.reservation)
        self._num_pages -= len(batch.pages)

    def _finish(self, promotion: Promotion) -> None:
        promotion.is_done = True
        self._num_promotions -= 1
        for key in split_keys(promotion.keys, promotion.start):
            if self._by_key.get(key) is promotion:
                del self._by_key[key]
        for tell in promotion.on_progress:
            tell()


def _equal(found: bytes, wanted: bytes) -> NDArray[np.bool_]:
    """Which of n keys are as wanted: bool `[n]`."""
    halves = np.frombuffer(found, "<u8") == np.frombuffer(wanted, "<u8")
    equal: NDArray[np.bool_] = halves.reshape(-1, 2).all(axis=1)
    return equal
