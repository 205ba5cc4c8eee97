"""Replicas and the object channel on real Gloo ranks."""

from __future__ import annotations

import os
import random
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist

from mlkv.dist import Agreement, Mark, Replica, Stream
from mlkv.errors import ConfigError, RankLost, RanksDiverged
from tests.ranks import run_ranks, watch_ranks


def replica_facts(rank: int, tp: int, dp: int) -> tuple[object, ...]:
    replica = Replica.from_world(tp=tp, dp=dp)
    return (
        replica.index,
        replica.rank,
        replica.global_ranks,
        replica.is_master,
        replica.one_host,
        replica.min_int(10 - rank),
        replica.places[replica.rank].pid == os.getpid(),
    )


def test_world_splits_into_replicas_of_neighbours_with_a_master_each() -> None:
    assert run_ranks(replica_facts, 4, 2, 2) == [
        (0, 0, (0, 1), True, True, 9, True),
        (0, 1, (0, 1), False, True, 9, True),
        (1, 0, (2, 3), True, True, 7, True),
        (1, 1, (2, 3), False, True, 7, True),
    ]


def wrong_world(rank: int) -> str:
    with pytest.raises(ConfigError) as caught:
        Replica.from_world(tp=3, dp=1)
    return str(caught.value)


def test_a_tp_that_does_not_fill_the_world_is_refused() -> None:
    assert run_ranks(wrong_world, 2) == ["tp=3 times dp=1 must be the world size, which is 2"] * 2


def from_existing(rank: int) -> tuple[object, ...]:
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    by_group = Replica.from_group(groups[rank // 2])
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    by_mesh = Replica.from_device_mesh(mesh, "tp")
    with pytest.raises(ConfigError, match="not 'pp'"):
        Replica.from_device_mesh(mesh, "pp")
    return by_group.global_ranks, by_group.rank, by_mesh.global_ranks, by_mesh.rank


def test_replicas_come_from_existing_groups_and_meshes() -> None:
    expected = [((0, 1), 0), ((0, 1), 1), ((2, 3), 0), ((2, 3), 1)]
    assert run_ranks(from_existing, 4) == [pair + pair for pair in expected]


def from_groups_of_uneven_ranks(rank: int) -> list[tuple[object, ...]]:
    """Rank 0 is in two groups that rank 1 knows nothing of, as with pipeline or expert parallelism."""
    backwards = dist.new_group([1, 0], sort_ranks=False)
    mesh = dist.init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    if rank == 0:
        for _ in range(2):
            dist.new_group([0], use_local_synchronization=True)
    made = [Replica.from_group(backwards, deadline_s=5.0) for _ in range(2)]
    made.append(Replica.from_device_mesh(mesh, "tp", deadline_s=5.0))
    for replica in made:
        agreement = Agreement(replica, "object")
        agreement.step(list)
        agreement.close()
    return [(replica.global_ranks, replica.rank, replica.all_ints(rank)) for replica in made]


def test_a_replica_of_a_group_does_not_depend_on_other_groups_and_keeps_its_order() -> None:
    first, second = run_ranks(from_groups_of_uneven_ranks, 2)
    assert first == [((1, 0), 1, [1, 0])] * 2 + [((0, 1), 0, [0, 1])]
    assert second == [((1, 0), 0, [1, 0])] * 2 + [((0, 1), 1, [0, 1])]


def steps_with_random_completions(rank: int, num_steps: int) -> list[tuple[object, ...]]:
    """Each rank finishes the same tasks in its own order at its own time; returns what it popped."""
    agreement = Agreement(Replica.from_world(tp=3, deadline_s=20))
    order = random.Random(rank)
    unfinished: dict[Mark, list[int]] = {mark: [] for mark in Mark}
    history: list[tuple[object, ...]] = []
    for step in range(num_steps):
        if step % 3 == 0:
            for stream in (Stream.LOADS, Stream.OFFLOADS):
                number = agreement.member.record(stream, b"%d" % step, "t")
                for mark in Mark:
                    if mark.stream is stream:
                        unfinished[mark].append(number)
        for mark in Mark:
            # Now and then this rank finishes nothing, or a few tasks in any order.
            for _ in range(order.randrange(3)):
                if unfinished[mark]:
                    number = unfinished[mark].pop(order.randrange(len(unfinished[mark])))
                    failed = order.random() < 0.2
                    agreement.member.finish(mark, number, order.randrange(4) if failed else None)
        agreed = agreement.step(lambda step=step: [b"fact %d" % step] if step % 7 == 0 else [])
        history.append((agreed.popped, agreed.facts, sorted(agreed.failures.items())))
    return history


def test_every_rank_pops_the_same_whatever_finishes_where_and_when() -> None:
    histories = run_ranks(steps_with_random_completions, 3, 300)
    assert histories[1] == histories[0]
    assert histories[2] == histories[0]
    assert sum(len(marks[Mark.LOADED]) for marks, _, _ in histories[0]) > 50
    assert any(failures for _, _, failures in histories[0])


def idle_or_busy(rank: int, num_steps: int) -> int:
    """Only replica 0 has work; replica 1 steps another number of times. No group spans both."""
    replica = Replica.from_world(tp=2, dp=2, deadline_s=20)
    agreement = Agreement(replica)
    popped = 0
    for _ in range(num_steps if replica.index == 0 else num_steps // 7):
        if replica.index == 0:
            number = agreement.member.record(Stream.LOADS, b"x", "t")
            agreement.member.finish(Mark.LOADED, number)
        popped += len(agreement.step(list).popped[Mark.LOADED])
    return popped


def test_an_idle_replica_neither_blocks_nor_is_blocked() -> None:
    assert run_ranks(idle_or_busy, 4, 200) == [200, 200, 0, 0]


def diverging(rank: int) -> str:
    agreement = Agreement(Replica.from_world(tp=3, deadline_s=20))
    agreement.step(list)
    agreement.member.record(Stream.CALLS, b"odd" if rank == 1 else b"even", f"lookup(on{rank})")
    with pytest.raises(RanksDiverged) as caught:
        agreement.step(list)
    with pytest.raises(RanksDiverged):  # and it stays broken
        agreement.step(list)
    assert caught.value.rank == 1
    return str(caught.value)


def test_divergence_is_raised_on_every_rank_and_names_the_rank() -> None:
    for rank, message in enumerate(run_ranks(diverging, 3)):
        assert "rank 1 of this replica diverged" in message
        assert f"lookup(on{rank})" in message


def master_cannot_decide(rank: int) -> str:
    agreement = Agreement(Replica.from_world(tp=2, deadline_s=20))

    def broken() -> list[bytes]:
        raise ValueError("the index is on fire")

    with pytest.raises(Exception, match="on fire") as caught:
        agreement.step(broken)
    return type(caught.value).__name__


def test_an_error_on_the_master_while_deciding_reaches_the_followers() -> None:
    assert run_ranks(master_cannot_decide, 2) == ["MasterFailed", "MasterFailed"]


def lose_a_rank(rank: int, victim: int, deadline_s: float) -> tuple[str, int, float]:
    agreement = Agreement(Replica.from_world(tp=3, deadline_s=deadline_s))
    for _ in range(5):
        agreement.step(list)
    if rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    try:
        while True:
            agreement.step(list)
    except RankLost as error:
        return str(error), error.rank, time.monotonic() - start


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_killed_rank_is_named_by_all_others_within_the_deadline(victim: int) -> None:
    outcomes = watch_ranks(lose_a_rank, 3, victim, 6.0)
    for rank, outcome in enumerate(outcomes):
        if rank == victim:
            assert outcome.exitcode == -signal.SIGKILL
            continue
        message, lost, seconds = outcome.value
        assert lost == victim, message
        assert seconds < 10


def stop_stepping(rank: int, deadline_s: float) -> tuple[str, int] | None:
    agreement = Agreement(Replica.from_world(tp=2, deadline_s=deadline_s))
    agreement.step(list)
    if rank == 1:
        # Alive, but its engine never comes back; it waits for what it is told at the end of the test.
        threading.Event().wait(deadline_s + 4)
        return None
    with pytest.raises(RankLost, match="did not come to step 2 within 2 s") as caught:
        agreement.step(list)
    return str(caught.value), caught.value.rank


def test_a_rank_that_stops_stepping_is_named_within_the_deadline() -> None:
    message, lost = watch_ranks(stop_stepping, 2, 2.0)[0].value
    assert lost == 1, message


def test_a_single_process_agrees_with_itself_without_torch_distributed() -> None:
    agreement = Agreement(Replica.single())
    number = agreement.member.record(Stream.LOADS, b"x", "t")
    assert agreement.step(lambda: [b"f"]).facts == (b"f",)
    agreement.member.finish(Mark.LOADED, number)
    assert agreement.step(list).popped[Mark.LOADED] == range(1, 2)
    assert torch.distributed.is_initialized() is False
