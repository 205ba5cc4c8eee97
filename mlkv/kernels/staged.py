"""Transfers of a device pool: copy engine and kernels, pipelined in chunks over a ring of staging memory.

A load, chunk by chunk: the copy stream waits until the segment is free and copies host pages into it; the kernel
stream waits for that copy, and (once) for the work that the caller had queued, and scatters. An offload runs the
other way: the kernel stream waits for the caller's work and gathers, the copy stream takes the chunk to the host.
Kernels leave the checksums of what they moved in pinned memory, where the host reads them once the last event of
the task is done: it compares them with the headers (load) or writes the headers (offload).

Everything is queued in advance, so a transfer needs no CPU while it runs. Queueing takes about 60 us a chunk; so
transfers of more than a few chunks are queued by a thread, and the caller only pays for small ones.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Generic

import numpy as np
import numpy.typing as npt
import torch

from mlkv.errors import CacheUsageError, DeadlineExceeded
from mlkv.kernels.device import Device, Event, S
from mlkv.kernels.host_pages import HostPages, PageBatch, num_verified
from mlkv.kernels.staging import StagingRing
from mlkv.kernels.transfer import LoadTransfer, OffloadTransfer, TransferEngine, TransferPath
from mlkv.kernels.worker import Worker
from mlkv.layout import KVPool

SEGMENT_BYTES = 16 << 20
"""Wanted size of a chunk. Large enough that the gaps between batches of copies (a few microseconds every 300) and
the launch of a kernel for each do not show; small enough that the last scatter or first gather does not either."""

INLINE_BYTES = 2 * SEGMENT_BYTES
"""Transfers up to this size are queued by the caller itself: cheaper than waking a thread, and sooner done."""

DIRECT_BYTES = 2 << 20
DIRECT_PIECE_BYTES = 128 << 10
DIRECT_TINY_PIECES_BYTES = 16 << 20
"""See `choose_path`. On an H200 batched copies reach 0.91 of the link with pieces of 1 MiB, 0.74 with 256 KiB and
0.42 with 64 KiB; a kernel that reaches into host memory has 0.93 with any, but slows a matmul beside it 1.5x."""


def choose_path(piece_bytes: int, num_pages: int, *, is_idle: bool) -> TransferPath:
    """Whether a kernel reaches into host memory itself ("direct") or the copy engine brings pages ("staged").

    Direct is for what is over before it can disturb anybody: small transfers, where one launch is sooner done than
    copies, events and a launch; and pages in tiny pieces, while little or nothing computes beside them.

    Args:
        piece_bytes: contiguous bytes of one page that this rank moves.
        is_idle: whether the caller's stream has nothing queued.
    """
    total_bytes = piece_bytes * num_pages
    if total_bytes <= DIRECT_BYTES:
        return "direct"
    if piece_bytes < DIRECT_PIECE_BYTES and (is_idle or total_bytes <= DIRECT_TINY_PIECES_BYTES):
        return "direct"
    return "staged"


class StagedTransferEngine(TransferEngine, Generic[S]):
    """See `TransferEngine`.

    Args:
        device: where the pool is.
        transfer: as in `TransferEngine.create`.
        segment_bytes: wanted size of a chunk.
        inline_bytes: transfers up to this size are queued on the calling thread.
        num_copy_streams: chunks take turns on this many copy streams of a direction.
    """

    def __init__(
        self,
        pool: KVPool,
        host: HostPages,
        device: Device[S],
        *,
        staging_bytes: int,
        max_tasks: int,
        transfer: TransferPath = "auto",
        segment_bytes: int = SEGMENT_BYTES,
        inline_bytes: int = INLINE_BYTES,
        num_copy_streams: int = 1,
    ) -> None:
        super().__init__(pool, host, max_tasks)
        self._device = device
        self._inline_bytes = inline_bytes if device.host_is_pinned else 0
        self._transfer: TransferPath = transfer
        if not (device.kernels.reaches_host and device.host_is_pinned):
            self._transfer = "staged"
        self._loads: _Direction[S] = _Direction(
            "mlkv-load", device, host.read_bytes, staging_bytes, segment_bytes, num_copy_streams, max_tasks
        )
        self._offloads: _Direction[S] = _Direction(
            "mlkv-offload", device, host.written_bytes, staging_bytes, segment_bytes, num_copy_streams, max_tasks
        )
        self._closed = False

    def load(self, pages: PageBatch, slots: torch.Tensor) -> LoadTransfer:
        task = _Load(self, self._loads, pages)
        self._submit(task, slots, lowest=-1)
        return task

    def offload(self, pages: PageBatch, slots: torch.Tensor) -> OffloadTransfer:
        task = _Offload(self, self._offloads, pages)
        self._submit(task, slots, lowest=0)
        return task

    def close(self, deadline_s: float) -> None:
        if self._closed:
            return
        end = time.monotonic() + deadline_s
        for direction in (self._loads, self._offloads):
            direction.close(max(0.0, end - time.monotonic()))
        self._device.close()
        self._closed = True

    def _submit(self, task: _Task[S], slots: torch.Tensor, lowest: int) -> None:
        if self._closed:
            raise CacheUsageError("the transfer engine is closed")
        self._check(task.pages, slots, lowest)
        direction = task.direction
        if not len(task.pages) or not direction.run_bytes:
            task.finish_empty()
            return
        if not direction.has_room(self._max_tasks):
            task.fail(f"refused: {self._max_tasks} transfers of this direction are in flight")
            return
        # Taken before anything else of this task, so that it follows exactly what the caller has queued.
        if slots.device.type == "cpu":
            task.slots = self._device.pinned((len(slots),))
            task.slots.copy_(slots)
        else:
            task.slots = slots.clone()
        caller = self._device.current_stream()
        num_bytes = direction.run_bytes * len(task.pages)
        task.path = self._transfer
        if task.path == "auto":
            idle = self._device.is_idle(caller)
            task.path = choose_path(direction.run_bytes, len(task.pages), is_idle=idle)
        task.after = self._device.record(caller)
        direction.in_flight.append(task)
        # Only this thread submits, so a worker without jobs stays without, and is not queueing beside us.
        if num_bytes <= self._inline_bytes and direction.worker.is_idle:
            try:
                task.run()
            except Exception as error:  # the caller gets a transfer that failed, as it would from the thread
                task.fail(f"{type(error).__name__}: {error}")
        else:
            direction.worker.submit(task)


class _Direction(Generic[S]):
    """Streams, staging, thread and unfinished tasks of one direction."""

    def __init__(
        self,
        name: str,
        device: Device[S],
        run_bytes: int,
        staging_bytes: int,
        segment_bytes: int,
        num_copy_streams: int,
        max_tasks: int,
    ) -> None:
        self.name = name
        self.device = device
        self.run_bytes = run_bytes
        self.kernel_stream = device.new_stream()
        self.copy_streams = [device.new_stream() for _ in range(num_copy_streams)]
        self.ring: StagingRing | None = None
        if run_bytes:
            self.ring = StagingRing(
                device.staging, total_bytes=staging_bytes, run_bytes=run_bytes, segment_bytes=segment_bytes
            )
        self.worker = Worker(name, max_tasks, device.run_thread)
        self.in_flight: list[_Task[S]] = []

    @property
    def streams(self) -> list[S]:
        return [self.kernel_stream, *self.copy_streams]

    def has_room(self, max_tasks: int) -> bool:
        if len(self.in_flight) >= max_tasks:
            self.in_flight = [task for task in self.in_flight if not task.poll()]
        return len(self.in_flight) < max_tasks

    def close(self, deadline_s: float) -> None:
        end = time.monotonic() + deadline_s
        self.worker.close(deadline_s)
        while any(not task.poll() for task in list(self.in_flight)):
            if time.monotonic() > end:
                raise DeadlineExceeded(
                    f"{self.name}: {len(self.in_flight)} transfers still run after {deadline_s:g} s"
                )
            time.sleep(0.0005)
        self.ring = None


class _Task(Generic[S]):
    """What loads and offloads have in common. Lives until the device has finished with all of its buffers."""

    def __init__(self, engine: StagedTransferEngine[S], direction: _Direction[S], pages: PageBatch) -> None:
        self._pool, self._host, self._device = engine._pool, engine._host, engine._device
        self.direction = direction
        self.pages = pages
        self.path: TransferPath = "staged"
        self.slots: torch.Tensor | None = None
        self.after: Event | None = None
        self.error: str | None = None
        self._sums: torch.Tensor | None = None
        self._buffers: list[torch.Tensor] = []
        self._done_events: tuple[Event, ...] | None = None  # None until everything is queued
        self._over = False

    @abstractmethod
    def run(self) -> None:
        """Queue everything on the device."""

    @abstractmethod
    def _complete(self) -> None:
        """The device has finished without error: verify, or write headers."""

    def poll(self) -> bool:
        if self._over or self._done_events is None:
            return self._over
        try:
            if not all(event.query() for event in self._done_events):
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
        self._buffers.clear()
        self.slots = self._sums = None
        if self in self.direction.in_flight:
            self.direction.in_flight.remove(self)

    def _prepare(self, num_heads: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Slots as the kernels read them, and room for sums."""
        assert self.slots is not None
        stream = self.direction.kernel_stream
        shape = (len(self.pages), num_heads, self._device.kernels.num_parts)
        self._sums = sums = self._device.pinned(shape)
        slots = self.slots
        if self.path == "staged" and slots.device.type == "cpu":
            # Each program of a kernel reads its slots, many programs the same ones: not over the link.
            slots = self._device.upload(stream, slots)
            self._buffers.append(slots)
        assert self.after is not None
        self._device.wait(stream, self.after)
        return slots, sums

    def _found_sums(self) -> npt.NDArray[np.uint64]:
        assert self._sums is not None
        parts: npt.NDArray[np.uint64] = self._sums.numpy().view(np.uint64)
        sums: npt.NDArray[np.uint64] = parts.sum(axis=-1, dtype=np.uint64)
        return sums

    def _run_direct(self, kernel: Callable[..., None], slots: torch.Tensor, sums: torch.Tensor) -> Event:
        addresses = self._device.pinned((len(self.pages),))
        addresses.numpy()[:] = self._host.run_addresses(self.pages)
        self._buffers.append(addresses)
        stream = self.direction.kernel_stream
        self._device.launch(stream, partial(kernel, slots, addresses, sums))
        return self._device.record(stream)

    def _chunks(self) -> list[tuple[slice, slice]]:
        """Runs of pages that fit a segment, and their slots."""
        assert self.direction.ring is not None
        step, tokens = self.direction.ring.pages_per_segment, self._pool.layout.page_tokens
        starts = range(0, len(self.pages), step)
        ends = [min(start + step, len(self.pages)) for start in starts]
        return [(slice(a, b), slice(a * tokens, b * tokens)) for a, b in zip(starts, ends, strict=True)]


class _Load(_Task[S], LoadTransfer):
    def __init__(self, engine: StagedTransferEngine[S], direction: _Direction[S], pages: PageBatch) -> None:
        super().__init__(engine, direction, pages)
        self.num_good = 0
        self._num_identified = 0
        self._expected = np.empty((0, 0), np.uint64)

    @torch.inference_mode()
    def run(self) -> None:
        slots, sums = self._prepare(self._host.rank_slice.num_heads)
        if self.path == "direct":
            events: tuple[Event, ...] = (self._run_direct(self._device.kernels.scatter, slots, sums),)
        else:
            events = self._run_staged(slots, sums)
        # Read while the device copies. Pages that are not the ones meant are copied as well, rare as they are:
        # nobody attaches them.
        self._num_identified = self._host.num_identified(self.pages)
        self._expected = self._host.expected_sums(self.pages)
        self._done_events = events

    def _run_staged(self, slots: torch.Tensor, sums: torch.Tensor) -> tuple[Event, ...]:
        device, direction, kernel = self._device, self.direction, self._device.kernels.scatter
        heads, head_bytes = self._host.rank_slice.num_heads, self._pool.layout.head_bytes
        assert direction.ring is not None
        addresses = self._host.run_addresses(self.pages)
        stream = direction.kernel_stream
        busy: tuple[Event, ...] = ()
        for at, (part, part_slots) in enumerate(self._chunks()):
            segment, copier = direction.ring.take(), direction.copy_streams[at % len(direction.copy_streams)]
            for event in segment.busy:
                device.wait(copier, event)
            num_pages = part.stop - part.start
            targets = segment.address + np.arange(num_pages, dtype=np.int64) * direction.run_bytes
            device.copy(copier, targets, addresses[part], direction.run_bytes, to_host=False)
            device.wait(stream, device.record(copier))
            slices = segment.memory[: num_pages * direction.run_bytes].view(num_pages, heads, head_bytes)
            device.launch(stream, partial(kernel, slots[part_slots], slices, sums[part]))
            busy = segment.busy = (device.record(stream),)
        return busy  # the kernel stream is in order: the last scatter is over last

    def _complete(self) -> None:
        if self._sums is None:  # this rank has no heads to copy
            self.num_good = self._host.num_identified(self.pages)
        else:
            self.num_good = min(self._num_identified, num_verified(self._expected, self._found_sums()))


class _Offload(_Task[S], OffloadTransfer):
    def __init__(self, engine: StagedTransferEngine[S], direction: _Direction[S], pages: PageBatch) -> None:
        super().__init__(engine, direction, pages)
        self._released_event: Event | None = None
        self._released = False

    def poll_released(self) -> bool:
        if self._released or self._over:
            return True
        if self._released_event is None:
            # Not queued yet, or failed while it was being queued: then it is the end that releases.
            return self.error is not None and self.poll()
        try:
            self._released = self._released_event.query()
        except Exception:  # the device is in error: poll() says so and ends the transfer
            self._released = self.poll()
        return self._released

    @torch.inference_mode()
    def run(self) -> None:
        device, direction, kernel = self._device, self.direction, self._device.kernels.gather
        heads, head_bytes = self._host.rank_slice.num_written_heads, self._pool.layout.head_bytes
        slots, sums = self._prepare(heads)
        if self.path == "direct":
            self._released_event = self._run_direct(kernel, slots, sums)
            self._done_events = (self._released_event,)
            return
        assert direction.ring is not None
        addresses = self._host.run_addresses(self.pages)
        stream = direction.kernel_stream
        last_copies: dict[int, Event] = {}
        gathered: Event | None = None
        for at, (part, part_slots) in enumerate(self._chunks()):
            which = at % len(direction.copy_streams)
            segment, copier = direction.ring.take(), direction.copy_streams[which]
            for event in segment.busy:
                device.wait(stream, event)
            num_pages = part.stop - part.start
            slices = segment.memory[: num_pages * direction.run_bytes].view(num_pages, heads, head_bytes)
            device.launch(stream, partial(kernel, slots[part_slots], slices, sums[part]))
            gathered = device.record(stream)
            device.wait(copier, gathered)
            sources = segment.address + np.arange(num_pages, dtype=np.int64) * direction.run_bytes
            device.copy(copier, addresses[part], sources, direction.run_bytes, to_host=True)
            last_copies[which] = device.record(copier)
            segment.busy = (last_copies[which],)
        self._released_event = gathered
        self._done_events = tuple(last_copies.values())

    def _complete(self) -> None:
        if self._sums is None:
            sums = np.empty((len(self.pages), 0), np.uint64)
        else:
            sums = self._found_sums()
        self._host.write_headers(self.pages, sums)
