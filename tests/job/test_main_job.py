"""The main job end to end, on real ranks with a tiny model: its report, faults, and every way to end early."""

from __future__ import annotations

import json
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.job.jobs import (
    ROOT,
    TINY,
    assert_nothing_left,
    eventually,
    finish,
    processes_of,
    rank_pid,
    read_until,
    start,
)


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="mlkv-test-", ignore_cleanup_errors=True) as path:
        yield Path(path)


def test_default_workload_passes_its_audits_with_pages_from_the_host(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    status, out, err = finish(start(folder, *TINY, "--max-new-tokens", "8", "--json", str(path)))
    assert (status, err) == (0, "")
    report = json.loads(path.read_text())
    assert report["world"] == {"tp": 2, "dp": 1, "backend": "gloo", "device": "cpu"}
    assert report["audits"] == {"outputs_equal": True, "ranks_equal": True, "pages_conserved": True}
    assert len(report["requests"]) >= 12
    assert sum(r["id"].endswith("+") for r in report["requests"]) > 1  # later turns of conversations
    tokens, before = report["tokens"], report["tokens_off"]
    # Each document is computed once instead of about three times.
    assert tokens["host"] > tokens["computed"] > 0
    assert before["host"] == 0
    assert before["computed"] > 2 * tokens["computed"]
    assert sum(tokens.values()) == sum(before.values()) == sum(r["prompt_tokens"] for r in report["requests"])
    assert report["pages"]["loaded"] > 0
    assert report["pages"]["offloaded"] > 0
    assert report["bytes"]["offloaded"] > 0
    for run in ("on", "off"):
        assert 0 < report["ttft_s"][run]["p50"] <= report["ttft_s"][run]["p95"]
    assert 0 < report["step_us"]["p50"] <= report["step_us"]["p99"]
    for word in ("computed", "device", "host", "first token", "outputs equal", "ranks equal", "pages conserved"):
        assert word in out
    assert_nothing_left(folder)


def test_audits_hold_under_faults_with_two_replicas(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    faults = "delay=rank1:0-30ms,fail=rank1:0.3,corrupt=rank0/load:0.2,seed=7"
    arguments = ("--dp", "2", "--max-new-tokens", "4", "--faults", faults, "--json", str(path))
    status, _, err = finish(start(folder, *TINY, *arguments))
    assert (status, err) == (0, "")
    report = json.loads(path.read_text())
    assert report["world"]["dp"] == 2
    assert all(report["audits"].values())
    assert report["failed"]["loads"] > 0
    assert report["failed"]["offloads"] > 0
    assert report["tokens"]["host"] > 0
    assert_nothing_left(folder)


def test_prompts_of_a_file_are_served_in_lower_precision(folder: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    long = "All work and no play makes Jack a dull boy. " * 20
    again = {"messages": [{"role": "user", "content": long}, {"role": "assistant", "content": "Yes."},
                          {"role": "user", "content": "Why?"}]}  # fmt: skip
    prompts.write_text(f"{long}\n\n{json.dumps({'prompt': 'What is a page?' * 60})}\n{json.dumps(again)}\n")
    path = tmp_path / "report.json"
    arguments = ("--prompts", str(prompts), "--tp", "1", "--dtype", "bfloat16", "--max-new-tokens", "4")
    status, out, err = finish(start(folder, *TINY, *arguments, "--json", str(path)))
    assert (status, err) == (0, "")
    report = json.loads(path.read_text())
    assert [request["id"] for request in report["requests"]] == ["line1", "line3", "line4"]
    assert all(report["audits"].values())
    assert "teacher-forced logits" in report["audit_details"]["outputs_equal"]
    assert "teacher-forced" in out
    assert_nothing_left(folder)


def test_ctrl_c_ends_everything(folder: Path) -> None:
    job = start(folder, *TINY, "--max-new-tokens", "400")
    read_until(job, "cache off")
    assert len(processes_of(folder)) >= 3  # torchrun and two ranks
    os.killpg(job.pid, signal.SIGINT)
    status, _, err = finish(job, deadline_s=30)
    assert (status, err) == (130, "launch.sh: ended by SIGINT\n")
    assert_nothing_left(folder)


def test_a_killed_rank_ends_the_job_and_is_named(folder: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("Once upon a time\nIn the beginning\n")
    job = start(folder, *TINY, "--prompts", str(prompts), "--max-new-tokens", "400")
    read_until(job, "cache on")
    os.kill(rank_pid(folder, 1), signal.SIGKILL)
    status, _, err = finish(job, deadline_s=60)
    assert status == 1
    assert err.startswith("launch.sh: error: rank 1 was ended by SIGKILL; the log of the ranks is ")
    assert err.count("\n") == 1
    assert_nothing_left(folder)


def test_a_job_whose_rank_is_killed_completes_when_it_may_be_restarted(folder: Path, tmp_path: Path) -> None:
    prompts, path = tmp_path / "prompts.txt", tmp_path / "report.json"
    prompts.write_text("Once upon a time\nIn the beginning\n")
    arguments = ("--prompts", str(prompts), "--max-new-tokens", "4", "--max-restarts", "1", "--json", str(path))
    status, _, err = finish(start(folder, *TINY, *arguments, "--faults", "kill=rank1@3"))
    assert (status, err) == (0, "")
    report = json.loads(path.read_text())
    assert all(report["audits"].values())
    assert len(report["requests"]) == 2
    assert_nothing_left(folder)


def test_ranks_do_not_outlive_a_killed_launcher(folder: Path) -> None:
    job = start(folder, *TINY, "--max-new-tokens", "400")
    read_until(job, "cache off")
    job.kill()
    finish(job)
    eventually(lambda: not processes_of(folder), "all ranks end")


def test_a_script_runs_under_torchrun_with_its_arguments_and_status(folder: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys, mlkv\n"
        "with open(sys.argv[1] + '/' + os.environ['RANK'], 'w') as file:\n"
        "    file.write(os.environ['WORLD_SIZE'] + ' '.join(sys.argv[2:]))\n"
        "sys.exit(len(sys.argv) - 3)\n"
    )
    status, _, err = finish(start(folder, "--tp", "2", "--dp", "2", "--", str(script), str(tmp_path), "--x"))
    assert (status, err) == (0, "")
    assert {(tmp_path / str(rank)).read_text() for rank in range(4)} == {"4--x"}
    status, _, _ = finish(start(folder, "--tp", "1", "--", str(script), str(tmp_path), "--x", "--y"))
    assert status == 1
    assert (tmp_path / "0").read_text() == "1--x --y"


def test_help_explains_every_option(folder: Path) -> None:
    status, out, err = finish(start(folder, "--help"))
    assert (status, err) == (0, "")
    for option in (
        "tp",
        "dp",
        "model",
        "prompts",
        "max-new-tokens",
        "host-cache",
        "page-size",
        "device",
        "faults",
        "max-restarts",
    ):
        assert f"--{option} " in out
    assert "-- script.py" in out
    assert (ROOT / "launch.sh").stat().st_mode & 0o111
