"""What the index answers: leases, reservations, and the facts about them."""

from __future__ import annotations

from dataclasses import dataclass, field

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
    evicted: tuple[Evicted, ...] = ()


@dataclass(frozen=True)
class Committed:
    """What a commit published."""

    num_good: int
    """Pages of the reservation that are in the index now; 0 if the index was cleared meanwhile."""
    num_readable: int
    """Leading keys of the whole chain that can be matched now."""


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
