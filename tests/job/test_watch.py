"""Ranks of the main job watch each other's processes, and name the one that is the cause."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mlkv.engine import plan as files
from mlkv.engine import watch as watching
from mlkv.engine.watch import RankGone, Watch
from mlkv.errors import RankLost

BROKEN = RuntimeError("Connection closed by peer")
TIMED_OUT = RuntimeError("Timed out waiting 8000ms for recv operation to complete")  # as Gloo says it


class Rank:
    """Another rank: a process that waits, and the files it leaves."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder, self.rank = folder, rank
        self.process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        files.write(files.CheckedIn(rank, self.process.pid), folder / f"present{rank}.json")

    def end(self) -> None:
        self.process.kill()
        self.process.wait()

    def leave_error(self, kind: str, lost: int = -1) -> None:
        error = files.RankError(self.rank, time.time(), kind, "its words", True, "", lost)
        files.write(error, self.folder / f"error{self.rank}.json")


@pytest.fixture
def others(tmp_path: Path) -> Iterator[list[Rank]]:
    ranks = [Rank(tmp_path, rank) for rank in (1, 2)]
    yield ranks
    for rank in ranks:
        rank.end()
        assert rank.process.stdin is not None
        rank.process.stdin.close()


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Watch]]:
    """A watch of rank 0 of three, with little patience."""
    monkeypatch.setattr(watching, "PATIENCE_S", 0.3)
    started: list[Watch] = []

    def make(
        on_gone: Callable[[RankGone], None] = lambda _gone: None, deadline_s: float = 30.0, tp: int = 3
    ) -> Watch:
        started.append(Watch(tmp_path, 0, 3, tp, deadline_s, on_gone))
        return started[-1]

    yield make
    for watch in started:
        watch.close()


def test_a_broken_collective_is_explained_by_the_process_that_ended(
    others: list[Rank], start: Callable[..., Watch]
) -> None:
    watch = start()
    others[1].end()
    gone = watch.explain(BROKEN)
    assert isinstance(gone, RankGone)
    assert gone.rank == 2
    assert "ended without a word" in str(gone)


def test_of_ranks_that_ended_together_the_one_that_blames_nobody_is_named(
    others: list[Rank], start: Callable[..., Watch]
) -> None:
    others[0].leave_error("RankGone", lost=2)
    others[1].leave_error("ZeroDivisionError")
    for rank in others:
        rank.end()
    gone = start().explain(BROKEN)
    assert isinstance(gone, RankGone)
    assert gone.rank == 2
    assert "ended with ZeroDivisionError: its words" in str(gone)


def test_a_rank_that_ended_because_another_is_stuck_leads_to_that_one(
    others: list[Rank], start: Callable[..., Watch]
) -> None:
    others[0].leave_error("RankLost", lost=2)
    others[0].end()
    gone = start().explain(BROKEN)
    assert isinstance(gone, RankGone)
    assert gone.rank == 2


def test_a_rank_that_has_left_its_result_is_not_missed(
    tmp_path: Path, others: list[Rank], start: Callable[..., Watch]
) -> None:
    watch = start()
    (tmp_path / "rank1.json").touch()
    others[0].end()
    others[1].leave_error("ConfigError")
    assert watch.explain(BROKEN) is BROKEN


def test_when_nobody_ended_the_rank_that_does_not_report_a_failure_as_well_is_named(
    tmp_path: Path, others: list[Rank], start: Callable[..., Watch]
) -> None:
    (tmp_path / "stuck1.json").touch()
    gone = start().explain(TimeoutError("no word within 8 s"))
    assert isinstance(gone, RankGone)
    assert gone.rank == 2
    assert "does not take part" in str(gone)


@pytest.mark.parametrize(("reported", "named"), [(2, 1), (1, 2)])
def test_a_stuck_rank_is_looked_for_in_the_replica_first(
    tmp_path: Path, others: list[Rank], start: Callable[..., Watch], reported: int, named: int
) -> None:
    (tmp_path / f"stuck{reported}.json").touch()
    gone = start(tp=2).explain(TIMED_OUT)
    assert isinstance(gone, RankGone)
    assert gone.rank == named


def test_a_rank_of_another_replica_that_only_computes_is_not_taken_for_the_stuck_one(
    others: list[Rank], start: Callable[..., Watch]
) -> None:
    gone = start(tp=2).explain(TIMED_OUT)
    assert isinstance(gone, RankGone)
    assert gone.rank == 1


def test_a_failure_of_this_rank_alone_is_not_blamed_on_ranks_that_wait_for_it(
    others: list[Rank], start: Callable[..., Watch]
) -> None:
    own = RuntimeError("CUDA out of memory")
    assert start().explain(own) is own


def test_errors_that_no_other_rank_can_cause_are_left_as_they_are(
    others: list[Rank], start: Callable[..., Watch]
) -> None:
    others[0].end()
    own, named = ValueError("of this rank"), RankLost(1, 7, "named by the agreement")
    watch = start()
    assert watch.explain(own) is own
    assert watch.explain(named) is named


def test_a_rank_that_never_starts_is_named_at_the_deadline(tmp_path: Path, start: Callable[..., Watch]) -> None:
    only = Rank(tmp_path, 1)
    told: list[RankGone] = []
    heard = threading.Event()
    start(lambda gone: (told.append(gone), heard.set()), deadline_s=0.3)
    assert heard.wait(10)
    only.end()
    assert [gone.rank for gone in told] == [2]
    assert "did not start within 0.3 s" in str(told[0])


def test_a_rank_stuck_for_good_is_ended_by_the_watch_but_one_that_ends_itself_is_not(
    others: list[Rank], start: Callable[..., Watch]
) -> None:
    told: list[RankGone] = []
    heard = threading.Event()
    start(lambda gone: (told.append(gone), heard.set()))
    ends_itself = start(lambda gone: pytest.fail(f"told of {gone}"))
    others[0].end()
    assert isinstance(ends_itself.explain(BROKEN), RankGone)
    ends_itself.close()
    assert heard.wait(10)
    assert [gone.rank for gone in told] == [1]


def test_a_process_that_ended_before_it_was_watched_is_found(tmp_path: Path, start: Callable[..., Watch]) -> None:
    early, late = Rank(tmp_path, 1), Rank(tmp_path, 2)
    early.end()
    assert not os.path.exists(f"/proc/{early.process.pid}")
    gone = start().explain(BROKEN)
    late.end()
    assert isinstance(gone, RankGone)
    assert gone.rank == 1
