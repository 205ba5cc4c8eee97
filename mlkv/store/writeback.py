"""Keeps lower tiers up to date with the host pool: which pages are written to them, and when."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from mlkv.page import IDENTITY_BYTES, peek_headers
from mlkv.store.chains import split_keys
from mlkv.store.index import Index
from mlkv.store.pool import HostPool
from mlkv.store.tiers.base import StoredPage
from mlkv.store.tiers.calls import Answer
from mlkv.store.tiers.runner import TierRunner
from mlkv.store_config import Admission

_POOL_SHARE: Final = 4
"""One page in so many may wait to be written to a tier: it cannot be evicted meanwhile."""

_AHEAD_SHARE: Final = 16
"""With admission at eviction: one page in so many is kept free, or in the tiers already, for the next prompts."""

_MAX_VICTIMS: Final = 64
"""Leaves that one reservation looks at to make room ahead; a bound of its time."""


@dataclass(eq=False)
class _Chain:
    """Pages of one chain that wait to be written to a tier. The hold keeps all of them in the pool."""

    pages: NDArray[np.int32]
    hold: int
    next: int = 0


class WriteBack:
    """Writes pages to the tiers by one of three rules of admission.

    `write`: as soon as they are complete. `second_use`: when they are matched the second time. `evict`: when the
    free pages and those that the tiers have get few, those that would be evicted next, each with what is above it.

    Pages are written in place: they are held, so nobody overwrites or evicts them, and nothing is copied. What
    cannot be handed to a tier now (too much waits for it, or it is out of order) is dropped, and tried again when
    it is used again. A page that a tier refuses is not offered to it again.

    Args:
        runners: 1 to 8 tiers, the nearest one first.
    """

    def __init__(self, index: Index, pool: HostPool, runners: Sequence[TierRunner], admission: Admission) -> None:
        self._index = index
        self._pool = pool
        self._runners = runners
        self._admission = admission
        self._waiting: list[deque[_Chain]] = [deque() for _ in runners]
        self._num_waiting = [0] * len(runners)
        self._max_waiting = max(1, index.num_pages // _POOL_SHARE)
        self._target_pages = max(1, index.num_pages // _AHEAD_SHARE)
        self._all_tiers = (1 << len(runners)) - 1
        # Of each page of the pool, a bit for each tier.
        self._offered = np.zeros(index.num_pages, np.uint8)  # the tier has it, or refused it
        self._queued = np.zeros(index.num_pages, np.uint8)
        self._num_uses = np.zeros(index.num_pages, np.uint8)
        self._num_clean = 0  # pages that were offered to all tiers

    # What happens in the pool

    def on_reserved(self, pages: NDArray[np.int32]) -> None:
        """These pages get new content, and room has become scarcer."""
        self._num_clean -= int((self._offered[pages] == self._all_tiers).sum())
        self._offered[pages] = 0
        self._num_uses[pages] = 0
        if self._admission == "evict":
            self._write_ahead()

    def on_committed(self, pages: NDArray[np.int32]) -> None:
        """An engine has completed these pages, a run of a chain."""
        if self._admission == "write":
            for tier in range(len(self._runners)):
                self._enqueue(tier, pages)

    def on_matched(self, pages: NDArray[np.int32]) -> None:
        """A chain was found, from its root on."""
        if self._admission == "evict":
            return
        wanted = pages
        if self._admission == "second_use":
            self._num_uses[pages] += self._num_uses[pages] < 2
            wanted = pages[self._num_uses[pages] >= 2]
        for tier in range(len(self._runners)):
            self._enqueue(tier, wanted)

    def on_published(self, pages: NDArray[np.int32], tier: int) -> None:
        """A tier has brought these pages, a run of a chain. Those below it had their chance when it was new."""
        self._set_offered(pages, self._all_tiers & ~((1 << tier) - 1))
        if self._admission != "evict":
            for nearer in range(tier):
                self._enqueue(nearer, pages)

    def on_cleared(self) -> None:
        """The index and all tiers have forgotten every key."""
        for tier in range(len(self._runners)):
            self._drop_waiting(tier)
        self._offered[:] = 0
        self._num_uses[:] = 0
        self._num_clean = 0

    @property
    def is_busy(self) -> bool:
        """Whether something waits to be written to a tier that works."""
        return any(chains for chains in self._waiting) or any(runner.has_writes for runner in self._runners)

    def num_waiting(self, tier: int) -> int:
        """Pages that wait to be handed to a tier."""
        return self._num_waiting[tier]

    def feed(self) -> None:
        """Hand to each tier the next batch of what waits for it, if it has a thread for it.

        One batch: it takes a millisecond or two, and engines wait for the owner meanwhile.
        """
        for tier, runner in enumerate(self._runners):
            if self._waiting[tier] and not runner.is_usable:
                self._drop_waiting(tier)
            elif self._waiting[tier] and not runner.num_write_pages:
                self._write_next(tier)

    @property
    def can_feed(self) -> bool:
        """Whether `feed` would do something at once."""
        pairs = zip(self._waiting, self._runners, strict=True)
        return any(chains and not (runner.is_usable and runner.num_write_pages) for chains, runner in pairs)

    # Inside

    def _enqueue(self, tier: int, pages: NDArray[np.int32]) -> None:
        """Have pages of one chain written to a tier that it was not offered yet."""
        bit = 1 << tier
        wanted = pages[((self._offered[pages] | self._queued[pages]) & bit) == 0]
        if not len(wanted):
            return
        runner = self._runners[tier]
        room = self._max_waiting - self._num_waiting[tier] if runner.is_usable else 0
        runner.counters.dropped_writes += max(0, len(wanted) - room)
        wanted = wanted[: max(0, room)]
        if not len(wanted):
            return
        self._queued[wanted] |= bit
        self._num_waiting[tier] += len(wanted)
        self._waiting[tier].append(_Chain(wanted, self._index.hold(int(wanted[-1]))))
        self.feed()

    def _write_next(self, tier: int) -> None:
        """Hand the next batch to a tier."""
        runner = self._runners[tier]
        chain = self._waiting[tier][0]
        pages = chain.pages[chain.next : chain.next + runner.batch_pages]
        chain.next += len(pages)
        self._num_waiting[tier] -= len(pages)
        stored = self._describe(pages)
        if stored is not None:
            hold = self._index.hold(int(pages[-1]))
            views = [self._pool.page(page).toreadonly() for page in pages.tolist()]
            if not runner.write(
                stored,
                views,
                lambda answer: self._answered(tier, pages, answer),
                lambda: self._returned(tier, pages, hold),
            ):
                self._returned(tier, pages, hold)
        else:
            self._queued[pages] &= ~np.uint8(1 << tier)
        if chain.next == len(chain.pages):
            self._waiting[tier].popleft()
            self._index.release([chain.hold])

    def _describe(self, pages: NDArray[np.int32]) -> list[StoredPage] | None:
        """What a tier is told of these pages; None if the header of one is not its own: then they stay here."""
        keys, generations, is_ready = self._index.identities(pages)
        found = peek_headers(self._pool.headers(pages, IDENTITY_BYTES))
        is_own = is_ready & found.is_valid & (found.generations == generations)
        if found.keys != keys or not (is_own & (found.used_bytes <= self._pool.page_bytes)).all():
            return None
        each = zip(*map(split_keys, (keys, found.parents, found.fingerprints)), generations.tolist(), strict=True)
        return [StoredPage(key, parent, fingerprint, number) for key, parent, fingerprint, number in each]

    def _answered(self, tier: int, pages: NDArray[np.int32], answer: Answer) -> None:
        if not answer.error:
            self._set_offered(pages, 1 << tier)

    def _returned(self, tier: int, pages: NDArray[np.int32], hold: int) -> None:
        self._queued[pages] &= ~np.uint8(1 << tier)
        self._index.release([hold])

    def _set_offered(self, pages: NDArray[np.int32], tiers: int) -> None:
        before = self._offered[pages] == self._all_tiers
        self._offered[pages] |= np.uint8(tiers)
        self._num_clean += int(((self._offered[pages] == self._all_tiers) & ~before).sum())

    def _drop_waiting(self, tier: int) -> None:
        chains, self._waiting[tier] = self._waiting[tier], deque()
        for chain in chains:
            left = chain.pages[chain.next :]
            self._queued[left] &= ~np.uint8(1 << tier)
            self._runners[tier].counters.dropped_writes += len(left)
            self._index.release([chain.hold])
        self._num_waiting[tier] = 0

    def _write_ahead(self) -> None:
        """Write what would be evicted next, so that an eviction soon loses nothing."""
        missing = self._target_pages - self._index.num_free - self._num_clean - sum(self._num_waiting)
        holds: list[int] = []
        while missing > 0 and len(holds) < _MAX_VICTIMS:
            victim = self._index.next_victim()
            if victim is None:
                break
            holds.append(self._index.hold(victim))  # so that the next one is found
            chain = self._unoffered_above(victim)
            for tier in range(len(self._runners)):
                self._enqueue(tier, chain)
            missing -= len(chain)
        self._index.release(holds)

    def _unoffered_above(self, page: int) -> NDArray[np.int32]:
        """`page` and the pages above it that some tier was not offered, from the top one on."""
        chain: list[int] = []
        at: int | None = page
        while at is not None and self._offered[at] != self._all_tiers and self._index.identity(at)[0]:
            chain.append(at)
            at = self._index.parent(at)
        return np.array(chain[::-1], np.int32)
