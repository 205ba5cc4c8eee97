"""What a tier has still to forget, and what must not be found in it until then. Pure."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Final

from mlkv.store.tiers.calls import Call

MAX_KEYS: Final = 65536
"""Deleted keys that may wait for a tier that is out of order; of more, the oldest are let go. What they name was
found bad by its checksum once, and will be again."""

_BATCH_KEYS: Final = 1024
_MAX_ATTEMPTS: Final = 3

_log = logging.getLogger("mlkv.store")


class Erasures:
    """Deletions that a tier was not told of yet, numbered in the order in which they were asked for.

    The runner makes them one at a time while no write runs. Writes that hang are not waited for: they may put
    something back after the deletion. So their keys count as absent until they return, and are deleted again then.
    """

    def __init__(self) -> None:
        self.num_asked = 0
        self._clear_number = 0  # of the newest clear
        self._is_clear_due = False
        self._due: dict[bytes, int] = {}  # key -> number of the newest deletion that names it
        self._hung_keys: set[bytes] = set()
        self._num_failures = 0

    def __bool__(self) -> bool:
        return self._is_clear_due or bool(self._due)

    def __len__(self) -> int:
        return self._is_clear_due + len(self._due)

    @property
    def is_clear_due(self) -> bool:
        """Whether the whole tier counts as empty."""
        return self._is_clear_due

    def delete(self, keys: Iterable[bytes], hung: Sequence[Call]) -> None:
        """Some keys were deleted; `hung` are calls that do not return."""
        self.num_asked += 1
        for key in keys:
            self._due.pop(key, None)  # to the end of the line
            self._due[key] = self.num_asked
        while len(self._due) > MAX_KEYS:
            del self._due[next(iter(self._due))]
        self.note_hung(hung)

    def clear(self, hung: Sequence[Call]) -> None:
        """All keys were deleted."""
        self.num_asked += 1
        self._clear_number = self.num_asked
        self._is_clear_due = True
        self._due.clear()
        self.note_hung(hung)

    def note_hung(self, hung: Sequence[Call]) -> None:
        """The calls that hang are others than before."""
        late = (call for call in hung if call.kind == "write" and call.num_erasures < self.num_asked)
        self._hung_keys = {key for call in late for key in call.keys}

    def end_hung_write(self, call: Call, hung: Sequence[Call]) -> None:
        """A write that hung has returned: what was deleted since it began is deleted once more."""
        if call.num_erasures < self.num_asked:
            self.delete(call.keys, hung)

    def next_call(self) -> Call:
        """The deletion to make now. Only when there is one, and none is running."""
        if self._is_clear_due:
            return Call("clear")
        return Call("delete", list(self._due)[:_BATCH_KEYS])

    def end(self, call: Call, error: str) -> None:
        """A deletion has ended, or was given up on."""
        if call.kind == "clear":
            # One that was asked for meanwhile is made again: something may have been written in between.
            if not error and self._clear_number <= call.num_erasures:
                self._is_clear_due = False
            return
        self._num_failures = self._num_failures + 1 if error else 0
        if error and self._num_failures < _MAX_ATTEMPTS:
            return
        if error:
            _log.error("%d bad pages could not be deleted and may be found again: %s", len(call.keys), error)
            self._num_failures = 0
        for key in call.keys:
            if self._due.get(key, 0) <= call.num_erasures:
                self._due.pop(key, None)

    def num_present(self, keys: Sequence[bytes]) -> int:
        """How many leading `keys`, all found in the tier, may be told of."""
        if self._is_clear_due:
            return 0
        for number, key in enumerate(keys):
            if key in self._due or key in self._hung_keys:
                return number
        return len(keys)
