"""`torchrun --max-restarts`: the new generation completes the job and hears nothing of the old one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_a_restarted_job_completes_after_a_rank_was_killed(tmp_path: Path) -> None:
    job = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--max-restarts=1"]
    job += ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "--monitor-interval=0.2"]
    job += ["-m", "tests.dist.restart_job", str(tmp_path)]
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(job, env=environ, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    # Torchrun ends the other rank as soon as it sees the dead one; where that rank was quicker, it has told.
    told = tmp_path / "generation0-rank0"
    assert not told.exists() or "rank 1 of this replica was lost at step 25" in told.read_text()
    assert not (tmp_path / "generation0-rank1").exists()
    results = [(tmp_path / f"generation1-rank{rank}").read_text() for rank in range(2)]
    assert results[0] == results[1]
    assert results[0].startswith("wrong=0 ")
