"""The contract of a lower tier: somewhere else that page bytes may live (a disk, a remote store)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

import numpy as np
from numpy.typing import NDArray

WritablePages: TypeAlias = Sequence[memoryview]
ReadOnlyPages: TypeAlias = Sequence[memoryview]


@dataclass(frozen=True)
class StoredPage:
    """What a tier is told about a page beside its bytes. All of it is in the page's own header as well.

    Attributes:
        key, parent: 16 bytes each; the parent of a chain's first page is the namespace's root key.
        fingerprint: 16 bytes of the namespace.
        generation: unsigned 64 bits, of this write of the key.
    """

    key: bytes
    parent: bytes
    fingerprint: bytes
    generation: int


@dataclass(frozen=True)
class TierStats:
    """A tier's own account, as far as it knows; -1 where it cannot tell. Bytes are those it occupies."""

    num_pages: int = -1
    used_bytes: int = -1
    limit_bytes: int = -1
    pages_evicted: int = 0
    """Since the start, to stay within its limit."""
    pages_damaged: int = 0
    """Since the start: pages it had, but could not read, or found to be other bytes than those it was given."""


class Tier(ABC):
    """Keeps copies of pages under their keys. Implementations block; somebody else gives them threads.

    Who calls. The owner process of a host runs each tier behind a `TierRunner`, which has a fixed number of
    threads for it. At most `concurrency` calls run at once, on any of those threads, so everything here must be
    thread-safe. `connect` comes first and alone, and again after failures; `close` comes last, once no call runs
    any more, or after the runner has given up on calls that do not return. No engine, and not the owner's own
    thread, ever waits for a method of this class.

    Memory. Every page is `page_bytes` long and lies in the host pool, aligned to 4096 bytes, unless said
    otherwise at the tier's construction. The views belong to the tier until the call returns, and not a moment
    longer: the pool gives the pages to others then.

    Failure. A method raises when it could not do its work at all (any `Exception`; `TierUnavailable` says best
    what to look at), and reports page by page where some of it worked. For engines all of that is a miss. A
    method should give up by itself after `deadline_s`; when it does not, the runner counts it as failed at that
    time, and keeps its pages out of use until it returns. After several failures in a row the runner's breaker
    opens: the tier is not called for a while, then tried again with `connect`.

    Truth. A tier may lose any page at any time. It may also return wrong bytes: whoever reads a page verifies
    header and checksums, so a tier need not checksum payloads itself. It must never return *success* for a page
    of which it wrote fewer bytes than `page_bytes`.

    Deletion is advice as far as memory is concerned, but binding for visibility: a key that was deleted, or
    cleared, before a call of `contains` or `read` began is absent for that call, unless it was written again
    after.
    """

    name: ClassVar[str]
    """A word for messages and metrics: "disk", "s3", ..."""

    concurrency: int = 4
    """How many calls may run at once."""

    batch_pages: int = 64
    """The most pages that one call of `read` or `write` is given."""

    deadline_s: float = 10.0
    """How long one call may take."""

    shared: bool = False
    """Whether other hosts read and write it too. Then this host's account of it is never complete."""

    @abstractmethod
    def connect(self, pool: memoryview) -> None:
        """Become usable, or raise. `pool` is the whole host pool, for tiers that register memory with a device.

        Called before anything else, and again before use is resumed after failures: a second call must not lose
        what the tier holds.
        """

    @abstractmethod
    def contains(self, keys: Sequence[bytes]) -> int:
        """How many of `keys`, from the first on, are here. Also counts as a use of what is found, for eviction."""

    @abstractmethod
    def read(self, keys: Sequence[bytes], pages: WritablePages) -> NDArray[np.bool_]:
        """Fill `pages[i]` with the bytes of `keys[i]`: bool `[n]`, whether all of its bytes were read."""

    @abstractmethod
    def write(self, stored: Sequence[StoredPage], pages: ReadOnlyPages) -> NDArray[np.bool_]:
        """Keep `pages[i]` under `stored[i].key`: bool `[n]`, whether it is here now (also when it was before).

        A present key keeps its old bytes unless the tier knows that its generation differs; either is right, since
        the bytes say which write they are of. Pages of one call are in the order of their chain. What does not fit
        is refused, or makes room for itself by an eviction in which a suffix goes before its prefix.
        """

    @abstractmethod
    def delete(self, keys: Sequence[bytes]) -> None:
        """Forget these keys, present or not."""

    @abstractmethod
    def clear(self) -> None:
        """Forget every key, now and after a restart."""

    @abstractmethod
    def scan(self, after: bytes, limit: int) -> list[bytes]:
        """Up to `limit` keys that are here, ascending, from the first one above `after` (b"": from the start).

        Raises NotImplementedError if the engine behind the tier cannot list. For people's tools only.
        """

    @abstractmethod
    def load_note(self, name: str) -> bytes | None:
        """The small value that was stored under `name` (letters, digits, dashes), or None. Survives restarts."""

    @abstractmethod
    def store_note(self, name: str, value: bytes) -> None:
        """Keep a small value (up to 1 KiB) apart from the pages. `clear` leaves it alone."""

    @abstractmethod
    def stats(self) -> TierStats:
        """Cheap: no call to a device or a network."""

    @abstractmethod
    def close(self) -> None:
        """Stop. When this returns, no page of the pool is touched any more by a call that has returned."""
