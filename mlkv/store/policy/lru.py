"""Least recently used leaf first."""

from __future__ import annotations

import heapq

from mlkv.store.policy.base import Policy


class LRU(Policy):
    """Evicts the leaf whose last use is longest ago.

    Using a page uses its whole prefix. Stamping every ancestor would make a match cost two passes over the
    chain, so only the deepest page is stamped and a page that leaves hands its stamp up to its parent:
    when the parent becomes a leaf, everything below it has left, and its stamp is that of the latest use.

    Candidates wait in a heap by stamp. Hiding a page leaves its entry behind; such an entry is recognised by
    its stamp when it reaches the top, and the heap is rebuilt when more than half of it is stale.
    """

    def __init__(self, num_pages: int) -> None:
        self._clock = 0
        self._stamp = [0] * num_pages
        self._candidates: set[int] = set()
        self._heap: list[tuple[int, int]] = []

    def touch(self, page: int) -> None:
        self._clock += 1
        self._stamp[page] = self._clock
        if page in self._candidates:
            self._push(page)

    def expose(self, page: int) -> None:
        if page not in self._candidates:
            self._candidates.add(page)
            self._push(page)

    def hide(self, page: int) -> None:
        self._candidates.discard(page)

    def forget(self, page: int, parent: int | None) -> None:
        self._candidates.discard(page)
        if parent is not None and self._stamp[page] > self._stamp[parent]:
            self._stamp[parent] = self._stamp[page]
            if parent in self._candidates:
                self._push(parent)
        self._stamp[page] = 0

    def victim(self) -> int | None:
        if not self._candidates:
            return None
        while True:
            stamp, page = self._heap[0]
            if page in self._candidates and self._stamp[page] == stamp:
                return page
            heapq.heappop(self._heap)

    def __contains__(self, page: int) -> bool:
        return page in self._candidates

    def __len__(self) -> int:
        return len(self._candidates)

    def _push(self, page: int) -> None:
        heapq.heappush(self._heap, (self._stamp[page], page))
        # At least half of the entries were pushed since the last rebuild, so they pay for this one.
        if len(self._heap) > 2 * len(self._candidates) + 64:
            self._heap = [(self._stamp[candidate], candidate) for candidate in self._candidates]
            heapq.heapify(self._heap)
