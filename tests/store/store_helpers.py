"""Shared by the tests of the store: chains of keys, and ranks that are real processes."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from typing import Any

import mlkv.errors

REPOSITORY = Path(mlkv.errors.__file__).resolve().parents[1]
DEADLINE_S = 30.0


def chain(text: str) -> bytes:
    """Keys of the pages of a prompt in which every letter is a page: "abc" shares two pages with "abd"."""
    return b"".join(key(text[:end]) for end in range(1, len(text) + 1))


def key(prefix: str) -> bytes:
    return blake2b(prefix.encode(), digest_size=16).digest()


def eventually(condition: Callable[[], Any], what: str, deadline_s: float = DEADLINE_S) -> Any:
    """Poll until `condition()` is true; fail at the deadline. For what another process does in its own time."""
    give_up_at = time.monotonic() + deadline_s
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < give_up_at, f"not within {deadline_s} s: {what}"
        time.sleep(0.005)


def is_running(pid: int) -> bool:
    """Whether a process lives; one that has ended but was not waited for does not."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return status.rpartition(")")[2].split()[0] not in ("Z", "X")


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(REPOSITORY)}


class RankProcess:
    """A rank in a process of its own. It does one command at a time; see store_rank.py."""

    def __init__(self, socket_path: Path, **connect: Any) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("store_rank.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment(),
        )
        self.start("connect", socket_path=str(socket_path), **connect)

    @property
    def pid(self) -> int:
        return self._process.pid

    def start(self, command: str, **arguments: Any) -> None:
        """Send a command; `answer` waits for what comes of it."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([command, arguments]).encode() + b"\n")
        self._process.stdin.flush()

    def answer(self) -> Any:
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], DEADLINE_S)
        assert ready, "the rank did not answer"
        line = self._process.stdout.readline()
        assert line, "the rank died"
        return json.loads(line)

    def do(self, command: str, **arguments: Any) -> Any:
        self.start(command, **arguments)
        return self.answer()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
