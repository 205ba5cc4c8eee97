"""What a disk tier knows about its slots, in memory: which page is where, who reads it, what goes next."""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from mlkv.page import PageHeaders
from mlkv.store.tiers.base import StoredPage
from mlkv.store.tiers.catalog import Row
from mlkv.store.tiers.recency import Recency

_KEY: Final = np.dtype("V16")


@dataclass(eq=False, slots=True)
class Intent:
    """A page that is being written. `slot` is None when there is no room for it.

    Attributes:
        is_wanted: False once its key was deleted in the meantime: then it must not become visible.
    """

    page: StoredPage
    slot: int | None = None
    is_wanted: bool = True


class DiskIndex:
    """Slots and the pages in them. Does no input or output, and is not thread-safe: its owner has a lock.

    A slot is, at any time, one of

    - *free*: no row of the catalog names it, nobody reads or writes it;
    - *taken* by an intent: being written, invisible;
    - *present*: found by its key;
    - *condemned*: invisible, but a row of the catalog may name it still. It becomes free when the catalog has
      forgotten it (`cleaned`) and the last reader has left it, in any order.

    That a slot with a row is never free is what makes the order "delete row, write, insert row" hold.

    Eviction takes pages that nobody reads and that no page of the tier continues, present or being written, so a
    suffix leaves before its prefix and no page makes room for its own continuation.
    """

    def __init__(self, max_slots: int) -> None:
        self.num_slots = 0
        """Slots that the slab has so far."""
        self.pages_evicted = 0
        self.recency = Recency(max_slots)
        self._slot_of: dict[bytes, int] = {}
        self._key = [b""] * max_slots
        self._parent = [b""] * max_slots
        self._generation = array("Q", [0]) * max_slots
        self._children: dict[bytes, int] = {}  # key -> pages, present or taken, that continue it
        self._intents: dict[bytes, Intent] = {}
        self._readers: dict[int, int] = {}
        self._free: list[int] = []  # a heap: low slots first, so that pages of one write are mostly neighbours
        self._condemned: set[int] = set()
        self._cleaned_but_read: set[int] = set()

    def __len__(self) -> int:
        return len(self._slot_of)

    @property
    def num_free(self) -> int:
        return len(self._free)

    # Start

    def load(self, rows: Iterable[tuple[int, bytes | None, bytes, int, int]], num_slots: int) -> None:
        """Take over what the catalog says of a slab of `num_slots`.

        `rows`: the fields of a `Row` each; without a key, the row is one to delete.
        """
        is_used = bytearray(num_slots)
        # Attributes are looked up once: a million pages pass here while an engine waits for its store.
        slot_of, children, restore = self._slot_of, self._children, self.recency.restore
        key_in, parent_in, generation_in = self._key, self._parent, self._generation
        for slot, key, parent, generation, used in rows:
            if key is None or key in slot_of:
                self._condemned.add(slot)
                continue
            slot_of[key] = slot
            key_in[slot] = key
            parent_in[slot] = parent
            generation_in[slot] = generation
            children[parent] = children.get(parent, 0) + 1
            restore(slot, used)
            is_used[slot] = True
        for key, slot in slot_of.items():
            if key not in children:
                self.recency.expose(slot)
        for slot in self._condemned:
            is_used[slot] = True
        self._free = [slot for slot, used in enumerate(is_used) if not used]
        self.num_slots = num_slots

    def grow(self, num_slots: int) -> None:
        """The slab has more slots now."""
        self._free.extend(range(self.num_slots, num_slots))
        heapq.heapify(self._free)
        self.num_slots = num_slots

    # Look

    def find(self, keys: Sequence[bytes]) -> int:
        """How many of `keys` are present, from the first on; counts as a use of them."""
        found = 0
        for key in keys:
            if key not in self._slot_of:
                break
            found += 1
        if found:
            # Of a chain only the end is marked: a page that leaves hands its use up to its parent.
            self.recency.use(self._slot_of[keys[found - 1]], self.recency.next_use())
        return found

    def has(self, key: bytes, generation: int) -> bool:
        """Whether this write of the key is present."""
        slot = self._slot_of.get(key)
        return slot is not None and self._generation[slot] == generation

    def keys(self) -> list[bytes]:
        """Every key that is present, in no order."""
        return list(self._slot_of)

    def is_expected_in(self, slots: Sequence[int], found: PageHeaders) -> NDArray[np.bool_]:
        """Whether each page that was read from `slots` is the one that was written there, bool `[n]`.

        Only between begin and end of a read; needs no lock then, since the slots stay as they are.
        """
        keys = np.frombuffer(b"".join([self._key[slot] for slot in slots]), _KEY)
        parents = np.frombuffer(b"".join([self._parent[slot] for slot in slots]), _KEY)
        generations = np.fromiter((self._generation[slot] for slot in slots), np.uint64, len(slots))
        is_same: NDArray[np.bool_] = keys == np.frombuffer(found.keys, _KEY)
        is_same &= parents == np.frombuffer(found.parents, _KEY)
        is_same &= generations == found.generations
        return is_same

    # Read

    def begin_read(self, keys: Sequence[bytes]) -> list[int | None]:
        """The slot of each key, or None; those slots stay as they are until `end_read`."""
        slots = [*map(self._slot_of.get, keys)]
        deepest: int | None = None
        readers, hide = self._readers, self.recency.hide
        for slot in slots:
            if slot is not None:
                readers[slot] = readers.get(slot, 0) + 1
                hide(slot)
                deepest = slot
        if deepest is not None:
            self.recency.use(deepest, self.recency.next_use())
        return slots

    def end_read(self, slots: Iterable[int], bad: Iterable[int]) -> None:
        """Readers leave `slots`. Those in `bad` did not hold what they should and are condemned."""
        for slot in bad:
            if self._is_present(slot):
                self._condemn(slot)
        readers, children = self._readers, self._children
        for slot in slots:
            if readers[slot] > 1:
                readers[slot] -= 1
                continue
            del readers[slot]
            if slot in self._cleaned_but_read:
                self._cleaned_but_read.discard(slot)
                heapq.heappush(self._free, slot)
            elif self._key[slot] not in children and self._is_present(slot):
                self.recency.expose(slot)

    # Write

    def intend(self, pages: Sequence[StoredPage]) -> list[Intent]:
        """Intents for those of `pages` that are neither here in this generation nor being written."""
        intents: list[Intent] = []
        slot_of, being_written = self._slot_of, self._intents
        for page in pages:
            key = page.key
            if key in being_written or (key in slot_of and self.has(key, page.generation)):
                continue
            intent = being_written[key] = Intent(page)
            intents.append(intent)
            self._link(page.parent)
        return intents

    def evict(self, num_pages: int) -> int:
        """Condemn up to `num_pages` pages; returns how many there were to condemn."""
        for done in range(num_pages):
            slot = self.recency.victim()
            if slot is None:
                return done
            self._condemn(slot)
            self.pages_evicted += 1
        return num_pages

    def take_slots(self, intents: Iterable[Intent]) -> None:
        """Give each intent a free slot, from the first on, as long as there are any."""
        for intent in intents:
            if not self._free:
                return
            intent.slot = heapq.heappop(self._free)

    def rows_for(self, intents: Iterable[Intent]) -> list[Row]:
        """The rows that make these intents survive a restart. Slots of what they replace are condemned."""
        rows: list[Row] = []
        for use, intent in enumerate(intents, self.recency.latest + 1):
            page, slot = intent.page, intent.slot
            replaced = self._slot_of.get(page.key)
            if replaced is not None:
                self._condemn(replaced)
            assert slot is not None
            rows.append(Row(slot, page.key, page.parent, page.generation, use))
        self.recency.latest += len(rows)
        return rows

    def publish(self, intents: Iterable[Intent], rows: Iterable[Row]) -> None:
        """These pages are present from now on; `rows` are those of `rows_for`."""
        being_written, children = self._intents, self._children
        for intent, (slot, key, parent, generation, used) in zip(intents, rows, strict=True):
            if being_written.get(key) is intent:
                del being_written[key]
            self._slot_of[key] = slot
            self._key[slot] = key
            self._parent[slot] = parent  # which its intent is linked to
            self._generation[slot] = generation
            self.recency.restore(slot, used)
            if key not in children:
                self.recency.expose(slot)

    def give_up(self, intents: Iterable[Intent], *, may_have_rows: bool = False) -> None:
        """These pages are not written after all. Their slots are free again, or condemned if rows may exist."""
        for intent in intents:
            self._drop_intent(intent)
            if intent.slot is None:
                continue
            if may_have_rows:
                self._condemned.add(intent.slot)
            else:
                heapq.heappush(self._free, intent.slot)

    # Forget

    def forget(self, keys: Iterable[bytes]) -> None:
        """Condemn these keys, present or being written."""
        for key in keys:
            if key in self._slot_of:
                self._condemn(self._slot_of[key])
            intent = self._intents.pop(key, None)
            if intent is not None:
                intent.is_wanted = False

    def forget_all(self) -> None:
        self.forget([*self._slot_of, *self._intents])

    def condemned(self) -> list[int]:
        """Slots that the catalog must forget before they can be used."""
        return list(self._condemned)

    def cleaned(self, slots: Iterable[int]) -> None:
        """The catalog has forgotten these slots."""
        for slot in slots:
            self._condemned.discard(slot)
            if slot in self._readers:
                self._cleaned_but_read.add(slot)
            else:
                heapq.heappush(self._free, slot)

    # Parts

    def _is_present(self, slot: int) -> bool:
        return self._slot_of.get(self._key[slot]) == slot

    def _may_go(self, slot: int) -> bool:
        return slot not in self._readers and self._key[slot] not in self._children

    def _refresh(self, slot: int) -> None:
        if self._may_go(slot):
            self.recency.expose(slot)
        else:
            self.recency.hide(slot)

    def _link(self, parent: bytes) -> None:
        self._children[parent] = self._children.get(parent, 0) + 1
        slot = self._slot_of.get(parent)
        if slot is not None:
            self.recency.hide(slot)

    def _unlink(self, parent: bytes) -> None:
        left = self._children[parent] - 1
        if left:
            self._children[parent] = left
            return
        del self._children[parent]
        slot = self._slot_of.get(parent)
        if slot is not None:
            self._refresh(slot)

    def _drop_intent(self, intent: Intent) -> None:
        if self._intents.get(intent.page.key) is intent:
            del self._intents[intent.page.key]
        self._unlink(intent.page.parent)

    def _condemn(self, slot: int) -> None:
        key, parent = self._key[slot], self._parent[slot]
        del self._slot_of[key]
        self._condemned.add(slot)
        use = self.recency.forget(slot)
        if parent in self._slot_of:
            self.recency.use(self._slot_of[parent], use)
        self._unlink(parent)
