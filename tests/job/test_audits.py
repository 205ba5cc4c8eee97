"""Each audit fails when what it is for does not hold."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
import pytest

from mlkv.engine.audits import run_audits
from mlkv.engine.plan import JobPlan, LogitNoise, Model, RankResult, ReplicaResult, Served, StoreAudit
from mlkv.engine.processes import killed_rank
from mlkv.engine.workload import Ask


def plan(dtype: str = "float32") -> JobPlan:
    model = Model("m", "d", None, "tiny", 0)
    asks = [[Ask(name, [{"role": "user", "content": name}]) for name in ("a", "b")]]
    return JobPlan("/run", model, 2, 1, "cpu", dtype, 16, 16, 8, 1 << 20, asks, 2, 3, 64, 21, "")


def served(request_id: str, answer: list[int]) -> Served:
    return Served(request_id, 10, 10, 0, 0, 0.1, 0.2, answer)


@dataclasses.dataclass
class Results:
    replica: ReplicaResult
    ranks: list[RankResult]

    def audits(self, of: JobPlan) -> dict[str, bool]:
        return {audit.name: audit.passed for audit in run_audits(of, [self.replica], self.ranks)}


def results(**changes: Any) -> Results:
    answers = [served("a", [1, 2, 3]), served("b", [4, 5])]
    phases = {"off": answers, "noise": answers, "on": answers}
    noise = {"noise": LogitNoise(0.1, 8.0, 5, 0), "on": LogitNoise(0.15, 8.0, 5, 0)}
    audit = StoreAudit(64, 60, 0, 4, 0, 0, 0, "")
    moved = {"loaded_pages": 1, "loaded_bytes": 1, "offloaded_pages": 1, "offloaded_bytes": 1}
    rest = {"steps": 9, "failed_loads": 0, "failed_offloads": 0, "agree_us": {}, "channel": "object"}
    ranks = [
        RankResult(rank, "steps", "outputs", loaded_pages_by_tier={"host": 1}, **moved, **rest)
        for rank in range(2)
    ]
    replica = ReplicaResult(0, phases, dict.fromkeys(phases, 1.0), noise, audit, "")
    return Results(msgspec.structs.replace(replica, **changes), ranks)


HOLD = {"outputs_equal": True, "ranks_equal": True, "pages_conserved": True}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_audits_hold_for_equal_results(dtype: str) -> None:
    assert results().audits(plan(dtype)) == HOLD


@pytest.mark.parametrize("on", [[served("a", [1, 2, 3]), served("b", [4, 6])], [served("a", [1, 2, 3])]])
def test_another_token_or_a_missing_answer_fails(on: list[Served]) -> None:
    answers = [served("a", [1, 2, 3]), served("b", [4, 5])]
    assert results(served={"off": answers, "on": on}).audits(plan()) == HOLD | {"outputs_equal": False}


@pytest.mark.parametrize(
    "on", [LogitNoise(0.5, 8.0, 5, 0), LogitNoise(float("inf"), 8.0, 5, 0), LogitNoise(0.1, 8.0, 4, 0)]
)
def test_logits_beyond_the_noise_or_not_compared_fail(on: LogitNoise) -> None:
    noise = {"noise": LogitNoise(0.1, 8.0, 5, 0), "on": on}
    assert results(noise=noise).audits(plan("bfloat16")) == HOLD | {"outputs_equal": False}


@pytest.mark.parametrize("change", [{"results_digest": "x"}, {"outputs_digest": "x"}, {"steps": 8}, {"rank": 5}])
def test_a_rank_with_other_results_or_none_fails(change: dict[str, Any]) -> None:
    found = results()
    found.ranks[1] = msgspec.structs.replace(found.ranks[1], **change)
    assert found.audits(plan()) == HOLD | {"ranks_equal": False}


@pytest.mark.parametrize(
    "audit",
    [
        StoreAudit(64, 59, 0, 4, 0, 0, 0, ""),  # one page is nowhere
        StoreAudit(64, 59, 1, 4, 0, 0, 1, ""),
        StoreAudit(64, 59, 0, 4, 1, 0, 0, ""),
        StoreAudit(64, 60, 0, 4, 0, 1, 0, ""),
        StoreAudit(64, 60, 0, 4, 0, 0, 0, "the index is wrong"),
    ],
)
def test_a_page_that_is_held_or_lost_fails(audit: StoreAudit) -> None:
    assert results(audit=audit).audits(plan()) == HOLD | {"pages_conserved": False}


def test_a_device_page_that_was_not_returned_fails() -> None:
    assert results(device_problem="1 page").audits(plan()) == HOLD | {"pages_conserved": False}


def test_the_killed_rank_is_found_among_those_that_torchrun_ended() -> None:
    failure = "[{0}]:\n  time : x\n  rank      : {0} (local_rank: {0})\n  exitcode  : {1} (pid: 23039) (x)\n"
    log = failure.format(0, -15) + "Root Cause (first observed failure):\n" + failure.format(1, -9)
    assert killed_rank(log) == "rank 1 was ended by SIGKILL"
    assert killed_rank(failure.format(0, -15) + failure.format(1, 1)) == ""
