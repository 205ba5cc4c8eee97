"""Least recently used leaf first."""

from __future__ import annotations

from mlkv.store.page_arrays import Rows, count_until
from mlkv.store.policy.base import Policy
from mlkv.store.policy.heap import PageHeap


class LRU(Policy):
    """Evicts the leaf whose last use is longest ago.

    Using a page uses its whole prefix. Stamping every ancestor would make a match cost two passes over the
    chain, so only the deepest page is stamped and a page that leaves hands its stamp up to its parent:
    when the parent becomes a leaf, everything below it has left, and its stamp is that of the latest use.

    Pages become candidates in another order than that of their use, when a long lease ends for example, so that a
    list in order of arrival would not do: candidates wait in a heap by stamp.
    """

    def __init__(self, num_pages: int) -> None:
        self._clock = 0
        self._heap = PageHeap(num_pages)
        self._stamp = self._heap.rank

    def touch(self, page: int) -> None:
        self._clock += 1
        self._heap.move_down(page, self._clock)

    def extend(self, pages: Rows, parent: int | None, is_fork: bool, key: int) -> None:
        """New pages count from their commit on."""

    def expose(self, page: int) -> None:
        if page not in self._heap:
            self._heap.add(page)

    def hide(self, page: int) -> None:
        if page in self._heap:
            self._heap.remove(page)

    def victim(self) -> int | None:
        return self._heap.lowest() if len(self._heap) else None

    def count_leaving(self, run: Rows) -> int:
        """A page that leaves hands its stamp up, so its parent is next unless it was used later itself."""
        stamps = self._heap.ranks[run]
        return count_until(stamps > stamps[0])

    def forget(self, run: Rows, key: int, parent: int | None, parent_is_leaf: bool) -> None:
        self.hide(int(run[0]))
        latest = int(self._heap.ranks[run].max())
        self._heap.ranks[run] = 0
        if parent is not None and latest > self._stamp[parent]:
            self._heap.move_down(parent, latest)

    def clear(self) -> None:
        self._heap.clear()

    def __contains__(self, page: int) -> bool:
        return page in self._heap

    def __len__(self) -> int:
        return len(self._heap)

    @property
    def num_bytes(self) -> int:
        return self._heap.num_bytes
