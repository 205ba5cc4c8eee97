"""What the transfers of one direction share: streams, staging, and the order in which they are queued."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Generic, Protocol

from mlkv.errors import DeadlineExceeded
from mlkv.kernels.device import Device, Event, S
from mlkv.kernels.host_pages import HostPages
from mlkv.kernels.staging import PinnedBlocks, StagingRing
from mlkv.kernels.worker import Worker
from mlkv.layout import KVPool


class Queueable(Protocol):
    """A task as its direction sees it."""

    def queue(self, may_go_on: Callable[[], bool]) -> bool:
        """Queue work on the device, from where the last call stopped.

        Args:
            may_go_on: asked after each chunk.

        Returns:
            whether everything is queued now.
        """
        ...

    def run(self) -> None:
        """Queue everything, however long that takes; on a worker's thread."""
        ...

    def fail(self, reason: str) -> None:
        """End with an error, once the device has finished what is queued already."""
        ...

    def poll(self) -> bool: ...


class Direction(Generic[S]):
    """Loads, or offloads, of one device.

    Tasks are queued on the device in the order of their submission and by the caller's own thread: in `submit`,
    and as far as they are too long for that, whenever somebody polls; never more than `max_chunks_ahead` ahead of
    the device. A thread of ours would have to take the interpreter lock from a busy engine after each call into
    CUDA, for up to 5 ms apiece. Only where copies or kernels make their caller wait there is one.
    """

    def __init__(
        self,
        name: str,
        pool: KVPool,
        host: HostPages,
        device: Device[S],
        *,
        run_bytes: int,
        staging_bytes: int,
        segment_bytes: int,
        num_copy_streams: int,
        max_chunks_ahead: int,
        max_tasks: int,
    ) -> None:
        self.name = name
        self.pool = pool
        self.host = host
        self.device = device
        self.run_bytes = run_bytes
        self.kernel_stream = device.new_stream()
        self.copy_streams = [device.new_stream() for _ in range(num_copy_streams)]
        self.pinned = PinnedBlocks(device.pinned)
        self._ring: StagingRing | None = None
        if run_bytes:
            self._ring = StagingRing(
                device.staging, total_bytes=staging_bytes, run_bytes=run_bytes, segment_bytes=segment_bytes
            )
        self._max_tasks = max_tasks
        self._max_chunks_ahead = max_chunks_ahead
        self._in_flight: list[Queueable] = []
        self._unqueued: deque[Queueable] = deque()
        self._ahead: deque[Event] = deque()  # one behind each chunk that is queued and perhaps not over
        self._worker: Worker | None = None
        if not (device.host_is_pinned and device.kernels.takes_stream):
            self._worker = Worker(name, max_tasks, device.run_thread)

    @property
    def ring(self) -> StagingRing:
        assert self._ring is not None, "a rank that moves no bytes has no staging"
        return self._ring

    @property
    def has_worker(self) -> bool:
        """Whether tasks are queued by a thread of ours, and not by whoever submits or polls them."""
        return self._worker is not None

    def has_room(self) -> bool:
        """Whether one more task may be in flight."""
        if len(self._in_flight) >= self._max_tasks:
            for task in list(self._in_flight):
                task.poll()  # takes itself out when it is over
        return len(self._in_flight) < self._max_tasks

    def submit(self, task: Queueable) -> None:
        """To be called within `device.current()`."""
        self._in_flight.append(task)
        if self._worker is not None:
            if not self._worker.submit(task):
                task.fail("refused: as many transfers as are let in are in flight")
            return
        self._unqueued.append(task)
        self._queue_more()

    def queue_more(self) -> None:
        """Queue on the device what there is room for."""
        if self._unqueued:
            with self.device.current():
                self._queue_more()

    def _queue_more(self) -> None:
        while self._unqueued and self._may_go_on():
            task = self._unqueued[0]
            try:
                if not task.queue(self._may_go_on):
                    return
            except Exception as error:  # its caller gets a transfer that failed, and the next ones are served
                task.fail(f"{type(error).__name__}: {error}")
            self._unqueued.popleft()

    def chunk_is_queued(self, over: Event) -> None:
        self._ahead.append(over)

    def is_over(self, task: Queueable) -> None:
        if task in self._in_flight:
            self._in_flight.remove(task)

    def record_all(self) -> tuple[Event, ...]:
        """Events after everything that is queued in this direction; the staging is not used again before them."""
        events: tuple[Event, ...] = ()
        try:
            with self.device.current():
                events = tuple(self.device.record(stream) for stream in (self.kernel_stream, *self.copy_streams))
        finally:
            if self._ring is not None:
                self._ring.distrust(events)
        return events

    def close(self, deadline_s: float) -> None:
        """Fail what is not queued at all or only in part, wait for what is. Raises DeadlineExceeded."""
        end = time.monotonic() + deadline_s
        while self._unqueued:
            self._unqueued.popleft().fail("the transfer engine was closed before this transfer was queued")
        if self._worker is not None:
            self._worker.close(deadline_s)
        while any([not task.poll() for task in list(self._in_flight)]):  # noqa: C419  every one is polled
            if time.monotonic() > end:
                raise DeadlineExceeded(
                    f"{self.name}: {len(self._in_flight)} transfers still run after {deadline_s:g} s"
                )
            time.sleep(0.0005)
        self._ring = None

    def _may_go_on(self) -> bool:
        try:
            while self._ahead and self._ahead[0].query():
                self._ahead.popleft()
        except Exception:  # the device is in error: its tasks will say so, and nothing is worth waiting for
            self._ahead.clear()
        return len(self._ahead) < self._max_chunks_ahead
