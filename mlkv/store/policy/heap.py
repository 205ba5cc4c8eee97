"""A heap that knows where its members are."""

from __future__ import annotations

from typing import Final

import numpy as np

_ABSENT: Final = -1


class PageHeap:
    """Pages with ranks, the lowest on top. Every change takes O(log n): nothing stale is kept, nothing rebuilt.

    `rank[page]` is read and written by the owner of the heap; it changes the rank of a member only by `move_down`.
    """

    def __init__(self, num_pages: int) -> None:
        ranks = np.zeros(num_pages, np.int64)
        heap = np.empty(num_pages, np.int32)
        position = np.full(num_pages, _ABSENT, np.int32)
        self.num_bytes = ranks.nbytes + heap.nbytes + position.nbytes
        self.ranks = ranks
        self.rank = ranks.data
        self._heap = heap.data
        self._positions = position
        self._position = position.data
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __contains__(self, page: int) -> bool:
        return self._position[page] != _ABSENT

    def lowest(self) -> int:
        """The page on top; there must be one."""
        return self._heap[0]

    def add(self, page: int) -> None:
        """Take in `page`, which is not in the heap."""
        at = self._size
        self._size += 1
        self._rise(at, page)

    def remove(self, page: int) -> None:
        """Take out `page`, which is in the heap."""
        at = self._position[page]
        self._position[page] = _ABSENT
        self._size -= 1
        if at == self._size:
            return
        last = self._heap[self._size]
        if at and self.rank[last] < self.rank[self._heap[(at - 1) // 2]]:
            self._rise(at, last)
        else:
            self._sink(at, last)

    def move_down(self, page: int, rank: int) -> None:
        """Raise the rank of `page`, which may be in the heap or not."""
        self.rank[page] = rank
        at = self._position[page]
        if at != _ABSENT:
            self._sink(at, page)

    def clear(self) -> None:
        self._positions.fill(_ABSENT)
        self.ranks.fill(0)
        self._size = 0

    def _rise(self, at: int, page: int) -> None:
        heap, position, rank = self._heap, self._position, self.rank
        own = rank[page]
        while at:
            above = (at - 1) // 2
            other = heap[above]
            if rank[other] <= own:
                break
            heap[at] = other
            position[other] = at
            at = above
        heap[at] = page
        position[page] = at

    def _sink(self, at: int, page: int) -> None:
        heap, position, rank, size = self._heap, self._position, self.rank, self._size
        own = rank[page]
        below = 2 * at + 1
        while below < size:
            other = heap[below]
            if below + 1 < size and rank[heap[below + 1]] < rank[other]:
                below += 1
                other = heap[below]
            if own <= rank[other]:
                break
            heap[at] = other
            position[other] = at
            at, below = below, 2 * below + 1
        heap[at] = page
        position[page] = at
