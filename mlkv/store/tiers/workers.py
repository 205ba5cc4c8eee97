"""The threads of one tier."""

from __future__ import annotations

import math
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress

from mlkv.store.tiers.base import Tier
from mlkv.store.tiers.calls import Call


class Workers:
    """Threads that make the calls they are given, and a descriptor that is readable when one has ended.

    The threads are daemons: one that never comes back from a tier does not keep the process alive.

    Args:
        clock: seconds, for the times that are noted in a call.
    """

    def __init__(self, tier: Tier, pool: memoryview, clock: Callable[[], float]) -> None:
        self._tier = tier
        self._pool = pool
        self._clock = clock
        self._ready: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        self._ended: deque[Call] = deque()  # appended by workers, taken from by the owner: both are atomic
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._threads: list[threading.Thread] = []

    def fileno(self) -> int:
        return self._wake_fd

    def add(self) -> None:
        """One thread more."""
        thread = threading.Thread(target=self._work, name=f"mlkv-{self._tier.name}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def remove(self) -> None:
        """One thread less, as soon as one has nothing to do."""
        self._ready.put(None)

    def start(self, call: Call) -> None:
        """Have a thread make this call. It waits if all of them are busy."""
        self._ready.put(call)

    def take_ended(self, limit_s: float = math.inf) -> Iterator[Call]:
        """The calls that have ended since the last time; to be iterated to its end.

        After `limit_s` the others are left for the next time, and the descriptor stays readable.
        """
        with suppress(BlockingIOError):  # none has ended
            os.eventfd_read(self._wake_fd)
        stop_at = time.monotonic() + limit_s
        while self._ended:
            yield self._ended.popleft()
            if self._ended and time.monotonic() >= stop_at:
                os.eventfd_write(self._wake_fd, 1)
                return

    def join(self, deadline_s: float) -> bool:
        """End the threads. False if some were still in a call at the deadline."""
        for _ in self._threads:
            self.remove()
        give_up_at = time.monotonic() + deadline_s
        for thread in self._threads:
            thread.join(max(0.0, give_up_at - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def dispose(self) -> None:
        """Close the descriptor, once no thread is left that could write to whatever gets its number next."""
        os.close(self._wake_fd)

    def _work(self) -> None:
        while (call := self._ready.get()) is not None:
            call.began_at = self._clock()
            try:
                call.answer = call.make(self._tier, self._pool)
            except BaseException as error:
                # A tier is somebody else's code over devices and networks; whatever it raises, SystemExit of a
                # client library too, is this call's failure and must not cost the tier a thread.
                call.failure = error
            call.ended_at = self._clock()
            self._ended.append(call)
            os.eventfd_write(self._wake_fd, 1)
