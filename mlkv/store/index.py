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

Requests speak of chains, and nearly all that happens to a page happens to its neighbours in the chain too: pages
are reserved, published and evicted in *runs*, with whole-array operations. Rule 1 makes a match cheap: how much of
a chain is there is found by bisection, and its pages by walking up from the deepest one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final

import numpy as np
from numpy.typing import NDArray

from mlkv.errors import ConfigError, StoreError
from mlkv.store.audit import find_problems
from mlkv.store.grants import Committed, Counts, Evicted, EvictedPages, Lease, Quarantined, Reservation
from mlkv.store.key_table import KEY_BYTES, Keys, KeyTable, NewKeys
from mlkv.store.page_arrays import Pages, Rows, count_until
from mlkv.store.page_stack import PageStack
from mlkv.store.policy import MAX_CHILDREN, Chooser, Policy, Share
from mlkv.store.states import FREE, QUARANTINED, READY, RESERVED, STATE_NAMES
from mlkv.store.tree import PageTree

__all__ = ["KEY_BYTES", "Index", "IndexBroken"]

_NO_PAGES: Final[Pages] = np.empty(0, np.int32)
_NO_ROWS: Final[Rows] = np.empty(0, np.intp)
_NO_GENERATIONS: Final[NDArray[np.uint64]] = np.empty(0, np.uint64)


@dataclass
class _Writing:
    pages: Rows
    first: int
    num_ready: int


class IndexBroken(AssertionError):
    """`Index.check` found a rule violated: a bug, never the caller's fault."""


class Index:
    """See the module. Keys travel as one bytes object of 16-byte keys, in the order of the chain.

    A request that is refused raises `StoreError` and changes nothing. Time per page is O(1) for match, release,
    commit and quarantine, and that of the policy for reserve; nothing scans the pool, except `clear` and `check`.
    """

    def __init__(
        self, num_pages: int, policy: Policy, first_generation: int = 1, free: PageStack | None = None
    ) -> None:
        """`first_generation`: that of the first page written; each write after it gets the next one.

        `free`: where free pages are kept, all of the pool; default: a PageStack.
        """
        if not 1 <= num_pages < 2**30:
            raise ConfigError(f"a store has between 1 and 2**30 - 1 pages, not {num_pages}")
        self.num_pages = num_pages
        self._policy = policy
        self._tree = PageTree(num_pages)
        self._table = KeyTable(num_pages)
        self._states = np.zeros(num_pages, np.uint8)
        self._state = self._states.data  # a quick view of single elements
        self._generation = np.zeros(num_pages, np.uint64)
        self._last_generation = first_generation - 1
        self._last_id = 0
        self._free = PageStack(num_pages) if free is None else free
        self._counts = [num_pages, 0, 0, 0]
        self._leases: dict[int, int] = {}  # lease -> its deepest page
        self._reservations: dict[int, _Writing] = {}

    # Requests

    def match(self, keys: bytes, limit: int, *, is_use: bool = True) -> Lease:
        """Lease the longest complete prefix of the chain `keys`, at most `limit` pages of it.

        `is_use`: whether that counts for what is evicted next.
        """
        num_keys = min(_count_keys(keys), limit)
        if limit < 0:
            raise StoreError(f"a match cannot be limited to {limit} pages")
        present = self._present(keys, num_keys)
        num_ready = self._count_ready(present)
        num_coming = len(present) - num_ready
        if not num_ready:
            return Lease(0, _NO_PAGES, _NO_GENERATIONS, num_coming)
        found = present[:num_ready]
        deepest = int(found[-1])
        if is_use:
            children = list(islice(self._tree.children(deepest), MAX_CHILDREN))
            self._policy.match(deepest, num_ready, num_keys, children)
        self._pin(deepest)
        lease_id = self._new_id()
        self._leases[lease_id] = deepest
        return Lease(lease_id, found.astype(np.int32), self._generation[found], num_coming)

    def release(self, lease_ids: Sequence[int]) -> None:
        """Give leases back. All of them must exist, each once; else none is released."""
        if len(set(lease_ids)) != len(lease_ids):
            raise StoreError(f"a lease is named twice in one release: {list(lease_ids)}")
        unknown = [lease_id for lease_id in lease_ids if lease_id not in self._leases]
        if unknown:
            raise StoreError(f"leases {unknown} do not exist; they were released before or never granted")
        for lease_id in lease_ids:
            self._unpin(self._leases.pop(lease_id))

    def reserve(self, keys: bytes, start: int = 0, share: Share | None = None) -> Reservation:
        """Reserve pages for the part of the chain that nobody has written or is writing.

        `keys` is the chain from its root. Keys before `start` are only looked at: if one of them is missing,
        nothing can be reserved. Present keys form a prefix, so what is missing is one run; it is cut where no
        page can be had. Every new page gets a generation that no page of this index had before.

        `share`: what the writer may take. Where that is less, pages that its share names make room first, and if
        that is not enough the run is cut.
        """
        num_keys = _count_keys(keys)
        if not 0 <= start <= num_keys:
            raise StoreError(f"a reservation starts inside its chain of {num_keys} keys, not at {start}")
        present = self._present(keys, num_keys)
        first, num_ready = len(present), self._count_ready(present)
        tail = self._tree.root
        if first:
            tail = int(present[-1])
            self._policy.touch(tail)
        if first < start or first == num_keys:
            return Reservation(0, first, num_ready, _NO_PAGES, _NO_GENERATIONS)
        # A key that is present elsewhere cannot belong to this chain too: it is malformed from there.
        wanted = self._table.find_new(_as_keys(keys)[first:])
        self._pin(tail)  # making room must not evict the prefix that is being continued
        own = () if share is None else self.evict(len(wanted) - share.room, share)
        if share is not None:
            wanted = wanted.first(max(0, share.room))
        evicted = self.evict(len(wanted) - len(self._free))
        if own:
            evicted = [*own, *evicted]
        pages = self._free.take(min(len(wanted), len(self._free)))
        if len(pages):
            self._begin(pages, wanted.first(len(pages)), tail)
        self._unpin(tail)
        if not len(pages):
            return Reservation(0, first, num_ready, _NO_PAGES, _NO_GENERATIONS, evicted)
        reservation_id = self._new_id()
        self._reservations[reservation_id] = _Writing(pages, first, num_ready)
        return Reservation(
            reservation_id, first, num_ready, pages.astype(np.int32), self._generation[pages], evicted
        )

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
        pages = writing.pages
        if not 0 <= num_good <= len(pages):
            raise StoreError(f"reservation {reservation_id} has {len(pages)} pages, not {num_good}")
        if generations is not None and len(generations) != num_good:
            raise StoreError(f"{len(generations)} generations were given for {num_good} pages")
        del self._reservations[reservation_id]
        if generations is not None:
            self._generation[pages[:num_good]] = generations
        doomed = not self._table.has_key(int(pages[0]))
        kept = 0 if doomed else num_good
        self._become(pages[:kept], RESERVED, READY)
        self._become(pages[kept:], RESERVED, QUARANTINED)
        num_readable = 0 if doomed else self._num_readable(writing, kept)
        committed = Committed(kept, num_readable, pages[:kept].astype(np.int32))
        if kept:
            self._policy.touch(int(pages[kept - 1]))
        if not doomed and kept < len(pages):
            self._drop(int(pages[kept]))
        # Those before the last good page are held by the pages below them.
        for page in pages[max(kept - 1, 0) :][::-1].tolist():
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
        top = int(writing.pages[0])
        if self._table.has_key(top):
            self._drop(top)

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
            key = self._table.key_of(page)
            if key is None or self._state[page] != READY or self._generation[page] != generation:
                continue
            bad_keys.append(key)
            num_dropped += self._drop(page)
        return Quarantined(bad_keys, num_dropped)

    def clear(self) -> int:
        """Forget every key. Leased pages and pages being written become FREE when their holders are done.

        Returns the number of keys forgotten. Legal at any time; a second call finds nothing to do.
        """
        num_forgotten = int(np.count_nonzero(self._table.known(slice(None))))
        self._table.clear()
        self._policy.clear()
        self._become(np.flatnonzero(self._states == READY), READY, QUARANTINED)
        held = np.zeros(self.num_pages, np.bool_)
        for page in self._leases.values():
            held[self._tree.path(page)] = True
        for writing in self._reservations.values():
            held[self._tree.path(int(writing.pages[-1]))] = True
        unheld = np.flatnonzero((self._states == QUARANTINED) & ~held)
        self._tree.keep_only(held)
        self._become(unheld, QUARANTINED, FREE)
        self._free.extend(unheld)
        return num_forgotten

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
        """(key, generation) of a READY page; the key of any other is None."""
        key = self._table.key_of(page) if self._state[page] == READY else None
        return key, int(self._generation[page])

    def identities(self, pages: Pages) -> tuple[bytes, NDArray[np.uint64], NDArray[np.bool_]]:
        """Of each page 16 bytes of key, the generation, and whether it is READY: if not, these mean nothing."""
        return self._table.keys_of(pages).tobytes(), self._generation[pages], self._states[pages] == READY

    def parent(self, page: int) -> int | None:
        """The page that a page in use continues; None at the start of a chain."""
        parent = self._tree.parent[page]
        return None if parent == self._tree.root else parent

    def next_victim(self) -> int | None:
        """The page that would be evicted now if there were no free one; None when none could be."""
        return self._policy.victim()

    # What people's tools look at

    def find(self, key: bytes) -> int | None:
        """The READY page with this key."""
        page = self._table.find(key) if len(key) == KEY_BYTES else -1
        return page if page >= 0 and self._state[page] == READY else None

    def entries(self, start: int, limit: int) -> tuple[Pages, bytes, NDArray[np.uint64], NDArray[np.uint8]]:
        """The first `limit` pages with a key, from page `start` on, their keys, generations and states."""
        pages = (np.flatnonzero(self._table.known(slice(start, None)))[:limit] + start).astype(np.int32)
        return pages, self._table.keys_of(pages).tobytes(), self._generation[pages], self._states[pages]

    def chain_starts(self) -> Pages:
        """The READY pages that continue no other."""
        return np.flatnonzero((self._states == READY) & self._tree.is_top).astype(np.int32)

    @property
    def num_free(self) -> int:
        return self._counts[FREE]

    @property
    def num_bytes(self) -> int:
        """Memory of the index and its policy, beside what single leases and reservations take."""
        arrays = (self._states, self._generation)
        parts = (self._tree, self._table, self._free, self._policy)
        return sum(array.nbytes for array in arrays) + sum(part.num_bytes for part in parts)

    def counts(self) -> Counts:
        free, reserved, ready, quarantined = self._counts
        return Counts(
            self.num_pages, free, reserved, ready, quarantined, len(self._leases), len(self._reservations)
        )

    # Steps that the requests are made of

    def _present(self, keys: bytes, num_keys: int) -> Rows:
        """The pages of the present prefix of the chain, from the root; at most `num_keys` of them."""
        find, depth = self._table.find, self._tree.depth
        view = memoryview(keys)
        deepest, low, high, at = -1, 0, num_keys, 0
        while low < high:
            page = find(view[at * KEY_BYTES : (at + 1) * KEY_BYTES])
            if page >= 0 and depth[page] == at:
                deepest, low = page, at + 1
            else:
                high = at
            # Most chains are either unknown or known to their end: after the first key, look at the last.
            at = high - 1 if at == 0 else (low + high) // 2
        if deepest < 0:
            return _NO_ROWS
        path = self._tree.path(deepest)
        # In a chain that is none, the keys above the deepest page found need not be those of its pages.
        return path[: self._table.count_equal(path, _as_keys(view[: len(path) * KEY_BYTES]))]

    def _count_ready(self, pages: Rows) -> int:
        """How many of `pages` are READY before the first one that is not."""
        return count_until(self._states[pages] != READY)

    def evict(self, number: int, chooser: Chooser | None = None) -> Sequence[Evicted]:
        """Make at least `number` pages FREE, or as many as can be; at once when every page is held.

        `chooser`: says which, instead of the policy.
        """
        choice = chooser or self._policy
        runs: list[Rows] = []
        while number > 0:
            leaf = choice.victim()
            if leaf is None:
                break
            chain = self._leaving(leaf, READY, number)
            run = chain[: choice.count_leaving(chain)]
            self._settle(self._cut(run))
            runs.append(run)
            number -= len(run)
        if not runs:
            return ()
        pages = runs[0] if len(runs) == 1 else np.concatenate(runs)
        evicted = EvictedPages(
            self._table.keys_of(pages).tobytes(), self._generation[pages], pages.astype(np.int32)
        )
        self._table.remove(pages)
        self._tree.drop(pages)
        self._become(pages, READY, FREE)
        self._free.extend(pages)
        return evicted

    def _begin(self, pages: Rows, keys: NewKeys, parent: int) -> None:
        """Make FREE pages RESERVED for `keys`, as a run below `parent`."""
        is_fork = self._tree.has_children(parent)
        self._become(pages, FREE, RESERVED)
        self._table.add(pages, keys)
        key = self._table.low_word_of(int(pages[0]))
        self._policy.extend(pages, None if parent == self._tree.root else parent, is_fork, key)
        first = self._last_generation + 1
        self._last_generation += len(pages)
        self._generation[pages] = np.arange(first, first + len(pages), dtype=np.uint64)
        self._tree.link(pages, parent)

    def _num_readable(self, writing: _Writing, kept: int) -> int:
        """Leading READY keys of the chain of a reservation whose first `kept` pages are complete.

        The keys before `num_ready` were READY when it was made and have been held by it since. Those between
        them and its first page were being written by others: they are looked at again.
        """
        readable = writing.first + kept
        page = self._tree.parent[int(writing.pages[0])]
        for depth in range(writing.first, writing.num_ready, -1):
            if self._state[page] != READY:
                readable = depth - 1
            page = self._tree.parent[page]
        return readable

    def _drop(self, top: int) -> int:
        """Remove the keys of `top` and of everything below it. Returns their number.

        READY pages become QUARANTINED; a RESERVED page stays so until its writer comes back and finds no key.
        """
        subtree = np.array(self._tree.subtree(top), np.intp)
        leaves = self._tree.leaves(subtree)
        known = subtree[self._table.known(subtree)]
        for leaf in leaves.tolist():
            self._policy.hide(leaf)
        self._become(known[self._states[known] == READY], READY, QUARANTINED)
        self._table.remove(known)
        for leaf in leaves.tolist():
            self._settle(leaf)
        return len(known)

    def _settle(self, page: int) -> None:
        """Called when a hold on `page` may have gone: offer it for eviction, or free it and look at its parent."""
        while not self._tree.holders[page]:
            state = self._state[page]
            if state == READY:
                self._policy.expose(page)
                return
            if state != QUARANTINED:
                return  # FREE already, or its writer still holds it
            run = self._leaving(page, QUARANTINED, self.num_pages)
            page = self._cut(run)
            self._tree.drop(run)
            self._become(run, QUARANTINED, FREE)
            self._free.extend(run)

    def _leaving(self, leaf: int, state: int, limit: int) -> Rows:
        """`leaf`, its parent, and so on: at most `limit` pages of this state that each only the last one holds."""
        chain = self._tree.climb_lone(leaf, limit)
        return chain[: count_until(self._states[chain] != state)]

    def _cut(self, run: Rows) -> int:
        """Cut a run that nothing holds off the tree, its deepest page first. Returns its former parent."""
        top = int(run[-1])
        parent = self._tree.cut(top)
        at_root = parent == self._tree.root
        key = self._table.low_word_of(top)
        self._policy.forget(run, key, None if at_root else parent, not self._tree.has_children(parent))
        return parent

    def _pin(self, page: int) -> None:
        self._tree.holders[page] += 1
        if page != self._tree.root:
            self._policy.hide(page)

    def _unpin(self, page: int) -> None:
        self._tree.holders[page] -= 1
        self._settle(page)

    def _become(self, pages: Rows, before: int, after: int) -> None:
        self._states[pages] = after
        self._counts[before] -= len(pages)
        self._counts[after] += len(pages)

    def _new_id(self) -> int:
        self._last_id += 1
        return self._last_id

    def check(self) -> None:
        """Check every rule over the whole pool, in O(num_pages). Raises `IndexBroken` saying which one failed."""
        problems = find_problems(
            tree=self._tree,
            table=self._table,
            policy=self._policy,
            states=self._states,
            free=self._free.to_array(),
            counts=self._counts,
            leases=self._leases.values(),
            writers=[writing.pages for writing in self._reservations.values()],
        )
        for problem in problems:
            raise IndexBroken(problem)


def _as_keys(keys: bytes | memoryview) -> Keys:
    """uint64 `[n, 2]` view of n keys."""
    return np.frombuffer(keys, "<u8").reshape(-1, 2)


def _count_keys(keys: bytes) -> int:
    if len(keys) % KEY_BYTES:
        raise StoreError(f"keys must be {KEY_BYTES} bytes each; {len(keys)} bytes are no whole number of them")
    return len(keys) // KEY_BYTES
