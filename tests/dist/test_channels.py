"""Every channel on real ranks: the same results everywhere, whatever is slow, long or far away."""

from __future__ import annotations

import logging
import random
import threading
import time

import pytest

from mlkv.dist import Agreement, Mark, Replica, Stream
from mlkv.dist.ledger import NUM_SLOTS, PIECE_BYTES, Ledger
from mlkv.errors import AgreementError, CacheUsageError, ConfigError, MLKVError, RanksDiverged
from tests.dist import agreeing
from tests.dist.agreeing import Way, Work, agreement_of, replica_of
from tests.ranks import run_ranks

every_way = pytest.mark.parametrize("way", agreeing.ALL, ids=str)
some_ways = pytest.mark.parametrize(
    "way", [agreeing.LEDGER, agreeing.TENSOR_LATE, agreeing.HIERARCHICAL_LATE], ids=str
)
History = list[tuple[object, ...]]


def work_with_delays(rank: int, way: Way, num_steps: int) -> tuple[History, str, bool]:
    """Steps of random work with random delays; what each step agreed."""
    agreement = agreement_of(rank, 4, way)
    work, delays = Work(agreement, rank), random.Random(100 + rank)
    history: History = []
    for step in range(num_steps):
        work.go_on()
        if delays.random() < 0.1:
            time.sleep(delays.random() * 0.004)
        agreed = agreement.step(lambda step=step: [b"fact %d" % step * 50] if step % 2 else [])
        history.append((agreed.popped, agreed.facts, sorted(agreed.failures.items())))
    agreement.close()
    return history, agreement.channel_name, agreement.late


@pytest.fixture(name="reference", scope="module")
def make_reference() -> History:
    return run_ranks(work_with_delays, 4, agreeing.OBJECT, 300)[0][0]


@every_way
def test_every_rank_gets_the_same_over_every_channel_whatever_is_slow(way: Way, reference: History) -> None:
    found = run_ranks(work_with_delays, 4, way, 300)
    for history, name, late in found:
        assert (name, late) == (way.channel, way.late == "on")
        # The same as over the reference channel; where it is one step late, exactly one step later.
        assert history == ([((range(1, 1),) * 3, (), []), *reference[:-1]] if late else reference)
    assert sum(len(popped[Mark.LOADED]) for popped, _, _ in reference) > 50
    assert any(failures for _, _, failures in reference)


SIZES = [0, 1, PIECE_BYTES - 20, PIECE_BYTES, 5 * PIECE_BYTES, (NUM_SLOTS + 3) * PIECE_BYTES, 3_000_000, 17]


def long_facts(rank: int, way: Way) -> int:
    agreement = agreement_of(rank, 4, way)
    seen: list[bytes] = []
    for size in [*SIZES, *SIZES, None]:
        facts = [] if size is None else [random.Random(size).randbytes(size)]
        seen += agreement.step(lambda facts=facts: facts).facts
    agreement.close()
    expected = [random.Random(size).randbytes(size) for size in [*SIZES, *SIZES]]
    assert [len(fact) for fact in seen] == [len(fact) for fact in expected]
    assert seen == expected
    return len(seen)


@every_way
def test_facts_longer_than_a_slot_a_row_or_the_ring_arrive_whole(way: Way) -> None:
    assert run_ranks(long_facts, 4, way) == [2 * len(SIZES)] * 4


def wrap_the_ring(rank: int) -> int:
    agreement = agreement_of(rank, 2, agreeing.LEDGER)
    for step in range(3 * NUM_SLOTS):
        fact = b"%d" % step
        assert agreement.step(lambda fact=fact: [fact]).facts == (fact,)
    agreement.close()
    return step


def test_the_ring_of_the_ledger_is_used_again_and_again() -> None:
    assert run_ranks(wrap_the_ring, 2) == [3 * NUM_SLOTS - 1] * 2


def diverge_late(rank: int, way: Way) -> tuple[int, str]:
    agreement = agreement_of(rank, 4, way)
    agreement.step(list)
    agreement.member.record(Stream.CALLS, b"odd" if rank == 3 else b"even", f"lookup(r{rank})")
    if agreement.late:
        agreement.step(list)
    with pytest.raises(RanksDiverged) as caught:
        agreement.step(list)
    with pytest.raises(RanksDiverged):  # and it stays broken
        agreement.step(list)
    agreement.close()
    return caught.value.rank, str(caught.value)


@some_ways
def test_divergence_is_named_alike_over_every_channel(way: Way) -> None:
    for rank, (diverged, message) in enumerate(run_ranks(diverge_late, 4, way)):
        assert diverged == 3
        assert "calls 1..1 are not the master's" in message
        assert f"lookup(r{rank})" in message


def broken_master(rank: int, way: Way) -> str:
    agreement = agreement_of(rank, 4, way)
    agreement.step(list)

    def broken() -> list[bytes]:
        raise ValueError("the index is on fire")

    if agreement.late:
        agreement.step(broken)
    with pytest.raises(AgreementError, match="ValueError: the index is on fire") as caught:
        agreement.step(broken)
    agreement.close()
    return type(caught.value).__name__


@some_ways
def test_an_error_of_the_master_reaches_every_rank_over_every_channel(way: Way) -> None:
    assert run_ranks(broken_master, 4, way) == ["MasterFailed"] * 4


def choose(rank: int, hosts: int) -> tuple[str, bool, list[str]]:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("mlkv.dist").addHandler(handler)
    logging.getLogger("mlkv.dist").setLevel(logging.INFO)
    agreement = Agreement(replica_of(rank, 4, hosts))
    for _ in range(3):
        agreement.step(list)
    agreement.close()
    return agreement.channel_name, agreement.late, lines


@pytest.mark.parametrize(
    ("hosts", "channel", "late"), [(1, "ledger", False), (2, "hierarchical", True), (4, "tensor", True)]
)
def test_auto_chooses_by_where_ranks_run_and_says_so_once(hosts: int, channel: str, late: bool) -> None:
    found = run_ranks(choose, 4, hosts)
    assert [(name, is_late) for name, is_late, _ in found] == [(channel, late)] * 4
    (line,) = found[0][2]
    assert channel in line
    assert f"4 ranks on {hosts} host" in line
    assert ("one step late" in line) is late
    assert [lines for _, _, lines in found[1:]] == [[], [], []]


def no_such_file(path: str, size: int, session: int) -> Ledger:
    raise MLKVError(f"cannot open the master's ledger at {path}: Permission denied")


def without_shared_memory(rank: int) -> tuple[str, str]:
    replica = replica_of(rank, 2, 1)
    if rank == 1:
        # As where /proc may not be read: the master's descriptor cannot be opened.
        Ledger.attach = no_such_file  # type: ignore[method-assign]
    with pytest.raises(MLKVError) as caught:
        Agreement(replica, "ledger")
    refused = str(caught.value)
    agreement = Agreement(replica, "auto")
    agreement.step(list)
    agreement.close()
    return refused, agreement.channel_name


def test_without_shared_memory_ledger_fails_everywhere_and_auto_does_without() -> None:
    (first, first_channel), (second, second_channel) = run_ranks(without_shared_memory, 2)
    assert "rank 1 of this replica cannot map the ledger" in first
    assert "cannot open the master's ledger at /proc/" in second
    assert (first_channel, second_channel) == ("tensor", "tensor")


def refused(rank: int, hosts: int, channel: str, late: str) -> str:
    replica = replica_of(rank, 2, hosts)
    if rank == 0:  # alone: were anything exchanged before the refusal, this would wait for rank 1
        with pytest.raises(ConfigError) as caught:
            Agreement(replica, channel, late=late)
        text = str(caught.value)
    else:
        text = ""
    replica.min_int(0)
    return text


@pytest.mark.parametrize(
    ("hosts", "channel", "late", "why"),
    [
        (2, "ledger", "auto", r"'ledger' is for ranks of one host.*on 2 \(ranks 0; 1\)"),
        (1, "hierarchical", "auto", "'hierarchical' is for several hosts"),
        (1, "ledger", "on", "'on' is for channels that cross hosts, not for 'ledger'"),
        (1, "smoke signals", "auto", "'smoke signals' is none of"),
        (1, "auto", "maybe", "'maybe' is none of"),
    ],
)
def test_a_channel_that_cannot_be_is_refused_before_anything_is_exchanged(
    hosts: int, channel: str, late: str, why: str
) -> None:
    import re

    text = run_ranks(refused, 2, hosts, channel, late, deadline_s=20.0)[0]
    assert re.search(why, text), text


def step_from_two_threads(rank: int) -> str:
    agreement = agreement_of(rank, 2, agreeing.LEDGER)
    if rank == 1:
        # Rank 1 takes its step only after rank 0 has tried its second one.
        replica_says = agreement._replica.min_int(0)
        agreement.step(list)
        return str(replica_says)
    inside = threading.Thread(target=lambda: agreement.step(list))
    inside.start()
    end = time.monotonic() + 10
    while not agreement._stepping and time.monotonic() < end:
        time.sleep(0.001)
    with pytest.raises(CacheUsageError, match="still runs in another thread") as caught:
        agreement.step(list)
    agreement._replica.min_int(0)
    inside.join()
    return str(caught.value)


def test_two_steps_at_once_are_refused_and_the_first_goes_on() -> None:
    assert "step 1 still runs" in run_ranks(step_from_two_threads, 2)[0]


def exchange_twice(rank: int) -> str:
    agreement = agreement_of(rank, 2, agreeing.LEDGER)
    agreement.step(list)
    if rank == 0:
        return ""
    with pytest.raises(AgreementError, match="each step is exchanged once") as caught:
        agreement._channel.exchange(1, agreement.member.report(), agreement._decisions)
    return str(caught.value)


def test_exchanging_a_step_twice_is_an_error() -> None:
    assert "step 1 exchanged after step 1" in run_ranks(exchange_twice, 2)[1]


def leave_after_a_late_step(rank: int) -> tuple[bytes, ...]:
    agreement = agreement_of(rank, 2, agreeing.TENSOR_LATE, 5.0)
    agreement.step(lambda: [b"last words"])
    # Rank 1 leaves while its own thread has hardly heard of the exchange.
    facts = agreement.step(list).facts if rank == 0 else ()
    agreement.close()
    return facts


def test_a_rank_that_leaves_right_after_a_late_step_has_taken_part_in_its_exchange() -> None:
    assert run_ranks(leave_after_a_late_step, 2)[0] == (b"last words",)


def test_a_single_rank_needs_no_other_and_is_never_late() -> None:
    agreement = Agreement(Replica.single(), "auto")
    assert (agreement.channel_name, agreement.late) == ("local", False)
    assert agreement.step(lambda: [b"x"]).facts == (b"x",)
