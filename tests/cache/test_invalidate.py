"""After `invalidate` no page of before is found: in no tier, by nobody, in flight or not, restarted or not."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mlkv import Hit, Replica
from tests.cache.bench import Rank, slots_of, tokens_of
from tests.ranks import run_ranks

NewRank = Any


@pytest.fixture
def new_rank(tmp_path: Path) -> Iterator[NewRank]:
    """Engines of one rank that share a store, and its pages by the settings `store`."""
    made: list[Rank] = []

    def make(**store: Any) -> Rank:
        made.append(Rank(Replica.single(), store={"directory": tmp_path, "name": "shared", **store}))
        return made[-1]

    (tmp_path).chmod(0o700)
    yield make
    for rank in made:
        rank.cache.close()


def stored(rank: Rank, length: int = 19, name: str = "stored") -> list[int]:
    tokens = tokens_of(length)
    rank.compute(tokens, slots_of(0, length))
    rank.store(name, tokens, slots_of(0, length))
    rank.poison()
    return tokens


def test_nothing_from_before_is_found_and_what_is_stored_after_is(new_rank: NewRank) -> None:
    rank = new_rank()
    tokens = stored(rank)
    assert rank.ask("before", tokens) == Hit(16)
    rank.cache.decline("before")
    rank.cache.invalidate()
    assert rank.ask("after", tokens) == Hit(0)
    stored(rank, name="again")
    slots = slots_of(100, 19)
    assert rank.fetch("new", tokens, slots) == 16
    assert rank.wrong_tokens(tokens[:16], slots[:16]) == []
    rank.drain()
    rank.check_conserved()


def test_its_pages_are_freed(new_rank: NewRank) -> None:
    rank = new_rank()
    stored(rank)
    assert rank.cache.audit().ready == 4
    rank.cache.invalidate()
    end = time.monotonic() + 10.0
    while (report := rank.cache.audit()).ready:
        assert time.monotonic() < end, f"{report.ready} pages stay"
    assert report.free == report.num_pages


def test_invalidating_again_and_with_nothing_stored_is_harmless(new_rank: NewRank) -> None:
    rank = new_rank()
    rank.cache.invalidate()
    rank.cache.invalidate()
    tokens = stored(rank)
    assert rank.ask("a", tokens) == Hit(16)
    rank.cache.decline("a")
    assert rank.cache.namespace.epoch == 2
    rank.drain()
    rank.check_conserved()


def test_lookup_in_flight_is_no_hit(new_rank: NewRank) -> None:
    rank = new_rank()
    tokens = stored(rank)
    rank.cache.lookup("flying", tokens)
    rank.cache.invalidate()
    rank.step_until(lambda: "flying" in rank.seen.hits, "the answer")
    assert rank.seen.hits["flying"] == Hit(0)
    rank.drain()
    rank.check_conserved()


@pytest.mark.parametrize("loads_before", [True, False])
def test_load_of_an_older_hit_fails_with_nothing_loaded(new_rank: NewRank, loads_before: bool) -> None:
    rank = new_rank()
    tokens = stored(rank)
    hit = rank.ask("old", tokens)
    assert hit == Hit(16)
    if loads_before:
        rank.cache.load("old", slots_of(100, 16))
        rank.cache.invalidate()
    else:
        rank.cache.invalidate()
        rank.cache.load("old", slots_of(100, 16))
    rank.drain()
    assert "old" not in rank.seen.loaded
    assert rank.seen.failed["old"].num_tokens == 0
    assert "invalidated" in rank.seen.failed["old"].reason
    rank.check_conserved()


@pytest.mark.parametrize("num_steps", [0, 1, 2, 3, 5])
def test_store_that_began_before_is_never_visible(new_rank: NewRank, num_steps: int) -> None:
    rank = new_rank()
    tokens = tokens_of(19)
    rank.compute(tokens, slots_of(0, 19))
    rank.cache.offload("old", tokens, slots_of(0, 19))
    for _ in range(num_steps):
        rank.step()
    is_over = "old" in rank.seen.offloaded
    rank.cache.invalidate()
    rank.drain()
    if not is_over:
        failure = rank.seen.unstored.pop("old")
        assert failure.num_tokens == 0
        assert "invalidated" in failure.reason
    assert rank.seen.released.count("old") == 1
    assert rank.ask("a", tokens) == Hit(0)
    # The same request under the same name goes on, and what it stores now is there.
    rank.seen.offloaded.pop("old", None)
    rank.store("old", tokens, slots_of(0, 19))
    assert rank.ask("b", tokens) == Hit(16)
    rank.cache.decline("b")
    rank.drain()
    rank.check_conserved()


def test_another_engine_of_the_store_neither_finds_nor_stores_older_pages_and_then_follows(
    new_rank: NewRank,
) -> None:
    one, other = new_rank(), new_rank()
    tokens = stored(one)
    assert other.ask("before", tokens) == Hit(16)
    other.cache.decline("before")
    one.cache.invalidate()
    other.compute(tokens, slots_of(0, 19))
    other.cache.offload("stale", tokens, slots_of(0, 19))
    assert other.ask("after", tokens) == Hit(0)
    other.drain()
    assert "stale" in other.seen.unstored
    assert one.ask("after", tokens) == Hit(0)
    # By now it has heard of it.
    assert other.cache.namespace == one.cache.namespace
    stored(other, name="new")
    assert one.ask("new", tokens) == Hit(16)
    one.cache.decline("new")
    for rank in (one, other):
        rank.drain()
    one.check_conserved()


def test_replicas_that_all_invalidate_share_pages_again(new_rank: NewRank) -> None:
    one, other = new_rank(), new_rank()
    one.cache.invalidate()
    tokens = stored(one)
    other.cache.invalidate()
    assert other.cache.namespace == one.cache.namespace
    assert other.ask("a", tokens) == Hit(16)
    other.cache.decline("a")
    other.drain()
    other.check_conserved()


def test_another_namespace_of_the_store_keeps_its_pages(new_rank: NewRank, tmp_path: Path) -> None:
    one = new_rank()
    other = Rank(Replica.single(), model="other", store={"directory": tmp_path, "name": "shared"})
    try:
        tokens = stored(one)
        stored(other)
        one.cache.invalidate()
        assert one.ask("a", tokens) == Hit(0)
        assert other.ask("a", tokens) == Hit(16)
        other.cache.decline("a")
        other.drain()
    finally:
        other.cache.close()


@pytest.mark.parametrize("is_invalidated", [False, True])
def test_it_holds_for_the_disk_after_a_restart_of_owner_and_engine(
    new_rank: NewRank, tmp_path: Path, is_invalidated: bool
) -> None:
    disk = {"directory": tmp_path / "disk", "limit_bytes": 8 << 20}
    rank = new_rank(disk=disk)
    tokens = stored(rank)
    if is_invalidated:
        rank.cache.invalidate()
    rank.cache.close()
    again = new_rank(disk=disk)
    assert again.cache.namespace.epoch == is_invalidated
    assert again.ask("a", tokens) == (Hit(0) if is_invalidated else Hit(16))
    if not is_invalidated:
        again.cache.decline("a")
    again.drain()


def invalidating_ranks(rank_index: int) -> tuple[Any, ...]:
    rank = Rank(Replica.from_world(tp=2, deadline_s=20.0))
    tokens = stored(rank)
    hit = rank.ask("old", tokens)
    rank.cache.load("old", slots_of(100, hit.num_tokens))
    rank.cache.offload("new", tokens + tokens_of(8, 5), slots_of(0, 27))
    rank.cache.invalidate()
    rank.drain()
    found = rank.ask("after", tokens)
    epoch = rank.cache.namespace.epoch
    rank.check_conserved()
    rank.cache.close()
    return rank.cache.results_digest, hit, found, epoch, dict(rank.seen.failed), dict(rank.seen.unstored)


def test_all_ranks_drop_what_is_in_flight_alike() -> None:
    first, second = run_ranks(invalidating_ranks, 2)
    assert first == second
    _, hit, found, epoch, failed, unstored = first
    assert (hit, found, epoch) == (Hit(16), Hit(0), 1)
    assert {name: failure.num_tokens for name, failure in failed.items()} == {"old": 0}
    assert {name: failure.num_tokens for name, failure in unstored.items()} == {"new": 0}
