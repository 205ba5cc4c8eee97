"""The step protocol without any transport: random progress on every rank, one decision for all."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlkv.dist import Decision, Mark, Master, Member, Progress, Stream, TaskFailure
from mlkv.dist.protocol import MAX_FAILURES, REPORT_BYTES
from mlkv.errors import AgreementError, MasterFailed, RanksDiverged


class Group:
    """Members and their master, stepped together; checks what every rank pops."""

    def __init__(self, size: int, master_type: type[Master] = Master) -> None:
        self.members = [Member(rank) for rank in range(size)]
        self.master = master_type(size, self.members[0])
        self.popped: dict[Mark, list[int]] = {mark: [] for mark in Mark}
        self.failures: dict[tuple[int, int], int] = {}

    def submit(self, stream: Stream, identity: bytes = b"x") -> int:
        (number,) = {member.record(stream, identity, "t") for member in self.members}
        return number

    def step(self, facts: tuple[bytes, ...] = ()) -> Decision:
        # Through the fixed-size words, as a channel carries them.
        words = [member.progress().to_words() for member in self.members]
        decision = self.master.decide([Progress.from_words(row) for row in words], facts)
        popped = [member.apply(decision) for member in self.members]
        assert all(mine == popped[0] for mine in popped)
        for mark in Mark:
            self.popped[mark] += list(popped[0][mark])
        for failure in decision.failures:
            self.failures[failure.mark, failure.number] = failure.num_good
        return decision


def test_slowest_rank_decides_what_is_popped() -> None:
    group = Group(3)
    for _ in range(3):
        group.submit(Stream.LOADS)
    for member, finished in zip(group.members, (3, 1, 2), strict=True):
        for number in range(1, finished + 1):
            member.finish(Mark.LOADED, number)
    group.step()
    assert group.popped[Mark.LOADED] == [1]
    group.members[1].finish(Mark.LOADED, 2)
    group.step()
    assert group.popped[Mark.LOADED] == [1, 2]


def test_completion_out_of_order_waits_for_the_earlier_task() -> None:
    group = Group(2)
    first, second = group.submit(Stream.LOADS), group.submit(Stream.LOADS)
    for member in group.members:
        member.finish(Mark.LOADED, second)
    group.step()
    assert group.popped[Mark.LOADED] == []
    for member in group.members:
        member.finish(Mark.LOADED, first)
    group.step()
    assert group.popped[Mark.LOADED] == [1, 2]


def test_failure_on_one_rank_is_everybodys_with_the_fewest_good_pages() -> None:
    group = Group(3)
    group.submit(Stream.LOADS)
    group.members[0].finish(Mark.LOADED, 1)
    group.members[1].finish(Mark.LOADED, 1, num_good=4)
    group.step()
    assert group.failures == {}  # rank 2 still reads the pages
    group.members[2].finish(Mark.LOADED, 1, num_good=2)
    decision = group.step()
    assert decision.failures == (TaskFailure(Mark.LOADED, 1, 2, rank=2),)


def test_a_completion_reported_twice_counts_once() -> None:
    group = Group(2)
    group.submit(Stream.LOADS)
    group.submit(Stream.LOADS)
    for _ in range(2):
        group.members[0].finish(Mark.LOADED, 1)
        group.members[1].finish(Mark.LOADED, 1)
    group.step()
    group.step()
    assert group.popped[Mark.LOADED] == [1]


def test_more_failures_than_a_report_holds_hold_back_their_marks() -> None:
    group = Group(2)
    count = 2 * MAX_FAILURES + 3
    for _ in range(count):
        group.submit(Stream.OFFLOADS)
    for number in range(1, count + 1):
        for member in group.members:
            member.finish(Mark.RELEASED, number)
        group.members[0].finish(Mark.OFFLOADED, number)
        group.members[1].finish(Mark.OFFLOADED, number, num_good=number % 3)
    seen = []
    for _ in range(3):
        group.step()
        seen.append(len(group.popped[Mark.OFFLOADED]))
    assert seen == [MAX_FAILURES, 2 * MAX_FAILURES, count]
    assert group.failures == {(Mark.OFFLOADED, n): n % 3 for n in range(1, count + 1)}


def test_an_empty_step_changes_nothing_and_is_always_sent() -> None:
    group = Group(2)
    for step in range(1, 100):
        decision = group.step()
        assert decision == Decision(step, (0, 0, 0))


def test_different_calls_are_named_with_rank_and_call() -> None:
    group = Group(3)
    group.step()
    for rank, member in enumerate(group.members):
        member.record(Stream.CALLS, b"other" if rank == 2 else b"same", f"lookup(r{rank})")
    with pytest.raises(RanksDiverged, match=r"rank 2 .* calls 1\.\.1 .*lookup\(r0\)") as caught:
        group.step()
    assert caught.value.rank == 2


def test_a_rank_that_made_fewer_calls_is_named() -> None:
    group = Group(2)
    group.members[0].record(Stream.LOADS, b"x", "r1")
    with pytest.raises(RanksDiverged, match=r"rank 1 .* made 0 loads, the master 1"):
        group.step()


def test_a_rank_at_another_step_is_named() -> None:
    group = Group(2)
    group.members[1].progress()
    with pytest.raises(RanksDiverged, match=r"rank 1 .* at step 2, the master at 1"):
        group.step()


def test_an_order_of_calls_is_part_of_their_identity() -> None:
    group = Group(2)
    for member, order in zip(group.members, ((b"a", b"b"), (b"b", b"a")), strict=True):
        for identity in order:
            member.record(Stream.CALLS, identity, "t")
    with pytest.raises(RanksDiverged, match="rank 1"):
        group.step()


def test_an_error_of_the_master_reaches_every_member() -> None:
    member = Member(1)
    member.progress()
    with pytest.raises(MasterFailed, match="out of luck"):
        member.apply(Decision(1, master_error="out of luck"))


class PollsOnlyItself(Master):
    """The classic mistake: the master's own events stand for everybody's."""

    def decide(self, progress: list[Progress], facts: tuple[bytes, ...]) -> Decision:  # type: ignore[override]
        return Decision(progress[0].step, progress[0].marks, (), tuple(facts))


def test_a_master_that_polls_only_itself_is_caught_by_the_rank_it_ignores() -> None:
    group = Group(2, PollsOnlyItself)
    group.submit(Stream.LOADS)
    group.members[0].finish(Mark.LOADED, 1)
    with pytest.raises(AgreementError, match="moved loaded from 0 to 1, but rank 1 has finished 0"):
        group.step()


def test_finishing_what_was_never_submitted_is_refused() -> None:
    with pytest.raises(AgreementError, match="never submitted"):
        Member(0).finish(Mark.LOADED, 1)


actions = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.sampled_from([Stream.LOADS, Stream.OFFLOADS])),
        st.tuples(
            st.just("finish"),
            st.integers(0, 3),
            st.sampled_from(list(Mark)),
            st.integers(1, 12),
            st.none() | st.integers(0, 5),
        ),
        st.just(("step",)),
    ),
    max_size=120,
)


@settings(max_examples=300, deadline=None)
@given(size=st.integers(1, 4), story=actions)
def test_any_story_pops_each_task_once_in_order_when_all_ranks_finished(size: int, story: list[tuple]) -> None:
    group = Group(size)
    submitted = {Stream.LOADS: 0, Stream.OFFLOADS: 0}
    finished: dict[tuple[Mark, int], dict[int, int | None]] = {}
    for action in story:
        if action[0] == "submit":
            submitted[action[1]] = group.submit(action[1])
        elif action[0] == "finish":
            _, rank, mark, number, num_good = action
            if rank < size and number <= submitted[mark.stream]:
                group.members[rank].finish(mark, number, num_good)
                finished.setdefault((mark, number), {}).setdefault(rank, num_good)
        else:
            group.step()
    for _ in range(12):  # enough for every held-back failure
        group.step()
    for mark in Mark:
        expected = []
        for number in range(1, submitted[mark.stream] + 1):
            if len(finished.get((mark, number), {})) < size:
                break
            expected.append(number)
        assert group.popped[mark] == expected
        for number in expected:
            goods = [good for good in finished[mark, number].values() if good is not None]
            assert group.failures.get((mark, number)) == (min(goods) if goods else None)


@settings(max_examples=150, deadline=None)
@given(story=actions)
def test_the_quick_report_is_the_full_one(story: list[tuple]) -> None:
    quick, full = Member(0), Member(0)
    submitted = {Stream.LOADS: 0, Stream.OFFLOADS: 0}
    for action in [*story, ("step",), ("step",), ("step",)]:
        if action[0] == "submit":
            submitted[action[1]] = quick.record(action[1], b"x", "t")
            full.record(action[1], b"x", "t")
        elif action[0] == "finish":
            _, _, mark, number, num_good = action
            if number <= submitted[mark.stream]:
                quick.finish(mark, number, num_good)
                full.finish(mark, number, num_good)
        else:
            progress = full.progress()
            assert quick.report() == progress.pack()
            assert quick.step == progress.step
            assert Progress.unpack(progress.step, progress.pack()) == progress
            assert Progress.from_words(progress.to_words()) == progress


@pytest.mark.parametrize("report", [b"", bytes(REPORT_BYTES - 8), b"\xff" * REPORT_BYTES])
def test_bytes_that_are_no_report_are_refused(report: bytes) -> None:
    with pytest.raises(ValueError, match="report"):
        Progress.unpack(1, report)


def test_a_late_member_applies_the_decision_of_the_step_before() -> None:
    member = Member(0, late=True)
    member.record(Stream.LOADS, b"x", "first")
    member.finish(Mark.LOADED, 1)
    member.progress()
    member.record(Stream.LOADS, b"x", "second")
    member.finish(Mark.LOADED, 2)
    member.progress()
    assert member.apply(Decision(1, (1, 0, 0)))[Mark.LOADED] == range(1, 2)
    assert member.describe_newest(2) == "loads[2]=second"
    member.progress()
    assert member.apply(Decision(2, (2, 0, 0)))[Mark.LOADED] == range(2, 3)


@pytest.mark.parametrize("decision", [Decision(2, (1, 0, 0)), Decision(1, (2, 0, 0)), Decision(0)])
def test_a_late_member_refuses_what_does_not_follow_from_the_step_before(decision: Decision) -> None:
    member = Member(0, late=True)
    for number in (1, 2):
        member.record(Stream.LOADS, b"x", "t")
        member.finish(Mark.LOADED, number)
        member.progress()
    with pytest.raises(AgreementError):
        member.apply(decision)
