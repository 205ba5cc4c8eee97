"""Groups and lower tiers, without processes."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from numpy.typing import NDArray
from store_helpers import chain, key

from mlkv.errors import StoreError
from mlkv.store import wire
from mlkv.store.index import Index
from mlkv.store.policy import LRU
from mlkv.store.pool import HostPool, create_pool_file
from mlkv.store.service import StoreService
from mlkv.store.tier import Tier, TierJob

PAGE_BYTES = 4096


class MemoryTier(Tier):
    """Pages in a dict. Reads are held until the test lets them go, and can be told to fail."""

    def __init__(self) -> None:
        self.pages: dict[bytes, tuple[int, bytes]] = {}
        self.jobs: list[TierJob] = []
        self.done: list[tuple[int, int]] = []
        self.raising: set[str] = set()
        self.refusing = False
        self.room = 100
        self.closed = False

    def _maybe_raise(self, what: str) -> None:
        if what in self.raising:
            raise OSError(f"{what} is broken")

    def find(self, keys: Sequence[bytes]) -> NDArray[np.uint64]:
        self._maybe_raise("find")
        found = []
        for page_key in keys:
            if page_key not in self.pages:
                break
            found.append(self.pages[page_key][0])
        return np.array(found, np.uint64)

    def read(self, job: TierJob) -> bool:
        self._maybe_raise("read")
        if not self.refusing:
            self.jobs.append(job)
        return not self.refusing

    def let_read(self, num_good: int | None = None) -> None:
        job = self.jobs.pop(0)
        num_good = len(job.keys) if num_good is None else num_good
        for page_key, page in zip(job.keys[:num_good], job.pages, strict=False):
            page[:] = self.pages[page_key][1]
        self.done.append((job.id, num_good))

    def poll(self) -> list[tuple[int, int]]:
        self._maybe_raise("poll")
        done, self.done = self.done, []
        return done

    def fileno(self) -> int:
        return -1

    def write(self, keys: Sequence[bytes], generations: Sequence[int], pages: Sequence[memoryview]) -> int:
        self._maybe_raise("write")
        taken = min(len(keys), self.room)
        for number in range(taken):
            self.pages[keys[number]] = (generations[number], bytes(pages[number]))
        return taken

    def delete(self, keys: Sequence[bytes]) -> None:
        for page_key in keys:
            self.pages.pop(page_key, None)

    def clear(self) -> None:
        self.pages.clear()

    def close(self) -> None:
        self.closed = True


class Store:
    """A service whose only caller is one group; pages hold their letter."""

    def __init__(self, num_pages: int, tiers: Sequence[Tier] = ()) -> None:
        fd = create_pool_file(num_pages, PAGE_BYTES)
        self.pool = HostPool(fd, num_pages, PAGE_BYTES)
        os.close(fd)
        self.service = StoreService(Index(num_pages, LRU(num_pages)), self.pool, tiers)
        self.service.join(b"g", 1)

    def ask(self, request: wire.Request, group: bytes = b"g") -> wire.Reply:
        reply = self.service.handle(group, request)
        assert self.service.check() == ""
        return reply

    def store(self, text: str) -> wire.Reserved:
        reserved = self.ask(wire.Reserve(chain(text)))
        assert isinstance(reserved, wire.Reserved)
        for page, letter in zip(reserved.page_ids.tolist(), text[reserved.first :], strict=False):
            self.pool.page(page)[:] = letter.encode() * PAGE_BYTES
        if reserved.reservation:
            self.ask(wire.Commit(reserved.reservation, len(reserved.page_ids)))
        return reserved

    def match(self, text: str) -> wire.Matched:
        """The match, its lease given back at once."""
        matched = self.ask(wire.Match(chain(text), len(text)))
        assert isinstance(matched, wire.Matched)
        if matched.lease:
            self.ask(wire.Release([matched.lease]))
        return matched

    def letters(self, text: str) -> str:
        return "".join(chr(self.pool.page(page)[0]) for page in self.match(text).page_ids.tolist())

    def report(self) -> wire.Report:
        report = self.ask(wire.Stats(audit=True))
        assert isinstance(report, wire.Report)
        assert report.free + report.reserved + report.ready + report.quarantined == report.num_pages
        assert report.problem == ""
        return report


@pytest.fixture
def tier() -> MemoryTier:
    return MemoryTier()


@pytest.fixture
def tiered(tier: MemoryTier) -> Iterator[Store]:
    """Two host pages above a tier that holds "abc"."""
    store = Store(2, [tier])
    tier.pages = {key("abc"[:end]): (100 + end, "abc"[end - 1].encode() * PAGE_BYTES) for end in (1, 2, 3)}
    yield store
    store.service.close()
    assert tier.closed


# Groups


def test_leases_and_reservations_stay_while_any_rank_of_the_group_lives():
    store = Store(4)
    store.service.join(b"g", 2)
    store.store("ab")
    store.ask(wire.Match(chain("ab"), 2))
    store.ask(wire.Reserve(chain("x")))
    store.service.leave(b"g", 1)
    assert (store.report().leases, store.report().reservations) == (1, 1)
    store.service.join(b"other", 3)
    store.service.leave(b"g", 2)
    report = store.service.handle(b"other", wire.Stats(audit=True))
    assert isinstance(report, wire.Report)
    assert (report.leases, report.reservations, report.free, report.ready) == (0, 0, 2, 2)


def test_group_cannot_end_what_another_group_holds():
    store = Store(4)
    store.service.join(b"other", 2)
    store.store("ab")
    matched = store.ask(wire.Match(chain("ab"), 2))
    reserved = store.ask(wire.Reserve(chain("x")))
    assert isinstance(matched, wire.Matched)
    assert isinstance(reserved, wire.Reserved)
    before = store.report()
    for request in (
        wire.Release([matched.lease]),
        wire.Commit(reserved.reservation, 1),
        wire.Cancel(reserved.reservation),
    ):
        with pytest.raises(StoreError, match="not this group's"):
            store.ask(request, b"other")
    assert store.report() == before
    store.ask(wire.Release([matched.lease]))
    store.ask(wire.Cancel(reserved.reservation))


def test_refused_requests_leave_no_trace():
    store = Store(4)
    store.store("ab")
    before = store.report()
    for request in (
        wire.Release([77]),
        wire.Commit(77, 0),
        wire.Match(b"x", 1),
        wire.Reserve(chain("xy"), -1),
        wire.Quarantine(b"xxx", b""),
        wire.Quarantine(b"\xff\xff\xff\xff", bytes(8)),
        wire.Quarantine(bytes(4), b""),
        wire.Hello(1),
    ):
        with pytest.raises(StoreError):
            store.ask(request)
    assert store.report() == before


def test_group_that_never_gives_back_is_told(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("mlkv.store.service.MAX_HOLDS", 2)
    store = Store(4)
    store.store("ab")
    for _ in range(2):
        store.ask(wire.Match(chain("ab"), 2))
    with pytest.raises(StoreError, match="2 leases"):
        store.ask(wire.Match(chain("ab"), 2))
    store.ask(wire.Reserve(chain("x")))
    store.ask(wire.Reserve(chain("y")))
    with pytest.raises(StoreError, match="2 reservations"):
        store.ask(wire.Reserve(chain("z")))


def test_report_counts_what_happened():
    store = Store(2)
    written = store.store("ab")
    store.match("abc")
    store.store("x")
    store.ask(wire.Quarantine(written.pages[:4], written.generations[:8]))
    report = store.report()
    assert (report.pages_written, report.pages_asked, report.pages_hit) == (3, 3, 2)
    assert (report.pages_evicted, report.pages_bad, report.clients) == (1, 1, 1)


# Lower tiers


def test_short_match_brings_pages_back_and_the_next_match_finds_them(tiered: Store, tier: MemoryTier):
    first = tiered.match("ab")
    assert (first.lease, first.num_coming) == (0, 2)
    assert tiered.match("ab").num_coming == 2
    assert len(tier.jobs) == 1, "pages on their way were asked for again"
    tier.let_read()
    tiered.service.poll_tiers()
    assert tiered.letters("ab") == "ab"
    assert tiered.match("ab").page_generations.tolist() == [101, 102]
    assert tiered.report().pages_promoted == 2


def test_page_on_its_way_from_a_tier_is_not_written_by_others(tiered: Store, tier: MemoryTier):
    tiered.match("a")
    reserved = tiered.ask(wire.Reserve(chain("a")))
    assert isinstance(reserved, wire.Reserved)
    assert (reserved.reservation, reserved.first) == (0, 1)
    tier.let_read()


def test_short_or_failed_read_is_a_miss(tiered: Store, tier: MemoryTier):
    tiered.match("ab")
    tier.let_read(num_good=1)
    tiered.service.poll_tiers()
    assert tiered.letters("ab") == "a"
    tier.let_read(num_good=0)
    tiered.service.poll_tiers()
    assert tiered.report().reserved == 0


def test_tier_that_finds_more_than_fits_fills_what_there_is(tiered: Store, tier: MemoryTier):
    assert tiered.match("abc").num_coming == 2
    tier.let_read()
    tiered.service.poll_tiers()
    assert tiered.letters("abc") == "ab"


def test_refused_read_gives_its_pages_back(tiered: Store, tier: MemoryTier):
    tier.refusing = True
    assert tiered.match("ab").num_coming == 0
    assert tiered.report().free == 2


@pytest.mark.parametrize("broken", ["find", "read", "write", "poll"])
def test_tier_that_raises_is_a_miss_and_counted(tiered: Store, tier: MemoryTier, broken: str):
    tier.raising = {broken}
    tiered.match("ab")
    tiered.service.poll_tiers()
    tier.raising = set()
    if tier.jobs:
        tier.let_read()
        tiered.service.poll_tiers()
    tier.raising = {broken}
    tiered.store("xy")
    assert tiered.report().tier_failures > 0
    assert tiered.letters("xy") == "xy"


def test_tier_that_speaks_of_jobs_it_never_had_is_ignored(tiered: Store, tier: MemoryTier):
    tiered.match("ab")
    tier.done += [(999, 1), (tier.jobs[0].id, 17)]
    tiered.service.poll_tiers()
    report = tiered.report()
    assert (report.tier_failures, report.reserved, report.ready) == (2, 0, 0)


def test_evicted_pages_go_down_with_their_bytes_and_come_back(tier: MemoryTier):
    store = Store(2, [tier])
    written = store.store("ab")
    store.store("xy")
    assert tier.pages[key("ab")] == (int(written.page_generations[1]), b"b" * PAGE_BYTES)
    assert store.match("ab").num_coming == 2
    tier.let_read()
    store.service.poll_tiers()
    assert store.letters("ab") == "ab"
    assert store.letters("xy") == ""


def test_what_one_tier_does_not_take_is_offered_to_the_next(tier: MemoryTier):
    lower = MemoryTier()
    store = Store(2, [tier, lower])
    tier.room = 1
    store.store("ab")
    store.store("xy")
    assert set(tier.pages) == {key("ab")}
    assert set(lower.pages) == {key("a")}


def test_bad_page_is_deleted_from_tiers_and_a_clear_reaches_them(tiered: Store, tier: MemoryTier):
    tiered.match("ab")
    tier.let_read()
    tiered.service.poll_tiers()
    found = tiered.match("ab")
    tiered.ask(wire.Quarantine(found.pages[:4], found.generations[:8]))
    assert key("a") not in tier.pages
    assert key("ab") in tier.pages
    tiered.ask(wire.Clear())
    assert tier.pages == {}


def test_read_in_flight_over_a_clear_is_not_published(tiered: Store, tier: MemoryTier):
    tiered.match("ab")
    kept = dict(tier.pages)
    tiered.ask(wire.Clear())
    tier.pages = kept  # the bytes arrive all the same
    tier.let_read()
    tier.pages = {}
    tiered.service.poll_tiers()
    assert tiered.match("ab").num_coming == 0
    assert tiered.report().free == 2
