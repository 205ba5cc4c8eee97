"""Waiting for a word of another process: spin, then yield, then sleep, with a deadline."""

from __future__ import annotations

import os
import time

_YIELD_S = 0.002  # a rank that is this late is not about to come in the next microseconds
_SLEEP_SHARE = 0.05  # of the time waited so far: waking late costs no more than this share
_MAX_SLEEP_S = 0.0005
LOOK_S = 0.002  # between two looks at the processes that are waited for


def spins_for(num_ranks: int) -> int:
    """How many polls to spin when `num_ranks` ranks of this host wait for each other.

    A spinning rank keeps a core from a rank that has work to do, unless there is a core for each and one over.
    """
    num_cores = len(os.sched_getaffinity(0))
    if num_cores > num_ranks:
        return 2000  # about 0.2 ms
    return 400 if num_cores == num_ranks else 0


class Patience:
    """One wait. Call `pause` between polls; when it returns True, look whether the other side still lives."""

    def __init__(self, deadline_s: float, spins: int = 0) -> None:
        self._spins = spins
        self._start = time.monotonic()
        self._end = self._start + deadline_s
        self._look_at = self._start + LOOK_S
        self.expired = False

    @property
    def waited_s(self) -> float:
        return time.monotonic() - self._start

    def pause(self) -> bool:
        """Let a little time pass. True when it is time to look around; look at `expired` then, too."""
        if self._spins > 0:
            self._spins -= 1
            return False
        now = time.monotonic()
        waited_s = now - self._start
        if waited_s < _YIELD_S:
            os.sched_yield()
            time.sleep(0)  # lets other threads of this process have the interpreter
        else:
            time.sleep(min(_MAX_SLEEP_S, waited_s * _SLEEP_SHARE))
        return self._look_due(now)

    def look_due(self) -> bool:
        """What `pause` returns, for a caller that has let time pass by other means."""
        return self._look_due(time.monotonic())

    def _look_due(self, now: float) -> bool:
        if now >= self._end:
            self.expired = True
            return True
        if now >= self._look_at:
            self._look_at = now + LOOK_S
            return True
        return False
