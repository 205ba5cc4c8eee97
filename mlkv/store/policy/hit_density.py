"""The leaf that is worth least: the fewest hits to expect for the time that it takes up its page."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from mlkv.store.page_arrays import Rows, count_until
from mlkv.store.policy.base import MAX_CHILDREN, Policy
from mlkv.store.policy.ghosts import GhostTable
from mlkv.store.policy.return_times import NUM_AGES, ReturnTimes, age_cells

MAX_TURNS: Final = 7
"""Chains that were continued as often or more are one class: few are, and nearly all of those come back."""

_SUPERSEDED: Final = MAX_TURNS + 1
_NUM_CLASSES: Final = MAX_TURNS + 2

_SAMPLE: Final = 64
"""Candidates that are compared for a victim: with so many the worst of them is among the worst 2% of all, in
nearly every case."""

_SAMPLES_DRAWN: Final = 64
"""Random numbers are drawn for so many samples at once."""

_RELEARN_REQUESTS: Final = 50
"""Requests after which densities are computed anew, in a few hundred microseconds."""

_PAGES_PER_GHOST: Final = 4
_MIN_GHOSTS: Final = 1 << 16
"""As many ghosts as chains go through the pool in several turnovers. In a small pool that is not long enough: how
many chains begin while a user thinks does not depend on the size of the pool."""

_AGE_BITS: Final = 48
"""Of an age, in pages written: years at any rate of writing."""

_ABSENT: Final = -1


class HitDensity(Policy):
    """Evicts the leaf with the lowest density of hits: expected hits per page and per time, see `ReturnTimes`.

    All it uses is what requests did so far. A request that goes on where an earlier one stopped, or that finds at
    least half of what it asks for, *continues* the chain of that one; others begin a chain. The class of a chain
    is how often it was continued, because that says most about whether it will be again: in recorded traffic
    (the Mooncake conversation trace) a chain that was never continued comes back once in four times, and one that
    was four times comes back two times of three. A leaf beside which a chain was continued is a class of its own:
    it is what the last turn ended with and the next one did not repeat, and is hardly ever asked for. What share
    of each class returns, and after how long, is learned all the time, from chains that are still here and from
    the ghosts of those that were evicted.

    Why it beats LRU where the cache is small: think times of users are longer than a page survives there, so the
    youngest chains are not the most valuable ones. Where nothing was learned all densities are equal, and the
    least recently used leaf goes, as it does among equals at any time.

    Victims are looked for in a random sample of the candidates, with an own generator and a fixed seed. So the
    time to find one does not depend on the size of the pool, though the densities change all the time.
    """

    def __init__(self, num_pages: int) -> None:
        self._clock = 1  # pages written so far
        stamps, kinds = np.zeros(num_pages, np.int64), np.zeros(num_pages, np.uint8)
        continued = np.zeros(num_pages, np.bool_)
        candidates, positions = np.empty(num_pages, np.int32), np.full(num_pages, _ABSENT, np.int32)
        self._stamps, self._kinds, self._continueds = stamps, kinds, continued
        self._candidates, self._positions = candidates, positions
        self._stamp, self._kind, self._continued = stamps.data, kinds.data, continued.data
        self._candidate, self._position = candidates.data, positions.data
        self._num_candidates = 0
        self._ghosts = GhostTable(max(num_pages // _PAGES_PER_GHOST, _MIN_GHOSTS))
        self._times = ReturnTimes(_NUM_CLASSES)
        self._worths = _worths(self._times.densities())
        self._until_relearning = _RELEARN_REQUESTS
        self._random = random.Random(0)
        self._drawn, self._num_drawn = np.empty((_SAMPLES_DRAWN, _SAMPLE), np.uint64), _SAMPLES_DRAWN
        self._victim: int | None = None

    # What requests do

    def touch(self, page: int) -> None:
        self._stamp[page] = self._clock
        self._forget_victim(page)

    def match(self, page: int, num_found: int, num_asked: int, children: Sequence[int]) -> None:
        self._clock += 1
        at_end = not children or (len(children) == 1 and children[0] in self)
        continues = at_end or (2 * num_found >= num_asked and len(children) < MAX_CHILDREN)
        self._continued[page] = continues
        if continues:
            kind = self._kind[page]
            self._times.come_back(kind, self._clock - self._stamp[page])
            self._kind[page] = _next_turn(kind)
            self._begin(self._kind[page])
            if num_found < num_asked:
                for child in children:
                    self._supersede(child)
        self.touch(page)

    def extend(self, pages: Rows, parent: int | None, is_fork: bool, key: int) -> None:
        kind = 0
        if parent is not None and (self._continued[parent] or not is_fork):
            kind = self._kind[parent]
            self._continued[parent] = False
        else:
            ghost = self._ghosts.pop(key)
            if ghost is not None:
                self._times.come_back(ghost.kind, self._clock - ghost.stamp)
                kind = _next_turn(ghost.kind)
            self._begin(kind)
        self._clock += len(pages)
        self._stamps[pages] = self._clock
        self._kinds[pages] = kind
        self._continueds[pages] = False

    def _supersede(self, page: int) -> None:
        if page in self and self._kind[page] != _SUPERSEDED:
            self._kind[page] = _SUPERSEDED
            self._times.begin(_SUPERSEDED)
            self._victim = None

    def _begin(self, kind: int) -> None:
        self._times.begin(kind)
        self._until_relearning -= 1
        if not self._until_relearning:
            self._until_relearning = _RELEARN_REQUESTS
            self._worths = _worths(self._times.densities())
            self._victim = None

    # What may go

    def expose(self, page: int) -> None:
        if self._position[page] != _ABSENT:
            return
        self._position[page] = self._num_candidates
        self._candidate[self._num_candidates] = page
        self._num_candidates += 1

    def hide(self, page: int) -> None:
        at = self._position[page]
        if at == _ABSENT:
            return
        self._num_candidates -= 1
        last = self._candidate[self._num_candidates]
        self._candidate[at] = last
        self._position[last] = at
        self._position[page] = _ABSENT
        self._forget_victim(page)

    def victim(self) -> int | None:
        if self._victim is None and self._num_candidates:
            self._victim = self._find_victim()
        return self._victim

    def count_leaving(self, run: Rows) -> int:
        """A page that leaves hands stamp and class up: its parent is worth as little unless it was used later."""
        stamps = self._stamps[run]
        return count_until(stamps > stamps[0])

    def forget(self, run: Rows, key: int, parent: int | None, parent_is_leaf: bool) -> None:
        leaf = int(run[0])
        self.hide(leaf)
        stamp, kind = self._stamp[leaf], self._kind[leaf]
        self._ghosts.put(key, stamp, kind)
        if parent is not None and self._stamp[parent] <= stamp:
            self._stamp[parent] = stamp
            if parent_is_leaf and kind != _SUPERSEDED:
                self._kind[parent] = kind

    def clear(self) -> None:
        self._positions.fill(_ABSENT)
        self._num_candidates = 0
        self._victim = None
        self._ghosts.clear()

    def __contains__(self, page: int) -> bool:
        return self._position[page] != _ABSENT

    def __len__(self) -> int:
        return self._num_candidates

    @property
    def num_bytes(self) -> int:
        tables = (self._stamps, self._kinds, self._continueds, self._candidates, self._positions)
        return sum(table.nbytes for table in tables) + self._ghosts.num_bytes

    def _find_victim(self) -> int:
        """The least dense of a sample of the candidates; of those that are, the one used longest ago."""
        pages = self._sample()
        ages = self._clock - self._stamps[pages]
        cells = np.multiply(self._kinds[pages], NUM_AGES, dtype=np.intp) + age_cells(ages)
        return int(pages[(self._worths[cells] - ages).argmin()])

    def _sample(self) -> Rows:
        number = self._num_candidates
        if number <= _SAMPLE:
            return self._candidates[:number].astype(np.intp)
        if self._num_drawn == _SAMPLES_DRAWN:
            self._num_drawn = 0
            words = np.frombuffer(self._random.randbytes(4 * _SAMPLE * _SAMPLES_DRAWN), np.uint32)
            self._drawn = words.astype(np.uint64).reshape(_SAMPLES_DRAWN, _SAMPLE)
        drawn = self._drawn[self._num_drawn]
        self._num_drawn += 1
        chosen: Rows = (drawn * np.uint64(number) >> np.uint64(32)).view(np.intp)
        return self._candidates[chosen].astype(np.intp)

    def _forget_victim(self, page: int) -> None:
        if page == self._victim:
            self._victim = None


def _worths(densities: NDArray[np.float64]) -> NDArray[np.int64]:
    """What tells densities apart, and what equals them, more than any age does; one for each cell of the table."""
    ranks = np.unique(densities, return_inverse=True)[1].ravel()
    return ranks.astype(np.int64) << _AGE_BITS


def _next_turn(kind: int) -> int:
    return 1 if kind == _SUPERSEDED else min(kind + 1, MAX_TURNS)
