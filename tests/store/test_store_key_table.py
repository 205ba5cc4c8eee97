"""The hash table and the tree below the index, against a dict and lists."""

from __future__ import annotations

import random

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from mlkv.store.key_table import KEY_BYTES, KeyTable
from mlkv.store.page_stack import PageStack
from mlkv.store.tree import PageTree

NUM_PAGES = 40


def colliding_key(number: int) -> bytes:
    """Keys of which many fall into the same bucket: the low word takes few values."""
    return (number % 3).to_bytes(8, "little") + number.to_bytes(8, "little")


def as_array(keys: list[bytes]) -> np.ndarray:
    return np.frombuffer(b"".join(keys), "<u8").reshape(-1, 2)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 25)), max_size=40), st.randoms(use_true_random=False))
def test_table_agrees_with_a_dict_however_keys_collide(steps: list[tuple[bool, int]], chance: random.Random):
    table, expected = KeyTable(NUM_PAGES), {}
    for adds, number in steps:
        if adds:
            pages = [page for page in range(NUM_PAGES) if page not in expected.values()][:number]
            keys = [key for key in map(colliding_key, range(60)) if key not in expected][: len(pages)]
            chance.shuffle(keys)
            new = table.find_new(as_array(keys))
            assert len(new) == len(keys)
            table.add(np.array(pages, np.intp), new)
            expected.update(zip(keys, pages, strict=True))
        else:
            keys = chance.sample(sorted(expected), min(number, len(expected)))
            pages = [expected.pop(key) for key in keys]
            table.remove(np.array(pages, np.intp))
        for key in map(colliding_key, range(60)):
            assert table.find(key) == expected.get(key, -1)
        assert [table.key_of(page) for page in range(NUM_PAGES)] == [
            next((key for key, where in expected.items() if where == page), None) for page in range(NUM_PAGES)
        ]
    table.clear()
    assert all(table.find(key) == -1 for key in expected)


@pytest.mark.parametrize("bad_at", [0, 3, 7])
def test_new_keys_are_counted_up_to_one_that_is_present_or_repeated(bad_at: int):
    table = KeyTable(NUM_PAGES)
    keys = [colliding_key(number) for number in range(8)]
    table.add(np.array([5]), table.find_new(as_array([keys[bad_at]])))
    assert len(table.find_new(as_array(keys))) == bad_at
    fresh = [colliding_key(number) for number in range(10, 18)]
    fresh[bad_at] = fresh[0]
    assert len(table.find_new(as_array(fresh))) == (bad_at or 8)


@pytest.mark.parametrize("present", [0, 15, 16, 39])
def test_new_keys_are_told_from_those_of_a_full_bucket_and_those_kept_aside(present: int):
    """All keys fall into one bucket of 16: what comes later is kept aside, and comes back out of there."""
    table = KeyTable(NUM_PAGES)
    keys = [bytes(8) + number.to_bytes(8, "little") for number in range(NUM_PAGES)]
    table.add(np.arange(NUM_PAGES), table.find_new(as_array(keys)))
    fresh = [bytes(8) + number.to_bytes(8, "little") for number in range(100, 110)]
    assert len(table.find_new(as_array(fresh))) == 10
    assert len(table.find_new(as_array([*fresh[:3], keys[present], *fresh[3:]]))) == 3
    page = table.find(keys[present])
    table.remove(np.array([page]))
    assert not table.known(np.arange(NUM_PAGES))[page]
    assert table.find(keys[present]) == -1
    assert len(table.find_new(as_array([*fresh, keys[present]]))) == 11


def test_keys_of_one_batch_do_not_take_the_place_of_each_other():
    """Hashes for keys, in batches as large as the pool is small: many want the same place at once."""
    table = KeyTable(600)
    chance = np.random.default_rng(0)
    for _ in range(3):
        keys = chance.integers(0, 2**64, (600, 2), np.uint64)
        table.add(np.arange(600), table.find_new(keys))
        assert [table.find(key.tobytes()) for key in keys] == list(range(600))
        table.remove(np.arange(600))
        assert all(table.find(key.tobytes()) == -1 for key in keys)


def test_equal_keys_are_counted_up_to_the_first_difference():
    table = KeyTable(NUM_PAGES)
    keys = [colliding_key(number) for number in range(8)]
    pages = np.arange(8)
    table.add(pages, table.find_new(as_array(keys)))
    assert table.count_equal(pages, as_array(keys)) == 8
    keys[5] = keys[5][: KEY_BYTES // 2] + b"\xff" * 8
    assert table.count_equal(pages, as_array(keys)) == 5


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 150), st.integers(0, 10**6)), min_size=1, max_size=6), st.integers(1, 300)
)
def test_chains_of_any_length_are_found_again_from_their_last_page(runs: list[tuple[int, int]], limit: int):
    tree = PageTree(1000)
    chains: list[list[int]] = [[]]
    chance = random.Random(len(runs))
    free = list(range(1000))
    chance.shuffle(free)
    for length, where in runs:
        base = chains[where % len(chains)]
        base = base[: where % (len(base) + 1)]
        run = [free.pop() for _ in range(length)]
        tree.link(np.array(run), base[-1] if base else tree.root)
        chains.append(base + run)
    for chain in chains[1:]:
        assert tree.path(chain[-1]).tolist() == chain
        assert tree.climb(chain[-1], limit).tolist() == chain[::-1][:limit]
        assert tree.depth[chain[-1]] == len(chain) - 1


@pytest.mark.parametrize("shuffled", [False, True], ids=["consecutive", "scattered"])
@pytest.mark.parametrize(("length", "held_at"), [(5, 2), (64, 0), (65, 64), (400, 30), (400, 100), (400, None)])
@pytest.mark.parametrize("limit", [1, 64, 65, 250, 1000])
def test_what_only_the_chain_itself_holds_ends_where_a_page_is_held(
    shuffled: bool, length: int, held_at: int | None, limit: int
):
    tree = PageTree(1000)
    run = np.arange(300, 300 + length)
    if shuffled:
        random.Random(0).shuffle(run)
    tree.link(run, tree.root)
    if held_at is not None:
        tree.link(np.array([7]), int(run[held_at]))
    expected = run[(0 if held_at is None else held_at + 1) :][::-1] if held_at != length - 1 else run[:0]
    if len(expected):
        assert tree.climb_lone(int(run[-1]), limit).tolist() == expected[:limit].tolist()
    else:
        assert tree.climb_lone(7, limit).tolist() == [7, *run[::-1].tolist()][:limit]


def test_tree_keeps_what_it_is_told_to_keep_and_its_links():
    tree = PageTree(8)
    tree.link(np.array([0, 1, 2]), tree.root)
    tree.link(np.array([3]), 1)
    tree.link(np.array([4, 5]), 1)
    tree.link(np.array([6]), tree.root)
    kept = np.zeros(8, np.bool_)
    kept[[0, 1, 3, 4]] = True
    tree.keep_only(kept)
    assert list(tree.children(tree.root)) == [0]
    assert sorted(tree.children(1)) == [3, 4]
    assert tree.leaves(np.array([0, 1, 3, 4])).tolist() == [3, 4]
    assert [page for page in range(8) if tree.is_linked(page)] == [0, 1, 3, 4]
    assert tree.cut(3) == 1
    assert tree.holders[1] == 1
    assert tree.cut(0) == tree.root
    tree.drop(np.array([3, 4, 1, 0]))
    assert not list(tree.children(tree.root))


def test_stack_gives_every_page_once_the_last_one_back_first():
    stack = PageStack(5)
    assert stack.take(3).tolist() == [0, 1, 2]
    stack.extend(np.array([2, 0], np.int32))
    stack.append(1)
    assert stack.take(5).tolist() == [1, 0, 2, 3, 4]
    assert len(stack) == 0
