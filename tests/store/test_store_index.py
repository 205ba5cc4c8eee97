from __future__ import annotations

import time

import numpy as np
import pytest
from store_helpers import chain, key

from mlkv.errors import ConfigError, StoreError
from mlkv.store.grants import Reservation
from mlkv.store.index import Index, IndexBroken
from mlkv.store.policy import LRU


def new_index(num_pages: int) -> Index:
    return Index(num_pages, LRU(num_pages))


def store(index: Index, text: str) -> Reservation:
    reservation = index.reserve(chain(text))
    if reservation.id:
        index.commit(reservation.id, len(reservation.pages))
    index.check()
    return reservation


def match_length(index: Index, text: str) -> int:
    lease = index.match(chain(text), len(text))
    if lease.id:
        index.release([lease.id])
    index.check()
    return len(lease.pages)


def test_match_finds_the_longest_complete_prefix():
    index = new_index(8)
    written = store(index, "abc")
    lease = index.match(chain("abxy"), 4)
    assert lease.pages.tolist() == written.pages.tolist()[:2]
    assert lease.generations.tolist() == written.generations.tolist()[:2]
    assert match_length(index, "abcd") == 3
    assert match_length(index, "xbc") == 0


def test_match_is_limited_and_an_empty_one_is_no_lease():
    index = new_index(8)
    store(index, "abc")
    assert len(index.match(chain("abc"), 2).pages) == 2
    before = index.counts()
    for lease in (index.match(chain("abc"), 0), index.match(b"", 5), index.match(chain("zz"), 2)):
        assert lease.id == 0
        assert len(lease.pages) == 0
    assert index.counts() == before


def test_page_is_invisible_until_committed():
    index = new_index(8)
    writing = index.reserve(chain("ab"))
    found = index.match(chain("ab"), 2)
    assert (found.id, found.num_coming) == (0, 2)
    index.commit(writing.id, 2)
    assert match_length(index, "ab") == 2


def test_keys_out_of_their_chain_do_not_match():
    index = new_index(8)
    store(index, "abc")
    assert len(index.match(key("ab"), 1).pages) == 0
    assert len(index.match(key("a") + key("abc"), 2).pages) == 1
    assert index.reserve(key("ab")).id == 0
    assert index.reserve(key("a") + key("abc")).id == 0


def test_present_pages_are_not_written_again():
    index = new_index(8)
    store(index, "abc")
    again = index.reserve(chain("abc"))
    assert (again.id, again.first, again.num_ready) == (0, 3, 3)
    longer = index.reserve(chain("abcde"))
    assert (longer.first, longer.num_ready, len(longer.pages)) == (3, 3, 2)


def test_page_that_somebody_else_writes_is_not_written_twice():
    index = new_index(8)
    first = index.reserve(chain("ab"))
    second = index.reserve(chain("abcd"))
    assert (second.first, second.num_ready, len(second.pages)) == (2, 0, 2)
    published = index.commit(second.id, 2)
    assert (published.num_good, published.num_readable) == (2, 0)
    assert match_length(index, "abcd") == 0
    assert index.commit(first.id, 2).num_readable == 2
    assert match_length(index, "abcd") == 4


def test_failure_of_a_writer_drops_what_others_hung_below_it():
    index = new_index(8)
    first = index.reserve(chain("ab"))
    ready_below = index.reserve(chain("abc"))
    index.commit(ready_below.id, 1)
    writing_below = index.reserve(chain("abcd"))
    index.commit(first.id, 1)
    index.check()
    assert match_length(index, "abcd") == 1
    # The page of the writer below stays its own until it comes back, and holds those above it.
    assert (index.counts().reserved, index.counts().quarantined) == (1, 2)
    others = index.reserve(chain("xyzuv"))
    assert len(others.pages) == 4
    assert writing_below.pages[0] not in others.pages
    published = index.commit(writing_below.id, 1)
    assert (published.num_good, published.num_readable) == (0, 0)
    index.check()
    assert (index.counts().reserved, index.counts().quarantined, index.counts().free) == (4, 0, 3)


def test_same_key_twice_in_one_chain_is_cut_there():
    index = new_index(8)
    cut = index.reserve(key("a") + key("a"))
    assert len(cut.pages) == 1
    index.commit(cut.id, 1)
    assert len(index.match(key("a") + key("a"), 2).pages) == 1
    index.check()


def test_bad_tail_of_a_commit_goes_back():
    index = new_index(8)
    writing = index.reserve(chain("abcd"))
    published = index.commit(writing.id, 2)
    assert (published.num_good, published.num_readable) == (2, 2)
    assert match_length(index, "abcd") == 2
    assert index.counts().free == 6


def test_cancelled_reservations_leak_nothing():
    index = new_index(8)
    for _ in range(100):
        index.cancel(index.reserve(chain("abcdef")).id)
    index.check()
    assert index.counts().free == 8
    assert len(store(index, "abcdef").pages) == 6


def test_reservation_starts_no_earlier_than_told_and_needs_its_parent():
    index = new_index(8)
    assert index.reserve(chain("abc"), start=1).id == 0
    store(index, "a")
    assert index.reserve(chain("abc"), start=1).first == 1
    assert index.reserve(b"").id == 0


def test_suffixes_leave_before_their_prefixes():
    index = new_index(4)
    store(index, "abcd")
    evicted = store(index, "xy").evicted
    assert [page.key for page in evicted] == [key("abcd"), key("abc")]
    assert match_length(index, "abcd") == 2


def test_the_least_recently_used_branch_leaves_first():
    index = new_index(4)
    store(index, "pa")
    store(index, "pb")
    store(index, "c")
    assert match_length(index, "pa") == 2
    # pb is the oldest leaf; then c; p was used with pa and outlives it.
    assert [page.key for page in store(index, "xyz").evicted] == [key("pb"), key("c"), key("pa")]
    assert match_length(index, "pa") == 1


def test_use_of_a_short_prefix_does_not_keep_its_suffix():
    index = new_index(4)
    store(index, "abc")
    store(index, "x")
    assert match_length(index, "ab") == 2
    assert [page.key for page in store(index, "y").evicted] == [key("abc")]
    assert [page.key for page in store(index, "z").evicted] == [key("x")]


def test_leased_pages_are_never_given_away():
    index = new_index(4)
    store(index, "abcd")
    lease = index.match(chain("abc"), 3)
    taken = index.reserve(chain("uvwxyz"))
    assert len(taken.pages) == 1
    assert not set(taken.pages) & set(lease.pages)
    assert index.reserve(chain("q")).id == 0
    index.cancel(taken.id)
    index.release([lease.id])
    index.check()
    assert len(store(index, "uvwx").pages) == 4


def test_prefix_being_continued_is_not_evicted_for_its_own_suffix():
    index = new_index(2)
    store(index, "ab")
    assert index.reserve(chain("abc")).id == 0
    assert match_length(index, "ab") == 2


def test_one_lease_keeps_a_page_that_another_gave_back():
    index = new_index(2)
    store(index, "ab")
    first, second = index.match(chain("ab"), 2), index.match(chain("ab"), 2)
    index.release([first.id])
    assert index.reserve(chain("x")).id == 0
    index.release([second.id])
    assert len(index.reserve(chain("xy")).pages) == 2


def test_full_pool_refuses_at_once_whatever_its_size():
    num_pages = 200_000
    index = new_index(num_pages)
    keys = b"".join(number.to_bytes(16, "little") for number in range(num_pages))
    index.commit(index.reserve(keys).id, num_pages)
    index.match(keys, num_pages)
    others = [(1 << 100 | number).to_bytes(16, "little") for number in range(2000)]
    begin = time.perf_counter()
    for other in others:
        assert index.reserve(other).id == 0
    # A scan of the pool takes milliseconds each time; this is microseconds.
    assert (time.perf_counter() - begin) / len(others) < 0.5e-3


def test_refusals_change_nothing():
    index = new_index(4)
    store(index, "ab")
    lease = index.match(chain("ab"), 2)
    writing = index.reserve(chain("x"))
    before = index.counts()
    refused = [
        lambda: index.release([lease.id, lease.id]),
        lambda: index.release([lease.id, 999]),
        lambda: index.commit(999, 0),
        lambda: index.commit(writing.id, 2),
        lambda: index.commit(writing.id, -1),
        lambda: index.cancel(lease.id),
        lambda: index.match(b"short", 1),
        lambda: index.match(chain("ab"), -1),
        lambda: index.reserve(b"x" * 17),
        lambda: index.reserve(chain("ab"), start=3),
        lambda: index.quarantine([4], [1]),
        lambda: index.quarantine([0], []),
    ]
    for request in refused:
        with pytest.raises(StoreError):
            request()
        assert index.counts() == before
        index.check()
    index.release([lease.id])
    with pytest.raises(StoreError, match="released before"):
        index.release([lease.id])


def test_index_without_pages_is_refused():
    with pytest.raises(ConfigError):
        new_index(0)


def test_bad_page_and_what_follows_it_are_never_matched_again():
    index = new_index(4)
    written = store(index, "abcd")
    removed = index.quarantine([int(written.pages[1])], [int(written.generations[1])])
    assert (removed.bad_keys, removed.num_dropped) == ([key("ab")], 3)
    index.check()
    assert match_length(index, "abcd") == 1
    assert index.counts().free == 3
    rewritten = store(index, "ab")
    assert rewritten.generations[0] > written.generations.max()
    assert match_length(index, "ab") == 2


def test_bad_page_stays_out_of_use_until_its_readers_are_done():
    index = new_index(4)
    written = store(index, "abcd")
    reader = index.match(chain("abc"), 3)
    index.quarantine([int(written.pages[0])], [int(written.generations[0])])
    index.check()
    # d had no reader and is free; a, b and c are still being read.
    assert (index.counts().free, index.counts().quarantined, index.counts().ready) == (1, 3, 0)
    assert len(index.reserve(chain("abcd")).pages) == 1
    index.release([reader.id])
    index.check()
    assert (index.counts().free, index.counts().quarantined) == (3, 0)


def test_report_of_an_earlier_content_of_a_page_is_ignored():
    index = new_index(1)
    old = store(index, "a")
    new = store(index, "b")
    assert old.pages.tolist() == new.pages.tolist()
    assert index.quarantine(old.pages.tolist(), old.generations.tolist()).num_dropped == 0
    assert match_length(index, "b") == 1
    assert index.quarantine(new.pages.tolist() * 2, new.generations.tolist() * 2).num_dropped == 1


def test_clear_forgets_everything_and_may_be_repeated():
    index = new_index(8)
    store(index, "abc")
    store(index, "xy")
    reader = index.match(chain("ab"), 2)
    assert index.clear() == 5
    assert index.clear() == 0
    index.check()
    assert (index.counts().free, index.counts().quarantined) == (6, 2)
    assert match_length(index, "abc") == 0
    store(index, "abc")
    assert match_length(index, "abc") == 3
    index.release([reader.id])
    index.check()
    assert (index.counts().free, index.counts().ready) == (5, 3)


def test_write_begun_before_a_clear_is_not_visible_after_it():
    index = new_index(8)
    doomed = index.reserve(chain("abc"))
    index.clear()
    fresh = index.reserve(chain("ab"))
    assert not set(fresh.pages) & set(doomed.pages)
    assert index.commit(fresh.id, 2).num_good == 2
    assert index.commit(doomed.id, 3).num_good == 0
    index.check()
    assert match_length(index, "abc") == 2
    assert index.counts().free == 6


def test_generations_given_by_a_lower_tier_replace_those_of_the_reservation():
    index = new_index(4)
    store(index, "a")
    promoted = index.reserve(chain("abc"), start=1)
    with pytest.raises(StoreError):
        index.commit(promoted.id, 2, np.array([70], np.uint64))
    index.commit(promoted.id, 2, np.array([70, 71], np.uint64))
    index.check()
    assert index.match(chain("abc"), 3).generations.tolist()[1:] == [70, 71]


def test_generations_begin_where_they_are_told_to():
    index = Index(4, LRU(4), first_generation=1 << 60)
    assert store(index, "ab").generations.tolist() == [1 << 60, (1 << 60) + 1]


def test_disowned_reservation_leaves_its_keys_to_others_and_keeps_its_pages():
    index = new_index(4)
    stuck = index.reserve(chain("ab"))
    index.disown(stuck.id)
    index.disown(stuck.id)
    written = store(index, "ab")
    assert not set(written.pages) & set(stuck.pages)
    lease = index.match(chain("ab"), 2)
    assert index.reserve(chain("x")).id == 0, "a page that a stuck writer may still touch was given away"
    index.release([lease.id])
    assert index.commit(stuck.id, 2).num_good == 0
    index.check()
    assert match_length(index, "ab") == 2
    assert index.counts().free == 2
    with pytest.raises(StoreError):
        index.disown(stuck.id)


def test_held_page_and_its_prefix_are_not_evicted_and_its_age_does_not_change():
    index = new_index(4)
    old = store(index, "ab")
    store(index, "xy")
    hold = index.hold(int(old.pages[1]))
    assert index.next_victim() != int(old.pages[1])
    index.release([hold])
    assert index.next_victim() == int(old.pages[1])
    assert index.parent(int(old.pages[1])) == int(old.pages[0])
    assert index.parent(int(old.pages[0])) is None
    assert index.identity(int(old.pages[1])) == (key("ab"), int(old.generations[1]))
    writing = index.reserve(chain("z"))
    with pytest.raises(StoreError, match="reserved"):
        index.hold(int(writing.pages[0]))


def test_end_of_a_chain_leaves_and_a_page_held_in_its_middle_stays_with_its_prefix():
    index = new_index(4)
    written = store(index, "abcd")
    hold = index.hold(int(written.pages[1]))
    taken = index.reserve(chain("wxyz"))
    assert [page.key for page in taken.evicted] == [key("abcd"), key("abc")]
    assert not set(taken.pages) & set(written.pages[:2])
    index.cancel(taken.id)
    index.release([hold])
    index.check()
    assert match_length(index, "abcd") == 2


def test_clear_keeps_chains_that_are_read_or_written_together_until_both_are_done():
    index = new_index(12)
    store(index, "abc")
    store(index, "abx")
    store(index, "pq")
    reader = index.match(chain("abc"), 3)
    writing = index.reserve(chain("abyz"))
    assert index.clear() == 8
    index.check()
    # a, b and c are read, y and z written; x, p and q were held by nobody.
    assert (index.counts().quarantined, index.counts().reserved, index.counts().free) == (3, 2, 7)
    index.release([reader.id])
    index.check()
    assert (index.counts().quarantined, index.counts().reserved, index.counts().free) == (2, 2, 8)
    assert index.commit(writing.id, 2).num_good == 0
    index.check()
    assert index.counts().free == 12


def test_evicted_pages_are_named_as_a_sequence():
    index = new_index(4)
    written = store(index, "abcd")
    evicted = index.reserve(chain("xyz")).evicted
    assert len(evicted) == 3
    assert (evicted[0].key, evicted[-1].key) == (key("abcd"), key("ab"))
    assert [page.key for page in evicted[1:]] == [key("abc"), key("ab")]
    assert [page.page for page in evicted] == written.pages[:0:-1].tolist()
    assert [page.generation for page in evicted] == written.generations[:0:-1].tolist()
    with pytest.raises(IndexError):
        evicted[3]


def test_audit_sees_a_page_that_two_could_get():
    index = new_index(2)
    written = store(index, "a")
    index._free.append(int(written.pages[0]))
    with pytest.raises(IndexBroken):
        index.check()
