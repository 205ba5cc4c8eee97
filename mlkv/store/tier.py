"""The contract of a lower tier: somewhere else that page bytes may live (disk, a remote store)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class TierJob:
    """Pages to fill from a tier: `pages[i]`, writable and one page long, for `keys[i]`, in the chain's order."""

    id: int
    keys: Sequence[bytes]
    pages: Sequence[memoryview]


class Tier(ABC):
    """Holds pages that the host pool has no room for.

    The owner process calls a tier from its one thread, between requests of engines, so no method may wait for a
    device or a network: `read` starts work that the tier does on threads of its own, and `poll` tells what has
    become of it. What the tiers are asked for and when:

    - a match that ends early: `find` for the rest of the chain; what is found gets host pages, reserved like
      those of any other writer, and `read` fills them. The next match of the chain finds them.
    - an eviction from the host pool: `write` for the pages that leave, before their memory gets new owners.
    - pages found bad: `delete`, because the tier may be where they came from. A cleared store: `clear`.

    A tier never fails a request. What it cannot do is a miss: it finds nothing, refuses to read or write, or reads
    fewer pages than asked. If it raises all the same, the owner counts a failure and goes on as after a refusal.
    """

    @abstractmethod
    def find(self, keys: Sequence[bytes]) -> NDArray[np.uint64]:
        """How many leading `keys` are here, told by the generations in their page headers: uint64 [found]."""

    @abstractmethod
    def read(self, job: TierJob) -> bool:
        """Start to fill the pages of `job`; False (or an exception) if nothing was and will be written to them.

        After True the pages belong to the tier until `poll` returns the job or `close` returns.
        """

    @abstractmethod
    def poll(self) -> list[tuple[int, int]]:
        """(job id, number of leading pages that are complete) of every read that ended since the last call.

        After this the tier does not touch the pages of that job any more.
        """

    @abstractmethod
    def fileno(self) -> int:
        """A descriptor that is readable while `poll` has something to tell; -1 if this tier never does."""

    @abstractmethod
    def write(self, keys: Sequence[bytes], generations: Sequence[int], pages: Sequence[memoryview]) -> int:
        """Take copies of pages, from the first on; returns how many were taken. The rest is lost to this tier.

        The views are valid during the call only: a tier that writes later copies into a bounded buffer first,
        and takes fewer when that is full.
        """

    @abstractmethod
    def delete(self, keys: Sequence[bytes]) -> None:
        """Forget these keys, present or not."""

    @abstractmethod
    def clear(self) -> None:
        """Forget every key, now and after a restart. Reads in flight end as they like: their pages are doomed."""

    @abstractmethod
    def close(self) -> None:
        """Stop. When this returns, no page of the pool is touched any more."""
