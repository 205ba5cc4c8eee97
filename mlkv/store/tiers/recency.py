"""Which slot of a disk tier was used longest ago, among those that may go."""

from __future__ import annotations

import heapq
from array import array


class Recency:
    """Ranks slots by the number of their last use, which only grows, and names the lowest candidate.

    Each slot has at most one entry in a heap, made when it becomes a candidate and not moved when it is used
    again: an entry's rank is a lower bound. An entry that comes to the top with too low a rank sinks to where it
    belongs, and one whose slot is no candidate any more is dropped. So no call ever stops to tidy up.
    """

    def __init__(self, max_slots: int) -> None:
        self._use = array("q", [0]) * max_slots
        self._is_candidate = bytearray(max_slots)
        self._has_entry = bytearray(max_slots)
        self._heap: list[tuple[int, int]] = []
        self._unsaved: dict[int, int] = {}
        self.num_candidates = 0
        self.latest = 0
        """Number of the latest use."""

    @property
    def num_unsaved(self) -> int:
        return len(self._unsaved)

    def next_use(self) -> int:
        """A number for a use that happens now."""
        self.latest += 1
        return self.latest

    def restore(self, slot: int, use: int) -> None:
        """Take over what is saved already. Slots may come in any order."""
        self._use[slot] = use
        if use > self.latest:
            self.latest = use

    def use(self, slot: int, use: int) -> None:
        """`slot` was used, or something whose use was also its own."""
        if use > self._use[slot]:
            self._use[slot] = use
            self._unsaved[slot] = use

    def expose(self, slot: int) -> None:
        """`slot` is a candidate from now on. No effect when it is one."""
        if self._is_candidate[slot]:
            return
        self._is_candidate[slot] = True
        self.num_candidates += 1
        if not self._has_entry[slot]:
            self._has_entry[slot] = True
            heapq.heappush(self._heap, (self._use[slot], slot))

    def hide(self, slot: int) -> None:
        """`slot` is no candidate any more. No effect when it is none."""
        if self._is_candidate[slot]:
            self._is_candidate[slot] = False
            self.num_candidates -= 1

    def forget(self, slot: int) -> int:
        """The page in `slot` is gone; returns the number of its last use."""
        self.hide(slot)
        self._unsaved.pop(slot, None)
        return self._use[slot]

    def victim(self) -> int | None:
        """The candidate whose use is longest ago, or None when there is none."""
        while self._heap:
            use, slot = self._heap[0]
            if not self._is_candidate[slot]:
                heapq.heappop(self._heap)
                self._has_entry[slot] = False
            elif use < self._use[slot]:
                heapq.heapreplace(self._heap, (self._use[slot], slot))
            else:
                return slot
        return None

    def take_unsaved(self) -> dict[int, int]:
        """Uses, by slot, that a restart would not know of; they count as saved from now on."""
        unsaved, self._unsaved = self._unsaved, {}
        return unsaved
