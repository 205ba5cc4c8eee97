"""Epochs of namespaces and the tiers that keep them: read before anything is served, written before it is told."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest
from store_helpers import DEADLINE_S, chain, eventually
from tier_cases import NAMESPACE, PAGE_BYTES, FakeClock, LatchTier, make_page

from mlkv.errors import StoreError, TierUnavailable
from mlkv.store import wire, wire_tools
from mlkv.store.epochs import MAX_NAMESPACES, OPEN_WAIT_S, SAVE_WAIT_S, Epochs, Namespace
from mlkv.store.index import Index
from mlkv.store.lower import LowerTiers
from mlkv.store.policy import LRU
from mlkv.store.pool import HostPool, create_pool_file
from mlkv.store.service import StoreService
from mlkv.store.tiers.breaker import Breaker
from mlkv.store.tiers.runner import TierRunner
from mlkv.store_config import StoreConfig

GROUP = b"g"
NOTE = f"epoch-{NAMESPACE.hex()}"


class Bench:
    """A service above one tier that a test holds, with its loop in the test's hand."""

    def __init__(self, tier: LatchTier, num_pages: int = 16) -> None:
        fd = create_pool_file(num_pages, PAGE_BYTES)
        self.pool = HostPool(fd, num_pages, PAGE_BYTES)
        os.close(fd)
        self.tier = tier
        self.index = Index(num_pages, LRU(num_pages), first_generation=1 << 40)
        breaker = Breaker(first_pause_s=0.01, max_pause_s=0.05)
        self.runner = TierRunner(tier, self.pool.buffer, PAGE_BYTES, num_pages, breaker=breaker)
        self.lower = LowerTiers(self.index, self.pool, [self.runner])
        self.service = StoreService(self.index, self.lower, self.pool)
        self.service.join(GROUP, 1)

    def turn(self) -> None:
        self.lower.poll()
        self.service.poll()

    def until(self, done: Callable[[], object], what: str) -> None:
        def turned() -> bool:
            self.turn()
            return bool(done())

        eventually(turned, what)

    def later(self, request: wire.Match | wire.SlowRequest, group: bytes = GROUP) -> list[wire.Reply]:
        answers: list[wire.Reply] = []
        self.service.handle_later(group, 1, request, answers.append)
        return answers

    def ask(self, request: wire.Match | wire.SlowRequest, group: bytes = GROUP) -> wire.Reply:
        answers = self.later(request, group)
        self.until(lambda: answers, f"the answer to {request}")
        return answers[0]

    def open(self, group: bytes = GROUP) -> wire.Reply:
        return self.ask(wire_tools.Open(NAMESPACE, "m", 4), group)

    def store(self, text: str, epoch: int) -> None:
        reserved = self.service.handle(GROUP, wire.Reserve(chain(text), epoch=epoch))
        assert isinstance(reserved, wire.Reserved)
        for position, page in enumerate(reserved.page_ids.tolist(), reserved.first):
            generation = int(reserved.page_generations[position - reserved.first])
            self.pool.page(page)[:] = make_page(text[: position + 1], generation)
        self.service.handle(GROUP, wire.Commit(reserved.reservation, len(reserved.page_ids)))


@pytest.fixture
def new_bench() -> Iterator[Callable[[LatchTier], Bench]]:
    made: list[Bench] = []

    def make(tier: LatchTier) -> Bench:
        made.append(Bench(tier))
        return made[-1]

    yield make
    for bench in made:
        assert bench.lower.close(DEADLINE_S)


NewBench = Callable[[LatchTier], Bench]


def test_epoch_is_that_of_the_tier_s_note(new_bench: NewBench) -> None:
    tier = LatchTier()
    tier.notes[NOTE] = b"7"
    assert new_bench(tier).open() == wire_tools.Opened(7, True)


def test_a_note_that_is_no_number_counts_as_none(new_bench: NewBench) -> None:
    tier = LatchTier()
    tier.notes[NOTE] = b"\xff!"
    assert new_bench(tier).open() == wire_tools.Opened(0, True)


def test_invalidation_is_told_only_once_the_tier_has_it(new_bench: NewBench) -> None:
    tier = LatchTier()
    bench = new_bench(tier)
    bench.open()
    with tier.held("store_note") as let_go:
        answers = bench.later(wire_tools.Invalidate())
        bench.until(lambda: tier.in_call, "the note is being written")
        assert answers == []
        assert bench.ask(wire.Match(chain("a"), 1)) == wire_tools.Stale(1), "it holds at once"
        let_go()
        bench.until(lambda: answers, "the invalidation is answered")
    assert answers == [wire_tools.Opened(1, True)]
    assert tier.notes[NOTE] == b"1"


def test_invalidation_does_not_wait_for_ever_and_is_saved_later(new_bench: NewBench) -> None:
    tier = LatchTier()
    bench = new_bench(tier)
    bench.open()
    tier.fail("store_note", TierUnavailable("down"))
    assert bench.ask(wire_tools.Invalidate()) == wire_tools.Opened(1, False)
    tier.faults.clear()
    bench.until(lambda: tier.notes.get(NOTE) == b"1", "the note is written after all")


def test_an_epoch_of_another_host_is_never_lowered(new_bench: NewBench) -> None:
    tier = LatchTier()
    bench = new_bench(tier)
    bench.open()
    tier.notes[NOTE] = b"5"
    assert bench.ask(wire_tools.Invalidate(epoch=1)) == wire_tools.Opened(5, True)
    assert tier.notes[NOTE] == b"5"


def test_until_its_note_is_read_a_tier_serves_nothing_of_the_namespace(new_bench: NewBench) -> None:
    tier = LatchTier()
    tier.notes[NOTE] = b"3"
    tier.put("abc")
    bench = new_bench(tier)
    bench.ask(wire_tools.Open(b"o" * 16, "other", 4))  # by now the tier is trusted with several calls at once
    with tier.held("load_note") as let_go:
        answers = bench.later(wire_tools.Open(NAMESPACE, "m", 4))
        bench.until(lambda: answers, "the namespace is opened without the tier")
        assert answers == [wire_tools.Opened(0, False)]
        matched = bench.ask(wire.Match(chain("abc"), 3, 5.0))
        assert isinstance(matched, wire.Matched)
        assert len(matched.page_ids) == 0
        assert "contains" not in tier.num_calls
        let_go()
        bench.until(lambda: bench.service.handle(GROUP, wire.Match(chain("a"), 1)) == wire_tools.Stale(3), "told")
    # Whoever works in the epoch of now is served.
    matched = bench.ask(wire.Match(chain("abc"), 3, 5.0, epoch=3))
    assert isinstance(matched, wire.Matched)
    assert len(matched.page_ids) == 3
    bench.service.handle(GROUP, wire.Release([matched.lease]))


def test_pages_being_written_are_not_published_and_those_here_are_freed(new_bench: NewBench) -> None:
    bench = new_bench(LatchTier())
    bench.open()
    bench.store("abcd", epoch=0)
    writing = bench.service.handle(GROUP, wire.Reserve(chain("xy"), epoch=0))
    assert isinstance(writing, wire.Reserved)
    bench.ask(wire_tools.Invalidate())
    assert bench.service.handle(GROUP, wire.Commit(writing.reservation, 2)) == wire.Published(0, 0)
    bench.until(lambda: not bench.lower.is_busy and bench.index.num_free == bench.index.num_pages, "all are free")
    assert bench.service.check() == ""


def test_writers_of_an_older_epoch_get_no_pages(new_bench: NewBench) -> None:
    bench = new_bench(LatchTier())
    bench.open()
    bench.service.join(b"other", 1)
    bench.open(b"other")
    bench.ask(wire_tools.Invalidate())
    assert bench.service.handle(b"other", wire.Reserve(chain("ab"), epoch=0)) == wire_tools.Stale(1)
    assert bench.index.num_free == bench.index.num_pages


def test_only_a_group_that_named_its_namespace_can_invalidate_without_naming_it(new_bench: NewBench) -> None:
    bench = new_bench(LatchTier())
    with pytest.raises(StoreError, match="names a namespace"):
        bench.later(wire_tools.Invalidate())
    with pytest.raises(StoreError, match="no client of this store has opened"):
        bench.later(wire_tools.Invalidate(b"?" * 16))


def test_namespaces_are_bounded_and_checked() -> None:
    epochs = Epochs([], lambda _: None, FakeClock())

    def ignore(_namespace: Namespace, _is_saved: bool) -> None:
        return

    for number in range(MAX_NAMESPACES):
        epochs.open(number.to_bytes(16, "big"), "m", 4, ignore)
    with pytest.raises(StoreError, match="namespaces apart already"):
        epochs.open(b"\xff" * 16, "m", 4, ignore)
    with pytest.raises(StoreError, match="fingerprint of 16 bytes"):
        epochs.open(b"short", "m", 4, ignore)


def test_waits_are_shorter_than_what_waits_for_them() -> None:
    assert StoreConfig().answer_deadline_s > SAVE_WAIT_S
    assert StoreConfig().connect_deadline_s > OPEN_WAIT_S
