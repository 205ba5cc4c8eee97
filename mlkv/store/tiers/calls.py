"""Calls of a tier on their way, and what is counted about them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from mlkv.histogram import Histogram
from mlkv.store.tiers.base import StoredPage, Tier

CallKind: TypeAlias = Literal[
    "connect", "contains", "read", "write", "delete", "clear", "load_note", "store_note", "scan"
]

NONE_GOOD: Final[NDArray[np.bool_]] = np.empty(0, np.bool_)


@dataclass(frozen=True)
class Answer:
    """What came of a call.

    Attributes:
        error: why it did not do its work; "" if it did. Then nothing else is known.
        num_found: of `contains`.
        good: of `read` and `write`, bool, one for each key; False everywhere after an error.
        note: of `load_note`: the value, None if there is none.
        keys: of `scan`.
    """

    error: str = ""
    num_found: int = 0
    note: bytes | None = None
    keys: Sequence[bytes] = ()
    good: NDArray[np.bool_] = field(default_factory=lambda: NONE_GOOD)


def ignore_answer(_answer: Answer) -> None:
    """For calls whose outcome changes nothing for the caller."""


def ignore_return() -> None:
    """For calls that touch no page."""


@dataclass(eq=False)
class Call:
    """One call of a tier. The runner's thread owns it, except while a worker runs it.

    Attributes:
        pages: of `read` and `write`: views that the tier may touch until `on_return`.
        on_answer: told once, at the end or at the deadline, whichever comes first.
        on_return: told once, when nobody touches `pages` any more; never before `on_answer`.
        began_at: when a worker took it; set by the worker, 0.0 before.
        num_erasures: how many deletions of the tier had been asked for when it began.
    """

    kind: CallKind
    keys: Sequence[bytes] = ()
    pages: Sequence[memoryview] = ()
    stored: Sequence[StoredPage] = ()
    on_answer: Callable[[Answer], None] = ignore_answer
    on_return: Callable[[], None] = ignore_return
    round: int = 0
    note: tuple[str, bytes] = ("", b"")
    """Name, and value to store."""
    limit: int = 0
    """Of `scan`, whose only key is where it begins."""
    num_erasures: int = 0
    began_at: float = 0.0
    ended_at: float = 0.0
    answer: Answer | None = None
    failure: BaseException | None = None
    is_given_up: bool = False

    def make(self, tier: Tier, pool: memoryview) -> Answer:
        """Call the tier and look at what it says. Blocks; raises what the tier raises."""
        if self.kind == "connect":
            tier.connect(pool)
        elif self.kind == "contains":
            num_found = tier.contains(self.keys)
            if not 0 <= num_found <= len(self.keys):
                raise ValueError(f"it found {num_found} of {len(self.keys)} pages")
            return Answer(num_found=num_found)
        elif self.kind == "read":
            return Answer(good=self._one_each(tier.read(self.keys, self.pages)))
        elif self.kind == "write":
            return Answer(good=self._one_each(tier.write(self.stored, self.pages)))
        elif self.kind == "load_note":
            return Answer(note=tier.load_note(self.note[0]))
        elif self.kind == "store_note":
            tier.store_note(*self.note)
        elif self.kind == "scan":
            try:
                return Answer(keys=tier.scan(self.keys[0], self.limit))
            except NotImplementedError as error:
                return Answer(f"it cannot list its pages: {error}")  # which says nothing about its health
        elif self.kind == "delete":
            tier.delete(self.keys)
        else:
            tier.clear()
        return Answer()

    def _one_each(self, good: NDArray[np.bool_]) -> NDArray[np.bool_]:
        found = np.asarray(good)
        if found.dtype != np.bool_ or found.shape != (len(self.pages),):
            raise ValueError(f"it answered for {len(self.pages)} pages with {found.dtype} of {found.shape}")
        return found


@dataclass
class TierCounters:
    """Totals since the start; they only grow. Bytes are those of pages, hits and misses are pages asked for."""

    hits: int = 0
    misses: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    pages_refused: int = 0
    """By the tier itself, which had no room or did not want them."""
    dropped_writes: int = 0
    """Pages that were not handed to the tier, because too many waited for it or it was out of order."""
    openings: int = 0
    """Times that the breaker opened."""
    failures: Counter[str] = field(default_factory=Counter)
    """Failed calls by cause: "timeout", or the name of what was raised."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Time spent in calls that returned, by kind, for means together with `calls`."""
    latency: dict[str, Histogram] = field(default_factory=dict)
    """The same by kind and duration."""
    calls: Counter[str] = field(default_factory=Counter)
    """Calls that returned, by kind."""
