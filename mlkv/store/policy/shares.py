"""Beside a policy for all pages, which page of one owner should go next: for owners that have a limit."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from typing import Final

import numpy as np

from mlkv.store.page_arrays import Pages, Rows, count_until
from mlkv.store.policy.base import Policy

_SPARE_ENTRIES: Final = 1024


class Shares(Policy):
    """Tells another policy everything and lets it choose, and keeps an order of its own for each limited owner.

    Owners are small numbers that say whose a page is; 0 is nobody. Within an owner the leaf used longest ago goes
    first, by the same stamps as in `LRU`. Outdated entries stay in an owner's heap until they come up or there are
    as many of them as others, so that each change costs O(log n) amortised.
    """

    def __init__(self, inner: Policy, num_pages: int) -> None:
        self._inner = inner
        self.owner = np.zeros(num_pages, np.uint16)
        self._owners, self._clock = self.owner.data, 0
        self._stamps = np.zeros(num_pages, np.int64)
        self._stamp = self._stamps.data
        self._heaps: dict[int, list[tuple[int, int]]] = {}
        self._max_entries: dict[int, int] = {}

    def limit(self, owner: int) -> None:
        """Keep an order for this owner from now on."""
        self._heaps[owner] = []
        self._max_entries[owner] = _SPARE_ENTRIES

    def assign(self, pages: Pages | Rows, owner: int) -> None:
        """These pages are this owner's now."""
        self.owner[pages] = owner
        if owner in self._heaps:
            for page in pages.tolist():
                if page in self._inner:
                    self._push(page)

    def own_victim(self, owner: int) -> int | None:
        """The candidate of this owner that should go next."""
        heap = self._heaps[owner]
        while heap:
            if self._is_current(heap[0], owner):
                return heap[0][1]
            heappop(heap)
        return None

    def own_count_leaving(self, run: Rows) -> int:
        """As `count_leaving`, among pages of one owner."""
        return count_until(self._stamps[run] > self._stamps[run[0]])

    # What the index tells

    def touch(self, page: int) -> None:
        self._inner.touch(page)
        self._stamp_now(page)

    def match(self, page: int, num_found: int, num_asked: int, children: Sequence[int]) -> None:
        self._inner.match(page, num_found, num_asked, children)
        self._stamp_now(page)

    def extend(self, pages: Rows, parent: int | None, is_fork: bool, key: int) -> None:
        self._inner.extend(pages, parent, is_fork, key)

    def expose(self, page: int) -> None:
        if page not in self._inner:
            self._inner.expose(page)
            self._push(page)

    def hide(self, page: int) -> None:
        self._inner.hide(page)

    def victim(self) -> int | None:
        return self._inner.victim()

    def count_leaving(self, run: Rows) -> int:
        return self._inner.count_leaving(run)

    def forget(self, run: Rows, key: int, parent: int | None, parent_is_leaf: bool) -> None:
        self._inner.forget(run, key, parent, parent_is_leaf)
        latest = int(self._stamps[run].max())
        self._stamps[run] = 0
        if parent is not None and latest > self._stamp[parent]:
            self._stamp[parent] = latest
            if parent in self._inner:
                self._push(parent)

    def clear(self) -> None:
        self._inner.clear()
        for heap in self._heaps.values():
            heap.clear()

    def __contains__(self, page: int) -> bool:
        return page in self._inner

    def __len__(self) -> int:
        return len(self._inner)

    @property
    def num_bytes(self) -> int:
        return self._inner.num_bytes + self.owner.nbytes + self._stamps.nbytes

    # Inside

    def _stamp_now(self, page: int) -> None:
        self._clock += 1
        self._stamp[page] = self._clock
        if page in self._inner:
            self._push(page)

    def _push(self, page: int) -> None:
        owner = self._owners[page]
        heap = self._heaps.get(owner)
        if heap is None:
            return
        heappush(heap, (self._stamp[page], page))
        if len(heap) > self._max_entries[owner]:
            heap[:] = {entry for entry in heap if self._is_current(entry, owner)}
            heapify(heap)
            self._max_entries[owner] = 2 * len(heap) + _SPARE_ENTRIES

    def _is_current(self, entry: tuple[int, int], owner: int) -> bool:
        stamp, page = entry
        return self._stamp[page] == stamp and self._owners[page] == owner and page in self._inner
