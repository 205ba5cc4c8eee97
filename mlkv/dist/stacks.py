"""Python stacks on request, to see what a rank that keeps the others waiting is doing."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys


def answer_requests() -> None:
    """From now on SIGUSR2 makes this process write the stacks of all its threads to stderr."""
    if _stderr_is_file():
        faulthandler.register(signal.SIGUSR2, all_threads=True, chain=False)


def dump(why: str, *, ask_pid: int | None = None) -> None:
    """Write the stacks of this process to stderr and ask another, which must answer requests, for its own."""
    print(f"mlkv: pid {os.getpid()}: {why}", file=sys.stderr, flush=True)
    if _stderr_is_file():
        faulthandler.dump_traceback(all_threads=True)
    if ask_pid is not None:
        try:
            os.kill(ask_pid, signal.SIGUSR2)
        except OSError:  # it is gone
            return


def _stderr_is_file() -> bool:
    # faulthandler writes to a descriptor; a notebook or a test may have replaced stderr by something without one.
    try:
        sys.stderr.fileno()
    except (AttributeError, OSError, ValueError):
        return False
    return True
