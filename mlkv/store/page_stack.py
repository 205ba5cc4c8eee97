"""The pages that are free."""

from __future__ import annotations

import numpy as np

from mlkv.store.page_arrays import Pages, Rows


class PageStack:
    """Page numbers, last in first out, so that pages whose bytes are still in a processor's cache are used again.

    Begins with all pages of a pool.
    """

    def __init__(self, num_pages: int) -> None:
        self._pages = np.arange(num_pages - 1, -1, -1, dtype=np.int32)
        self._num_free = num_pages

    @property
    def num_bytes(self) -> int:
        return self._pages.nbytes

    def __len__(self) -> int:
        return self._num_free

    def take(self, number: int) -> Rows:
        """The `number` pages on top, the topmost first. There must be as many."""
        self._num_free -= number
        return self._pages[self._num_free : self._num_free + number][::-1].astype(np.intp)

    def extend(self, pages: Pages | Rows) -> None:
        self._pages[self._num_free : self._num_free + len(pages)] = pages
        self._num_free += len(pages)

    def append(self, page: int) -> None:
        self._pages[self._num_free] = page
        self._num_free += 1

    def to_array(self) -> Pages:
        """All of them, the bottom one first."""
        return self._pages[: self._num_free].copy()
