"""The operator's campaign of kills above all tiers, in short, with a fixed seed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.job.jobs import ROOT

SEED = "429"
"""Of which the first runs strike everybody, at every moment, damage the disk once, and have every remote store."""


@pytest.mark.timeout(200)
def test_killed_owners_and_ranks_leave_right_bytes_in_all_tiers_and_nothing_else(tmp_path: Path) -> None:
    record = tmp_path / "runs.jsonl"
    command = [sys.executable, str(ROOT / "scripts" / "chaos_store.py"), "--runs", "6", "--seed", SEED]
    done = subprocess.run(
        [*command, "--json", str(record)], capture_output=True, text=True, timeout=190, cwd=tmp_path
    )
    assert done.returncode == 0, done.stdout + done.stderr
    runs = [json.loads(line) for line in record.read_text().splitlines()]
    assert [run["problems"] for run in runs] == [[]] * 6
    assert {run["victim"] for run in runs if run["struck"]} == {"owner", "rank", "ranks", "both"}
    assert sum(run["pages_after_restart"].get("disk", 0) for run in runs) > 0
    assert sum(run["pages_compared"]["disk"] for run in runs) > 0
    assert any(run["damaged"] for run in runs)
