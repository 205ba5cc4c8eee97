"""Pages that come back from lower tiers: deferred answers, batches, several tiers, admission."""

from __future__ import annotations

import pytest
from store_helpers import chain, key
from tier_cases import GROUP, FakeClock, LatchTier, NewStore, make_page

from mlkv.store import wire


def test_lookup_waits_until_the_tier_has_brought_the_whole_prefix(new_store: NewStore):
    tier = LatchTier()
    store = new_store(16, tier)
    tier.put("abcdefghij", generation=100)
    with tier.held("read") as let_go:
        answers = store.match_later("abcdefghij")
        tier.wait_for("contains", 0)
        store.until(lambda: bool(tier.in_call), "the tier is read")
        assert answers == []
        let_go()
        store.until(lambda: bool(answers), "the lookup was answered")
    assert answers[0].page_generations.tolist() == [101 + n for n in range(10)]
    assert store.take(answers[0], "abcdefghij") == "abcdefghij"
    assert store.here("abcdefghij") == "abcdefghij"
    store.check_conservation()


def test_lookup_that_host_memory_answers_whole_does_not_ask_a_tier(new_store: NewStore):
    tier = LatchTier()
    store = new_store(8, tier)
    store.store("abc")
    answers = store.match_later("abc")
    assert store.take(answers[0], "abc") == "abc", "the answer waited"
    assert "contains" not in tier.num_calls


def test_lookup_answers_with_the_best_prefix_when_its_wait_is_over(new_store: NewStore):
    clock = FakeClock()
    tier = LatchTier(concurrency=1, batch_pages=2, deadline_s=1000.0)
    store = new_store(32, tier, clock=clock)
    tier.put("abcdef")
    with tier.held("read"):
        answers = store.match_later("abcdef", wait_s=5.0)
        store.until(lambda: bool(tier.in_call) and tier.in_call[0][0] == "read", "the first batch is read")
        clock.now += 4.9
        store.lower.poll()
        assert answers == []
        assert store.lower.due_at is not None
        assert store.lower.due_at <= clock.now + 0.2
        clock.now += 0.2
        store.lower.poll()
        assert store.take(answers[0], "abcdef") == ""
    store.settle()
    assert store.here("abcdef") == "abcdef", "what came late is there for the next lookup"
    store.check_conservation()


def test_lookup_without_a_wait_is_answered_at_once_and_a_later_one_finds_the_pages(new_store: NewStore):
    tier = LatchTier()
    store = new_store(8, tier)
    tier.put("ab")
    matched = store.ask(wire.Match(chain("ab"), 2))
    assert isinstance(matched, wire.Matched)
    assert matched.lease == 0
    store.settle()
    assert store.here("ab") == "ab"


def test_lookups_of_one_prefix_share_one_read(new_store: NewStore):
    tier = LatchTier()
    store = new_store(32, tier)
    tier.put("abcd")
    with tier.held("read"):
        first, second, longer = store.match_later("abcd"), store.match_later("abc"), store.match_later("abcdx")
    store.until(lambda: bool(first and second and longer), "all were answered")
    assert store.take(first[0], "abcd") == "abcd"
    assert store.take(second[0], "abc") == "abc"
    assert store.take(longer[0], "abcdx") == "abcd"
    assert tier.num_calls["read"] == 1
    store.check_conservation()


def test_prefix_that_waits_is_not_evicted(new_store: NewStore):
    tier = LatchTier()
    store = new_store(4, tier)
    store.store("ab")
    store.settle()
    tier.put("abcd")
    with tier.held("contains"):
        answers = store.match_later("abc")
        assert len(store.reserve("xyzw").page_ids) == 2, "the prefix of a lookup that waits was evicted"
    store.until(lambda: bool(answers), "the lookup was answered")
    assert store.take(answers[0], "abc") == "ab"


def test_pages_that_are_being_read_are_not_given_to_others(new_store: NewStore):
    tier = LatchTier()
    store = new_store(4, tier)
    tier.put("ab")
    with tier.held("read"):
        answers = store.match_later("ab")
        tier.wait_for("contains", 0)
        store.until(lambda: store.report().reserved == 1 or store.report().reserved == 2, "pages are reserved")
        busy = store.report().reserved
        assert len(store.reserve("wxyz").page_ids) == 4 - busy
    store.until(lambda: bool(answers), "the lookup was answered")
    store.take(answers[0], "ab")


def test_batch_that_comes_half_is_published_as_far_as_it_came(new_store: NewStore):
    tier = LatchTier(concurrency=1, batch_pages=4)
    store = new_store(32, tier)
    tier.put("abcdefgh")
    tier.fail("read", "short", 2)
    assert store.find("abcdefgh") == "abcdef"
    assert store.here("abcdefgh") == "abcdef"
    store.check_conservation()


def test_batches_that_end_out_of_order_are_published_in_order(new_store: NewStore):
    tier = LatchTier(concurrency=3, batch_pages=2)
    store = new_store(32, tier)
    tier.put("abcdef")
    with tier.held("read", 1):
        answers = store.match_later("abcdef")
        store.until(lambda: tier.num_calls.get("read") == 3 and len(tier.in_call) == 1, "later batches have ended")
        store.lower.poll()
        assert answers == []
        assert store.report().ready == 0, "published before what it continues"
    store.until(lambda: bool(answers), "the lookup was answered")
    assert store.take(answers[0], "abcdef") == "abcdef"
    store.check_conservation()


def test_batches_that_came_before_the_first_one_failed_are_not_kept(new_store: NewStore):
    near, far = LatchTier(concurrency=3, batch_pages=2), LatchTier()
    store = new_store(32, near, far)
    near.put("abcdef", generation=100)
    far.put("abcdef", generation=200)
    near.fail("read", OSError("broken"), 1)
    with near.held("read", 1):
        answers = store.match_later("abcdef")
        store.until(lambda: near.num_calls.get("read") == 3 and len(near.in_call) == 1, "later batches have ended")
        store.lower.poll()
    store.until(lambda: bool(answers), "the lookup was answered")
    assert [generation // 100 for generation in answers[0].page_generations.tolist()] == [2] * 6
    assert store.take(answers[0], "abcdef") == "abcdef"
    store.check_conservation()


def test_what_the_nearer_tier_lacks_or_fails_to_bring_comes_from_the_next(new_store: NewStore):
    near, far = LatchTier(concurrency=1, batch_pages=2), LatchTier()
    store = new_store(32, near, far)
    near.put("abcd", generation=100)
    far.put("abcdefgh", generation=200)
    near.fail("read", OSError("the disk is broken"), 2)
    answers = store.match_later("abcdefgh")
    store.until(lambda: bool(answers), "the lookup was answered")
    assert [generation // 100 for generation in answers[0].page_generations.tolist()] == [1, 1, 2, 2, 2, 2, 2, 2]
    assert store.take(answers[0], "abcdefgh") == "abcdefgh"
    store.settle()
    assert all(near.pages[key("abcdefgh"[:end])] == far.pages[key("abcdefgh"[:end])] for end in (5, 6, 7, 8)), (
        "what came from the far tier was not kept in the near one"
    )
    assert [tier.pages_hit for tier in store.report().tiers] == [2, 6]
    store.check_conservation()


def test_page_from_a_tier_counts_as_its_hit_once_and_then_as_one_of_the_host(new_store: NewStore):
    tier = LatchTier()
    store = new_store(8, tier)
    tier.put("ab")
    answers = store.match_later("ab")
    store.until(lambda: bool(answers), "the lookup was answered")
    assert answers[0].sources == b"\x01\x01"
    store.take(answers[0], "ab")
    again = store.match_later("ab")[0]
    assert again.sources == b"\x00\x00"
    store.take(again, "ab")
    report = store.report()
    assert (report.pages_asked, report.pages_hit) == (4, 4)
    assert (report.tiers[0].pages_hit, report.tiers[0].pages_promoted) == (2, 2)


@pytest.mark.parametrize(
    "damage",
    ["header", "key", "parent", "namespace", "nothing"],
)
def test_page_that_is_not_what_its_key_names_is_a_miss_and_is_deleted(new_store: NewStore, damage: str):
    tier = LatchTier()
    store = new_store(8, tier)
    tier.put("abc")
    data = bytearray(tier.pages[key("ab")])
    if damage == "header":
        data[20] ^= 1
    elif damage == "key":
        data[:] = make_page("ax", 7)
    elif damage == "parent":
        data[:] = make_page("ab", 7, parent=key("x"))
    elif damage == "namespace":
        data[:] = make_page("ab", 7, namespace=b"m" * 16)
    tier.pages[key("ab")] = bytes(data)
    found = store.find("abc")
    store.settle()
    if damage == "nothing":
        assert found == "abc"
    else:
        assert found == "a"
        assert key("ab") not in tier.pages
        assert store.report().tiers[0].pages_bad == 1
    store.check_conservation()


def test_promotion_takes_what_room_there_is_and_evicts_only_what_nobody_holds(new_store: NewStore):
    tier = LatchTier(batch_pages=2)
    store = new_store(8, tier)
    store.store("uvwxy")
    lease = store.match_later("uvwxy")[0]
    tier.put("abcdef")
    assert store.find("abcdef") == "abc"
    store.take(lease, "uvwxy")
    store.check_conservation()


def test_page_that_an_engine_is_writing_is_not_read_from_a_tier(new_store: NewStore):
    tier = LatchTier()
    store = new_store(8, tier)
    tier.put("abc")
    reserved = store.reserve("ab")
    answers = store.match_later("abc")
    assert store.take(answers[0], "abc") == ""
    assert "contains" not in tier.num_calls
    store.ask(wire.Commit(reserved.reservation, 2))
    assert store.find("abc") == "abc"
    store.check_conservation()


def test_lookup_of_a_group_that_leaves_is_forgotten_and_its_pages_are_free(new_store: NewStore):
    tier = LatchTier()
    store = new_store(8, tier)
    store.store("a")
    store.settle()
    tier.put("abc")
    with tier.held("contains"):
        answers = store.match_later("abc")
        store.service.leave(GROUP, 1)
    store.service.join(GROUP, 1)
    store.check_conservation()
    assert answers == []


def test_page_goes_to_every_tier_as_soon_as_it_is_complete(new_store: NewStore):
    near, far = LatchTier(batch_pages=2), LatchTier()
    store = new_store(32, near, far)
    written = store.store("abcde")
    store.settle()
    for tier in (near, far):
        assert set(tier.pages) == {key("abcde"[:end]) for end in range(1, 6)}
    assert near.pages[key("ab")] == make_page("ab", int(written.page_generations[1]))
    assert near.num_calls["write"] == 3
    store.check_conservation()


def test_page_that_is_being_written_to_a_tier_is_not_evicted(new_store: NewStore):
    tier = LatchTier()
    store = new_store(4, tier)
    with tier.held("write"):
        store.store("a")
        assert len(store.reserve("wxyz").page_ids) == 3
    store.settle()
    assert tier.pages[key("a")] == make_page("a", 1 << 40)


def test_second_use_admits_what_was_matched_twice(new_store: NewStore):
    tier = LatchTier()
    store = new_store(8, tier, admission="second_use")
    store.store("abc")
    store.find("abc", wait_s=0.0)
    store.settle()
    assert tier.pages == {}
    store.find("ab", wait_s=0.0)
    store.settle()
    assert set(tier.pages) == {key("a"), key("ab")}
    store.check_conservation()


def test_eviction_admits_the_next_victims_with_their_prefix_before_they_go(new_store: NewStore):
    tier = LatchTier()
    store = new_store(32, tier, admission="evict")
    store.store("abcdefgh")
    store.settle()
    assert tier.pages == {}, "written although there was room"
    store.store("".join(chr(ord("A") + n) for n in range(23)))
    store.settle()
    assert set(tier.pages) == {key("abcdefgh"[:end]) for end in range(1, 9)}
    store.store("ijklmnop")
    store.settle()
    assert store.here("abcdefgh") != "abcdefgh"
    assert store.find("abcdefgh") == "abcdefgh"
    store.check_conservation()


def test_pages_that_the_tier_could_not_be_given_are_written_when_they_are_used_again(new_store: NewStore):
    tier = LatchTier()
    store = new_store(8, tier)
    store.store("x")
    store.settle()
    tier.fail("write", OSError("no"), 2)
    store.store("ab")
    store.settle()
    assert set(tier.pages) == {key("x")}
    store.find("ab")
    store.settle()
    assert set(tier.pages) == {key("x"), key("a"), key("ab")}


def test_writes_that_pile_up_are_dropped_and_counted(new_store: NewStore):
    tier = LatchTier(concurrency=1, batch_pages=1)
    store = new_store(16, tier)
    with tier.held("write"):
        for letter in "abcdefgh":
            store.store(letter)
        report = store.report()
        assert report.tiers[0].dropped_writes == 2, "a quarter of the pool waits, and one is being written"
        assert report.tiers[0].queued_pages == 5
    store.check_conservation()


def test_chain_longer_than_one_promotion_comes_in_several(new_store: NewStore, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("mlkv.store.promotion.MAX_KEYS", 3)
    tier = LatchTier()
    store = new_store(64, tier)
    tier.put("abcdefghij")
    assert store.find("abcdefghijk") == "abcdefghij"
    assert tier.num_calls["contains"] == 4
    store.check_conservation()
