"""Real vLLM answers the same with mlkv as without, however it runs its workers and whatever happens to copies."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.conftest import Run, add_row
from tests.vllm.harness import Ended

Truth = list[list[list[int]]]

STORE = {"host_bytes": "64MiB"}
# Drawn anew for each load and each rank, so ranks finish in different orders.
SLOW = "delay=all/load:0-80ms,delay=all/offload:0-30ms"

# Two jobs on one host must not share vLLM's memory; three ranks may have fewer cores.
WORKER = "mlkv.integrations.vllm.cpu_worker.JobWorker"


def with_mlkv(tp: int, backend: str | None, **more: Any) -> dict[str, Any]:
    extra = {"store": STORE, "page_tokens": 64, **more.pop("extra", {})}
    return {"tp": tp, "backend": backend, "connector": "MLKVConnector", "extra": extra, **more}


def check(mode: str, ended: Ended, truth: Truth, *, num_replicas: int = 1) -> list[dict[str, Any]]:
    """All ranks done, all answers as without mlkv, and the cache did serve."""
    if ended.kind != "done":
        add_row(mode, ended, ended.kind)
        raise AssertionError(f"{mode}: the job {ended.kind}\n{ended.log}")
    right = sum(answer == other for rank in ended.ranks for answer, other in _pairs(rank["rounds"], truth))
    total = len(ended.ranks) * len(_pairs(truth, truth))
    add_row(mode, ended, f"{right} of {total} equal")
    assert right == total, mode
    for rank in ended.ranks[: len(ended.ranks) // num_replicas or 1]:
        assert rank["hit_tokens"] > 1000, mode
    return ended.ranks


def _pairs(rounds: Truth, truth: Truth) -> list[tuple[list[int], list[int]]]:
    return [pair for one, other in zip(rounds, truth, strict=True) for pair in zip(one, other, strict=True)]


def test_one_process(run: Run, truth: Truth) -> None:
    check("TP=1, in process", run(**with_mlkv(1, None)), truth)


def test_two_workers_of_the_multiprocessing_executor(run: Run, truth: Truth) -> None:
    check("TP=2, mp executor, slow loads", run(**with_mlkv(2, "mp", extra={"faults": SLOW})), truth)


@pytest.mark.parametrize(("tp", "worker"), [(2, "auto"), (3, WORKER)])
def test_torchrun_with_loads_that_end_in_different_orders(run: Run, truth: Truth, tp: int, worker: str) -> None:
    task = with_mlkv(tp, "external_launcher", worker=worker, extra={"faults": SLOW})
    check(f"TP={tp}, torchrun, slow loads", run(**task), truth)


def test_two_jobs_on_one_host_at_once(run: Run, truth: Truth) -> None:
    task = with_mlkv(2, "external_launcher", worker=WORKER)
    with ThreadPoolExecutor(2) as threads:
        jobs = [threads.submit(run, **task) for _ in range(2)]
    for number, job in enumerate(jobs, start=1):
        check(f"TP=2, torchrun, job {number} of 2 at once", job.result(), truth)


def test_torchrun_with_two_replicas(run: Run, truth: Truth) -> None:
    task = with_mlkv(1, "external_launcher", dp=2)
    check("DP=2, torchrun", run(**task), truth)


@pytest.mark.parametrize("backend", ["external_launcher", "mp"])
def test_loads_that_fail_on_one_rank_are_recomputed_on_all(run: Run, truth: Truth, backend: str) -> None:
    task = with_mlkv(2, backend, extra={"faults": f"{SLOW},fail=rank1/load:0.6,seed=5"})
    name = "torchrun" if backend == "external_launcher" else "mp executor"
    ranks = check(f"TP=2, {name}, failing loads on rank 1", run(**task), truth)
    assert ranks[0]["failed_loads"] > 0


def test_rotten_pages_are_recomputed(run: Run, truth: Truth) -> None:
    task = with_mlkv(2, "external_launcher", extra={"faults": "corrupt=rank0/load:0.6,seed=5"})
    ranks = check("TP=2, torchrun, flipped bytes", run(**task), truth)
    assert ranks[0]["failed_loads"] > 0


def test_preempted_requests_answer_the_same(run: Run) -> None:
    # Answers grow by four blocks each; 66 blocks hold four or five of the eight talks. 64 is the fewest that vLLM
    # takes for its longest request.
    long = {"new_tokens": 128, "rounds": 2}
    reference = run(tp=1, backend=None, **long)
    assert reference.kind == "done", reference.log
    task = with_mlkv(2, "external_launcher", blocks=66, extra={"faults": SLOW}, **long)
    ranks = check("TP=2, torchrun, small pool", run(**task), reference.ranks[0]["rounds"])
    assert ranks[0]["preemptions"] > 0


def test_what_two_ranks_stored_one_reads(run: Run, truth: Truth) -> None:
    store = {**STORE, "name": "shared", "linger_s": 300.0}
    first = run(**with_mlkv(2, "external_launcher", rounds=1, extra={"store": store, "model": "tiny"}))
    assert first.kind == "done", first.log
    task = with_mlkv(1, None, from_second=True, first_answers=truth[0], extra={"store": store, "model": "tiny"})
    check("TP=1 reads what TP=2 wrote", run(**task), truth)


def test_a_job_reads_from_disk_what_an_earlier_one_wrote(run: Run, truth: Truth, tmp_path: Path) -> None:
    disk = {"directory": str(tmp_path / "kv"), "limit_bytes": "256MiB"}
    # Nothing outlives the first job but the disk: it has a store of its own, which ends with it. On a busy machine
    # a lookup may wait for long.
    store = {**STORE, "disk": disk, "answer_deadline_s": 30.0}
    first = run(**with_mlkv(2, "external_launcher", rounds=1, extra={"store": store, "model": "tiny"}))
    assert first.kind == "done", first.log
    assert first.ranks[0]["pages_from_disk"] == 0
    # Two rounds: the prompts of before, then the talks going on from them.
    task = with_mlkv(2, "external_launcher", from_second=True, first_answers=truth[0])
    task["extra"] = {**task["extra"], "store": store, "model": "tiny"}
    ranks = check("TP=2, torchrun, after a restart from disk", run(**task), truth)
    assert ranks[0]["hit_tokens_by_round"][1] > 1000
    assert ranks[0]["pages_from_disk"] * 64 > 1000


@pytest.mark.parametrize(("tp", "backend"), [(2, "external_launcher"), (2, "mp")])
def test_a_reset_of_the_connector_forgets_everything_on_every_rank(
    run: Run, truth: Truth, tmp_path: Path, tp: int, backend: str
) -> None:
    disk = {"directory": str(tmp_path / "kv"), "limit_bytes": "256MiB"}
    task = with_mlkv(tp, backend, invalidate_after=[0], extra={"store": {**STORE, "disk": disk}, "faults": SLOW})
    name = "torchrun" if backend == "external_launcher" else "mp executor"
    ranks = check(f"TP=2, {name}, reset_connector", run(**task), truth)
    for rank in ranks:
        assert rank["hit_tokens_by_round"][1] == 0  # the prompts of the first round again
        assert rank["hit_tokens_by_round"][2] > 1000  # stored after the reset


def test_without_agreement_the_same_job_goes_wrong(run: Run, truth: Truth) -> None:
    task = with_mlkv(2, "external_launcher", extra={"faults": SLOW})
    task |= {"connector": "DisagreeingConnector", "module": "tests.vllm.disagreeing"}
    ended = run(stall_s=60.0, **task)
    assert ended.started, ended.log  # it went wrong while generating, not before
    wrong = 0
    if ended.kind == "done":
        wrong = sum(one != other for rank in ended.ranks for one, other in _pairs(rank["rounds"], truth))
    add_row("TP=2, torchrun, no agreement", ended, f"{wrong} wrong" if ended.kind == "done" else ended.kind)
    assert wrong or ended.kind in ("hung", "crashed")
