"""A tier that fails, lies, hangs or comes late, beside an owner that goes on."""

from __future__ import annotations

import time

import pytest
from store_helpers import chain, key
from tier_cases import PAGE_BYTES, FakeClock, LatchTier, NewStore, TieredStore, make_page

from mlkv.errors import TierUnavailable
from mlkv.store import wire


def works(store: TieredStore, tier: LatchTier, text: str) -> None:
    """A page goes down, is forgotten above, and comes back."""
    store.wait_until_connected()
    store.store(text)
    store.settle()
    assert key(text) in tier.pages
    pages = store.store(text)
    assert pages.reservation == 0
    lease = store.index.match(chain(text), len(text))
    store.index.quarantine(lease.pages[:1].tolist(), lease.generations[:1].tolist())
    store.index.release([lease.id])
    assert store.here(text) == ""
    assert store.find(text) == text


# Failures of single calls: each is a miss, each is counted, and the tier lives on


@pytest.mark.parametrize("kind", ["contains", "read", "write", "delete", "clear"])
@pytest.mark.parametrize("what", [OSError("broken"), TierUnavailable("gone"), SystemExit(3), KeyboardInterrupt()])
@pytest.mark.parametrize("number", [1, 2])
def test_call_that_raises_anything_is_a_counted_miss_and_costs_no_page_and_no_thread(
    new_store: NewStore, kind: str, what: BaseException, number: int
):
    tier = LatchTier(batch_pages=2)
    store = new_store(32, tier)
    tier.put("abcdefgh")
    store.find("u")  # so that the breaker is closed, and one failure does not open it
    tier.num_calls.clear()
    tier.fail(kind, what, number)
    assert "abcdefgh".startswith(store.find("abcdefgh"))
    store.store("uvwxyz")
    store.settle()
    found = store.ask(wire.Match(chain("uvwxyz"), 6))
    assert isinstance(found, wire.Matched)
    store.ask(wire.Quarantine(found.pages[4:8], found.generations[8:16]))
    store.take(found, "uvwxyz")
    store.settle()
    store.ask(wire.Clear())
    store.settle()
    if tier.num_calls.get(kind, 0) >= number:
        assert store.report().tiers[0].failures == {type(what).__name__: 1}
    tier.faults.clear()
    store.check_conservation()
    works(store, tier, "n")
    store.check_conservation()


@pytest.mark.parametrize("kind", ["contains", "read", "write"])
@pytest.mark.parametrize("what", ["short", "lie"])
def test_short_or_senseless_answer_is_a_miss(new_store: NewStore, kind: str, what: str):
    tier = LatchTier()
    store = new_store(32, tier)
    tier.put("abcd")
    store.find("u")
    tier.fail(kind, what)
    found = store.find("abcd")
    assert found == ("abcd" if kind == "write" else "ab" if what == "short" else "")
    store.store("uvwx")
    store.settle()
    assert len(set(tier.pages) - {key("abcd"[:end]) for end in range(1, 5)}) == (
        4 if kind != "write" or what == "lie" else 2
    )
    failures = store.report().tiers[0].failures
    assert failures == ({"ValueError": 1} if what == "lie" else {})
    store.check_conservation()


def test_task_between_two_failed_ones_is_done(new_store: NewStore):
    tier = LatchTier(concurrency=1, batch_pages=1)
    store = new_store(32, tier)
    store.find("u")
    tier.fail("write", SystemExit(), 2)
    tier.fail("write", OSError(), 4)
    for letter in "abcde":
        store.store(letter)
    store.settle()
    assert set(tier.pages) == {key("a"), key("c"), key("e")}
    assert store.report().tiers[0].failures == {"SystemExit": 1, "OSError": 1}
    store.check_conservation()


# The breaker


def test_server_that_is_down_is_left_alone_and_comes_back_by_itself(new_store: NewStore):
    clock = FakeClock()
    tier = LatchTier()
    store = new_store(32, tier, clock=clock)
    store.find("u")
    for kind in ("contains", "read", "write", "connect"):
        tier.fail(kind, ConnectionRefusedError("nobody there"))
    for letter in "abc":
        store.find(letter)
    assert store.report().tiers[0].breaker == "open"
    calls = dict(tier.num_calls)
    assert store.match_later("abc")[0].lease == 0, "a lookup waited for a tier that is left alone"
    store.store("xyz")
    assert tier.num_calls == calls
    for _ in range(5):
        clock.now += 0.05
        store.until(lambda: store.report().tiers[0].breaker == "open" and not tier.in_call, "it was tried again")
    assert tier.num_calls["connect"] > 2
    assert tier.num_calls["contains"] == calls["contains"]
    tier.faults.clear()
    clock.now += 0.05
    works(store, tier, "n")
    assert store.report().tiers[0].breaker == "closed"
    assert store.report().tiers[0].openings >= 2
    store.check_conservation()


def test_server_that_lets_us_in_and_then_fails_is_tried_with_one_call_at_a_time(new_store: NewStore):
    clock = FakeClock()
    tier = LatchTier(concurrency=4)
    store = new_store(32, tier, clock=clock)
    tier.fail("contains", OSError("broken"))
    store.find("a")
    assert store.report().tiers[0].breaker == "open"
    clock.now += 1.0
    store.wait_until_connected()
    with tier.held("contains"):
        answers = [store.match_later(letter) for letter in "abc"]
        assert [bool(answer) for answer in answers] == [False, True, True], "more than one waited for the trial"
        tier.wait_for("contains")
        store.lower.poll()
        assert len(tier.in_call) == 1
    store.until(lambda: all(answers), "all were answered")
    assert tier.num_calls["contains"] == 2, "those that waited were tried as well"
    clock.now += 1.0
    tier.faults.clear()
    store.wait_until_connected()
    store.check_conservation()


# Calls that hang


def test_call_that_hangs_costs_its_deadline_and_its_pages_until_it_returns(new_store: NewStore):
    clock = FakeClock()
    tier = LatchTier(concurrency=2, deadline_s=10.0)
    store = new_store(32, tier, clock=clock)
    store.find("u")
    tier.put("ab")
    with tier.held("read"):
        answers = store.match_later("ab", wait_s=1000.0)
        store.until(lambda: bool(tier.in_call) and tier.in_call[0][0] == "read", "pages are read")
        assert store.lower.due_at is not None
        clock.now += 10.1
        assert store.lower.due_at <= clock.now
        store.lower.poll()
        assert store.take(answers[0], "ab") == ""
        report = store.report()
        assert (report.tiers[0].hung, report.tiers[0].failures) == (1, {"timeout": 1})
        assert report.reserved == 2
        written = store.store("ab")
        assert len(written.page_ids) == 2, "an engine could not store what a hung read holds the keys of"
        matched = store.match_later("ab")[0]
        rest = store.reserve("".join(chr(0x4E00 + n) for n in range(32)))
        assert len(rest.page_ids) == 28
    store.until(lambda: store.report().tiers[0].hung == 0, "the call returned")
    store.ask(wire.Cancel(rest.reservation))
    assert store.here("ab") == "ab"
    assert matched.page_generations.tolist() == written.page_generations.tolist(), "a late answer won"
    store.take(matched, "ab")
    clock.now += 1.0
    store.wait_until_connected()
    store.check_conservation()


def test_as_many_calls_hang_as_there_are_threads_and_then_none_is_made_until_one_returns(new_store: NewStore):
    clock = FakeClock()
    tier = LatchTier(concurrency=2, deadline_s=1.0)
    store = new_store(64, tier, clock=clock)
    store.find("u")
    letters = iter("abcdefghijklmnopqrstuvwxyz" * 10)
    with tier.held("contains"):

        def are_begun() -> bool:
            state = store.runners[0].state
            return len(tier.in_call) == state.running + state.hung

        answers = []
        for _ in range(20):
            answers += [store.match_later(next(letters), wait_s=1000.0) for _ in range(3)]
            store.until(are_begun, "what was asked of the tier has begun")
            clock.now += 1.1
            store.lower.poll()
        assert all(answers), "a lookup waits for a tier of which every thread hangs"
        assert 2 <= store.report().tiers[0].hung < 4
        store.ask(wire.Clear())
        clock.now += 100.0
        store.lower.poll()
        assert store.runners[0].state.running == 0
        assert "clear" not in tier.num_calls
    store.until(lambda: store.report().tiers[0].hung == 0, "all returned")
    clock.now += 100.0
    works(store, tier, "n")
    store.check_conservation()


def test_tier_that_hangs_for_ever_blocks_neither_requests_nor_the_end(new_store: NewStore):
    tier = LatchTier(deadline_s=0.05)
    store = TieredStore(32, [tier])
    store.wait_until_connected()
    tier.put("abc")
    with tier.held("read"):
        assert store.find("abc") == ""
        start = time.monotonic()
        for number in range(200):
            store.find("abc" + chr(0x4E00 + number), wait_s=0.0)
            store.ask(wire.Stats())
        assert time.monotonic() - start < 5.0
        start = time.monotonic()
        assert not store.lower.close(0.2)
        assert time.monotonic() - start < 2.0


def test_connect_that_hangs_makes_lookups_misses_at_once():
    tier = LatchTier()
    with tier.held("connect"):
        store = TieredStore(8, [tier])
        assert store.match_later("abc")[0].lease == 0
        store.store("abc")
        assert store.report().tiers[0].connected is False
    store.wait_until_connected()
    works(store, tier, "n")
    store.close()


# Deletions


def test_write_that_runs_during_a_clear_does_not_stay(new_store: NewStore):
    tier = LatchTier(concurrency=2, batch_pages=1)
    store = new_store(32, tier)
    store.find("u")
    with tier.held("write"):
        for letter in "abcd":
            store.store(letter)
        tier.wait_for("write", 2)
        store.ask(wire.Clear())
        store.ask(wire.Clear())
        assert store.match_later("a")[0].lease == 0
    store.settle()
    assert tier.pages == {}
    assert tier.num_calls["write"] == 2, "what waited to be written was written after the clear"
    works(store, tier, "n")
    store.check_conservation()


def test_write_that_hangs_over_a_clear_is_not_found_when_it_comes_back(new_store: NewStore):
    clock = FakeClock()
    tier = LatchTier(concurrency=2, deadline_s=10.0)
    store = new_store(32, tier, clock=clock)
    store.find("u")
    with tier.held("write"):
        store.store("ab")
        tier.wait_for("write")
        clock.now += 10.1
        store.lower.poll()
        store.ask(wire.Clear())
        store.until(lambda: tier.num_calls.get("clear", 0) == 1, "the clear did not wait for ever")
        tier.put("ab")  # as if the hung write had got that far
        assert store.find("ab") == "", "what was cleared was found again"
    store.settle()
    assert tier.pages == {}
    assert tier.num_calls["delete"] == 1
    works(store, tier, "n")
    store.check_conservation()


def test_read_and_lookup_that_run_during_a_clear_bring_nothing_back(new_store: NewStore):
    tier = LatchTier(concurrency=1)
    store = new_store(32, tier)
    tier.put("ab")
    tier.put("xy")
    with tier.held("read"):
        answers = store.match_later("ab")
        store.until(lambda: bool(tier.in_call) and tier.in_call[0][0] == "read", "pages are read")
        waiting = store.match_later("xy")
        store.ask(wire.Clear())
        store.ask(wire.Clear())
    store.until(lambda: bool(answers and waiting), "both were answered")
    assert store.take(answers[0], "ab") == ""
    assert store.take(waiting[0], "xy") == ""
    store.settle()
    assert store.here("ab") == ""
    store.check_conservation()


def test_clear_that_fails_is_repeated_and_the_tier_counts_as_empty_until_then(new_store: NewStore):
    clock = FakeClock()
    tier = LatchTier()
    store = new_store(32, tier, clock=clock)
    store.store("ab")
    store.settle()
    tier.fail("clear", OSError("not now"))
    store.ask(wire.Clear())
    store.until(lambda: store.report().tiers[0].breaker == "open", "the breaker opened")
    assert key("ab") in tier.pages
    assert store.find("ab") == ""
    store.store("xy")
    tier.faults.clear()
    clock.now += 60.0
    store.wait_until_connected()
    store.settle()
    assert key("ab") not in tier.pages
    assert store.find("ab") == ""
    works(store, tier, "n")
    store.check_conservation()


def test_bad_page_is_deleted_everywhere_also_while_it_is_being_written(new_store: NewStore):
    near, far = LatchTier(), LatchTier()
    store = new_store(32, near, far)
    store.find("u")
    with near.held("write"), far.held("write"):
        written = store.store("ab")
        near.wait_for("write")
        store.ask(wire.Quarantine(written.pages[:4], written.generations[:8]))
        assert store.here("ab") == ""
    store.settle()
    for tier in (near, far):
        assert key("a") not in tier.pages
    assert store.find("ab") == ""
    store.check_conservation()


def test_bad_page_is_absent_from_the_moment_it_is_known(new_store: NewStore):
    tier = LatchTier()
    store = new_store(32, tier)
    store.find("u")
    written = store.store("ab")
    store.settle()
    with tier.held("delete"):
        store.ask(wire.Quarantine(written.pages[4:8], written.generations[8:16]))
        assert store.find("ab") == "a"
    store.settle()
    store.check_conservation()


def test_deletion_that_always_fails_is_given_up_and_told(new_store: NewStore, caplog: pytest.LogCaptureFixture):
    tier = LatchTier()
    store = new_store(32, tier)
    store.find("u")
    written = store.store("a")
    store.settle()
    tier.fail("delete", PermissionError("read only"))
    store.ask(wire.Quarantine(written.pages[:4], written.generations[:8]))
    store.until(lambda: store.report().tiers[0].erasures == 0, "it was given up")
    assert "could not be deleted" in caplog.text
    tier.faults.clear()
    works(store, tier, "n")


# Numbers


def test_counters_tell_what_was_moved(new_store: NewStore):
    tier = LatchTier()
    store = new_store(32, tier)
    tier.put("abc")
    store.store("xy")
    store.find("abcd")
    store.settle()
    report = store.report().tiers[0]
    assert (report.hits, report.misses) == (3, 1)
    assert (report.bytes_read, report.bytes_written) == (3 * PAGE_BYTES, 2 * PAGE_BYTES)
    assert (report.calls["read"], report.calls["write"], report.calls["connect"]) == (1, 1, 1)
    assert report.seconds["read"] >= 0.0
    assert (report.breaker, report.connected, report.hung, report.failures) == ("closed", True, 0, {})
    assert report.num_pages == 5


def test_page_whose_header_is_not_its_own_is_not_written_down(new_store: NewStore):
    tier = LatchTier()
    store = new_store(32, tier)
    reserved = store.reserve("a")
    store.pool.page(int(reserved.page_ids[0]))[:] = make_page("a", 7)
    store.ask(wire.Commit(reserved.reservation, 1))
    store.settle()
    assert tier.pages == {}
    store.check_conservation()
