"""The tree of prefixes: which page continues which."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np
from numpy.typing import NDArray

_NONE: Final = -1

_STRIDE: Final = 32
"""Pages between two anchors. A chain of n pages is walked in n / 32 single steps and 32 steps of whole arrays,
which cost 20 times as much each: few in all for the usual chains of hundreds of pages and for those of 16k."""

_FEW_STEPS: Final = 2 * _STRIDE
"""Up to here single steps are faster."""

Pages = NDArray[np.int32]


class PageTree:
    """Parent and child links between pages, as arrays: no object per page, a run of pages changes at once.

    Pages are numbers in [0, num_pages); `root` = num_pages stands for the empty prefix. A page is either
    linked below exactly one parent or not linked at all.

    Pages at a depth that is a multiple of 32 are *anchors*. Each page knows the nearest anchor above it, so that
    the whole chain of a page is found without a step of the interpreter for each of its pages.
    """

    def __init__(self, num_pages: int) -> None:
        self.root = num_pages
        self._parent, self._first, self._next, self._previous, self._depth, self._anchor = (
            np.full(num_pages + 1, _NONE, np.int32) for _ in range(6)
        )
        # Single elements are read through these views: several times faster than indexing an array.
        self.parent = self._parent.data
        self.next = self._next.data
        self.previous = self._previous.data
        self.depth = self._depth.data
        self._first_at = self._first.data
        self._anchor_at = self._anchor.data

    @property
    def num_bytes(self) -> int:
        return 6 * self._parent.nbytes

    def link(self, run: Pages, parent: int) -> None:
        """Hang `run`, pages that are not linked, each below the one before it and the first below `parent`."""
        head, first = int(run[0]), self._first_at[parent]
        self.parent[head] = parent
        self.next[head] = first
        if first != _NONE:
            self.previous[first] = head
        self._first_at[parent] = head
        self._parent[run[1:]] = run[:-1]
        self._first[run[:-1]] = run[1:]
        depth = self.depth[parent] + 1
        self._depth[run] = np.arange(depth, depth + len(run), dtype=np.int32)
        above = parent if self.depth[parent] % _STRIDE == 0 else self._anchor_at[parent]
        anchor = np.arange(depth - 1, depth + len(run) - 1) // _STRIDE * _STRIDE - depth
        self._anchor[run] = np.where(anchor >= 0, run[np.maximum(anchor, 0)], above)

    def unlink(self, run: Pages) -> int:
        """Take `run` out of the tree: a leaf, its parent, and so on upwards, each the only child of the next.

        Returns the former parent of the last one.
        """
        top = int(run[-1])
        parent, before, after = self.parent[top], self.previous[top], self.next[top]
        if before == _NONE:
            self._first_at[parent] = after
        else:
            self.next[before] = after
        if after != _NONE:
            self.previous[after] = before
        self.next[top] = self.previous[top] = _NONE
        self._parent[run] = _NONE
        self._first[run] = _NONE
        return parent

    def keep_only(self, kept: NDArray[np.bool_]) -> None:
        """Take out every page that is not in `kept`, bool `[num_pages]`, which has the parents of all in it."""
        self._parent[:-1][~kept] = _NONE
        self._first.fill(_NONE)
        self._next.fill(_NONE)
        self._previous.fill(_NONE)
        pages = np.flatnonzero(kept).astype(np.int32)
        pages = pages[np.argsort(self._parent[pages], kind="stable")]
        parents = self._parent[pages]
        siblings = parents[1:] == parents[:-1]
        self._next[pages[:-1][siblings]] = pages[1:][siblings]
        self._previous[pages[1:][siblings]] = pages[:-1][siblings]
        is_first = np.ones(len(pages), np.bool_)
        is_first[1:] = ~siblings
        self._first[parents[is_first]] = pages[is_first]

    @property
    def is_top(self) -> NDArray[np.bool_]:
        """Whether each page is linked below the root, bool `[num_pages]`."""
        top: NDArray[np.bool_] = self._parent[:-1] == self.root
        return top

    def is_linked(self, page: int) -> bool:
        return self.parent[page] != _NONE

    def has_children(self, page: int) -> bool:
        return self._first_at[page] != _NONE

    def children(self, page: int) -> Iterator[int]:
        """The children of `page`, latest first. The tree must not change during the iteration."""
        child = self._first_at[page]
        while child != _NONE:
            yield child
            child = self.next[child]

    def leaves(self, pages: Pages) -> Pages:
        """Those of `pages` that have no children."""
        leaves: Pages = pages[self._first[pages] == _NONE]
        return leaves

    def path(self, page: int) -> Pages:
        """The chain that ends at `page`, from its first page on; int32 `[depth + 1]`."""
        return self.climb(page, self.depth[page] + 1)[::-1]

    def climb(self, page: int, limit: int) -> Pages:
        """`page`, its parent, and so on; int32 `[min(limit, depth + 1)]`."""
        number = min(limit, self.depth[page] + 1)
        if number <= _FEW_STEPS:
            parent = self.parent
            pages = [page]
            for _ in range(number - 1):
                page = parent[page]
                pages.append(page)
            return np.array(pages, np.int32)
        anchors = [page]
        anchor = self._anchor_at[page]
        below_anchor = self.depth[page] - self.depth[anchor]
        for _ in range(below_anchor, number, _STRIDE):
            anchors.append(anchor)
            anchor = self._anchor_at[anchor]
        # Row r: the page r steps above each anchor. What is above the first page of the chain is cut off below.
        steps = np.empty((_STRIDE, len(anchors)), np.int32)
        steps[0] = anchors
        for row in range(1, _STRIDE):
            self._parent.take(steps[row - 1], out=steps[row], mode="wrap")
        return np.concatenate((steps[:below_anchor, 0], steps[:, 1:].T.ravel()))[:number]

    def has_siblings(self, pages: Pages) -> NDArray[np.bool_]:
        """Whether each page shares its parent with others."""
        has: NDArray[np.bool_] = (self._next[pages] & self._previous[pages]) != _NONE
        return has

    def subtree(self, page: int) -> list[int]:
        """`page` and everything below it, each parent before its children."""
        pages = [page]
        for member in pages:  # grows while it is walked
            pages.extend(self.children(member))
        return pages
