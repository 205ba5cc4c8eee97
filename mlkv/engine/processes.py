"""Ranks under torchrun: started in a session of their own, watched, and ended with nothing of them left.

The launcher makes itself the reaper of orphans, so whatever a job started, the store's owner included, ends up
as its child when its own parents are gone, and is waited for or killed by pid.
"""

from __future__ import annotations

import ctypes
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import IO, Any

from mlkv.errors import ConfigError

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_POLL_S = 0.1

SHUTDOWN_S = 5.0
"""How long ranks may take to end after SIGTERM, and the store's owner after the ranks."""

_libc = ctypes.CDLL(None, use_errno=True)


class Interrupted(BaseException):
    """Somebody wants the job to end: Ctrl-C or a signal. Not an `Exception`: nothing on the way may swallow it."""

    def __init__(self, signum: int) -> None:
        self.signum = signum
        super().__init__(signal.Signals(signum).name)


def interruptible() -> None:
    """From now on SIGINT, SIGTERM and SIGHUP raise `Interrupted` in the main thread."""

    def raise_once(signum: int, _frame: FrameType | None) -> None:
        # A second Ctrl-C must not interrupt the clean-up, which has deadlines of its own.
        for other in _SIGNALS:
            signal.signal(other, signal.SIG_IGN)
        raise Interrupted(signum)

    for signum in _SIGNALS:
        signal.signal(signum, raise_once)


_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def die_with_parent(signum: int) -> None:
    """Have the kernel send `signum` to this process when the one that started it ends."""
    _libc.prctl(_PR_SET_PDEATHSIG, signum, 0, 0, 0)


def check_port(port: int) -> None:
    """Raises ConfigError when the port of the rendezvous cannot be had."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise ConfigError(
                f"port: {port} cannot be used: {error.strerror}; give another one, or none to take a free one"
            ) from None


def torchrun_command(
    num_ranks: int, port: int | None, target: Sequence[str], *, max_restarts: int = 0
) -> list[str]:
    """`target`: a script with arguments, or "-m", a module and arguments. `port` None: a free one."""
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={num_ranks}"]
    command.append(f"--max-restarts={max_restarts}")
    if port is None:
        command += ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", f"--rdzv-id=mlkv-{os.getpid()}"]
    else:
        command += ["--master-addr=127.0.0.1", f"--master-port={port}"]
    return [*command, "--local-addr=127.0.0.1", "--monitor-interval=0.1", *target]


def rank_environment(num_ranks: int) -> dict[str, str]:
    """Ours, with as many threads for each rank as there are cores for it."""
    environment = dict(os.environ)
    cores = len(os.sched_getaffinity(0))
    environment.setdefault("OMP_NUM_THREADS", str(max(1, cores // num_ranks)))
    # All ranks are on this host, and the name of a host without a network may lead nowhere.
    environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    environment.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(int(SHUTDOWN_S)))
    # So that ranks find this package however this process has.
    paths = [os.path.abspath(entry) for entry in sys.path]
    environment["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    return environment


class Job:
    """A torchrun job. Use as a context manager: on leaving it, its ranks have ended."""

    def __init__(
        self, command: Sequence[str], environment: dict[str, str], *, log: IO[Any] | None = None, reap: bool = True
    ) -> None:
        """Args:
        log: where its output goes; None: where ours goes.
        reap: also end what its ranks leave behind, such as a store's owner that would linger.
        """
        self._command, self._environment, self._log, self._reap = list(command), environment, log, reap
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Job:
        if self._reap:
            _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self._process = subprocess.Popen(
            self._command,
            env=self._environment,
            stdin=subprocess.DEVNULL if self._log is not None else None,
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,
            preexec_fn=lambda: die_with_parent(signal.SIGTERM),
        )
        return self

    def wait(self, on_poll: Callable[[], None]) -> int:
        """Its exit status; `on_poll` is called a few times a second."""
        assert self._process is not None
        while self._process.poll() is None:
            on_poll()
            time.sleep(_POLL_S)
        return self._process.returncode

    def __exit__(self, *exc_info: object) -> None:
        assert self._process is not None
        if self._process.poll() is None:
            self._process.terminate()  # torchrun ends its ranks, and itself
            try:
                self._process.wait(2 * SHUTDOWN_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        if self._reap:
            _reap_orphans(SHUTDOWN_S)


def _reap_orphans(deadline_s: float) -> None:
    """Wait for what the job has left, which ends by itself when its clients are gone; then end it."""
    for signum, patience_s in ((None, deadline_s), (signal.SIGTERM, deadline_s), (signal.SIGKILL, deadline_s)):
        if signum is not None:
            for pid in _children():
                os.kill(pid, signum)  # ours and not waited for, so the number is still its own
        give_up_at = time.monotonic() + patience_s
        while time.monotonic() < give_up_at:
            try:
                pid, _ = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                time.sleep(0.01)


def _children() -> list[int]:
    """Processes whose parent is this one."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            after_name = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has just ended
        if int(after_name[1]) == os.getpid():
            found.append(int(folder.name))
    return found


def killed_rank(log: str) -> str:
    """Which rank torchrun's log says was ended by a signal that torchrun itself does not send; "" if none."""
    for rank, number in re.findall(r"rank\s*:\s*(\d+) [^\[]*?exitcode\s*:\s*-(\d+)", log):
        if int(number) != signal.SIGTERM:
            return f"rank {rank} was ended by {signal.Signals(int(number)).name}"
    return ""
