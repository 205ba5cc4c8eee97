"""Starts jobs of real vLLM in processes of their own, under a watchdog, and keeps what came of them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlkv.engine.on_vllm import no_shared_memory_left

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = float(os.environ.get("VLLM_TEST_DEADLINE_S", "420"))

_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
}
_TERM_GRACE_S = 10.0


@dataclass
class Ended:
    """How a job ended.

    Attributes:
        kind: "done", "crashed", or "hung": no rank made progress for too long.
        ranks: what each rank wrote, if done.
        started: whether every rank had begun to generate.
        log: the end of its output.
    """

    kind: str
    ranks: list[dict[str, Any]] = field(default_factory=list)
    started: bool = False
    log: str = ""
    seconds: float = 0.0


def run_job(folder: Path, task: dict[str, Any], *, stall_s: float = DEADLINE_S) -> Ended:
    """Run `task` (see tests/vllm/job.py); under torchrun when its backend is external_launcher.

    Args:
        folder: an empty one, for the task and what comes of it.
        stall_s: a job that has begun to generate and then shows nothing for so long has hung.
    """
    external = task["backend"] == "external_launcher"
    num_ranks = task["tp"] * task.get("dp", 1) if external else 1
    (folder / "task.json").write_text(json.dumps(task))
    command = [sys.executable]
    if external:
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    command += ["-m", "tests.vllm.job", str(folder / "task.json"), str(folder / "out")]
    environment = {**os.environ, **_ENVIRONMENT, "PYTHONPATH": str(ROOT)}
    if external or task["backend"] is None:
        environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    start = time.monotonic()
    with no_shared_memory_left(), open(folder / "log", "w") as log:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        kind = _watch(process, folder, start, stall_s)
    text = (folder / "log").read_text(errors="replace")
    outs = [folder / f"out.{rank}" for rank in range(num_ranks)]
    if kind == "done" and not all(out.exists() for out in outs):
        kind = "crashed"
    ranks = [json.loads(out.read_text()) for out in outs] if kind == "done" else []
    started = all(Path(f"{out}.progress").exists() for out in outs)
    return Ended(kind, ranks, started, text[-6000:], time.monotonic() - start)


def _watch(process: subprocess.Popen[bytes], folder: Path, start: float, stall_s: float) -> str:
    while process.poll() is None:
        now = time.time()
        progress = [path.stat().st_mtime for path in folder.glob("out.*.progress")]
        if time.monotonic() - start > DEADLINE_S or (progress and now - max(progress) > stall_s):
            _end(process)
            return "hung"
        time.sleep(0.2)
    _end(process)  # whatever it left running
    return "done" if process.returncode == 0 else "crashed"


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the job's own process group, torchrun first politely so that it ends its ranks."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            return
        give_up_at = time.monotonic() + _TERM_GRACE_S
        while process.poll() is None and time.monotonic() < give_up_at:
            time.sleep(0.1)
