"""The index against a model so plain that it is obviously right: every page an object, every question a scan."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from store_helpers import chain, key

from mlkv.store.index import Index
from mlkv.store.policy import LRU

NUM_PAGES = 5
TEXTS = st.text("ab", min_size=1, max_size=4)
SELDOM = st.integers(0, 3).map(lambda number: number == 3)
"""What empties the pool must be rare, or it is never full long enough for the order of eviction to matter."""


@dataclass(eq=False)
class Page:
    """Something in the pool that is not free."""

    prefix: str
    number: int
    generation: int
    parent: Page | None
    known: bool = True  # can be found by its key
    written: bool = False
    writer: int | None = None
    readers: set[int] = field(default_factory=set)  # every lease that covers it, not only those that end here
    used: int = 0


class ModelOfIndex(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.index = Index(NUM_PAGES, LRU(NUM_PAGES))
        self.pages: list[Page] = []
        self.leases: dict[int, list[Page]] = {}
        self.reservations: dict[int, list[Page]] = {}
        self.history: list[tuple[int, int]] = []
        self.clock = 0

    # The model

    def find(self, prefix: str) -> Page | None:
        return next((page for page in self.pages if page.known and page.prefix == prefix), None)

    def present(self, text: str) -> list[Page]:
        found: list[Page] = []
        for end in range(1, len(text) + 1):
            page = self.find(text[:end])
            if page is None:
                break
            found.append(page)
        return found

    def readable(self, text: str) -> list[Page]:
        found = self.present(text)
        return found[: next((i for i, page in enumerate(found) if not page.written), len(found))]

    def use(self, pages: list[Page]) -> None:
        self.clock += 1
        for page in pages:
            page.used = self.clock

    def children(self, parent: Page) -> list[Page]:
        return [page for page in self.pages if page.parent is parent]

    def evictable(self, protected: list[Page]) -> list[Page]:
        return [
            page
            for page in self.pages
            if page.known
            and page.written
            and not page.readers
            and not self.children(page)
            and page not in protected
        ]

    def forget(self, top: Page) -> None:
        for child in self.children(top):
            self.forget(child)
        top.known = False

    def collect(self) -> None:
        """Free what nobody knows, reads, writes or hangs below."""
        while True:
            gone = [
                page
                for page in self.pages
                if not page.known and page.writer is None and not page.readers and not self.children(page)
            ]
            if not gone:
                return
            self.pages = [page for page in self.pages if page not in gone]

    # Both at once

    @rule(text=TEXTS, limit=st.integers(0, 5))
    def match(self, text: str, limit: int) -> None:
        expected = self.readable(text[:limit])
        lease = self.index.match(chain(text), limit)
        assert lease.pages.tolist() == [page.number for page in expected]
        assert lease.generations.tolist() == [page.generation for page in expected]
        assert lease.num_coming == len(self.present(text[:limit])) - len(expected)
        assert (lease.id != 0) == bool(expected)
        if expected:
            self.leases[lease.id] = expected
            for page in expected:
                page.readers.add(lease.id)
            self.use(expected)

    @rule(text=TEXTS, start=st.integers(0, 3))
    def reserve(self, text: str, start: int) -> None:
        start = min(start, len(text))
        before = self.present(text)
        num_ready = len(self.readable(text))
        if before:
            self.use(before)
        new: list[Page] = []
        evicted: list[str] = []
        for end in range(len(before) + 1, len(text) + 1) if len(before) >= start else ():
            if len(self.pages) == NUM_PAGES:
                candidates = self.evictable(before)
                if not candidates:
                    break
                victim = min(candidates, key=lambda page: page.used)
                evicted.append(victim.prefix)
                victim.known = False
                self.collect()
            parent = (before + new)[-1] if before or new else None
            new.append(Page(text[:end], -1, 0, parent))
            self.pages.append(new[-1])
        reservation = self.index.reserve(chain(text), start)
        assert [page.key for page in reservation.evicted] == [key(prefix) for prefix in evicted]
        assert (reservation.first, reservation.num_ready) == (len(before), num_ready)
        assert len(reservation.pages) == len(new)
        for page, number, generation in zip(
            new, reservation.pages.tolist(), reservation.generations.tolist(), strict=True
        ):
            assert number not in {other.number for other in self.pages}, "a page that is in use was given away"
            assert (number, generation) not in self.history
            self.history.append((number, generation))
            page.number, page.generation, page.writer = number, generation, reservation.id
        if new:
            self.reservations[reservation.id] = new

    @rule(data=st.data(), part=st.floats(0, 1))
    def commit_some(self, data: st.DataObject, part: float) -> None:
        if self.reservations:
            self.commit(data.draw(st.sampled_from(sorted(self.reservations))), part)

    @rule(text=TEXTS)
    def store_whole(self, text: str) -> None:
        """The common case, which fills the pool and makes it evict."""
        before = set(self.reservations)
        self.reserve(text, 0)
        for reservation_id in set(self.reservations) - before:
            self.commit(reservation_id, 1.0)

    @rule(text=TEXTS)
    def use_and_release(self, text: str) -> None:
        before = set(self.leases)
        self.match(text, len(text))
        self.release(sorted(set(self.leases) - before))

    def commit(self, reservation_id: int, part: float) -> None:
        pages = self.reservations.pop(reservation_id)
        doomed = not pages[0].known
        num_good = round(part * len(pages))
        for page in pages:
            page.writer = None
            page.written = pages.index(page) < num_good
        path = [pages[0].prefix[:end] for end in range(1, len(pages[0].prefix))]
        path += [page.prefix for page in pages[:num_good]]
        good = self.present(path[-1]) if path and not doomed else []
        readable = self.readable(path[-1]) if path and not doomed else []
        if good and num_good:
            self.use(good)
        if not doomed and num_good < len(pages):
            self.forget(pages[num_good])
        self.collect()
        committed = self.index.commit(reservation_id, num_good)
        assert committed.num_good == (0 if doomed else num_good)
        assert committed.num_readable == len(readable)

    @rule(data=st.data())
    def release_some(self, data: st.DataObject) -> None:
        if self.leases:
            self.release(data.draw(st.lists(st.sampled_from(sorted(self.leases)), min_size=1, unique=True)))

    def release(self, chosen: list[int]) -> None:
        for lease in chosen:
            for page in self.leases.pop(lease):
                page.readers.discard(lease)
        self.collect()
        self.index.release(chosen)

    @rule(data=st.data(), really=SELDOM)
    def quarantine_some(self, data: st.DataObject, really: bool) -> None:
        if really and self.history:
            self.quarantine(*data.draw(st.sampled_from(self.history)))

    def quarantine(self, number: int, generation: int) -> None:
        bad = [
            page
            for page in self.pages
            if (page.number, page.generation) == (number, generation) and page.known and page.written
        ]
        for page in bad:
            self.forget(page)
        self.collect()
        removed = self.index.quarantine([number], [generation])
        assert removed.bad_keys == [key(page.prefix) for page in bad]

    @rule(really=SELDOM)
    def clear(self, really: bool) -> None:
        if not really:
            return
        for page in self.pages:
            page.known = False
        self.collect()
        self.index.clear()

    @invariant()
    def counts_agree(self) -> None:
        self.index.check()
        counts = self.index.counts()
        assert counts.free == NUM_PAGES - len(self.pages)
        assert counts.reserved == sum(page.writer is not None for page in self.pages)
        assert counts.ready == sum(page.known and page.written for page in self.pages)
        assert counts.free + counts.reserved + counts.ready + counts.quarantined == NUM_PAGES
        assert (counts.leases, counts.reservations) == (len(self.leases), len(self.reservations))

    def teardown(self) -> None:
        """When everybody is done, a cleared pool is empty."""
        self.index.release(sorted(self.leases))
        for reservation in self.reservations:
            self.index.cancel(reservation)
        self.index.clear()
        self.index.check()
        assert self.index.counts().free == NUM_PAGES


TestIndexModel = ModelOfIndex.TestCase
TestIndexModel.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize("seed", [*range(20), pytest.param(random.randrange(1 << 30), id="another each time")])
def test_long_random_schedules_agree_with_the_model(seed: int):
    """Hypothesis finds short stories and shrinks them; orders of eviction show in long ones on a full pool."""
    print(f"seed {seed}")
    chance, machine = random.Random(seed), ModelOfIndex()
    for _ in range(500):
        text = "".join(chance.choices("ab", k=chance.randint(1, 4)))
        match chance.randrange(40):
            case 0:
                machine.clear(really=True)
            case 1 if machine.history:
                machine.quarantine(*chance.choice(machine.history))
            case 2 | 3:
                machine.match(text, chance.randint(0, 4))
            case 4 | 5:
                machine.reserve(text, chance.randint(0, 2))
            case 6 | 7 | 8 if machine.leases:
                machine.release([chance.choice(list(machine.leases))])
            case 9 | 10 | 11 if machine.reservations:
                machine.commit(chance.choice(list(machine.reservations)), chance.choice([0.0, 0.5, 1.0]))
            case number if number % 2:
                machine.store_whole(text)
            case _:
                machine.use_and_release(text)
        machine.counts_agree()
    machine.teardown()
