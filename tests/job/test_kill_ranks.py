"""The operator's campaign of killed ranks, in short, with a fixed seed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.job.jobs import ROOT


def test_ranks_struck_at_random_moments_are_named_and_leave_nothing_and_restarts_complete(tmp_path: Path) -> None:
    record = tmp_path / "runs.jsonl"
    command = [sys.executable, str(ROOT / "scripts" / "kill_ranks.py"), "--runs", "3", "--others", "1"]
    done = subprocess.run(
        [*command, "--seed", "7", "--json", str(record)], capture_output=True, text=True, timeout=170, cwd=tmp_path
    )
    assert done.returncode == 0, done.stdout + done.stderr
    runs = [json.loads(line) for line in record.read_text().splitlines()]
    assert [run["problems"] for run in runs] == [[]] * 6
    assert {run["kind"] for run in runs} == {"kill", "exit", "raise", "stall"}
    assert any(run["restart"] and run["completed"] for run in runs)
    assert any(run["keep"] and run["named"] for run in runs)
