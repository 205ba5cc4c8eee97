"""What every eviction policy owes the index, and what each of them prefers."""

from __future__ import annotations

import random
import time
from typing import get_args

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from store_helpers import chain, key

from mlkv.config import StoreConfig
from mlkv.store.index import Index
from mlkv.store.policy import DEFAULT_POLICY, POLICIES, HitDensity, PolicyName, Sieve
from mlkv.store.policy.ghosts import Ghost, GhostTable
from mlkv.store.policy.return_times import NUM_AGES, ReturnTimes, age_cells

every_policy = pytest.mark.parametrize("policy", sorted(POLICIES))


def new_index(policy: PolicyName, num_pages: int) -> Index:
    return Index(num_pages, POLICIES[policy](num_pages))


def ask(index: Index, text: str) -> list[bytes]:
    """What a request does: look up, load, store the rest. Returns the keys that were evicted for it."""
    lease = index.match(chain(text), len(text))
    if lease.id:
        index.release([lease.id])
    writing = index.reserve(chain(text))
    if writing.id:
        index.commit(writing.id, len(writing.pages))
    return [page.key for page in writing.evicted]


def holds(index: Index, text: str) -> bool:
    """Whether a whole chain is there; does not count as a use."""
    lease = index.match(chain(text), len(text), is_use=False)
    if lease.id:
        index.release([lease.id])
    return len(lease.pages) == len(text)


# What all of them owe


def test_setting_names_every_policy_there_is():
    assert sorted(POLICIES) == sorted(get_args(PolicyName))
    assert StoreConfig().policy == DEFAULT_POLICY
    for name in POLICIES:
        assert StoreConfig(policy=name).policy == name
    with pytest.raises(ValueError, match="policy"):
        StoreConfig(policy="fifo")


@every_policy
@settings(max_examples=25, deadline=None)
@given(st.data())
def test_only_leaves_that_nobody_holds_are_evicted(policy: PolicyName, data: st.DataObject):
    """The audit of the index says so after each step, and that candidates are exactly those."""
    index = new_index(policy, 6)
    leases: list[int] = []
    writing: list[tuple[int, int]] = []
    for step in data.draw(st.lists(st.sampled_from("mmrrwwwcdaax"), max_size=30)):
        text = data.draw(st.text("ab", min_size=1, max_size=5))
        if step == "m" and (lease := index.match(chain(text), len(text))).id:
            leases.append(lease.id)
        elif step == "r" and leases:
            index.release([leases.pop(data.draw(st.integers(0, len(leases) - 1)))])
        elif step == "w" and (reservation := index.reserve(chain(text))).id:
            writing.append((reservation.id, len(reservation.pages)))
        elif step == "c" and writing:
            reservation_id, number = writing.pop()
            index.commit(reservation_id, data.draw(st.integers(0, number)))
        elif step == "d" and writing:
            index.disown(writing[0][0])
        elif step == "a":
            ask(index, text)
        elif step == "x" and data.draw(st.integers(0, 5)) == 0:
            index.clear()
        index.check()
    index.release(leases)
    for reservation_id, _ in writing:
        index.cancel(reservation_id)
    index.check()
    assert len(index.reserve(chain("pqrstu")).pages) == 6, "a page was lost"


@every_policy
def test_evicted_chain_is_given_up_from_its_end(policy: PolicyName):
    index = new_index(policy, 6)
    ask(index, "abcd")
    assert ask(index, "wxyz") == [key("abcd"), key("abc")]
    index.check()


@every_policy
def test_nothing_to_evict_is_said_at_once_whatever_the_size(policy: PolicyName):
    num_pages = 100_000
    index = new_index(policy, num_pages)
    keys = np.random.default_rng(0).bytes(16 * num_pages)
    index.commit(index.reserve(keys).id, num_pages)
    index.match(keys, num_pages)
    begin = time.perf_counter()
    for number in range(500):
        assert index.reserve(number.to_bytes(16, "big")).id == 0
    # A scan of the pool takes tens of milliseconds each time.
    assert (time.perf_counter() - begin) / 500 < 1e-3


@every_policy
def test_same_requests_have_the_same_victims(policy: PolicyName):
    """More leaves than the default compares at once, so that its random choice takes part."""
    stories = []
    for _ in range(2):
        chance, index = random.Random(3), new_index(policy, 300)
        stories.append([ask(index, chance.choice("abcdefgh") + str(chance.randrange(200))) for _ in range(500)])
    assert stories[0] == stories[1]
    assert any(stories[0])


@every_policy
def test_next_victim_is_what_leaves_next(policy: PolicyName):
    chance, index = random.Random(4), new_index(policy, 200)
    while index.num_free:
        ask(index, "".join(chance.choices("abcdef", k=chance.randint(1, 5))))
    for number in range(200):
        ask(index, "".join(chance.choices("abcdef", k=chance.randint(1, 5))))
        victim = index.next_victim()
        assert victim is not None
        assert victim == index.next_victim()
        expected, _ = index.identity(victim)
        assert ask(index, chr(1000 + number)) == [expected]


@every_policy
def test_memory_of_a_page_is_bounded(policy: PolicyName):
    for num_pages in (1_000_000, 1 << 20):
        assert new_index(policy, num_pages).num_bytes / num_pages < 100


# Hit density


def test_while_nothing_was_learned_the_least_recently_used_leaf_goes():
    chance = random.Random(5)
    ours, lru = new_index("hit-density", 30), new_index("lru", 30)
    for number in range(40):
        text = f"{number:03}"[::-1] + "x" * chance.randint(0, 3)
        for index in (ours, lru):
            index.commit((writing := index.reserve(chain(text))).id, len(writing.pages))
    assert [holds(ours, f"{number:03}"[::-1]) for number in range(40)] == [
        holds(lru, f"{number:03}"[::-1]) for number in range(40)
    ]


def test_chains_that_were_continued_outlive_younger_ones_that_never_are():
    """Sessions go on for ever, every second request is somebody who never comes back; LRU keeps those as long."""
    rates = {}
    for policy in ("hit-density", "lru"):
        index, hits = new_index(policy, 60), 0
        sessions = [f"{name}" for name in "abcdefgh"]
        for number in range(1000):
            who = number % len(sessions)
            sessions[who] = sessions[who] + "." if len(sessions[who]) < 12 else sessions[who][0]
            hits += holds(index, sessions[who][:-1]) if number > 500 and len(sessions[who]) > 1 else 0
            ask(index, sessions[who])
            ask(index, f"{number:05}"[::-1])
        rates[policy] = hits
    assert rates["hit-density"] > 1.3 * rates["lru"]


def test_what_the_next_turn_did_not_repeat_leaves_first():
    index = new_index("hit-density", 200)
    for group in range(1000, 1120, 12):  # learn: each turn ends with a page that the next one does not repeat
        for turn in range(1, 5):
            for session in range(group, group + 12):
                ask(index, f"{chr(session)}{'t' * turn}e")
    index.clear()
    ask(index, "Z" * 193)
    index.match(chain("Z" * 193), 193)
    for text in ("Y", "Xtte", "Xttte"):
        ask(index, text)
    assert index.num_free == 0
    assert ask(index, "n") == [key("Xtte")], "Y is older, but may still go on"


def test_common_beginning_is_not_a_chain_that_goes_on():
    """A system prompt with many sessions below it does not make each of them look like a continued one."""
    policy = HitDensity(100)
    index = Index(100, policy)
    for number in range(20):
        ask(index, f"ss{chr(500 + number)}")
    newest = index.match(chain("ss" + chr(519)), 3)
    assert policy._kind[int(newest.pages[1])] <= 8
    assert policy._kind[int(newest.pages[2])] == 1  # its own match just now
    index.release([newest.id])


@pytest.mark.parametrize("age", [0, 1, 2, 3, 4, 1023, 1024, 1 << 45])
def test_single_ages_and_arrays_of_them_are_counted_alike(age: int):
    times = ReturnTimes(1)
    times.come_back(0, age)
    assert np.flatnonzero(times._ages[0]).tolist() == age_cells(np.array([age])).tolist()


def test_density_is_that_of_the_best_time_to_keep_a_chain():
    """All chains of the class return after 2**10 pages: worth more the closer they are to it, nothing after it."""
    times = ReturnTimes(2)
    for _ in range(1000):
        times.begin(0)
        times.begin(1)
        times.come_back(0, 1 << 10)
    returning, never = times.densities()
    assert np.all(np.diff(returning[:11]) > 0)
    assert np.all(returning[11:] < 1e-6)
    assert np.all(never[:11] < 0.2 * returning[:11])
    # A share of 0.98 comes in the cell from 1024 to 2048 pages, for which half of it waits half of the time.
    assert returning[10] == pytest.approx(0.98 / (1024 * (1 - 0.98 / 2)), rel=0.05)


def test_nothing_known_is_worth_nothing_and_what_is_known_fades():
    times = ReturnTimes(2)
    assert not times.densities().any()
    for kind in (0, 1):
        for _ in range(3000):
            times.begin(kind)
            if kind == 0:
                times.come_back(kind, 100)
        times.densities()
    for _ in range(8):
        for _ in range(5000):
            times.begin(0)
            times.begin(1)
            times.come_back(1, 100)
        last = times.densities()
    assert last[1, 0] > 10 * last[0, 0], "the classes have changed their habits, and it was not noticed"
    assert last.shape == (2, NUM_AGES)


def test_ghost_is_found_once_and_only_by_its_key():
    ghosts = GhostTable(100)
    ghosts.put(0xABCD_0000_0000_0007, 12, 3)
    assert ghosts.pop(0x1234_0000_0000_0007) is None
    assert ghosts.pop(0xABCD_0000_0000_0007) == Ghost(12, 3)
    assert ghosts.pop(0xABCD_0000_0000_0007) is None
    ghosts.put(1 << 63, 5, 1)
    ghosts.clear()
    assert ghosts.pop(1 << 63) is None


# SIEVE


@settings(max_examples=80, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("nnut"), st.integers(0, 30)), max_size=60))
def test_sieve_agrees_with_a_list(steps: list[tuple[str, int]]):
    """Pages without children: new, used, evicted."""
    policy, queue, marked, hand = Sieve(100), [], set(), 0
    fresh = iter(range(100))
    for step, number in steps:
        if step == "n":
            page = next(fresh)
            queue.append(page)
            policy.expose(page)
        elif step == "u" and queue:
            page = queue[number % len(queue)]
            marked.add(page)
            policy.touch(page)
        elif step == "t" and queue:
            while queue[hand] in marked:
                marked.discard(queue[hand])
                hand = (hand + 1) % len(queue)
            assert policy.victim() == queue[hand]
            policy.forget(np.array([queue[hand]], np.int32), 0, None, parent_is_leaf=False)
            del queue[hand]
            hand = hand if hand < len(queue) else 0
        assert len(policy) == len(queue)


def test_sieve_keeps_the_place_of_a_leaf_that_was_only_pinned():
    policy = Sieve(4)
    for page in (0, 1):
        policy.expose(page)
    policy.hide(0)
    policy.expose(0)
    assert policy.victim() == 0
    policy.hide(0)
    assert policy.victim() == 1
    policy.expose(0)
    assert policy.victim() == 1
    policy.clear()
    assert policy.victim() is None
    assert 1 not in policy
