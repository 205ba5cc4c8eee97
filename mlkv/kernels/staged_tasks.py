"""One load or offload on its way through copy engine, staging and kernels; see `staged` for the whole."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Generic

import numpy as np
import numpy.typing as npt
import torch

from mlkv.errors import DeadlineExceeded
from mlkv.kernels.device import Device, Event, S, Segment, Words
from mlkv.kernels.host_pages import HostPages, PageBatch, num_verified
from mlkv.kernels.staging import PinnedBlock, PinnedBlocks, StagingRing
from mlkv.kernels.transfer import LoadTransfer, OffloadTransfer, TransferPath
from mlkv.kernels.worker import Worker
from mlkv.layout import KVPool


class Direction(Generic[S]):
    """Streams, staging and unfinished tasks of one direction.

    Chunks are queued by the caller's own thread, when it submits and when it polls, no further ahead of the device
    than `max_chunks_ahead`. A thread of ours would have to take the interpreter lock from a busy engine for each
    of its calls, which costs up to 5 ms apiece. Only pageable memory is copied by one, because the driver's calls
    return when such a copy is over.
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
        self.ring: StagingRing | None = None
        if run_bytes:
            self.ring = StagingRing(
                device.staging, total_bytes=staging_bytes, run_bytes=run_bytes, segment_bytes=segment_bytes
            )
        self.pinned = PinnedBlocks(device.pinned)
        self.worker = None if device.host_is_pinned else Worker(name, max_tasks, device.run_thread)
        self.in_flight: list[StagedTask[S]] = []
        self._max_chunks_ahead = max_chunks_ahead
        self._unqueued: deque[StagedTask[S]] = deque()
        self._ahead: deque[Event] = deque()  # one behind each chunk that is queued and perhaps not over

    @property
    def streams(self) -> list[S]:
        return [self.kernel_stream, *self.copy_streams]

    def submit(self, task: StagedTask[S]) -> None:
        self.in_flight.append(task)
        if self.worker is not None:
            self.worker.submit(task)
        else:
            self._unqueued.append(task)
            self.pump()

    def pump(self) -> None:
        """Queue what is next, oldest task first, as far ahead as is wanted."""
        while self._unqueued:
            while self._ahead and _is_over(self._ahead[0]):
                self._ahead.popleft()
            if len(self._ahead) >= self._max_chunks_ahead:
                return
            task = self._unqueued[0]
            try:
                event = task.queue_chunk()
            except Exception as error:  # the caller gets a transfer that failed; the next ones are tried
                task.fail(f"{type(error).__name__}: {error}")
                event = None
            if event is None:
                self._unqueued.popleft()
            else:
                self._ahead.append(event)

    def has_room(self, max_tasks: int) -> bool:
        if len(self.in_flight) >= max_tasks:
            for task in list(self.in_flight):
                task.poll()  # takes itself out when it is over
        return len(self.in_flight) < max_tasks

    def close(self, deadline_s: float) -> None:
        end = time.monotonic() + deadline_s
        if self.worker is not None:
            self.worker.close(deadline_s)
        while any(not task.poll() for task in list(self.in_flight)):
            if time.monotonic() > end:
                raise DeadlineExceeded(
                    f"{self.name}: {len(self.in_flight)} transfers still run after {deadline_s:g} s"
                )
            time.sleep(0.0005)
        self.ring = None


class StagedTask(Generic[S]):
    """What loads and offloads have in common. Lives until the device has finished with all of its buffers."""

    num_heads: int  # moved by this rank
    kernel: Callable[[int, Words, Segment | Words, Words, int], None]

    def __init__(self, direction: Direction[S], pages: PageBatch) -> None:
        self._pool, self._host, self._device = direction.pool, direction.host, direction.device
        self.direction = direction
        self.pages = pages
        self.path: TransferPath = "staged"
        self.after: Event | None = None
        self.error: str | None = None
        self._block: PinnedBlock | None = None
        self._queueing: Iterator[Event] | None = None
        self._done_events: tuple[Event, ...] | None = None  # None until everything is queued
        self._over = False

    @abstractmethod
    def _chunks(self) -> Iterator[Event]:
        """Queue the task on the device, chunk by chunk; yields after each the event behind it.

        What ends the task is set before the last one is asked for more.
        """

    @abstractmethod
    def _complete(self) -> None:
        """The device has finished without error: verify, or write headers."""

    def take_slots(self, slots: torch.Tensor) -> None:
        """Keep the slots, which the caller may change, and make room for addresses and sums."""
        num_pages, num_slots = len(self.pages), slots.numel()
        num_sums = num_pages * self.num_heads * self._device.kernels.num_parts
        self._block = block = self.direction.pinned.take(num_slots + num_pages + num_sums + 2)
        # Each part begins on 16 bytes.
        addresses = num_slots + num_slots % 2
        sums = addresses + num_pages + num_pages % 2
        self._slots_are_pinned = slots.device.type == "cpu"
        if self._slots_are_pinned:
            block.array[:num_slots] = slots.numpy()
            self._slots = block.words.part(0, num_slots)
        else:
            self._slots = Words(slots.clone())
        self._addresses = block.words.part(addresses, num_pages)
        self._address_array = block.array[addresses : addresses + num_pages]
        self._sums = block.words.part(sums, num_sums)
        sum_parts = block.array[sums : sums + num_sums].view(np.uint64)
        self._sum_parts = sum_parts.reshape(num_pages, self.num_heads, -1)

    def queue_chunk(self) -> Event | None:
        """Queue the next chunk and give the event behind it; None when all is queued."""
        if self._queueing is None:
            self._queueing = self._chunks()
        return next(self._queueing, None)

    def run(self) -> None:
        """Queue everything at once."""
        while self.queue_chunk() is not None:
            pass

    def poll(self) -> bool:
        if not self._over:
            self.direction.pump()
        if self._over or self._done_events is None:
            return self._over
        try:
            for event in self._done_events:
                if not event.query():
                    return False
            if self.error is None:
                self._complete()
        except Exception as error:  # a dead context, or a bad page pool: this transfer failed, its caller lives
            self.error = f"{type(error).__name__}: {error}"
        self._end()
        return True

    def fail(self, reason: str) -> None:
        """Over with an error, but not before the device has finished what is queued already."""
        self.error = reason
        if self.after is None:
            self._end()
            return
        try:
            events = tuple(self._device.record(stream) for stream in self.direction.streams)
        except Exception as error:  # no event can be had from a device in error, and nothing runs on it any more
            self.error = f"{reason}; then {type(error).__name__}: {error}"
            events = ()
        if self.direction.ring is not None:
            self.direction.ring.distrust(events)
        self._done_events = events

    def finish_empty(self) -> None:
        self._complete()
        self._end()

    def _end(self) -> None:
        self._over = True
        if self._block is not None:
            # Only now, and with it the slots on the device: kernels that were queued had read them until here.
            self.direction.pinned.give(self._block)
            self._block = None
            del self._slots, self._addresses, self._address_array, self._sums, self._sum_parts
        if self in self.direction.in_flight:
            self.direction.in_flight.remove(self)

    def _found_sums(self) -> npt.NDArray[np.uint64]:
        sums: npt.NDArray[np.uint64] = self._sum_parts.sum(axis=-1)
        return sums

    def _join_caller(self) -> None:
        """Let kernels begin after what the caller had queued when it submitted this task."""
        assert self.after is not None
        self._device.wait(self.direction.kernel_stream, self.after)

    def _run_direct(self) -> Event:
        stream = self.direction.kernel_stream
        self._join_caller()
        self._address_array[:] = self._host.run_addresses(self.pages)
        self._launch(0, len(self.pages), self._addresses)
        return self._device.record(stream)

    def _launch(self, first: int, num_pages: int, pages: Segment | Words) -> None:
        """Queue the kernel for some of the pages."""
        tokens, parts = self._pool.layout.page_tokens, self.num_heads * self._device.kernels.num_parts
        slots = self._slots.part(first * tokens, num_pages * tokens)
        sums = self._sums.part(first * parts, num_pages * parts)
        self._device.launch(self.direction.kernel_stream, partial(self.kernel, num_pages, slots, pages, sums))

    def _upload_slots(self) -> None:
        """Bring the slots to the device: each program of a kernel reads its page's, many programs the same ones.

        For a single chunk the few microseconds of reading them over the link are less than those of a copy.
        """
        assert self.direction.ring is not None
        if self._slots_are_pinned and len(self.pages) > self.direction.ring.pages_per_segment:
            self._slots = self._device.upload(self.direction.kernel_stream, self._slots)

    def _runs(self, segment: Segment, num_pages: int) -> npt.NDArray[np.int64]:
        """Addresses of pages within a segment."""
        return segment.address + np.arange(num_pages, dtype=np.int64) * self.direction.run_bytes


class StagedLoad(StagedTask[S], LoadTransfer):
    def __init__(self, direction: Direction[S], pages: PageBatch) -> None:
        super().__init__(direction, pages)
        self.num_heads = self._host.rank_slice.num_heads
        self.kernel = self._device.kernels.scatter
        self.num_good = 0
        self._num_identified = 0
        self._expected = np.empty((0, 0), np.uint64)

    def _chunks(self) -> Iterator[Event]:
        if self.path == "direct":
            last = self._run_direct()
            yield last
        else:
            for last in self._staged_chunks():
                yield last
        # Read while the device copies. Pages that are not the ones meant are copied as well, rare as they are:
        # nobody attaches them.
        self._num_identified = self._host.num_identified(self.pages)
        self._expected = self._host.expected_sums(self.pages)
        self._done_events = (last,)  # the kernel stream is in order: the last scatter is over last

    def _staged_chunks(self) -> Iterator[Event]:
        device, direction = self._device, self.direction
        ring = direction.ring
        assert ring is not None
        addresses = self._host.run_addresses(self.pages)
        for at, first in enumerate(range(0, len(self.pages), ring.pages_per_segment)):
            num_pages = min(ring.pages_per_segment, len(self.pages) - first)
            segment, copier = ring.take(), direction.copy_streams[at % len(direction.copy_streams)]
            for event in segment.busy:
                device.wait(copier, event)
            targets = self._runs(segment, num_pages)
            sources = addresses[first : first + num_pages]
            device.copy(copier, targets, sources, direction.run_bytes, to_host=False)
            if not first:  # only now, so that the first copy is on its way as early as can be
                self._upload_slots()
                self._join_caller()
            device.wait(direction.kernel_stream, device.record(copier))
            self._launch(first, num_pages, segment)
            scattered = device.record(direction.kernel_stream)
            segment.busy = (scattered,)
            yield scattered

    def _complete(self) -> None:
        if self._block is None:  # this rank has no heads to copy
            self.num_good = self._host.num_identified(self.pages)
        else:
            self.num_good = min(self._num_identified, num_verified(self._expected, self._found_sums()))


class StagedOffload(StagedTask[S], OffloadTransfer):
    def __init__(self, direction: Direction[S], pages: PageBatch) -> None:
        super().__init__(direction, pages)
        self.num_heads = self._host.rank_slice.num_written_heads
        self.kernel = self._device.kernels.gather
        self._released_event: Event | None = None
        self._released = False

    def poll_released(self) -> bool:
        if self._released or self._over:
            return True
        self.direction.pump()
        if self._released_event is None:
            # Not queued yet, or failed while it was being queued: then it is the end that releases.
            return self.error is not None and self.poll()
        try:
            self._released = self._released_event.query()
        except Exception:  # the device is in error: poll() says so and ends the transfer
            self._released = self.poll()
        return self._released

    def _chunks(self) -> Iterator[Event]:
        if self.path == "direct":
            gathered = self._run_direct()
            yield gathered
            self._released_event, self._done_events = gathered, (gathered,)
            return
        self._upload_slots()
        self._join_caller()
        device, ring, stream = self._device, self.direction.ring, self.direction.kernel_stream
        assert ring is not None
        addresses = self._host.run_addresses(self.pages)
        last_copies: dict[int, Event] = {}
        first, chunk = 0, 0
        while first < len(self.pages):
            # One chunk first, so that copies begin; then all that there is room for by one kernel, so that slots
            # are released while the first chunk is still on its way; then chunk by chunk, as room comes back.
            rest = -(-(len(self.pages) - first) // ring.pages_per_segment)
            segments = ring.take_free(rest if first else 1)
            for event in [event for segment in segments for event in segment.busy]:
                device.wait(stream, event)
            num_pages = min(len(segments) * ring.pages_per_segment, len(self.pages) - first)
            self._launch(first, num_pages, ring.joined(segments))
            gathered = device.record(stream)
            for segment in segments:
                which = chunk % len(self.direction.copy_streams)
                last_copies[which] = self._copy_out(segment, addresses[first:], which, gathered)
                segment.busy = (last_copies[which],)
                first += ring.pages_per_segment
                chunk += 1
                yield last_copies[which]
        self._released_event = gathered
        self._done_events = tuple(last_copies.values())

    def _copy_out(self, segment: Segment, addresses: npt.NDArray[np.int64], which: int, gathered: Event) -> Event:
        """Queue the copy of a gathered segment to the first of these addresses."""
        assert self.direction.ring is not None
        copier, targets = self.direction.copy_streams[which], addresses[: self.direction.ring.pages_per_segment]
        self._device.wait(copier, gathered)
        self._device.copy(
            copier, targets, self._runs(segment, len(targets)), self.direction.run_bytes, to_host=True
        )
        return self._device.record(copier)

    def _complete(self) -> None:
        if self._block is None:
            sums = np.empty((len(self.pages), 0), np.uint64)
        else:
            sums = self._found_sums()
        self._host.write_headers(self.pages, sums)


def _is_over(event: Event) -> bool:
    try:
        return event.query()
    except Exception:  # the device is in error: its tasks say so, and nothing is worth waiting for
        return True
