"""Which page holds which key: a hash table over the pages of a pool that never rehashes."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

KEY_BYTES: Final = 16

_NONE: Final = -1
_FEW_PAGES: Final = 8
"""Up to here a loop over single pages is faster than whole-array operations of about a microsecond each."""

Keys = NDArray[np.uint64]
Pages = NDArray[np.int32]


class KeyTable:
    """Keys of pages in [0, num_pages), each page with at most one key and each key at one page.

    Every bucket is a list linked through its pages, so that nothing moves, no tombstones gather and no operation
    ever pays for those before it. Two buckets for each page: a search looks at 1.25 pages on average. Keys are
    hashes already: their low bits choose the bucket.

    Arrays of keys are uint64 `[n, 2]`, the little-endian view of n keys of 16 bytes.
    """

    def __init__(self, num_pages: int) -> None:
        num_buckets = 1 << (2 * num_pages - 1).bit_length()
        self._mask = num_buckets - 1
        self._low_bits = np.uint64(self._mask)
        self._head: Pages = np.full(num_buckets, _NONE, np.int32)
        # The entry behind the last page stands for "no page": index -1 finds it, and it counts as known.
        self._next: Pages = np.full(num_pages + 1, _NONE, np.int32)
        self._known: NDArray[np.bool_] = np.zeros(num_pages + 1, np.bool_)
        self._known[num_pages] = True
        self._keys: Keys = np.zeros((num_pages, 2), np.uint64)
        # Single elements are read through these views: several times faster than indexing an array.
        self._head_at = self._head.data
        self._next_at = self._next.data
        self._known_at = self._known.data
        self._key_bytes = self._keys.data.cast("B")

    @property
    def num_bytes(self) -> int:
        return sum(array.nbytes for array in (self._head, self._next, self._known, self._keys))

    @property
    def known(self) -> NDArray[np.bool_]:
        """Whether each page has a key, bool `[num_pages]`: a view that follows the table, not to be changed."""
        return self._known[:-1]

    def has_key(self, page: int) -> bool:
        return bool(self._known_at[page])

    def key_of(self, page: int) -> bytes | None:
        return bytes(self._key_bytes[page * KEY_BYTES : (page + 1) * KEY_BYTES]) if self._known_at[page] else None

    def keys_of(self, pages: Pages) -> Keys:
        """The keys of pages that all have one."""
        return self._keys[pages]

    def find(self, key: bytes | memoryview) -> int:
        """The page that holds `key`; -1 if none does."""
        page: int = self._head_at[int.from_bytes(key[:8], "little") & self._mask]
        while page >= 0 and self._key_bytes[page * KEY_BYTES : (page + 1) * KEY_BYTES] != key:
            page = self._next_at[page]
        return page

    def count_equal(self, pages: Pages, keys: Keys) -> int:
        """At how many of the first `pages` the keys are `keys`, up to the first difference."""
        equal = self._keys[pages] == keys
        return len(pages) if equal.all() else int(equal.all(axis=1).argmin())

    def count_new(self, keys: Keys) -> int:
        """How many of the first keys are neither in the table nor twice among `keys`."""
        page = self._head[self._buckets(keys)]
        at = (page >= 0).nonzero()[0]
        page = page[at]
        end = len(keys)
        while len(at):
            equal = self._keys[page, 0] == keys[at, 0]
            if equal.any():  # as good as always the same key
                equal = (self._keys[page] == keys[at]).all(axis=1)
                end = min(end, int(at[equal.argmax()]) if equal.any() else end)
            page = self._next[page]
            goes_on = (page >= 0) & (at < end)
            at, page = at[goes_on], page[goes_on]
        low = np.sort(keys[:end, 0])
        if (low[1:] == low[:-1]).any():  # as good as never, unless a client repeats itself
            end = _count_distinct(keys[:end])
        return end

    def add(self, pages: Pages, keys: Keys) -> None:
        """Give each of `pages`, none of which has a key, one of `keys`, none of which is in the table."""
        self._keys[pages] = keys
        self._known[pages] = True
        buckets = self._buckets(keys)
        while len(pages):
            # Of those for the same bucket the last one wins; the others go in front of it in the next round.
            self._next[pages] = self._head[buckets]
            self._head[buckets] = pages
            lost = self._head[buckets] != pages
            pages, buckets = pages[lost], buckets[lost]

    def remove(self, pages: Pages) -> None:
        """Take the keys of `pages`, which all have one, out of the table."""
        self._known[pages] = False
        if len(pages) <= _FEW_PAGES:
            for page in pages.tolist():
                self._remove_one(page)
            return
        buckets = self._buckets(self._keys[pages])
        first = self._skip_removed(self._head[buckets])
        self._head[buckets] = first
        page = first[first >= 0]
        while len(page):
            following = self._skip_removed(self._next[page])
            self._next[page] = following
            page = following[following >= 0]

    def clear(self) -> None:
        self._head.fill(_NONE)
        self._known[:-1] = False

    def _buckets(self, keys: Keys) -> NDArray[np.int64]:
        return (keys[:, 0] & self._low_bits).view(np.int64)

    def _skip_removed(self, pages: Pages) -> Pages:
        """Each page, or the next one in its bucket that still has its key. Changes and returns `pages`."""
        removed = (~self._known[pages]).nonzero()[0]
        while len(removed):
            pages[removed] = self._next[pages[removed]]
            removed = removed[~self._known[pages[removed]]]
        return pages

    def _remove_one(self, page: int) -> None:
        low = int.from_bytes(self._key_bytes[page * KEY_BYTES : page * KEY_BYTES + 8], "little")
        bucket, following = low & self._mask, self._next_at[page]
        at = self._head_at[bucket]
        if at == page:
            self._head_at[bucket] = following
            return
        while self._next_at[at] != page:
            at = self._next_at[at]
        self._next_at[at] = following


def _count_distinct(keys: Keys) -> int:
    seen: set[bytes] = set()
    for number, key in enumerate(keys):
        seen.add(key.tobytes())
        if len(seen) <= number:
            return number
    return len(keys)
