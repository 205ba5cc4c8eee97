"""Which page holds which key: a hash table over the pages of a pool that never rehashes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from mlkv.store.page_arrays import Pages, Rows, count_until

KEY_BYTES: Final = 16

_NONE: Final = -1
_WAYS: Final = 16
_PAGES_PER_BUCKET: Final = 9
"""More than half of the places of a bucket are taken when every page has a key: with hashes for keys 1.1% of the
buckets would need more than they have then, and one key in 400 is kept aside."""

Keys = NDArray[np.uint64]


@dataclass(slots=True)
class NewKeys:
    """Keys that are not in the table, looked up once for counting and adding them; `[n]` of each.

    `rows`: the tags of the bucket of each key, `[n, 16]`, as they were when it was looked up.
    """

    keys: Keys
    buckets: Rows
    tags: NDArray[np.uint16]
    rows: NDArray[np.uint16]

    def __len__(self) -> int:
        return len(self.keys)

    def first(self, number: int) -> NewKeys:
        """The first `number` of them."""
        if number >= len(self.keys):
            return self
        return NewKeys(self.keys[:number], self.buckets[:number], self.tags[:number], self.rows[:number])


class KeyTable:
    """Keys of pages in [0, num_pages), each page with at most one key and each key at one page.

    A bucket has 16 places, and a key goes to any that is empty, so that nothing ever moves, no tombstones gather
    and no operation pays for those before it. In each place are 16 bits of its key, a *tag*: a bucket is searched
    by one comparison of 32 bytes, and whole keys are compared only where tags are equal. Each page knows its place
    and leaves it without a search. Keys whose bucket is full are *spilled* to a dict. Keys are hashes already:
    bits 32 to 63 choose the bucket, bits 0 to 15 are the tag.

    Arrays of keys are uint64 `[n, 2]`, the little-endian view of n keys of 16 bytes.
    """

    def __init__(self, num_pages: int) -> None:
        self._num_buckets = -(-num_pages // _PAGES_PER_BUCKET)
        num_places = _WAYS * self._num_buckets
        self._spill_place = num_places  # stands for the dict; its tag is always that of an empty place
        self._tags = np.zeros(num_places + _WAYS, np.uint16)
        self._pages: Pages = np.full(num_places + _WAYS, _NONE, np.int32)
        self._place: Pages = np.full(num_pages, _NONE, np.int32)
        self._keys: Keys = np.zeros((num_pages, 2), np.uint64)
        self._num_spilled = np.zeros(self._num_buckets, np.int32)
        self._spilled: dict[bytes, int] = {}
        # Single elements are read through these views: several times faster than indexing an array.
        self._tag_at = self._tags.data
        self._page_at = self._pages.data
        self._place_at = self._place.data
        self._num_spilled_at = self._num_spilled.data
        self._key_bytes = self._keys.data.cast("B")
        self._key_words = self._keys.data

    @property
    def num_bytes(self) -> int:
        arrays = (self._tags, self._pages, self._place, self._keys, self._num_spilled)
        return sum(array.nbytes for array in arrays)

    def known(self, pages: Pages | Rows | slice) -> NDArray[np.bool_]:
        """Whether each of `pages` has a key."""
        known: NDArray[np.bool_] = self._place[pages] != _NONE
        return known

    def has_key(self, page: int) -> bool:
        return self._place_at[page] != _NONE

    def key_of(self, page: int) -> bytes | None:
        return self._key_at(page) if self.has_key(page) else None

    def low_word_of(self, page: int) -> int:
        """The first 64 bits of the key of a page that has one."""
        word: int = self._key_words[page, 0]
        return word

    def keys_of(self, pages: Pages | Rows) -> Keys:
        """The keys of pages that all have one."""
        return self._keys.take(pages, axis=0)

    def find(self, key: bytes | memoryview) -> int:
        """The page that holds `key`; -1 if none does."""
        low = int.from_bytes(key[:8], "little")
        bucket, tag = (low >> 32) * self._num_buckets >> 32, low & 0xFFFF | 1
        first = bucket * _WAYS
        tags = self._tag_at[first : first + _WAYS].tolist()
        if tag in tags:
            for way in range(_WAYS):
                if tags[way] == tag:
                    page: int = self._page_at[first + way]
                    if self._key_bytes[page * KEY_BYTES : (page + 1) * KEY_BYTES] == key:
                        return page
        return self._spilled.get(bytes(key), _NONE) if self._num_spilled_at[bucket] else _NONE

    def count_equal(self, pages: Pages | Rows, keys: Keys) -> int:
        """At how many of the first `pages` the keys are `keys`, up to the first difference."""
        equal = self.keys_of(pages) == keys
        return len(pages) if np.count_nonzero(equal) == equal.size else int(equal.all(axis=1).argmin())

    def find_new(self, keys: Keys) -> NewKeys:
        """The first of `keys`, up to one that is in the table or for the second time among them."""
        low = keys[:, 0]
        buckets = ((low >> np.uint64(32)) * np.uint64(self._num_buckets) >> np.uint64(32)).view(np.intp)
        tags = low.astype(np.uint16) | np.uint16(1)  # a tag of 0 stands for an empty place
        rows = self._tags.reshape(-1, _WAYS).take(buckets, axis=0)
        new = NewKeys(keys, buckets, tags, rows)
        same_tag = rows == tags[:, None]
        if np.count_nonzero(same_tag):
            new = new.first(self._count_absent(new, same_tag))
        if self._spilled:
            spilled = self._num_spilled.take(buckets[: len(new)])
            if np.count_nonzero(spilled):
                new = new.first(self._count_unspilled(keys, spilled.nonzero()[0]))
        low = np.sort(low[: len(new)])
        if np.count_nonzero(low[1:] == low[:-1]):  # as good as never, unless a client repeats itself
            new = new.first(_count_distinct(keys[: len(new)]))
        return new

    def add(self, pages: Rows, new: NewKeys) -> None:
        """Give each of `pages`, none of which has a key, one of the keys `new`.

        They were looked up in this table, and none was added since.
        """
        self._keys[pages] = new.keys
        buckets, tags, rows = new.buckets, new.tags, new.rows
        while len(pages):
            place = buckets * _WAYS + (rows == 0).argmax(axis=1)
            taken = self._tags[place]
            if np.count_nonzero(taken):  # no place in this bucket is empty
                is_full = taken != 0
                self._spill(pages[is_full], buckets[is_full])
                fits = ~is_full
                pages, buckets, tags, place = pages[fits], buckets[fits], tags[fits], place[fits]
            # Of those for the same place the last one wins; the others choose again.
            self._pages[place] = pages
            self._tags[place] = tags
            self._place[pages] = place
            lost = (self._pages[place] != pages).nonzero()[0]
            if not len(lost):
                return
            pages, buckets, tags = pages[lost], buckets[lost], tags[lost]
            rows = self._tags.reshape(-1, _WAYS).take(buckets, axis=0)

    def remove(self, pages: Rows) -> None:
        """Take the keys of `pages`, which all have one, out of the table."""
        place = self._place[pages].astype(np.intp)
        self._place[pages] = _NONE
        self._tags[place] = 0
        if self._spilled:
            is_spilled = place == self._spill_place
            if np.count_nonzero(is_spilled):
                for page in pages[is_spilled].tolist():
                    self._num_spilled_at[self._bucket_of(page)] -= 1
                    del self._spilled[self._key_at(page)]

    def clear(self) -> None:
        self._tags.fill(0)
        self._place.fill(_NONE)
        self._num_spilled.fill(0)
        self._spilled.clear()

    # Inside

    def _key_at(self, page: int) -> bytes:
        return bytes(self._key_bytes[page * KEY_BYTES : (page + 1) * KEY_BYTES])

    def _bucket_of(self, page: int) -> int:
        return (self.low_word_of(page) >> 32) * self._num_buckets >> 32

    def _spill(self, pages: Rows, buckets: Rows) -> None:
        self._place[pages] = self._spill_place
        for page, bucket in zip(pages.tolist(), buckets.tolist(), strict=True):
            self._spilled[self._key_at(page)] = page
            self._num_spilled_at[bucket] += 1

    def _count_absent(self, new: NewKeys, same_tag: NDArray[np.bool_]) -> int:
        """How many of the first keys are in no place of their bucket, `same_tag` of which are looked at."""
        number, way = same_tag.nonzero()
        page = self._pages[new.buckets[number] * _WAYS + way]
        is_same = (self._keys[page] == new.keys[number]).all(axis=1)
        return int(number[count_until(is_same)]) if np.count_nonzero(is_same) else len(new)

    def _count_unspilled(self, keys: Keys, suspects: Rows) -> int:
        """How many of the first keys are not among those kept aside, which only `suspects` can be."""
        is_spilled = (number for number in suspects.tolist() if keys[number].tobytes() in self._spilled)
        return next(is_spilled, len(keys))


def _count_distinct(keys: Keys) -> int:
    seen: set[bytes] = set()
    for number, key in enumerate(keys):
        seen.add(key.tobytes())
        if len(seen) <= number:
            return number
    return len(keys)
