"""`./launch.sh --engine vllm` as a person starts it: its audits hold, and pages were loaded, in real vLLM."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.job.jobs import assert_nothing_left, finish, start
from tests.vllm.conftest import add_row
from tests.vllm.harness import DEADLINE_S, Ended


@pytest.fixture
def folder() -> Iterator[Path]:
    # Sockets lie in it, and the paths of pytest's own folders are too long for theirs.
    with tempfile.TemporaryDirectory(prefix="mlkv-test-", ignore_cleanup_errors=True) as path:
        yield Path(path)


def serve(folder: Path, tmp_path: Path, model: str, *options: str) -> dict[str, Any]:
    """The report of a job that passed its audits."""
    path = tmp_path / "report.json"
    begin = time.monotonic()
    job = start(
        folder, "--engine", "vllm", "--model", model, "--json", str(path), "--max-new-tokens", "8", *options
    )
    status, out, err = finish(job, DEADLINE_S)
    assert (status, err) == (0, ""), out
    report: dict[str, Any] = json.loads(path.read_text())
    outcome = "audits hold" if all(report["audits"].values()) else str(report["audit_details"])
    add_row(
        f"launch.sh --engine vllm {' '.join(options)}",
        Ended("done", [{"hit_tokens": report["tokens"]["host"]}], seconds=time.monotonic() - begin),
        outcome,
    )
    assert report["audits"] == {"outputs_equal": True, "ranks_equal": True, "pages_conserved": True}
    assert_nothing_left(folder)
    return report


@pytest.mark.parametrize(("tp", "dp"), [(2, 1), (1, 2)])
def test_main_job_passes_its_audits_in_vllm(model: str, folder: Path, tmp_path: Path, tp: int, dp: int) -> None:
    shape = ["--tp", str(tp), "--dp", str(dp)]
    report = serve(folder, tmp_path, model, *shape, "--faults", "delay=rank1/load:0-20ms")
    tokens, before = report["tokens"], report["tokens_off"]
    assert report["settings"]["engine"] == "vllm"
    assert tokens["host"] > 1000
    assert tokens["computed"] < before["computed"] / 2
    assert before["host"] == before["device"] == 0  # the run to compare with had no cache
    assert sum(tokens.values()) == sum(before.values()) == sum(r["prompt_tokens"] for r in report["requests"])


def test_main_job_goes_on_in_vllm_when_a_rank_was_killed(model: str, folder: Path, tmp_path: Path) -> None:
    report = serve(folder, tmp_path, model, "--tp", "2", "--max-restarts", "1", "--faults", "kill=rank1@100")
    assert report["tokens"]["host"] > 1000
