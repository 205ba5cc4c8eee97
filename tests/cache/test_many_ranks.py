"""The facade on several real Gloo ranks: what one rank sees, all see, whatever finishes where and when."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from mlkv import ConfigError, MLKVError, RankLost, RanksDiverged, Replica
from mlkv.address import owner_socket
from mlkv.config import StoreConfig
from mlkv.store import StoreClient
from tests.cache.bench import PAGE_TOKENS, Rank, layout_of, slots_of, tokens_of
from tests.ranks import run_ranks, watch_ranks


def make(tp: int, dp: int = 1, **settings: Any) -> Rank:
    return Rank(Replica.from_world(tp=tp, dp=dp, deadline_s=20.0), **settings)


def ended(rank: Rank, value: Any) -> Any:
    """Audit and close, so that every test of this file also tests conservation."""
    rank.drain()
    rank.check_conserved()
    rank.cache.close()
    return value


# -- random traffic under random delays and failures -------------------------------------------------------


def random_traffic(
    rank_index: int, tp: int, faults: str, num_rounds: int, host_pages: int, num_kv_heads: int = 2
) -> tuple[Any, ...]:
    """Conversations that grow, are stored, forgotten by the device and fetched again, several at a time."""
    rank = make(tp, num_kv_heads=num_kv_heads, num_slots=512, host_pages=host_pages, faults=faults)
    chance = random.Random(5)  # the same on every rank
    talks = [tokens_of(9, seed) for seed in range(4)]
    wrong = 0
    used = 0
    for round_ in range(num_rounds):
        names = [f"talk{number}-{round_}" for number in range(len(talks))]
        chance.shuffle(order := list(range(len(talks))))
        for at in order:
            rank.cache.lookup(names[at], talks[at])
        rank.step_until(lambda names=names: all(n in rank.seen.hits for n in names), "hits")
        places = {at: slots_of(128 * at, len(talks[at])) for at in order}
        for at in order:
            hit = rank.seen.hits[names[at]]
            if hit.num_tokens and chance.random() < 0.15:
                rank.cache.abort(names[at])
            elif hit.num_tokens:
                rank.cache.load(names[at], places[at][: hit.num_tokens])
        rank.drain()
        for at in order:
            name, tokens, slots = names[at], talks[at], places[at]
            valid = rank.seen.loaded.get(name, 0)
            if name in rank.seen.failed:
                valid = rank.seen.failed[name].num_tokens
            wrong += len(rank.wrong_tokens(tokens[:valid], slots[:valid]))
            used += valid
            rank.compute(tokens, slots, start=valid)
            wrong += len(rank.wrong_tokens(tokens, slots))
            rank.cache.offload(name, tokens, slots)
            if chance.random() < 0.1:
                rank.cache.abort(name)
        # The slots are rewritten as soon as each request is released, as an engine would.
        rank.step_until(lambda names=names: all(n in rank.seen.released for n in names), "release")
        rank.poison()
        rank.drain()
        talks = [talk + tokens_of(chance.randrange(1, 6), seed=round_ + 10) for talk in talks]
    return ended(rank, (rank.cache.results_digest, wrong, used))


@pytest.mark.parametrize(
    "faults",
    [
        "",
        "delay=rank1:5-20ms",  # rank 1 last
        "delay=rank0:5-20ms",  # the master last
        "delay=all:0-15ms,seed=3",  # every order
        "delay=all:0-5ms,fail=rank1:0.2,corrupt=rank0:0.1,seed=4",
    ],
)
def test_results_are_equal_and_bytes_right_whatever_finishes_when(faults: str) -> None:
    results = run_ranks(random_traffic, 2, 2, faults, 6, 200)
    assert results[0] == results[1]
    _, wrong, used = results[0]
    assert wrong == 0
    assert used > 50


def test_results_stay_equal_under_eviction_pressure_on_three_uneven_ranks() -> None:
    results = run_ranks(random_traffic, 3, 3, "delay=all:0-5ms,fail=all:0.1,seed=9", 6, 14)
    assert results[0] == results[1] == results[2]
    assert results[0][1] == 0


# -- failures of one rank ----------------------------------------------------------------------------------


def one_rank_fails(rank_index: int) -> tuple[Any, ...]:
    rank = make(2, faults="fail=rank1/load:1.0,seed=2")
    tokens, slots = tokens_of(41), slots_of(0, 41)
    rank.compute(tokens, slots)
    rank.store("a", tokens, slots)
    rank.poison()
    num_tokens = rank.fetch("b", tokens, slots_of(100, 41))
    failure = rank.seen.failed["b"]
    wrong = rank.wrong_tokens(tokens[:num_tokens], slots_of(100, num_tokens))
    again = rank.ask("again", tokens).num_tokens
    if again:
        rank.cache.decline("again")
    return ended(rank, (num_tokens, failure, wrong, again))


def test_a_load_that_fails_on_one_rank_gives_all_ranks_the_same_good_prefix_once() -> None:
    first, second = run_ranks(one_rank_fails, 2)
    assert first == second
    num_tokens, failure, wrong, again = first
    assert num_tokens < 40
    assert num_tokens % PAGE_TOKENS == 0
    assert failure.reason.startswith("rank 1 verified")
    assert wrong == []
    assert again == num_tokens  # the bad key is not matched again


def abort_while_another_rank_copies(rank_index: int, kind: str) -> list[str]:
    """Rank 1 is slow; the request is aborted when rank 0 has long finished."""
    rank = make(2, faults=f"delay=rank1/{kind}:60-60ms")
    tokens, slots = tokens_of(21), slots_of(0, 21)
    rank.compute(tokens, slots)
    rank.cache.offload("a", tokens, slots)
    if kind == "load":
        rank.drain()
        rank.seen.released.clear()
        rank.ask("a", tokens)
        rank.cache.load("a", slots[:20])
    for _ in range(4):
        rank.step()
    early = list(rank.seen.released)
    rank.cache.abort("a")
    rank.step_until(lambda: "a" in rank.seen.released, "release")
    story = early + rank.seen.released
    return ended(rank, story)


@pytest.mark.parametrize("kind", ["load", "offload"])
def test_slots_of_an_aborted_request_are_released_only_when_the_slowest_rank_is_done(kind: str) -> None:
    assert run_ranks(abort_while_another_rank_copies, 2, kind) == [["a"], ["a"]]


def diverge(rank_index: int) -> tuple[str, int]:
    rank = make(2)
    rank.cache.lookup("same", tokens_of(9))
    rank.step()
    rank.cache.lookup("odd" if rank_index else "even", tokens_of(9))
    with pytest.raises(RanksDiverged) as caught:
        rank.step()
    rank.cache.close()
    return str(caught.value), caught.value.rank


def test_ranks_that_call_differently_are_named_in_the_next_step() -> None:
    for rank, (message, diverged) in enumerate(run_ranks(diverge, 2)):
        assert diverged == 1
        assert "lookup(even)" in message
        assert f"lookup({'odd' if rank else 'even'})" in message


def other_settings(rank_index: int) -> str:
    with pytest.raises(ConfigError) as caught:
        make(2, model="test" if rank_index == 0 else "other")
    return str(caught.value)


def test_ranks_with_different_settings_are_refused_at_the_start() -> None:
    assert all("rank 1 of the replica has other settings" in text for text in run_ranks(other_settings, 2))


def unreachable_store(rank_index: int) -> str:
    if rank_index == 1:
        os.environ["XDG_RUNTIME_DIR"] = "/proc/self"  # nobody can make a folder there
    with pytest.raises(MLKVError) as caught:
        make(2)
    return str(caught.value)


def test_a_rank_that_cannot_reach_the_store_fails_the_start_on_all() -> None:
    messages = run_ranks(unreachable_store, 2)
    assert "rank 1 of this replica could not reach the store" in messages[0]
    assert "/proc/self" in messages[1]


# -- any TP size reads what any other wrote ----------------------------------------------------------------


SHARED = {"name": "shared", "host_bytes": 1 << 20}


def write_or_read(rank_index: int, tp: int, num_kv_heads: int, writes: bool) -> tuple[int, int]:
    rank = make(tp, num_kv_heads=num_kv_heads, store=dict(SHARED))
    tokens, slots = tokens_of(25), slots_of(0, 25)
    if writes:
        rank.compute(tokens, slots)
        rank.store("w", tokens, slots)
        return ended(rank, (rank.seen.offloaded["w"], 0))
    num_tokens = rank.fetch("r", tokens, slots)
    return ended(rank, (num_tokens, len(rank.wrong_tokens(tokens[:num_tokens], slots[:num_tokens]))))


@pytest.mark.parametrize("num_kv_heads", [3, 2])  # on 1, 2, 3, 4 ranks: even, uneven, padded away, replicated
@pytest.mark.parametrize("tp_written", [1, 2, 3, 4])
def test_any_tp_size_reads_what_any_other_wrote(num_kv_heads: int, tp_written: int) -> None:
    # The store outlives the replicas that write and read, because the test itself is its client.
    config = StoreConfig(**SHARED)
    keeper = StoreClient.connect(
        owner_socket(config),
        host_bytes=int(config.host_bytes),
        page_bytes=layout_of(num_kv_heads).page_bytes,
        group=b"the test",
        rank=0,
        deadline_s=20.0,
    )
    with keeper:
        written = run_ranks(write_or_read, tp_written, tp_written, num_kv_heads, True)
        assert written == [(24, 0)] * tp_written
        for tp in (1, 2, 3, 4):
            read = run_ranks(write_or_read, tp, tp, num_kv_heads, False)
            assert read == [(24, 0)] * tp, f"written by {tp_written}, read by {tp}"


# -- replicas ----------------------------------------------------------------------------------------------


def busy_and_idle(rank_index: int) -> tuple[int, ...]:
    """Replica 0 works while replica 1 only steps, then the other way round; they share one store."""
    rank = make(2, dp=2, store={"host_bytes": 1 << 20})
    tokens, slots = tokens_of(25), slots_of(0, 25)
    found = []
    for turn in range(2):
        if rank.replica.index != turn:
            for _ in range(50):  # another number of steps than the busy one makes
                rank.step()
            wait_for(Path(os.environ["XDG_RUNTIME_DIR"], f"turn{turn}-done"))
            continue
        found.append(rank.fetch(f"ask{turn}", tokens, slots))
        rank.compute(tokens, slots, start=found[-1])
        found.append(len(rank.wrong_tokens(tokens, slots)))
        rank.store(f"put{turn}", tokens, slots)
        rank.drain()
        if rank.replica.is_master:
            Path(os.environ["XDG_RUNTIME_DIR"], f"turn{turn}-done").touch()
    rank.cache.close()
    return tuple(found)


def wait_for(path: Path) -> None:
    end = time.monotonic() + 20
    while not path.exists():
        assert time.monotonic() < end, f"{path} did not appear"
        time.sleep(0.01)


def test_an_idle_replica_does_not_block_and_finds_what_its_neighbour_stored() -> None:
    assert run_ranks(busy_and_idle, 4) == [(0, 0), (0, 0), (24, 0), (24, 0)]


# -- kill -9 -----------------------------------------------------------------------------------------------


def lose_one(rank_index: int, victim: str) -> tuple[Any, ...]:
    rank = make(2, faults="delay=all:0-5ms", agree={"deadline_s": 6.0})
    owner = rank.cache._client.owner_pid
    tokens, slots = tokens_of(41), slots_of(0, 41)
    rank.compute(tokens, slots)
    rank.store("a", tokens, slots)
    rank.ask("held", tokens)
    if victim == f"rank{rank_index}":
        os.kill(os.getpid(), signal.SIGKILL)
    if victim == "owner" and rank_index == 1:
        os.kill(owner, signal.SIGKILL)
    start = time.monotonic()
    try:
        for _ in range(50):
            rank.step()
        rank.cache.load("held", slots[:40])
        rank.drain()
        valid = rank.seen.loaded.get("held")
        later = rank.ask("later", tokens).num_tokens
    except RankLost as error:
        rank.cache.close()
        return owner, "lost", error.rank, time.monotonic() - start
    rank.cache.close()
    return owner, "went on", valid, later


@pytest.mark.parametrize("victim", [0, 1])
def test_after_kill_9_of_a_rank_the_other_names_it_and_nothing_is_left(victim: int) -> None:
    outcomes = watch_ranks(lose_one, 2, f"rank{victim}")
    assert outcomes[victim].exitcode == -signal.SIGKILL
    owner, how, lost, seconds = outcomes[1 - victim].value
    assert (how, lost) == ("lost", victim)
    assert seconds < 8
    nothing_is_left(owner)


def test_after_kill_9_of_the_owner_the_ranks_go_on_with_misses() -> None:
    outcomes = watch_ranks(lose_one, 2, "owner")
    values = [outcome.value for outcome in outcomes]
    assert values[0] == values[1]
    assert values[0][1:] == ("went on", 40, 0)
    nothing_is_left(values[0][0])


def nothing_is_left(owner_pid: int) -> None:
    """The owner has ended, and neither socket nor shared memory remains."""
    folder = Path(os.environ["XDG_RUNTIME_DIR"])
    end = time.monotonic() + 10
    while Path(f"/proc/{owner_pid}").exists() or list(folder.rglob("*.sock")):
        assert time.monotonic() < end, f"owner {owner_pid} or {list(folder.rglob('*'))} remains"
        time.sleep(0.02)
    assert [name for name in os.listdir("/dev/shm") if "mlkv" in name] == []
