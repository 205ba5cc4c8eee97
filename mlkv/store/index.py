"""The index of the host pool: which page holds which key, who may touch it, what may go.

Pure: no sockets, clocks, threads or page bytes. The owner process feeds it one request at a time.

Life of a page:

    FREE --reserve--> RESERVED --commit--> READY --evicted--> FREE
                          |                  |
                          | failed           | found bad, or cleared
                          v                  v
                         FREE            QUARANTINED --last holder gone--> FREE

Keys form chains (each key is a hash over its predecessor), so the index is a tree of prefixes. Three rules
keep it right, and everything below follows from them:

1. A key is in the index only if its parent is. Eviction takes leaves only.
2. A page is *held* by its leases, by its writer while RESERVED, and by the pages below it. A held page is never
   given to another key. One pin on the deepest page of a match therefore holds the whole prefix, in O(1).
3. A page whose key was removed (found bad, cleared, or below such a page) stays in the tree without its key until
   nothing holds it. It can no longer be found, and its readers and writers can finish in peace.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from mlkv.errors import ConfigError, StoreError
from mlkv.store.grants import Committed, Counts, Evicted, Lease, Quarantined, Reservation
from mlkv.store.policy import Policy
from mlkv.store.tree import PageTree

KEY_BYTES: Final = 16

FREE: Final = 0
RESERVED: Final = 1
READY: Final = 2
QUARANTINED: Final = 3
STATE_NAMES: Final = ("free", "reserved", "ready", "quarantined")

_NO_PAGES: Final[NDArray[np.int32]] = np.empty(0, np.int32)
_NO_GENERATIONS: Final[NDArray[np.uint64]] = np.empty(0, np.uint64)


@dataclass
class _Writing:
    pages: list[int]
    first: int
    num_ready: int


class IndexBroken(AssertionError):
    """`Index.check` found a rule violated: a bug, never the caller's fault."""


class Index:
    """See the module. Keys travel as one bytes object of 16-byte keys, in the order of the chain.

    A request that is refused raises `StoreError` and changes nothing. Time per page is O(1) for match, release,
    commit and quarantine, and that of the policy for reserve; nothing ever scans the pool, except `check`.
    """

    def __init__(self, num_pages: int, policy: Policy, first_generation: int = 1) -> None:
        """`first_generation`: that of the first page written; each write after it gets the next one."""
        if not 1 <= num_pages < 2**31:
            raise ConfigError(f"a store has between 1 and 2**31 - 1 pages, not {num_pages}")
        self.num_pages = num_pages
        self._policy = policy
        self._tree = PageTree(num_pages)
        self._page_of: dict[bytes, int] = {}
        self._key: list[bytes | None] = [None] * num_pages
        self._state = bytearray(num_pages)
        self._pins = array("i", [0]) * (num_pages + 1)
        self._pins[self._tree.root] = 1  # so that the root is never offered for eviction nor freed
        self._generation = np.zeros(num_pages, np.uint64)
        self._last_generation = first_generation - 1
        self._last_id = 0
        self._free = list(range(num_pages - 1, -1, -1))
        self._counts = [num_pages, 0, 0, 0]
        self._leases: dict[int, int] = {}  # lease -> its deepest page
        self._reservations: dict[int, _Writing] = {}

    # Requests

    def match(self, keys: bytes, limit: int) -> Lease:
        """Lease the longest complete prefix of the chain `keys`, at most `limit` pages of it."""
        num_keys = min(_count_keys(keys), limit)
        if limit < 0:
            raise StoreError(f"a match cannot be limited to {limit} pages")
        pages: list[int] = []
        num_coming = 0
        for page, state in self._walk(keys, num_keys):
            if state == READY and not num_coming:
                pages.append(page)
            else:
                num_coming += 1
        if not pages:
            return Lease(0, _NO_PAGES, _NO_GENERATIONS, num_coming)
        self._policy.touch(pages[-1])
        self._pin(pages[-1])
        lease_id = self._new_id()
        self._leases[lease_id] = pages[-1]
        found = np.array(pages, np.int32)
        return Lease(lease_id, found, self._generation[found], num_coming)

    def release(self, lease_ids: Sequence[int]) -> None:
        """Give leases back. All of them must exist, each once; else none is released."""
        if len(set(lease_ids)) != len(lease_ids):
            raise StoreError(f"a lease is named twice in one release: {list(lease_ids)}")
        unknown = [lease_id for lease_id in lease_ids if lease_id not in self._leases]
        if unknown:
            raise StoreError(f"leases {unknown} do not exist; they were released before or never granted")
        for lease_id in lease_ids:
            self._unpin(self._leases.pop(lease_id))

    def reserve(self, keys: bytes, start: int = 0) -> Reservation:
        """Reserve pages for the part of the chain that nobody has written or is writing.

        `keys` is the chain from its root. Keys before `start` are only looked at: if one of them is missing,
        nothing can be reserved. Present keys form a prefix, so what is missing is one run; it is cut where no
        page can be had. Every new page gets a generation that no page of this index had before. A lower tier
        that brings a page back gives the one in its header instead: `generations[i]` is that of
        keys[start + i].
        """
        num_keys = _count_keys(keys)
        if not 0 <= start <= num_keys:
            raise StoreError(f"a reservation starts inside its chain of {num_keys} keys, not at {start}")
        tail, first, num_ready = self._tree.root, 0, 0
        for page, state in self._walk(keys, num_keys):
            num_ready += state == READY and num_ready == first
            tail, first = page, first + 1
        if tail != self._tree.root:
            self._policy.touch(tail)
        pages: list[int] = []
        evicted: list[Evicted] = []
        if first >= start:
            self._pin(tail)  # making room must not evict the prefix that is being continued
            parent = tail
            for position in range(first, num_keys):
                key = keys[position * KEY_BYTES : (position + 1) * KEY_BYTES]
                # A key that is present elsewhere cannot belong to this chain too: it is malformed from here.
                page_or_none = None if key in self._page_of else self._allocate(evicted)
                if page_or_none is None:
                    break
                self._begin(page_or_none, key, parent)
                parent = page_or_none
                pages.append(parent)
            self._unpin(tail)
        if not pages:
            return Reservation(0, first, num_ready, _NO_PAGES, _NO_GENERATIONS, tuple(evicted))
        reservation_id = self._new_id()
        self._reservations[reservation_id] = _Writing(pages, first, num_ready)
        taken = np.array(pages, np.int32)
        return Reservation(reservation_id, first, num_ready, taken, self._generation[taken], tuple(evicted))

    def commit(
        self, reservation_id: int, num_good: int, generations: NDArray[np.uint64] | None = None
    ) -> Committed:
        """Publish the first `num_good` pages of a reservation and give back the others.

        `generations`: uint64 `[num_good]` from the headers of pages that a lower tier brought back; they replace
        those of the reservation.

        The caller promises that nobody can still write any of its pages. What hangs below a page that is given
        back is dropped with it, whoever wrote it.
        """
        writing = self._reservations.get(reservation_id)
        if writing is None:
            raise StoreError(f"reservation {reservation_id} does not exist; it was ended before or never granted")
        if not 0 <= num_good <= len(writing.pages):
            raise StoreError(f"reservation {reservation_id} has {len(writing.pages)} pages, not {num_good}")
        if generations is not None and len(generations) != num_good:
            raise StoreError(f"{len(generations)} generations were given for {num_good} pages")
        del self._reservations[reservation_id]
        doomed = self._key[writing.pages[0]] is None
        if generations is not None:
            self._generation[writing.pages[:num_good]] = generations
        kept = 0 if doomed else num_good
        for position, page in enumerate(writing.pages):
            self._become(page, READY if position < kept else QUARANTINED)
        committed = Committed(kept, 0 if doomed else self._num_readable(writing, kept))
        if kept:
            self._policy.touch(writing.pages[kept - 1])
        if not doomed and kept < len(writing.pages):
            self._drop(writing.pages[kept])
        for page in reversed(writing.pages):
            self._settle(page)
        return committed

    def cancel(self, reservation_id: int) -> None:
        """Give back all pages of a reservation. The caller promises that nobody can still write them."""
        self.commit(reservation_id, 0)

    def disown(self, reservation_id: int) -> None:
        """Forget the keys of a reservation whose writer may never come back, so that others can write them.

        Its pages stay RESERVED until `commit` or `cancel`; nothing of it will be published.
        """
        writing = self._reservations.get(reservation_id)
        if writing is None:
            raise StoreError(f"reservation {reservation_id} does not exist; it was ended before or never granted")
        if self._key[writing.pages[0]] is not None:
            self._drop(writing.pages[0])

    def quarantine(self, pages: Sequence[int], generations: Sequence[int]) -> Quarantined:
        """Remove pages whose bytes were found bad, and everything below them.

        They are never matched again and become FREE when their leases are gone. A pair whose page is not READY
        with that generation speaks of an earlier content of the page and is ignored.
        """
        if len(pages) != len(generations):
            raise StoreError(f"{len(pages)} pages were given with {len(generations)} generations")
        outside = [page for page in pages if not 0 <= page < self.num_pages]
        if outside:
            raise StoreError(f"pages {outside} are outside of the pool of {self.num_pages} pages")
        bad_keys: list[bytes] = []
        num_dropped = 0
        for page, generation in zip(pages, generations, strict=True):
            key = self._key[page]
            if key is None or self._state[page] != READY or self._generation[page] != generation:
                continue
            bad_keys.append(key)
            num_dropped += self._drop(page)
        return Quarantined(bad_keys, num_dropped)

    def clear(self) -> int:
        """Forget every key. Leased pages and pages being written become FREE when their holders are done.

        Returns the number of keys forgotten. Legal at any time; a second call finds nothing to do.
        """
        tops = [page for page in self._tree.children(self._tree.root) if self._key[page] is not None]
        return sum(self._drop(page) for page in tops)

    # What lower tiers are kept up to date with

    def hold(self, page: int) -> int:
        """Lease a READY page, and the prefix above it with it, without counting a use. Returns the lease's id."""
        if self._state[page] != READY:
            raise StoreError(f"page {page} is {STATE_NAMES[self._state[page]]}: only a ready page can be held")
        self._pin(page)
        lease_id = self._new_id()
        self._leases[lease_id] = page
        return lease_id

    def identity(self, page: int) -> tuple[bytes | None, int]:
        """(key, generation) of a page; the key is None if it has none that can be found."""
        return self._key[page], int(self._generation[page])

    def parent(self, page: int) -> int | None:
        """The page that a page in use continues; None at the start of a chain."""
        parent = self._tree.parent[page]
        return None if parent == self._tree.root else parent

    def next_victim(self) -> int | None:
        """The page that would be evicted now if there were no free one; None when none could be."""
        return self._policy.victim()

    @property
    def num_free(self) -> int:
        return self._counts[FREE]

    def counts(self) -> Counts:
        free, reserved, ready, quarantined = self._counts
        return Counts(
            self.num_pages, free, reserved, ready, quarantined, len(self._leases), len(self._reservations)
        )

    # Steps that the requests are made of

    def _walk(self, keys: bytes, num_keys: int) -> Iterator[tuple[int, int]]:
        """(page, state) of the present prefix of the chain, from the root; at most `num_keys` of them."""
        page_of, parent_of, state_of = self._page_of, self._tree.parent, self._state
        parent = self._tree.root
        for at in range(0, num_keys * KEY_BYTES, KEY_BYTES):
            page = page_of.get(keys[at : at + KEY_BYTES])
            if page is None or parent_of[page] != parent:
                return
            yield page, state_of[page]
            parent = page

    def _allocate(self, evicted: list[Evicted]) -> int | None:
        """A FREE page, made by an eviction if need be; None, at once, when every page is held."""
        if not self._free:
            victim = self._policy.victim()
            if victim is None:
                return None
            key = self._forget_key(victim)
            evicted.append(Evicted(key, int(self._generation[victim]), victim))
            self._settle(self._free_page(victim))
        return self._free.pop()

    def _begin(self, page: int, key: bytes, parent: int) -> None:
        """Make a FREE page RESERVED for `key`, as a child of `parent`."""
        self._last_generation += 1
        self._become(page, RESERVED)
        self._key[page] = key
        self._page_of[key] = page
        self._generation[page] = self._last_generation
        self._tree.link(page, parent)

    def _num_readable(self, writing: _Writing, kept: int) -> int:
        """Leading READY keys of the chain of a reservation whose first `kept` pages are complete.

        The keys before `num_ready` were READY when it was made and have been held by it since. Those between
        them and its first page were being written by others: they are looked at again.
        """
        readable = writing.first + kept
        page = self._tree.parent[writing.pages[0]]
        for depth in range(writing.first, writing.num_ready, -1):
            if self._state[page] != READY:
                readable = depth - 1
            page = self._tree.parent[page]
        return readable

    def _drop(self, top: int) -> int:
        """Remove the keys of `top` and of everything below it. Returns their number.

        READY pages become QUARANTINED; a RESERVED page stays so until its writer comes back and finds no key.
        """
        subtree = self._tree.subtree(top)
        num_dropped = 0
        for page in subtree:
            if self._key[page] is None:
                continue
            self._forget_key(page)
            num_dropped += 1
            if self._state[page] == READY:
                self._policy.hide(page)
                self._become(page, QUARANTINED)
        for page in reversed(subtree):  # children first, so that a parent finds itself without them
            self._settle(page)
        return num_dropped

    def _settle(self, page: int) -> None:
        """Called when a hold on `page` may have gone: offer it for eviction, or free it and look at its parent."""
        while not self._pins[page] and not self._tree.has_children(page):
            state = self._state[page]
            if state == READY:
                self._policy.expose(page)
                return
            if state != QUARANTINED:
                return  # FREE already, or its writer still holds it
            page = self._free_page(page)

    def _free_page(self, page: int) -> int:
        """Make a page FREE that has no key and no holder. Returns its former parent."""
        parent = self._tree.unlink(page)
        self._policy.forget(page, parent if parent != self._tree.root else None)
        self._become(page, FREE)
        self._free.append(page)
        return parent

    def _forget_key(self, page: int) -> bytes:
        key = self._key[page]
        assert key is not None
        del self._page_of[key]
        self._key[page] = None
        return key

    def _pin(self, page: int) -> None:
        self._pins[page] += 1
        if page != self._tree.root:
            self._policy.hide(page)

    def _unpin(self, page: int) -> None:
        self._pins[page] -= 1
        self._settle(page)

    def _become(self, page: int, state: int) -> None:
        self._counts[self._state[page]] -= 1
        self._counts[state] += 1
        self._state[page] = state

    def _new_id(self) -> int:
        self._last_id += 1
        return self._last_id

    # Audit

    def check(self) -> None:
        """Check every rule over the whole pool, in O(num_pages). Raises `IndexBroken` saying which one failed."""
        for problem in self._problems():
            raise IndexBroken(problem)

    def _problems(self) -> Iterator[str]:
        tree, root = self._tree, self._tree.root
        pins = [0] * self.num_pages
        for leaf in self._leases.values():
            pins[leaf] += 1
        writers = [0] * self.num_pages
        for writing in self._reservations.values():
            for page in writing.pages:
                writers[page] += 1
        if len(self._free) != len(set(self._free)):
            yield "a page is twice in the free list"
        if len(self._page_of) != sum(key is not None for key in self._key):
            yield "keys and pages are not one to one"
        free = set(self._free)
        tally = [0, 0, 0, 0]
        num_candidates = 0
        for page in range(self.num_pages):
            state, key = self._state[page], self._key[page]
            who = f"page {page} ({STATE_NAMES[state]})"
            leaf = not tree.has_children(page)
            tally[state] += 1
            num_candidates += page in self._policy
            if (state == FREE) != (page in free) or (state == FREE) == tree.is_linked(page):
                yield f"{who} disagrees with the free list or the tree"
            if self._pins[page] != pins[page]:
                yield f"{who} has {self._pins[page]} pins but {pins[page]} leases end there"
            if writers[page] != (state == RESERVED):
                yield f"{who} has {writers[page]} writers"
            if key is not None and self._page_of.get(key) != page:
                yield f"{who} is not found by its key"
            if (page in self._policy) != (state == READY and leaf and not pins[page]):
                yield f"{who} is wrongly offered for, or kept from, eviction"
            if state == FREE:
                if key is not None or pins[page] or not leaf:
                    yield f"{who} still has a key, a lease or children"
                continue
            parent = tree.parent[page]
            if parent != root and self._state[parent] == FREE:
                yield f"{who} hangs below the free page {parent}"
            if key is not None and parent != root and self._key[parent] is None:
                yield f"{who} can be found although its parent {parent} cannot"
            if (state == READY and key is None) or (state == QUARANTINED and key is not None):
                yield f"{who} has a key that does not go with its state"
            if state == QUARANTINED and leaf and not pins[page]:
                yield f"{who} is held by nobody and was not freed"
        if tally != self._counts or sum(tally) != self.num_pages:
            yield f"pages by state are {tally}, counted as {self._counts}"
        if num_candidates != len(self._policy):
            yield f"the policy counts {len(self._policy)} candidates and has {num_candidates}"


def _count_keys(keys: bytes) -> int:
    if len(keys) % KEY_BYTES:
        raise StoreError(f"keys must be {KEY_BYTES} bytes each; {len(keys)} bytes are no whole number of them")
    return len(keys) // KEY_BYTES
