"""One load or offload on its way through copy engine, staging and kernels; see `staged` for the whole."""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Generic

import numpy as np
import numpy.typing as npt
import torch

from mlkv.kernels.device import Event, S, Staging, Words
from mlkv.kernels.direction import Direction
from mlkv.kernels.host_pages import HostRun, PageBatch, num_verified
from mlkv.kernels.staging import PinnedBlock, Segments
from mlkv.kernels.transfer import LoadTransfer, OffloadTransfer, TransferPath

LOAD_CHUNK_SEGMENTS = 2
"""Segments that one batch of copies, and the scatter after it, take at most. A loop of matmuls on an H200 takes
1.032 of its time beside loads in chunks of 2 segments of 16 MiB, 1.038 with 8, which hold up a matmul for longer,
and 1.044 with 1. Each chunk costs the caller some 50 us."""

OFFLOAD_CHUNK_SEGMENTS = 8
"""The same for the copies behind a gather, which are no concern of a matmul: few, for the sake of the caller."""


class StagedTask(Generic[S]):
    """What loads and offloads have in common. Lives until the device has finished with all of its buffers."""

    num_heads: int  # moved by this rank
    kernel: Callable[[int, Words, Staging | Words, Words, int], None]

    def __init__(self, direction: Direction[S], pages: PageBatch, slots: torch.Tensor) -> None:
        self._pool, self._host, self._device = direction.pool, direction.host, direction.device
        self._direction = direction
        self.pages = pages
        self._num_pages = len(pages)
        self._callers_slots: torch.Tensor | None = slots  # until they are kept
        self._slots_are_pinned = slots.is_cpu
        self._num_kept = 0  # of the slots
        self.path: TransferPath = "staged"
        self.after: Event | None = None  # what the caller had queued, if that was not over
        self.error: str | None = None
        self._block: PinnedBlock | None = None
        self._num_queued = 0  # pages
        self._num_chunks = 0
        # In the order of the device: an event, and how many pages are through once it is over. A worker appends
        # while the caller polls.
        self._arrivals: deque[tuple[Event, int]] = deque()
        self._num_complete = 0  # pages
        self._all_queued = False
        self._is_prepared = False
        self._over = False

    def queue(self, may_go_on: Callable[[], bool]) -> bool:
        """See `direction.Queueable`."""
        if self.path == "direct":
            self._queue_direct()
        else:
            if not self._num_queued:
                self._paged = self._host.run_addresses(self.pages)
            if not self._queue_chunks(may_go_on):
                return False
        self._all_queued = True
        return True

    @abstractmethod
    def _queue_chunks(self, may_go_on: Callable[[], bool]) -> bool:
        """As `queue`, on the staged path."""

    @abstractmethod
    def _prepare(self) -> None:
        """Do on the host what needs no result of the device, while it copies."""

    @abstractmethod
    def _complete(self, first: int, end: int) -> None:
        """The device has finished with pages `[first, end)`, and without error: verify, or write headers.

        Comes after `_prepare`.
        """

    def run(self) -> None:
        self.queue(lambda: True)

    def keep_slots(self, most: int | None = None) -> None:
        """Keep the slots, which the caller may change once it has the task back. Idempotent.

        With them the task gets pinned memory for addresses of pages and for sums.

        Args:
            most: only the first so many for now, because a device waits for these.
        """
        slots = self._callers_slots
        if slots is None:
            return
        num_slots, block = slots.numel(), self._block
        if block is None:
            num_sums = self._num_pages * self.num_heads * self._device.kernels.num_parts
            self._block = block = self._direction.pinned.take(num_slots, self._num_pages, num_sums)
            self._slots, self._addresses, self._sums = block.parts
        end = num_slots if most is None else min(most, num_slots)
        if self._slots_are_pinned:
            block.array[self._num_kept : end] = slots.numpy()[self._num_kept : end]
            self._num_kept = end
        else:
            self._slots, end = Words(slots.clone()), num_slots
        if end == num_slots:
            self._callers_slots = None

    def poll(self) -> bool:
        if self._over:
            return True
        if not self._all_queued:
            self._direction.queue_more()
        all_queued, arrivals = self._all_queued, self._arrivals  # in this order: what follows may become more
        try:
            if arrivals and not self._is_prepared and self.error is None:
                self._is_prepared = True
                if self._block is not None:
                    self._parts = self._parts_of(self._block)
                self._prepare()  # raises for a bad page pool; the device still copies, so that is not the end
        except Exception as error:
            self.error = f"{type(error).__name__}: {error}"
        try:
            while arrivals and arrivals[0][0].query():
                end = arrivals.popleft()[1]
                if self.error is None:
                    self._complete(self._num_complete, end)
                self._num_complete = end
        except Exception as error:  # a dead context, on which nothing runs: this transfer failed, its caller lives
            self.error = f"{type(error).__name__}: {error}"
            self._end()
            return True
        if arrivals or not all_queued:
            return False
        self._end()
        return True

    def fail(self, reason: str) -> None:
        self.error = reason
        try:
            self._await_everything()
        except Exception as error:  # no event can be had from a device in error, and nothing runs on it any more
            self.error = f"{reason}; then {type(error).__name__}: {error}"
            self._arrivals = deque()
        self._all_queued = True

    def _await_everything(self) -> None:
        """After a failure, who knows how far the streams got: over is this when all that they have is over."""
        self._arrivals = deque((event, self._num_pages) for event in self._direction.record_all())

    def refuse(self, reason: str) -> None:
        """End with an error before anything was submitted."""
        self.error = reason
        self._end()

    def finish_empty(self) -> None:
        """A transfer without bytes, but perhaps with headers."""
        self._prepare()
        self._complete(0, self._num_pages)
        self._end()

    def _end(self) -> None:
        self._over = True
        if self._block is not None:
            # Only now, and with it the slots on the device: kernels that were queued had read them until here.
            self._direction.pinned.give(self._block)
            self._block = None
            del self._slots, self._addresses, self._sums
        self._direction.is_over(self)

    def _parts_of(self, block: PinnedBlock) -> npt.NDArray[np.uint64]:
        """Where the kernels leave partial sums: a view, uint64 `[num_pages, num_heads, num_parts]`."""
        return block.array_of(self._sums).view(np.uint64).reshape(self._num_pages, self.num_heads, -1)

    def _found_sums(self, first: int, end: int) -> npt.NDArray[np.uint64]:
        """What the kernels summed up: uint64 `[end - first, num_heads]`."""
        sums: npt.NDArray[np.uint64] = np.add.reduce(self._parts[first:end], axis=-1)
        return sums

    def _upload_slots(self, *, beyond: int) -> None:
        """Bring the slots of more than so many pages to the device, for the kernels queued from now on.

        Every program of a kernel reads slots, many programs the same ones. For few pages that costs less over the
        link than it takes to queue this.
        """
        if not self._slots_are_pinned or self._num_pages <= beyond:
            return
        assert self._block is not None
        uploaded = self._block.on_device(self._device.staging).part(0, self._slots.length)
        # By a kernel: a copy engine would bring them after all the pages that are queued on it already.
        kernels = self._device.kernels
        self._device.launch(self._direction.kernel_stream, partial(kernels.fetch, self._slots, uploaded))
        self._slots = uploaded

    def _join_caller(self) -> None:
        """Let kernels begin after what the caller had queued when it submitted this task."""
        if self.after is not None:
            self._device.wait(self._direction.kernel_stream, self.after)

    def _queue_direct(self) -> None:
        self.keep_slots()
        assert self._block is not None
        pages: HostRun | Words = self._addresses
        if self._num_pages == 1:
            # A table of one address would be read over the link before anything else can be.
            pages = self._host.run_of(self.pages)
        else:
            self._host.write_run_addresses(self.pages, self._block.array_of(self._addresses))
        self._join_caller()
        launch = partial(self.kernel, self._num_pages, self._slots, pages, self._sums)
        self._device.launch(self._direction.kernel_stream, launch)
        self._arrivals.append((self._device.record(self._direction.kernel_stream), self._num_pages))

    def _launch(self, first: int, num_pages: int, pages: Staging) -> Event:
        """Queue the kernel for some of the pages. The event comes after it."""
        tokens, parts = self._pool.layout.page_tokens, self.num_heads * self._device.kernels.num_parts
        slots = self._slots.part(first * tokens, num_pages * tokens)
        sums = self._sums.part(first * parts, num_pages * parts)
        stream = self._direction.kernel_stream
        self._device.launch(stream, partial(self.kernel, num_pages, slots, pages, sums))
        return self._device.record(stream)

    def _copy(self, segments: Segments, after: list[Event], *, to_host: bool) -> Event:
        """Queue copies between segments and the pages that come next, as many as fit.

        Args:
            after: the copies wait for these events.

        Returns the event after them.
        """
        copier = self._direction.copy_streams[self._num_chunks % len(self._direction.copy_streams)]
        self._num_chunks += 1
        for event in after:
            self._device.wait(copier, event)
        paged = self._paged[self._num_queued : self._num_queued + segments.num_pages]
        staged = segments.addresses[: len(paged)]
        targets, sources = (paged, staged) if to_host else (staged, paged)
        self._device.copy(copier, targets, sources, self._direction.run_bytes, to_host=to_host)
        return self._device.record(copier)


class StagedLoad(StagedTask[S], LoadTransfer):
    """See `LoadTransfer`."""

    def __init__(self, direction: Direction[S], pages: PageBatch, slots: torch.Tensor) -> None:
        super().__init__(direction, pages, slots)
        self.num_heads = self._host.rank_slice.num_heads
        self.kernel = self._device.kernels.scatter
        self.num_good = 0
        self._num_identified = 0
        self._expected = np.empty((0, 0), np.uint64)

    def _prepare(self) -> None:
        # Pages that are not the ones meant are copied as well, rare as they are: nobody attaches them.
        self._num_identified = self._host.num_identified(self.pages)
        if self._block is not None:
            self._expected = self._host.expected_sums(self.pages)

    def _queue_chunks(self, may_go_on: Callable[[], bool]) -> bool:
        ring = self._direction.ring
        # Half of the ring, so that there is another part to copy into meanwhile.
        most = min(LOAD_CHUNK_SEGMENTS, max(1, ring.num_segments // 2))
        while True:
            # The first copy is small and comes before everything else, so that the link is busy early. The last
            # ones are smaller and smaller, since nothing is copied beside the last scatter.
            rest = -(-(self._num_pages - self._num_queued) // ring.pages_per_segment)
            segments = ring.take(min(most, -(-rest // 2)) if self._num_queued else 1)
            copied = self._copy(segments, segments.busy, to_host=False)
            if not self._num_queued:
                self.keep_slots()
                self._upload_slots(beyond=ring.pages_per_segment)
                self._join_caller()
            self._device.wait(self._direction.kernel_stream, copied)
            num_pages = min(segments.num_pages, self._num_pages - self._num_queued)
            scattered = self._launch(self._num_queued, num_pages, segments)
            segments.busy = [scattered]
            self._direction.chunk_is_queued(scattered)
            self._num_queued += num_pages
            self._arrivals.append((scattered, self._num_queued))
            if self._num_queued == self._num_pages:
                return True
            if not may_go_on():
                return False

    def _complete(self, first: int, end: int) -> None:
        if self.num_good < first:
            return  # a page before these is bad already
        verified = end
        if self._block is not None:  # else this rank has no heads to copy
            verified = first + num_verified(self._expected[first:end], self._found_sums(first, end))
        self.num_good = min(verified, self._num_identified)

    def _end(self) -> None:
        if self.error is not None:
            self.num_good = 0
        super()._end()


class StagedOffload(StagedTask[S], OffloadTransfer):
    """See `OffloadTransfer`."""

    def __init__(self, direction: Direction[S], pages: PageBatch, slots: torch.Tensor) -> None:
        super().__init__(direction, pages, slots)
        self.num_heads = self._host.rank_slice.num_written_heads
        self.kernel = self._device.kernels.gather
        self._gathered: deque[tuple[Segments, Event]] = deque()  # and not copied yet
        self._num_gathered = 0  # pages
        self._released_event: Event | None = None
        self._released = False
        self._bindings: npt.NDArray[np.uint64]

    def poll_released(self) -> bool:
        if self._released or self._over:
            return True
        if self._released_event is None:
            self._direction.queue_more()
        if self._released_event is None:
            # Not queued to the end, or failed on the way there: then it is the end that releases.
            return self.error is not None and self.poll()
        try:
            self._released = self._released_event.query()
        except Exception:  # the device is in error: poll() says so and ends the transfer
            self._released = self.poll()
        return self._released

    def _queue_direct(self) -> None:
        super()._queue_direct()
        self._released_event = self._arrivals[-1][0]

    def _prepare(self) -> None:
        self._host.write_identities(self.pages)
        self._bindings = self._host.sum_bindings(self.pages)

    def _queue_chunks(self, may_go_on: Callable[[], bool]) -> bool:
        ring = self._direction.ring
        if not self._num_gathered:
            # One segment first, so that copies begin; then all that there is room for by one kernel, so that slots
            # are released while the first segment is still on its way; then as room comes back.
            self.keep_slots(ring.pages_per_segment * self._pool.layout.page_tokens)
            self._join_caller()
            self._gather(1)
            self.keep_slots()
            self._upload_slots(beyond=ring.num_segments * ring.pages_per_segment)
        while self._num_queued < self._num_pages:
            # Not into the first one, which nothing shows to be in use until its copy is queued.
            room = ring.num_segments - len(self._gathered)
            rest = -(-(self._num_pages - self._num_gathered) // ring.pages_per_segment)
            if rest and room:
                self._gather(min(rest, room))
            while self._gathered:
                self._copy_gathered(*self._gathered.popleft())
            if self._num_queued < self._num_pages and not may_go_on():
                return False
        return True

    def _gather(self, most: int) -> None:
        """Queue the gather of the pages that come next, into at most so many segments."""
        ring = self._direction.ring
        if ring.next_is_free():
            segments = ring.take(most, only_free=True)
        else:
            segments = ring.take(min(most, OFFLOAD_CHUNK_SEGMENTS, max(1, ring.num_segments // 2)))
            for event in segments.busy:
                self._device.wait(self._direction.kernel_stream, event)
        num_pages = min(segments.num_pages, self._num_pages - self._num_gathered)
        gathered = self._launch(self._num_gathered, num_pages, segments)
        self._gathered.append((segments, gathered))
        self._num_gathered += num_pages
        if self._num_gathered == self._num_pages:
            self._released_event = gathered

    def _copy_gathered(self, segments: Segments, gathered: Event) -> None:
        """Queue the copies to the host of what was gathered into these segments."""
        # What is gathered next into the first ones must not wait for all of them.
        is_last = self._num_queued + segments.num_pages >= self._num_pages
        for group in [segments] if is_last else segments.split(OFFLOAD_CHUNK_SEGMENTS):
            copied = self._copy(group, [gathered], to_host=True)
            group.busy = [copied]
            self._direction.chunk_is_queued(copied)
            self._num_queued = min(self._num_queued + group.num_pages, self._num_pages)
            self._arrivals.append((copied, self._num_queued))

    def _complete(self, first: int, end: int) -> None:
        if self._block is not None:  # else this rank has no heads to write
            indices, bindings = self.pages.indices[first:end], self._bindings[first:end]
            self._host.write_sums(indices, self._found_sums(first, end), bindings)
