"""What the index answers: leases, reservations, and the facts about them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import overload

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Lease:
    """The longest complete prefix of a chain, pinned until its id is released. Id 0: nothing found, no lease."""

    id: int
    pages: NDArray[np.int32]
    generations: NDArray[np.uint64]
    num_coming: int
    """Further pages of the chain that somebody is writing now; asking again later may find them."""


@dataclass(frozen=True)
class Evicted:
    """A page that lost its place. Its bytes stay as they were until the next writer hears of its page."""

    key: bytes
    generation: int
    page: int


class EvictedPages(Sequence[Evicted]):
    """Pages that were evicted together, in the order in which they went; made into objects one by one when asked.

    `keys`: 16 bytes each; `generations`: uint64 `[n]`; `pages`: int32 `[n]`.
    """

    def __init__(self, keys: bytes, generations: NDArray[np.uint64], pages: NDArray[np.int32]) -> None:
        self.keys = keys
        self.generations = generations
        self.pages = pages

    def __len__(self) -> int:
        return len(self.pages)

    @overload
    def __getitem__(self, at: int) -> Evicted: ...
    @overload
    def __getitem__(self, at: slice) -> EvictedPages: ...
    def __getitem__(self, at: int | slice) -> Evicted | EvictedPages:
        if isinstance(at, slice):
            numbers = range(len(self))[at]
            keys = b"".join(self._key(number) for number in numbers)
            return EvictedPages(keys, self.generations[at], self.pages[at])
        number = range(len(self))[at]
        return Evicted(self._key(number), int(self.generations[number]), int(self.pages[number]))

    def __iter__(self) -> Iterator[Evicted]:
        return (self[number] for number in range(len(self)))

    def _key(self, number: int) -> bytes:
        key_bytes = len(self.keys) // len(self)
        return self.keys[number * key_bytes : (number + 1) * key_bytes]


@dataclass(frozen=True)
class Reservation:
    """Pages to be written for keys[first : first + len(pages)], each by this reservation's holder alone.

    Id 0: nothing to write, because all of it is there or being written, or because no page could be had.
    """

    id: int
    first: int
    num_ready: int
    """Leading keys of the chain that are readable now; the keys from there to `first` are being written."""
    pages: NDArray[np.int32]
    generations: NDArray[np.uint64]
    evicted: Sequence[Evicted] = ()


@dataclass(frozen=True)
class Committed:
    """What a commit published."""

    num_good: int
    """Pages of the reservation that are in the index now; 0 if the index was cleared meanwhile."""
    num_readable: int
    """Leading keys of the whole chain that can be matched now."""
    pages: NDArray[np.int32]
    """The published ones, `[num_good]`."""


@dataclass(frozen=True)
class Counts:
    """Pages by state, and who holds them. free + reserved + ready + quarantined == num_pages, always."""

    num_pages: int
    free: int
    reserved: int
    ready: int
    quarantined: int
    leases: int
    reservations: int


@dataclass(frozen=True)
class Quarantined:
    """What `Index.quarantine` removed: the bad pages' own keys, and how many pages left with them."""

    bad_keys: list[bytes] = field(default_factory=list)
    num_dropped: int = 0
