"""Start the main job as a person would, and look for what it has left behind."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

TINY = ("--model", "random:tiny", "--device", "cpu")
ROOT = Path(__file__).resolve().parents[2]


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """`./launch.sh ARGUMENTS` in a process group of its own, with `folder` for sockets and models."""
    environment = {**os.environ, "PYTHON": sys.executable, "XDG_RUNTIME_DIR": str(folder)}
    environment["MLKV_HOME"] = str(folder / "home")
    return subprocess.Popen(
        [str(ROOT / "launch.sh"), *arguments],
        env=environment,
        cwd="/",
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


def finish(job: subprocess.Popen[str], deadline_s: float = 170.0) -> tuple[int, str, str]:
    """Exit status, standard output, standard error."""
    try:
        out, err = job.communicate(timeout=deadline_s)
    except subprocess.TimeoutExpired:
        job.kill()
        raise
    return job.returncode, out, err


def read_until(job: subprocess.Popen[str], text: str) -> None:
    """Until its standard output says `text`; its end is bounded by the test's timeout."""
    assert job.stdout is not None
    for line in job.stdout:
        if text in line:
            return
    raise AssertionError(f"the job ended without saying {text!r}: {job.stderr.read() if job.stderr else ''}")


def processes_of(folder: Path) -> dict[int, str]:
    """pid -> command line of processes of a job whose files are in `folder`."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if str(folder) in line and entry.name != str(os.getpid()):
            found[int(entry.name)] = line
    return found


def rank_pid(folder: Path, rank: int) -> int:
    for pid, line in processes_of(folder).items():
        if "mlkv.engine.job" in line and "torch.distributed.run" not in line:
            environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            if f"RANK={rank}".encode() in environment:
                return pid
    raise AssertionError(f"there is no rank {rank}")


def eventually(condition: Callable[[], bool], what: str, deadline_s: float = 20.0) -> None:
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, f"{what} within {deadline_s} s"
        time.sleep(0.05)


def assert_nothing_left(folder: Path) -> None:
    assert processes_of(folder) == {}
    assert [path.name for path in folder.iterdir() if path.name != "home"] == []
