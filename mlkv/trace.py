"""A trace of a rank's tasks and steps that Chrome (chrome://tracing) and Perfetto (ui.perfetto.dev) show.

Its format is the JSON array of the Trace Event Format. The array stays open at its end: both accept that, so the
file of a process that was killed is as good as another one, but for the last quarter of a second.
"""

from __future__ import annotations

import json
import logging
import os
import time
from pathlib import Path
from typing import Any, Final

from mlkv.observe import TaskKind

TRACE_VARIABLE: Final = "MLKV_TRACE"
"""Names the file; the rank is put in front of its ending."""

_FLUSH_BYTES: Final = 64 << 10
_FLUSH_S: Final = 0.25

log = logging.getLogger(__name__)


def trace_path(file: str, rank: int) -> Path:
    """`trace.json` -> `trace.rank3.json`."""
    path = Path(file).absolute()
    return path.with_name(f"{path.stem}.rank{rank}{path.suffix}")


class Trace:
    """Writes what it is told to a file, at most every quarter of a second. An `Observer`.

    When the file cannot be written any more it says so once and stops: an engine never stops for its trace.
    """

    def __init__(self, path: Path, rank: int) -> None:
        """Make the file anew. Raises OSError."""
        self._rank = rank
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        self._path = path
        self._unwritten = bytearray(b"[\n")
        self._written_at = time.monotonic()
        # Clocks of ranks are compared by people: all of them count from the epoch.
        self._zero_us = time.time() * 1e6 - time.monotonic() * 1e6
        for name, args in (("process_name", f"rank {rank}"), ("thread_name", "steps")):
            self._add("M", name, 0.0, tid=0, args={"name": args})
        self._flush()

    def began(self, kind: TaskKind, call: int, request_id: str) -> None:
        self._add("b", kind, time.monotonic(), id=call, cat=kind, args={"request": request_id})

    def released(self, call: int, request_id: str) -> None:
        self._add("n", "released", time.monotonic(), id=call, cat="offload", args={"request": request_id})

    def ended(self, kind: TaskKind, call: int, request_id: str, num_tokens: int, why: str) -> None:
        args = {"tokens": num_tokens, "why": why} if why else {"tokens": num_tokens}
        self._add("e", kind, time.monotonic(), id=call, cat=kind, args=args)

    def stepped(self, step: int, began_s: float, agreed_s: float, ended_s: float) -> None:
        self._add("X", "step", began_s, tid=0, dur=(ended_s - began_s) * 1e6, args={"step": step})
        self._add("X", "agree", began_s, tid=0, dur=(agreed_s - began_s) * 1e6)
        if len(self._unwritten) >= _FLUSH_BYTES or ended_s >= self._written_at + _FLUSH_S:
            self._flush()

    def close(self) -> None:
        """Write the rest."""
        self._flush()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _add(self, phase: str, name: str, at_s: float, **fields: Any) -> None:
        if self._fd < 0:
            return
        event = {"ph": phase, "name": name, "pid": self._rank, "ts": at_s * 1e6 + self._zero_us, **fields}
        self._unwritten += json.dumps(event, separators=(",", ":")).encode() + b",\n"
        if len(self._unwritten) >= 2 * _FLUSH_BYTES:
            self._flush()  # many calls in one step

    def _flush(self) -> None:
        """Whole lines in one write, which a kill does not cut."""
        self._written_at = time.monotonic()
        if self._fd < 0:
            return
        try:
            while self._unwritten:
                written = os.write(self._fd, self._unwritten)
                del self._unwritten[:written]
        except OSError as error:
            log.warning("the trace ends, %s cannot be written: %s", self._path, error.strerror)
            os.close(self._fd)
            self._fd = -1
            self._unwritten.clear()
