"""`MLKV_TRACE`: what a rank did and when, for Chrome and Perfetto."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from mlkv import Hit, Replica
from mlkv.trace import Trace, trace_path
from tests.cache.bench import Rank, slots_of, tokens_of
from tests.ranks import run_ranks, watch_ranks


def events_of(path: Path) -> list[dict[str, Any]]:
    """As Perfetto reads it: an array that need not be closed."""
    text = path.read_text()
    events: list[dict[str, Any]] = json.loads(text.rstrip().rstrip(",") + "]")
    assert all({"ph", "name", "pid", "ts"} <= set(event) for event in events)
    return events


def traffic(rank: Rank) -> None:
    tokens = tokens_of(19)
    rank.compute(tokens, slots_of(0, 19))
    rank.store("a", tokens, slots_of(0, 19))
    assert rank.fetch("b", tokens, slots_of(50, 19)) == 16
    assert rank.ask("c", tokens) == Hit(16)
    rank.cache.abort("c")
    rank.cache.lookup("d", tokens)
    rank.cache.decline("d")
    rank.cache.offload("e", tokens_of(9, 1), slots_of(0, 9))
    rank.cache.abort("e")
    rank.drain()


def traced_rank(rank_index: int, file: str) -> int:
    os.environ["MLKV_TRACE"] = file
    rank = Rank(Replica.from_world(tp=2, deadline_s=20.0))
    traffic(rank)
    rank.check_conserved()
    rank.cache.close()
    return rank.cache.stats().steps


def test_each_rank_writes_a_file_in_which_every_task_ends(tmp_path: Path) -> None:
    steps = run_ranks(traced_rank, 2, str(tmp_path / "trace.json"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["trace.rank0.json", "trace.rank1.json"]
    for number in range(2):
        events = events_of(tmp_path / f"trace.rank{number}.json")
        assert {event["pid"] for event in events} == {number}
        begun = Counter((event["cat"], event["id"]) for event in events if event["ph"] == "b")
        ended = Counter((event["cat"], event["id"]) for event in events if event["ph"] == "e")
        assert begun == ended
        assert Counter(kind for kind, _ in begun) == {"lookup": 3, "load": 1, "offload": 2}
        assert set(begun.values()) == {1}
        whys = [event["args"].get("why") for event in events if event["ph"] == "e"]
        assert "given up" in whys
        load = [event for event in events if event.get("cat") == "load"]
        assert load[1]["args"] == {"tokens": 16}
        assert load[1]["ts"] >= load[0]["ts"]
        assert next(event["args"]["request"] for event in events if event["name"] == "released") == "a"
        step_events = [event for event in events if event["name"] == "step"]
        assert [event["args"]["step"] for event in step_events] == list(range(1, steps[number] + 1))
        agree = [event for event in events if event["name"] == "agree"]
        assert all(within["dur"] <= whole["dur"] for within, whole in zip(agree, step_events, strict=True))


def killed_rank(rank_index: int, file: str) -> None:
    os.environ["MLKV_TRACE"] = file
    rank = Rank(Replica.single())
    traffic(rank)
    for _ in range(3000):
        rank.step()
    os.kill(os.getpid(), signal.SIGKILL)


def test_file_of_a_killed_rank_can_be_read(tmp_path: Path) -> None:
    (outcome,) = watch_ranks(killed_rank, 1, str(tmp_path / "trace.json"))
    assert outcome.exitcode == -signal.SIGKILL
    assert len(events_of(tmp_path / "trace.rank0.json")) > 10


def test_without_the_variable_nobody_watches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLKV_TRACE", raising=False)
    rank = Rank(Replica.single())
    try:
        assert rank.cache._lifecycle.observer is None
    finally:
        rank.cache.close()


def test_a_file_that_cannot_be_made_stops_nobody(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MLKV_TRACE", str(tmp_path / "absent" / "trace.json"))
    rank = Rank(Replica.single())
    try:
        traffic(rank)
    finally:
        rank.cache.close()
    assert "no trace: No such file or directory" in caplog.text


def test_a_full_disk_ends_the_trace_and_memory_stays_bounded(caplog: pytest.LogCaptureFixture) -> None:
    trace = Trace(Path("/dev/full"), 0)
    for call in range(20_000):
        trace.began("lookup", call, "x" * 100)
    assert len(trace._unwritten) < 1 << 20
    assert caplog.text.count("No space left on device") == 1
    trace.close()


def test_memory_is_bounded_within_a_step(tmp_path: Path) -> None:
    trace = Trace(trace_path(str(tmp_path / "t.json"), 3), 3)
    for call in range(5000):
        trace.began("lookup", call, "x" * 100)
        assert len(trace._unwritten) < 256 << 10
    trace.close()
    assert len(events_of(tmp_path / "t.rank3.json")) == 5002
