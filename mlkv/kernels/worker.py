"""A thread with a bounded queue that survives whatever its jobs raise."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Protocol

from mlkv.errors import DeadlineExceeded


class Job(Protocol):
    """Something a worker runs once. `fail` is called instead of or after `run`, on the worker's thread."""

    def run(self) -> None: ...

    def fail(self, reason: str) -> None: ...


class Worker:
    """Runs jobs one after the other on its own thread.

    Args:
        name: of the thread.
        max_jobs: bound of the jobs waiting or running.
        around: called on the thread to run its loop, for what must be set up on that thread.

    The queue itself needs no bound, because no more than `max_jobs` are let in.
    """

    def __init__(
        self, name: str, max_jobs: int, around: Callable[[Callable[[], None]], None] | None = None
    ) -> None:
        self._name = name
        self._jobs: queue.Queue[Job | None] = queue.Queue()
        self._max_jobs = max_jobs
        self._num_jobs = 0  # waiting or running
        self._lock = threading.Lock()
        self._closed = False
        target, args = (self._loop, ()) if around is None else (around, (self._loop,))
        self._thread = threading.Thread(target=target, args=args, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> bool:
        """Queue a job. False, and the job is not touched, when `max_jobs` are waiting or running."""
        with self._lock:
            if self._num_jobs >= self._max_jobs:
                return False
            self._num_jobs += 1
        self._jobs.put(job)
        return True

    def close(self, deadline_s: float) -> None:
        """Fail the jobs that have not begun and wait for the one that has. Raises DeadlineExceeded."""
        end = time.monotonic() + deadline_s
        self._closed = True
        self._jobs.put(None)
        self._thread.join(max(0.0, end - time.monotonic()))
        if self._thread.is_alive():
            raise DeadlineExceeded(f"thread {self._name} is still copying after {deadline_s:g} s")

    def _loop(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                if self._closed:
                    job.fail("the transfer engine was closed before this transfer began")
                else:
                    job.run()
            except BaseException as error:  # also SystemExit from a library: the next jobs must still be served
                job.fail(f"{type(error).__name__}: {error}")
            finally:
                with self._lock:
                    self._num_jobs -= 1
