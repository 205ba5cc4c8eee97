"""`./launch.sh --engine vllm` as a person starts it: its audits hold, and pages were loaded, in real vLLM."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.job.jobs import assert_nothing_left, finish, start
from tests.vllm.conftest import add_row
from tests.vllm.harness import DEADLINE_S, Ended


@pytest.fixture
def folder() -> Iterator[Path]:
    # Sockets lie in it, and the paths of pytest's own folders are too long for theirs.
    with tempfile.TemporaryDirectory(prefix="mlkv-test-", ignore_cleanup_errors=True) as path:
        yield Path(path)


@pytest.mark.parametrize(("tp", "dp"), [(2, 1), (1, 2)])
def test_main_job_passes_its_audits_in_vllm(model: str, folder: Path, tmp_path: Path, tp: int, dp: int) -> None:
    path = tmp_path / "report.json"
    shape = ["--tp", str(tp), "--dp", str(dp), "--max-new-tokens", "8", "--faults", "delay=rank1/load:0-20ms"]
    begin = time.monotonic()
    job = start(folder, "--engine", "vllm", "--model", model, "--json", str(path), *shape)
    status, out, err = finish(job, DEADLINE_S)
    assert (status, err) == (0, ""), out
    report = json.loads(path.read_text())
    tokens, before = report["tokens"], report["tokens_off"]
    outcome = "audits hold" if all(report["audits"].values()) else str(report["audit_details"])
    add_row(
        f"launch.sh --engine vllm --tp {tp} --dp {dp}",
        Ended("done", [{"hit_tokens": tokens["host"]}], seconds=time.monotonic() - begin),
        outcome,
    )
    assert report["audits"] == {"outputs_equal": True, "ranks_equal": True, "pages_conserved": True}
    assert report["settings"]["engine"] == "vllm"
    assert tokens["host"] > 1000
    assert tokens["computed"] < before["computed"] / 2
    assert before["host"] == before["device"] == 0  # the run to compare with had no cache
    assert sum(tokens.values()) == sum(before.values()) == sum(r["prompt_tokens"] for r in report["requests"])
    assert_nothing_left(folder)
