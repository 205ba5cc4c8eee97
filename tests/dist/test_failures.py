"""A rank that dies, hangs, raises or leaves: every other rank is told who, within the deadline."""

from __future__ import annotations

import os
import random
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from mlkv.dist import Agreement
from mlkv.dist.ledger import Kind
from mlkv.dist.verdict import Verdicts
from mlkv.errors import AgreementError, RankLost
from tests.dist import agreeing
from tests.dist.agreeing import Way, Work, agreement_of, replica_of
from tests.ranks import Outcome, watch_ranks

DEADLINE_S = 8.0


def lose_a_rank(
    rank: int, size: int, way: Way, victim: int, how: str, moment_s: float
) -> tuple[int, int, str, float]:
    """All ranks step until the victim is gone; who was lost, at which step, why, and how long after."""
    agreement = agreement_of(rank, size, way, DEADLINE_S)
    work = Work(agreement, rank)
    if rank == victim and how == "kill":
        threading.Timer(moment_s, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
    end = time.monotonic() + moment_s
    step_start = time.monotonic()
    try:
        while True:
            if rank == victim and time.monotonic() > end and how != "kill":
                if how == "exit":
                    os._exit(3)
                raise ZeroDivisionError("the engine of this rank fails")
            work.go_on()
            step_start = time.monotonic()
            agreement.step(list)
    except RankLost as error:
        return error.rank, error.step, error.why, time.monotonic() - step_start


def check_named(outcomes: list[Outcome], victim: int, within_s: float) -> None:
    steps = set()
    for rank, outcome in enumerate(outcomes):
        if rank == victim:
            assert outcome.exitcode != 0
            continue
        assert outcome.error is None, outcome
        lost, step, why, seconds = outcome.value
        assert lost == victim, why
        assert seconds < within_s, why
        steps.add(step)
    assert max(steps) - min(steps) <= 1, steps  # those that were done with the last step miss it in the next


@pytest.mark.parametrize(
    ("way", "victim", "how"),
    [
        (agreeing.LEDGER, 1, "exit"),
        (agreeing.LEDGER, 3, "raise"),
        (agreeing.HIERARCHICAL, 0, "kill"),
        (agreeing.HIERARCHICAL_LATE, 2, "kill"),
        (agreeing.HIERARCHICAL_LATE, 3, "exit"),
        (agreeing.TENSOR, 2, "kill"),
        (agreeing.TENSOR_LATE, 0, "kill"),
    ],
    ids=str,
)
def test_a_rank_that_dies_is_named_by_every_other_rank(way: Way, victim: int, how: str) -> None:
    outcomes = watch_ranks(lose_a_rank, 4, 4, way, victim, how, 0.05)
    check_named(outcomes, victim, DEADLINE_S if way.hosts > 1 else 1.0)


@pytest.mark.parametrize("seed", range(4))
def test_a_rank_killed_at_any_moment_is_named_in_milliseconds_over_the_ledger(seed: int) -> None:
    chance = random.Random(seed)
    victim, moment_s = chance.randrange(3), chance.uniform(0.0, 0.05)
    outcomes = watch_ranks(lose_a_rank, 3, 3, agreeing.LEDGER, victim, "kill", moment_s)
    check_named(outcomes, victim, 0.5)
    for rank, outcome in enumerate(outcomes):
        assert rank == victim or "is gone" in outcome.value[2]


def step_some(agreement: Agreement, num_steps: int) -> None:
    for _ in range(num_steps):
        agreement.step(list)


def stall(rank: int, way: Way, victim: int, deadline_s: float) -> tuple[int, int, str, float]:
    """The victim stops stepping until everybody has given it up, and then comes back."""
    agreement = agreement_of(rank, 4, way, deadline_s)
    for _ in range(5):
        agreement.step(list)
    if rank == victim:
        time.sleep(2 * deadline_s + 1.5)
    start = time.monotonic()
    with pytest.raises(RankLost) as caught:
        step_some(agreement, 3)
    waited_s = time.monotonic() - start
    if rank != victim:
        time.sleep(max(0.0, 2 * deadline_s + 3 - waited_s))  # the victim comes back to ranks that still live
    agreement.close()
    return caught.value.rank, caught.value.step, caught.value.why, waited_s


@pytest.mark.parametrize(
    ("way", "victim"),
    [
        (agreeing.LEDGER, 0),
        (agreeing.LEDGER, 3),
        (agreeing.HIERARCHICAL_LATE, 0),
        (agreeing.HIERARCHICAL_LATE, 3),
        (agreeing.TENSOR, 1),
    ],
    ids=str,
)
def test_a_rank_that_stops_stepping_is_named_within_the_deadline_and_told_so_when_it_returns(
    way: Way, victim: int
) -> None:
    outcomes = watch_ranks(stall, 4, way, victim, 1.0)
    for rank, outcome in enumerate(outcomes):
        assert outcome.error is None, outcome
        lost, step, why, seconds = outcome.value
        if rank == victim:
            assert lost != victim
            assert "gave up waiting for this rank" in why
        else:
            assert lost == victim, why
            assert step in (6, 7)
            assert seconds < 1.0 + 1.5, why


def step_once_more(rank: int) -> tuple[str, str]:
    agreement = agreement_of(rank, 3, agreeing.LEDGER, 1.0)
    agreement.step(list)
    if rank == 1:
        with pytest.raises(RankLost) as caught:
            agreement.step(list)  # its engine calls step twice where the others call it once
        return str(caught.value), ""
    time.sleep(2.5)
    with pytest.raises(RankLost) as caught:
        agreement.step(list)
    return "", str(caught.value)


def test_a_rank_that_steps_twice_is_named_by_the_others() -> None:
    outcomes = watch_ranks(step_once_more, 3)
    assert [outcome.error for outcome in outcomes] == [None] * 3, outcomes
    assert "rank 0 of this replica was lost at step 2: it did not come to step 2" in outcomes[1].value[0]
    # Rank 0 is told who ran ahead of it; the others hear what rank 1 found.
    assert "rank 1 of this replica was lost" in outcomes[0].value[1]
    assert "gave up waiting for this rank" in outcomes[0].value[1]


def close_early(rank: int) -> str:
    agreement = agreement_of(rank, 3, agreeing.LEDGER, 10.0)
    for _ in range(3):
        agreement.step(list)
    if rank == 2:
        agreement.close()
        agreement.close()
        time.sleep(1.0)
        return ""
    start = time.monotonic()
    with pytest.raises(RankLost) as caught:
        agreement.step(list)
    assert time.monotonic() - start < 1.0
    return str(caught.value)


def test_a_rank_that_left_is_named_at_once() -> None:
    outcomes = watch_ranks(close_early, 3)
    for rank in (0, 1):
        assert (
            "rank 2 of this replica was lost at step 4: it closed its cache after step 3" in outcomes[rank].value
        )


def interrupted(rank: int) -> str:
    """An exception from inside a step, as Ctrl-C would be, leaves half an exchange behind."""
    agreement = agreement_of(rank, 2, agreeing.LEDGER, 10.0)
    agreement.step(list)

    def ctrl_c() -> list[bytes]:
        raise KeyboardInterrupt

    if rank == 0:
        with pytest.raises(KeyboardInterrupt):
            agreement.step(ctrl_c)
        with pytest.raises(AgreementError, match="step 2 was left by KeyboardInterrupt"):
            agreement.step(list)
        time.sleep(1.0)
        return ""
    with pytest.raises(RankLost) as caught:
        agreement.step(list)
    return str(caught.value)


def test_a_step_left_by_an_exception_ends_the_other_ranks_at_once() -> None:
    outcomes = watch_ranks(interrupted, 2)
    assert [outcome.error for outcome in outcomes] == [None] * 2, outcomes
    assert "rank 0 of this replica was lost" in outcomes[1].value
    assert "step 2 was left by KeyboardInterrupt" in outcomes[1].value


def forged_ahead(rank: int) -> str:
    agreement = agreement_of(rank, 2, agreeing.LEDGER, 10.0)
    agreement.step(list)
    if rank == 1:
        ledger = agreement._channel._ledger
        ledger.words[ledger.token_at[1]] = ledger.token(9, Kind.SAME)
        time.sleep(1.0)
        return ""
    with pytest.raises(RankLost) as caught:
        agreement.step(list)
    return str(caught.value)


def test_a_rank_that_runs_ahead_is_named() -> None:
    assert "it runs ahead: it is at step 9, rank 0 at 2" in watch_ranks(forged_ahead, 2)[0].value


def rotten_entry(rank: int) -> str:
    agreement = agreement_of(rank, 2, agreeing.LEDGER, 1.0)
    agreement.step(list)
    channel = agreement._channel
    if rank == 1:
        ledger = channel._ledger
        put = ledger.put_report

        def put_and_damage(own: int, step: int, report: bytes) -> None:
            put(own, step, report)
            ledger.words[ledger.token_at[own] + 2 * 8 + 5] ^= 1 << 17

        ledger.put_report = put_and_damage
        channel._last_report = None
    with pytest.raises(RankLost) as caught:
        agreement.step(list)
    return str(caught.value)


def test_a_report_that_stays_torn_is_never_accepted() -> None:
    outcomes = watch_ranks(rotten_entry, 2)
    assert "waited 1 s for its report, which stays unreadable" in outcomes[0].value
    assert "gave up waiting for this rank" in outcomes[1].value


def roll_call(rank: int, deadline_s: float) -> tuple[int, str]:
    """Three hosts of one rank: nobody sees the process of the rank that dies, only that connections break."""
    agreement = agreement_of(rank, 3, Way("tensor", "off", 3), deadline_s)
    for _ in range(3):
        agreement.step(list)
    if rank == 1:
        os._exit(1)
    if rank == 2:
        time.sleep(1.0)  # in its model while rank 0 already asks who is there
    with pytest.raises(RankLost) as caught:
        agreement.step(list)
    return caught.value.rank, caught.value.why


def test_ranks_alone_on_their_hosts_find_the_dead_one_by_a_roll_call() -> None:
    outcomes = watch_ranks(roll_call, 3, DEADLINE_S)
    assert [outcomes[rank].value[0] for rank in (0, 2)] == [1, 1]


def verdict_of_an_earlier_start(rank: int) -> str:
    old, new = replica_of(rank, 2, 2), replica_of(rank, 2, 2)
    if rank == 0:
        Verdicts(old, [0, 1]).post(RankLost(1, 7, "in an earlier start"))
    old.min_int(0)
    assert Verdicts(old, [0, 1]).look(8, 0) is not None
    assert Verdicts(new, [0, 1]).look(8, 0) is None
    agreement = Agreement(new)
    for _ in range(20):
        agreement.step(list)
        time.sleep(0.01)
    agreement.close()
    return "went on"


def test_a_verdict_of_an_earlier_start_is_not_heard() -> None:
    outcomes = watch_ranks(verdict_of_an_earlier_start, 2)
    assert [outcome.value for outcome in outcomes] == ["went on"] * 2, outcomes


def stuck_in_the_engine(event: threading.Event) -> None:
    event.wait(5.0)


def stalled_with_stacks(rank: int, folder: str) -> None:
    errors = open(Path(folder, f"stderr{rank}"), "w")  # noqa: SIM115 - stays open as this process's stderr
    os.dup2(errors.fileno(), 2)
    sys.stderr = os.fdopen(2, "w", closefd=False)
    agreement = Agreement(replica_of(rank, 2, 1, 1.0), dump_stacks=True)
    agreement.step(list)
    if rank == 1:
        stuck_in_the_engine(threading.Event())
        return
    with pytest.raises(RankLost):
        agreement.step(list)


def test_stacks_of_the_waiting_and_of_the_stalled_rank_are_written_on_request() -> None:
    with tempfile.TemporaryDirectory() as folder:
        outcomes = watch_ranks(stalled_with_stacks, 2, folder)
        assert [outcome.error for outcome in outcomes] == [None] * 2, outcomes
        waiting, stalled = (Path(folder, f"stderr{rank}").read_text() for rank in range(2))
    assert "rank 1 of this replica was lost at step 2" in waiting
    assert "in stalled_with_stacks" in waiting
    assert "in stuck_in_the_engine" in stalled


def dies_while_reading(rank: int) -> tuple[int, str]:
    agreement = agreement_of(rank, 3, agreeing.LEDGER, 10.0)
    agreement.step(list)
    if rank == 2:
        agreement._channel._ledger.put_cursor = lambda *_: os._exit(1)
    with pytest.raises(RankLost) as caught:
        agreement.step(lambda: [bytes(1 << 20)])  # four times the ring
    return caught.value.rank, caught.value.why


def test_a_rank_that_dies_in_the_middle_of_a_long_message_is_named_by_its_reader_and_its_writer() -> None:
    outcomes = watch_ranks(dies_while_reading, 3)
    for outcome in outcomes[:2]:
        assert outcome.error is None, outcome
        rank, why = outcome.value
        assert rank == 2
        assert "is gone" in why


def _target(fd: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except FileNotFoundError:  # of the listing itself
        return ""


def nothing_left(rank: int) -> list[str]:
    agreement = agreement_of(rank, 2, agreeing.LEDGER)
    agreement.step(list)
    maps = Path("/proc/self/maps").read_text()
    assert "mlkv-ledger" in maps
    agreement.close()
    assert "mlkv-ledger" not in Path("/proc/self/maps").read_text()
    dist.barrier()
    return [name for name in map(_target, os.listdir("/proc/self/fd")) if "ledger" in name]


def test_the_ledger_leaves_no_name_no_mapping_and_no_descriptor() -> None:
    assert [outcome.value for outcome in watch_ranks(nothing_left, 2)] == [[], []]
    assert not [name for name in os.listdir("/dev/shm") if "mlkv" in name]
