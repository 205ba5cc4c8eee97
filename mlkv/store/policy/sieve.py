"""SIEVE: first in, first out, but whoever was used since the hand came by stays for another round."""

from __future__ import annotations

from typing import Final

import numpy as np

from mlkv.store.page_arrays import Rows, count_until
from mlkv.store.policy.base import Policy

_NONE: Final = -1

_UNLISTED: Final = 0
_HIDDEN: Final = 1
_LISTED: Final = 2


class Sieve(Policy):
    """SIEVE (Zhang et al., NSDI 2024) over the leaves of a tree.

    Leaves stand in a queue in the order in which they first became candidates. A hand goes from the oldest to the
    newest and starts again: a leaf that was used since the hand was there last is passed and loses its mark, one
    that was not is the victim. A use moves nothing, so a leaf that is only pinned keeps its place; the hand takes
    those that are no candidates out of the queue when it meets them, and they come back as the newest.

    A page whose last child left takes the place of that child: it is as old as what was below it.

    `victim` is amortised O(1): the hand may pass many leaves in one call, each of them for one use or one hiding.
    """

    def __init__(self, num_pages: int) -> None:
        self._end = num_pages  # stands for both ends of the queue
        tables = np.full((2, num_pages + 1), _NONE, np.int32)
        tables[:, self._end] = self._end
        self._tables = tables
        self._newer, self._older = tables[0].data, tables[1].data
        self._places = np.zeros(num_pages, np.uint8)
        self._place = self._places.data
        self._marks = np.zeros(num_pages, np.bool_)
        self._marked = self._marks.data
        self._hand = self._end  # the next to look at; the end: begin with the oldest
        self._num_candidates = 0

    def touch(self, page: int) -> None:
        self._marked[page] = self._place[page] != _UNLISTED

    def extend(self, pages: Rows, parent: int | None, is_fork: bool, key: int) -> None:
        """New pages count from their commit on."""

    def expose(self, page: int) -> None:
        place = self._place[page]
        if place == _LISTED:
            return
        self._num_candidates += 1
        self._place[page] = _LISTED
        if place == _UNLISTED:
            self._insert(page, self._end)

    def hide(self, page: int) -> None:
        if self._place[page] == _LISTED:
            self._place[page] = _HIDDEN
            self._num_candidates -= 1

    def victim(self) -> int | None:
        if not self._num_candidates:
            return None
        while True:
            page = self._newer[self._end] if self._hand == self._end else self._hand
            self._hand = page
            if self._place[page] == _HIDDEN:
                self._unlist(page)
            elif self._marked[page]:
                self._marked[page] = False
                self._hand = self._newer[page]
            else:
                return page

    def count_leaving(self, run: Rows) -> int:
        """A parent that is not in the queue yet takes the place of its child, unmarked, and the hand is there."""
        return 1 + count_until(self._places[run[1:]] != _UNLISTED)

    def forget(self, run: Rows, key: int, parent: int | None, parent_is_leaf: bool) -> None:
        for page in run[self._places[run] != _UNLISTED].tolist():
            self.hide(page)
            after = self._newer[page]
            self._unlist(page)
            if parent is not None and parent_is_leaf and self._place[parent] == _UNLISTED:
                self._place[parent] = _HIDDEN  # until it is exposed
                self._insert(parent, after)
                self._hand = parent if self._hand == after else self._hand

    def clear(self) -> None:
        self._tables[:, :-1] = _NONE
        self._tables[:, self._end] = self._end
        self._places.fill(_UNLISTED)
        self._marks.fill(False)
        self._hand = self._end
        self._num_candidates = 0

    def __contains__(self, page: int) -> bool:
        return self._place[page] == _LISTED

    def __len__(self) -> int:
        return self._num_candidates

    @property
    def num_bytes(self) -> int:
        return self._tables.nbytes + self._places.nbytes + self._marks.nbytes

    def _insert(self, page: int, before: int) -> None:
        """Put `page` into the queue in front of `before`; in front of the end is where the newest stands."""
        older = self._older[before]
        self._newer[page], self._older[page] = before, older
        self._newer[older] = self._older[before] = page

    def _unlist(self, page: int) -> None:
        newer, older = self._newer[page], self._older[page]
        self._newer[older], self._older[newer] = newer, older
        self._newer[page] = self._older[page] = _NONE
        self._place[page] = _UNLISTED
        self._marked[page] = False
        if self._hand == page:
            self._hand = newer
