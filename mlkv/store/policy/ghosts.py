"""What was evicted lately."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Ghost(NamedTuple):
    """A chain that was evicted: when it was last used, and of which class it was."""

    stamp: int
    kind: int


class GhostTable:
    """Remembers evicted chains by their first page's key, in a fixed amount of memory.

    Each key has one place, and the chain that came there last stays. With a few places for each chain that the
    pool can hold, few are lost while they are of interest. Beside its place 31 bits of a key are compared; a chain
    that is taken for another one all the same is counted wrongly, which is all that can happen.
    """

    def __init__(self, num_places: int) -> None:
        size = 1 << max(num_places - 1, 1).bit_length()
        tags, stamps, kinds = np.zeros(size, np.uint32), np.zeros(size, np.int64), np.zeros(size, np.uint8)
        self.num_bytes = tags.nbytes + stamps.nbytes + kinds.nbytes
        self._mask = size - 1
        self._all_tags = tags
        self._tags, self._stamps, self._kinds = tags.data, stamps.data, kinds.data

    def put(self, key: int, stamp: int, kind: int) -> None:
        place, tag = self._place(key)
        self._tags[place], self._stamps[place], self._kinds[place] = tag, stamp, kind

    def pop(self, key: int) -> Ghost | None:
        place, tag = self._place(key)
        if self._tags[place] != tag:
            return None
        self._tags[place] = 0
        return Ghost(self._stamps[place], self._kinds[place])

    def clear(self) -> None:
        self._all_tags.fill(0)

    def _place(self, key: int) -> tuple[int, int]:
        """(place, tag) of a key of 64 bits; no tag is 0, which stands for an empty place."""
        return key & self._mask, key >> 32 | 1
