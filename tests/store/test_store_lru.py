from __future__ import annotations

import random

import numpy as np

from mlkv.store.policy import LRU


def forget(policy: LRU, page: int, parent: int | None) -> None:
    policy.forget(np.array([page], np.int32), 0, parent, parent_is_leaf=True)


def test_no_candidate_no_victim():
    policy = LRU(4)
    assert policy.victim() is None
    policy.touch(1)
    assert policy.victim() is None
    policy.expose(1)
    policy.hide(1)
    policy.hide(1)
    assert policy.victim() is None


def test_victim_is_the_candidate_used_longest_ago():
    policy = LRU(4)
    for page in (2, 0, 3):
        policy.touch(page)
        policy.expose(page)
    assert policy.victim() == 2
    policy.touch(2)
    assert policy.victim() == 0
    policy.hide(0)
    assert policy.victim() == 3


def test_parent_inherits_the_use_of_a_child_that_leaves():
    policy = LRU(4)
    for page in (0, 1, 2):
        policy.touch(page)
    policy.expose(1)
    policy.expose(2)
    forget(policy, 2, 0)
    policy.expose(0)
    assert policy.victim() == 1
    forget(policy, 1, None)
    assert policy.victim() == 0


def test_page_that_comes_back_is_as_if_new():
    policy = LRU(2)
    policy.touch(0)
    policy.touch(1)
    policy.touch(0)
    policy.expose(0)
    policy.expose(1)
    forget(policy, 0, None)
    assert 0 not in policy
    policy.expose(0)
    assert policy.victim() == 0


def test_order_is_exact_whatever_the_order_of_exposure():
    seed = random.randrange(1 << 30)
    chance = random.Random(seed)
    policy, last_use, clock, candidates = LRU(50), [0] * 50, 0, set()
    for _ in range(20_000):
        page = chance.randrange(50)
        if chance.random() < 0.5:
            clock += 1
            last_use[page] = clock
            policy.touch(page)
        if page in candidates:
            candidates.discard(page)
            policy.hide(page)
        else:
            candidates.add(page)
            policy.expose(page)
        expected = min(candidates, key=lambda page: last_use[page], default=None)
        victim = policy.victim()
        assert (victim is None) == (expected is None), seed
        assert victim is None or last_use[victim] == last_use[expected], seed
        assert len(policy) == len(candidates), seed
