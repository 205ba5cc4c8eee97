"""The tree of prefixes: which page continues which."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np
from numpy.typing import NDArray

from mlkv.store.page_arrays import Rows, count_until

_NONE: Final = -1

_STRIDE: Final = 32
"""Pages between two anchors. A chain of n pages is walked in n / 32 single steps and 32 steps of whole arrays,
which cost 20 times as much each: few in all for the usual chains of hundreds of pages and for those of 16k."""

_FEW_STEPS: Final = 2 * _STRIDE
"""Up to here single steps are faster."""

_LONGER: Final = 8
"""How many times as much of a chain is looked at next for how much of it may leave: many of its ends are short."""

_NO_ROWS: Final[Rows] = np.empty(0, np.intp)


class PageTree:
    """Parent and child links between pages, as arrays: no object per page, a run of pages changes at once.

    Pages are numbers in [0, num_pages); `root` = num_pages stands for the empty prefix. A page is either
    linked below exactly one parent or not linked at all. What holds a page is counted: its children, and whoever
    pinned it. The root is held for ever.

    Pages at a depth that is a multiple of 32 are *anchors*, and each knows the next one above it, so that the
    whole chain of a page is found without a step of the interpreter for each of its pages.
    """

    def __init__(self, num_pages: int) -> None:
        self.root = num_pages
        self._parent, self._first, self._next, self._previous, self._depth, self._anchor = (
            np.full(num_pages + 1, _NONE, np.int32) for _ in range(6)
        )
        self._holders = np.zeros(num_pages + 1, np.int32)
        # Single elements are read through these views: several times faster than indexing an array.
        self.parent = self._parent.data
        self.next = self._next.data
        self.previous = self._previous.data
        self.depth = self._depth.data
        self.holders = self._holders.data
        self._first_at = self._first.data
        self._anchor_at = self._anchor.data
        self.holders[self.root] = 1

    @property
    def num_bytes(self) -> int:
        return 7 * self._parent.nbytes

    def link(self, run: Rows, parent: int) -> None:
        """Hang `run`, pages that are not linked, each below the one before it and the first below `parent`."""
        head, first = int(run[0]), self._first_at[parent]
        upper, lower = run[:-1], run[1:]
        self._parent[lower] = upper
        self._first[upper] = lower
        self._holders[upper] = 1
        self._first_at[int(run[-1])] = _NONE
        self.parent[head] = parent
        self.next[head] = first
        if first != _NONE:
            self.previous[first] = head
        self._first_at[parent] = head
        self.holders[parent] += 1
        depth = self.depth[parent] + 1
        self._depth[run] = np.arange(depth, depth + len(run), dtype=np.int32)
        anchors = run[-depth % _STRIDE :: _STRIDE]
        if len(anchors):
            self._anchor_at[int(anchors[0])] = parent if depth == 0 else self._nearest_anchor(parent)
            self._anchor[anchors[1:]] = anchors[:-1]

    def cut(self, top: int) -> int:
        """Take `top`, and with it what hangs below it, from its parent, which is returned. `drop` them next."""
        parent, before, after = self.parent[top], self.previous[top], self.next[top]
        if before == _NONE:
            self._first_at[parent] = after
        else:
            self.next[before] = after
        if after != _NONE:
            self.previous[after] = before
        self.next[top] = self.previous[top] = _NONE
        self.holders[parent] -= 1
        return parent

    def drop(self, pages: Rows) -> None:
        """These pages are not linked any more: all that was below pages that were cut off."""
        self._parent[pages] = _NONE
        self._holders[pages] = 0

    def keep_only(self, kept: NDArray[np.bool_]) -> None:
        """Take out every page that is not in `kept`, bool `[num_pages]`, which has the parents of all in it."""
        leaving = self._parent[:-1][~kept]
        num_lost = np.bincount(leaving[leaving != _NONE], minlength=self.root + 1)
        self._holders -= num_lost.astype(np.int32)
        self._parent[:-1][~kept] = _NONE
        self._first.fill(_NONE)
        self._next.fill(_NONE)
        self._previous.fill(_NONE)
        pages = np.flatnonzero(kept)
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
        """Of a page that is linked, or of the root."""
        return self._first_at[page] != _NONE

    def children(self, page: int) -> Iterator[int]:
        """The children of `page`, latest first. The tree must not change during the iteration."""
        child = self._first_at[page]
        while child != _NONE:
            yield child
            child = self.next[child]

    def leaves(self, pages: Rows) -> Rows:
        """Those of `pages` that have no children."""
        leaves: Rows = pages[self._first[pages] == _NONE]
        return leaves

    def path(self, page: int) -> Rows:
        """The chain that ends at `page`, from its first page on; `[depth + 1]`."""
        return self.climb(page, self.depth[page] + 1)[::-1]

    def climb(self, page: int, limit: int) -> Rows:
        """`page`, its parent, and so on; `[min(limit, depth + 1)]`."""
        number = min(limit, self.depth[page] + 1)
        chain = self._count_down(page, number)
        if len(chain) == number:
            return chain
        if number <= _FEW_STEPS:
            return np.array(self._step_up(page, number), np.intp)
        lead = self._step_up(page, self.depth[page] % _STRIDE)
        anchor = self.parent[lead[-1]] if lead else page
        anchors = []
        for _ in range(len(lead), number, _STRIDE):
            anchors.append(anchor)
            anchor = self._anchor_at[anchor]
        # Row r: the page r steps above each anchor. What is above the first page of the chain is cut off below.
        steps = np.empty((_STRIDE, len(anchors)), np.int32)
        steps[0] = anchors
        for row in range(1, _STRIDE):
            self._parent.take(steps[row - 1], out=steps[row], mode="wrap")
        chain = np.empty(len(lead) + steps.size, np.intp)
        chain[: len(lead)] = lead
        chain[len(lead) :] = steps.T.ravel()
        return chain[:number]

    def climb_lone(self, leaf: int, limit: int) -> Rows:
        """`leaf`, its parent, and so on: at most `limit` pages that only the one before holds."""
        number = min(limit, self.depth[leaf] + 1)
        chain = self._count_down(leaf, number) if number > _FEW_STEPS else _NO_ROWS
        if len(chain) <= _FEW_STEPS:
            few = self._step_up_lone(leaf, min(number, _FEW_STEPS))
            chain = np.array(few, np.intp)
            if len(few) < _FEW_STEPS:
                return chain
        while True:
            num_lone = 1 + count_until(self._holders[chain[1:]] != 1)
            if num_lone < len(chain) or len(chain) == number:
                return chain[:num_lone]
            chain = self.climb(leaf, min(number, _LONGER * len(chain)))

    def subtree(self, page: int) -> list[int]:
        """`page` and everything below it, each parent before its children."""
        pages = [page]
        for member in pages:  # grows while it is walked
            pages.extend(self.children(member))
        return pages

    def _count_down(self, page: int, number: int) -> Rows:
        """`page`, its parent, and so on, as long as each number is one less than the one before; `number` at most.

        Pages that were reserved together mostly are like that, and are told by one comparison.
        """
        if self.parent[page] != page - 1:
            return np.array([page], np.intp)
        low = max(0, page + 1 - number)
        numbers = np.arange(low, page + 1)
        ends = self._parent[low + 1 : page + 1] != numbers[:-1]
        return numbers[::-1][: 1 + count_until(ends[::-1])]

    def _step_up(self, page: int, number: int) -> list[int]:
        """`page`, its parent, and so on; `number` of them."""
        parent = self.parent
        pages = []
        for _ in range(number):
            pages.append(page)
            page = parent[page]
        return pages

    def _step_up_lone(self, page: int, number: int) -> list[int]:
        """`page`, its parent, and so on: at most `number` pages that only the one before holds."""
        parent, holders = self.parent, self.holders
        pages = [page]
        for _ in range(number - 1):
            page = parent[page]
            if holders[page] != 1:
                break
            pages.append(page)
        return pages

    def _nearest_anchor(self, page: int) -> int:
        """The first anchor from `page` on upwards."""
        while self.depth[page] % _STRIDE:
            page = self.parent[page]
        return page
