"""At the end of the main job ranks wait for each other's files; one that stands still is named, not waited for."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mlkv.engine import rank as ranks
from mlkv.engine.plan import RankResult
from mlkv.engine.watch import RankGone
from mlkv.errors import DeadlineExceeded
from mlkv.tasks import CacheStats

CACHE: Any = SimpleNamespace(stats=CacheStats, results_digest=b"")


@pytest.fixture
def plan() -> Any:
    """Of two replicas of two ranks."""
    return SimpleNamespace(tp=2, dp=2, deadline_s=0.2, tiers={})


def leave(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).touch()


def test_a_rank_without_a_result_is_named(plan: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    leave(tmp_path, "rank1.json", "rank2.json")
    with pytest.raises(RankGone, match=r"rank3\.json did not appear") as raised:
        ranks.report_rank(CACHE, "", plan, tmp_path)
    assert raised.value.rank == 3
    assert ranks.files.read(tmp_path / "rank0.json", RankResult).rank == 0, "its own is there all the same"


def test_a_rank_may_end_when_all_have_left_their_results(
    plan: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "2")
    leave(tmp_path, "rank0.json", "rank1.json", "rank3.json")
    ranks.report_rank(CACHE, "", plan, tmp_path)


def test_a_master_that_stops_before_or_while_it_counts_is_named(plan: Any, tmp_path: Path) -> None:
    leave(tmp_path, "drained0")
    with pytest.raises(RankGone, match="drained1 did not appear") as raised:
        ranks.await_books(plan, tmp_path, replica=1)
    assert raised.value.rank == 2
    leave(tmp_path, "drained1")
    with pytest.raises(RankGone, match=r"replica1\.json did not appear") as raised:
        ranks.await_books(plan, tmp_path, replica=1)
    assert raised.value.rank == 2
    leave(tmp_path, "replica1.json")
    ranks.await_books(plan, tmp_path, replica=1)


def test_another_replica_that_still_serves_is_nobodys_fault(
    plan: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "_REPLICAS_DEADLINE_S", 0.5)
    leave(tmp_path, "drained1")
    with pytest.raises(DeadlineExceeded, match="drained0 did not appear within 0 s"):
        ranks.await_books(plan, tmp_path, replica=1)
