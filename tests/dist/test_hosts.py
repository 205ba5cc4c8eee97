"""The whole cache over replicas whose ranks (pretend to) run on several hosts, and the faults of a plan."""

from __future__ import annotations

import time
from typing import Any

import pytest

from mlkv.errors import ConfigError, RankLost
from mlkv.faults import FaultPlan, InjectedFault
from tests.cache.bench import Rank, slots_of, tokens_of
from tests.dist.agreeing import replica_of
from tests.ranks import run_ranks, watch_ranks

TOKENS = tokens_of(40)


def store_and_fetch(rank: int, size: int, hosts: int, num_kv_heads: int, agree: dict[str, Any]) -> tuple[Any, ...]:
    replica = replica_of(rank, size, hosts)
    # Hosts may have different room; page ids must fit into every pool.
    bench = Rank(replica, num_kv_heads=num_kv_heads, host_pages=64 if rank == 0 else 48, agree=agree)
    written, read = slots_of(0, len(TOKENS)), slots_of(100, len(TOKENS))
    bench.compute(TOKENS, written)
    bench.store("a", TOKENS, written)
    bench.poison()
    num_tokens = bench.fetch("b", [*TOKENS, 1], read)
    wrong = bench.wrong_tokens(TOKENS[:num_tokens], read[:num_tokens])
    bench.drain()
    report = bench.cache.audit()
    assert report.problem == ""
    found = (
        num_tokens,
        wrong,
        bench.seen.failed,
        bench.cache.results_digest,
        bench.cache._client.owner_pid,
        report.num_pages,
        (report.ready, report.leases, report.reservations),
        bench.cache.stats().channel,
    )
    replica.min_int(0)
    bench.cache.close()
    return found


@pytest.mark.parametrize(
    ("size", "hosts", "num_kv_heads", "agree", "channel"),
    [
        (2, 2, 2, {"deadline_s": 20.0}, "tensor"),
        (4, 2, 4, {"deadline_s": 20.0}, "hierarchical"),
        (4, 2, 1, {"deadline_s": 20.0}, "hierarchical"),  # one head, read by ranks of both hosts
        (3, 3, 2, {"deadline_s": 20.0, "late": "off"}, "tensor"),
        (4, 2, 4, {"deadline_s": 20.0, "channel": "object"}, "object"),
    ],
)
def test_a_replica_over_hosts_stores_and_loads_on_each_of_them(
    size: int, hosts: int, num_kv_heads: int, agree: dict[str, Any], channel: str
) -> None:
    found = run_ranks(store_and_fetch, size, size, hosts, num_kv_heads, agree)
    num_tokens, wrong, failed, digests, owners, pages, counts, channels = zip(*found, strict=True)
    assert num_tokens == (40,) * size
    assert wrong == ([],) * size
    assert failed == ({},) * size
    assert len(set(digests)) == 1
    assert set(channels) == {channel}
    assert set(pages) == {48}
    # One owner for each host, and only the master's keeps books.
    assert [owners.index(owner) for owner in owners] == [
        rank * hosts // size * size // hosts for rank in range(size)
    ]
    assert counts[0] == (10, 0, 0)
    assert all(count == (0, 0, 0) for count, owner in zip(counts, owners, strict=True) if owner != owners[0])


def differing_settings(rank: int, hosts: int) -> str:
    replica = replica_of(rank, 2, hosts)
    with pytest.raises(ConfigError) as caught:
        Rank(replica, host_pages=64 if rank == 0 else 48, min_load_tokens=1 + rank * (hosts - 1))
    return str(caught.value)


@pytest.mark.parametrize("hosts", [1, 2])
def test_other_settings_than_the_size_of_the_pool_must_be_equal_over_hosts(hosts: int) -> None:
    for text in run_ranks(differing_settings, 2, hosts):
        assert "rank 1 of the replica has other settings" in text


def strike(rank: int, faults: str) -> tuple[str, str, float]:
    bench = Rank(replica_of(rank, 2, 1, 5.0), faults=faults)
    start = time.monotonic()
    steps = 0
    try:
        while steps < 60:
            bench.step()
            steps += 1
    except (RankLost, InjectedFault) as error:
        return type(error).__name__, f"{steps} {error}", time.monotonic() - start
    bench.replica.min_int(0)
    bench.cache.close()
    return "", str(steps), time.monotonic() - start


def test_the_fault_plan_raises_on_one_rank_and_the_other_is_told() -> None:
    outcomes = watch_ranks(strike, 2, "raise=rank1@30")
    assert outcomes[1].value[:2] == ("InjectedFault", "29 rank 1 fails at step 30, as the fault plan says")
    name, text, _ = outcomes[0].value
    assert name == "RankLost"
    assert "29 rank 1 of this replica was lost at step 30" in text


def test_the_fault_plan_kills_a_rank_at_its_step() -> None:
    outcomes = watch_ranks(strike, 2, "kill=rank0@12")
    assert outcomes[0].exitcode == -9
    assert "11 rank 0 of this replica was lost at step 12" in outcomes[1].value[1]


def test_the_fault_plan_stalls_a_rank_and_all_wait_for_it() -> None:
    outcomes = watch_ranks(strike, 2, "stall=rank1@20:0.7")
    assert [outcome.value[:2] for outcome in outcomes] == [("", "60")] * 2
    assert all(outcome.value[2] > 0.65 for outcome in outcomes)


@pytest.mark.parametrize(
    "item", ["kill=rank1", "kill=all@3", "kill=rank1@0", "kill=rank1@3:2", "stall=rank1@3", "raise=rank1@x"]
)
def test_a_malformed_fault_at_a_step_is_refused(item: str) -> None:
    with pytest.raises(ConfigError, match="is not a rank and a step"):
        FaultPlan.parse(item)


def test_faults_at_steps_strike_only_in_the_first_start_of_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = FaultPlan.parse("stall=rank1@3:0.5,stall=rank1@3:0.25,kill=rank0@9")
    assert [strike.seconds for strike in plan.of_steps(1)[3]] == [0.5, 0.25]
    assert list(plan.of_steps(0)) == [9]
    assert plan.of_steps(2) == {}
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert plan.of_steps(1) == {}
