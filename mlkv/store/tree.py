"""The tree of prefixes: which page continues which."""

from __future__ import annotations

from array import array
from collections.abc import Iterator

_NONE = -1


class PageTree:
    """Parent and child links between pages, as arrays: no object per page, every change O(1).

    Pages are numbers in [0, num_pages); `root` = num_pages stands for the empty prefix. A page is either
    linked below exactly one parent or not linked at all.
    """

    def __init__(self, num_pages: int) -> None:
        self.root = num_pages
        self.parent = array("i", [_NONE]) * (num_pages + 1)
        self._first = array("i", [_NONE]) * (num_pages + 1)
        self._next = array("i", [_NONE]) * (num_pages + 1)
        self._previous = array("i", [_NONE]) * (num_pages + 1)

    def link(self, page: int, parent: int) -> None:
        """Hang `page`, which must not be linked, below `parent`."""
        first = self._first[parent]
        self.parent[page] = parent
        self._next[page] = first
        if first != _NONE:
            self._previous[first] = page
        self._first[parent] = page

    def unlink(self, page: int) -> int:
        """Take `page`, which must have no children, out of the tree. Returns its former parent."""
        parent, before, after = self.parent[page], self._previous[page], self._next[page]
        if before == _NONE:
            self._first[parent] = after
        else:
            self._next[before] = after
        if after != _NONE:
            self._previous[after] = before
        self.parent[page] = self._next[page] = self._previous[page] = _NONE
        return parent

    def is_linked(self, page: int) -> bool:
        return self.parent[page] != _NONE

    def has_children(self, page: int) -> bool:
        return self._first[page] != _NONE

    def children(self, page: int) -> Iterator[int]:
        """The children of `page`, latest first. The tree must not change during the iteration."""
        child = self._first[page]
        while child != _NONE:
            yield child
            child = self._next[child]

    def subtree(self, page: int) -> list[int]:
        """`page` and everything below it, each parent before its children."""
        pages = [page]
        for member in pages:  # grows while it is walked
            pages.extend(self.children(member))
        return pages
