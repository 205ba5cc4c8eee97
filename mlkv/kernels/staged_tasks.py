"""One load or offload on its way through copy engine, staging and kernels; see `staged` for the whole."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Generic

import numpy as np
import numpy.typing as npt
import torch

from mlkv.kernels.device import Event, S, Staging, Words
from mlkv.kernels.direction import Direction
from mlkv.kernels.host_pages import PageBatch, num_verified
from mlkv.kernels.staging import PinnedBlock, Segments
from mlkv.kernels.transfer import LoadTransfer, OffloadTransfer, TransferPath

CHUNK_SEGMENTS = 8
"""Segments that one batch of copies takes at most: fewer, larger chunks cost the caller less time."""


class StagedTask(Generic[S]):
    """What loads and offloads have in common. Lives until the device has finished with all of its buffers."""

    num_heads: int  # moved by this rank
    kernel: Callable[[int, Words, Staging | Words, Words, int], None]

    def __init__(self, direction: Direction[S], pages: PageBatch, slots: torch.Tensor) -> None:
        self._pool, self._host, self._device = direction.pool, direction.host, direction.device
        self._direction = direction
        self.pages = pages
        self._paged = self._host.run_addresses(pages)
        self._callers_slots: torch.Tensor | None = slots  # until `keep_slots`
        self.path: TransferPath = "staged"
        self.after: Event | None = None  # what the caller had queued, if that was not over
        self.error: str | None = None
        self._block: PinnedBlock | None = None
        self._num_queued = 0  # pages
        self._num_chunks = 0
        self._done_events: tuple[Event, ...] | None = None  # None until everything is queued
        self._is_prepared = False
        self._over = False

    @abstractmethod
    def queue(self, may_go_on: Callable[[], bool]) -> bool:
        """See `direction.Queueable`."""

    @abstractmethod
    def _prepare(self) -> None:
        """Do on the host what needs no result of the device, while it copies."""

    @abstractmethod
    def _complete(self) -> None:
        """The device has finished without error: verify, or write headers."""

    def run(self) -> None:
        self.queue(lambda: True)

    def keep_slots(self) -> None:
        """Keep the slots, which the caller may change later, and make room for addresses and sums. Idempotent."""
        slots, self._callers_slots = self._callers_slots, None
        if slots is None:
            return
        num_pages, num_slots = len(self.pages), slots.numel()
        num_sums = num_pages * self.num_heads * self._device.kernels.num_parts
        self._block = block = self._direction.pinned.take(num_slots + num_pages + num_sums + 2)
        # Each part begins on 16 bytes.
        addresses = num_slots + num_slots % 2
        sums = addresses + num_pages + num_pages % 2
        self._slots_are_pinned = slots.device.type == "cpu"
        if self._slots_are_pinned:
            block.array[:num_slots] = slots.numpy()
            self._slots = block.words.part(0, num_slots)
        else:
            self._slots = Words(slots.clone())
        block.array[addresses : addresses + num_pages] = self._paged
        self._paged_words = block.words.part(addresses, num_pages)
        self._sums = block.words.part(sums, num_sums)
        sum_parts = block.array[sums : sums + num_sums].view(np.uint64)
        self._sum_parts = sum_parts.reshape(num_pages, self.num_heads, -1)

    def poll(self) -> bool:
        if self._over:
            return True
        if self._done_events is None:
            self._direction.queue_more()
            if self._done_events is None:
                return False
        if not self._is_prepared and self.error is None:
            self._is_prepared = True
            try:
                self._prepare()
            except Exception as error:  # a bad page pool; the device still copies, so this is not the end
                self.error = f"{type(error).__name__}: {error}"
        try:
            for event in self._done_events:
                if not event.query():
                    return False
            if self.error is None:
                self._complete()
        except Exception as error:  # a dead context, on which nothing runs: this transfer failed, its caller lives
            self.error = f"{type(error).__name__}: {error}"
        self._end()
        return True

    def fail(self, reason: str) -> None:
        self.error = reason
        try:
            self._done_events = self._direction.record_all()
        except Exception as error:  # no event can be had from a device in error, and nothing runs on it any more
            self.error = f"{reason}; then {type(error).__name__}: {error}"
            self._done_events = ()

    def refuse(self, reason: str) -> None:
        """End with an error before anything was submitted."""
        self.error = reason
        self._end()

    def finish_empty(self) -> None:
        """A transfer without bytes, but perhaps with headers."""
        self._prepare()
        self._complete()
        self._end()

    def _end(self) -> None:
        self._over = True
        if self._block is not None:
            # Only now, and with it the slots on the device: kernels that were queued had read them until here.
            self._direction.pinned.give(self._block)
            self._block = None
            del self._slots, self._paged_words, self._sums, self._sum_parts
        self._direction.is_over(self)

    def _found_sums(self) -> npt.NDArray[np.uint64]:
        sums: npt.NDArray[np.uint64] = self._sum_parts.sum(axis=-1)
        return sums

    def _upload_slots(self) -> None:
        """Bring the slots to the device, for chunks after the first.

        Every program of a kernel reads slots, many programs the same ones. For one chunk that costs less over the
        link than a copy that this chunk would have to wait for.
        """
        if not self._slots_are_pinned or len(self.pages) <= self._direction.ring.pages_per_segment:
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

    def _queue_direct(self) -> Event:
        self.keep_slots()
        self._join_caller()
        return self._launch(0, len(self.pages), self._paged_words)

    def _launch(self, first: int, num_pages: int, pages: Staging | Words) -> Event:
        """Queue the kernel for some of the pages. The event comes after it."""
        tokens, parts = self._pool.layout.page_tokens, self.num_heads * self._device.kernels.num_parts
        slots = self._slots.part(first * tokens, num_pages * tokens)
        sums = self._sums.part(first * parts, num_pages * parts)
        stream = self._direction.kernel_stream
        self._device.launch(stream, partial(self.kernel, num_pages, slots, pages, sums))
        return self._device.record(stream)

    def _copy(self, segments: Segments, after: list[Event], *, to_host: bool) -> tuple[Event, int]:
        """Queue copies between segments and the pages that come next, as many as fit.

        Args:
            after: the copies wait for these events.

        Returns:
            the event after them, and on which copy stream it is.
        """
        which = self._num_chunks % len(self._direction.copy_streams)
        self._num_chunks += 1
        copier = self._direction.copy_streams[which]
        for event in after:
            self._device.wait(copier, event)
        paged = self._paged[self._num_queued : self._num_queued + segments.num_pages]
        staged = segments.addresses[: len(paged)]
        targets, sources = (paged, staged) if to_host else (staged, paged)
        self._device.copy(copier, targets, sources, self._direction.run_bytes, to_host=to_host)
        return self._device.record(copier), which


class StagedLoad(StagedTask[S], LoadTransfer):
    """See `LoadTransfer`."""

    def __init__(self, direction: Direction[S], pages: PageBatch, slots: torch.Tensor) -> None:
        super().__init__(direction, pages, slots)
        self.num_heads = self._host.rank_slice.num_heads
        self.kernel = self._device.kernels.scatter
        self.num_good = 0
        self._num_identified = 0
        self._expected = np.empty((0, 0), np.uint64)

    def queue(self, may_go_on: Callable[[], bool]) -> bool:
        last = self._queue_direct() if self.path == "direct" else self._queue_chunks(may_go_on)
        if last is None:
            return False
        self._done_events = (last,)
        return True

    def _prepare(self) -> None:
        # Pages that are not the ones meant are copied as well, rare as they are: nobody attaches them.
        self._num_identified = self._host.num_identified(self.pages)
        if self._block is not None:
            self._expected = self._host.expected_sums(self.pages)

    def _queue_chunks(self, may_go_on: Callable[[], bool]) -> Event | None:
        """Returns the event after the last scatter once all chunks are queued, None before."""
        ring = self._direction.ring
        # Eighths of the task, so that the last scatter, beside which nothing is copied, is short; and half of the
        # ring, so that there is another part to copy into meanwhile.
        num_segments = -(-len(self.pages) // ring.pages_per_segment)
        most = min(CHUNK_SEGMENTS, -(-num_segments // 8), max(1, ring.num_segments // 2))
        while True:
            # The first copy is small and comes before everything else, so that the link is busy early.
            segments = ring.take(most if self._num_queued else 1)
            copied, _ = self._copy(segments, segments.busy, to_host=False)
            if not self._num_queued:
                self.keep_slots()
                self._upload_slots()
                self._join_caller()
            self._device.wait(self._direction.kernel_stream, copied)
            num_pages = min(segments.num_pages, len(self.pages) - self._num_queued)
            scattered = self._launch(self._num_queued, num_pages, segments)
            segments.busy = [scattered]
            self._direction.chunk_is_queued(scattered)
            self._num_queued += num_pages
            if self._num_queued == len(self.pages):
                return scattered  # kernels are in order: the last scatter is over last
            if not may_go_on():
                return None

    def _complete(self) -> None:
        self.num_good = self._num_identified
        if self._block is not None:  # else this rank has no heads to copy
            self.num_good = min(self.num_good, num_verified(self._expected, self._found_sums()))


class StagedOffload(StagedTask[S], OffloadTransfer):
    """See `OffloadTransfer`."""

    def __init__(self, direction: Direction[S], pages: PageBatch, slots: torch.Tensor) -> None:
        super().__init__(direction, pages, slots)
        self.num_heads = self._host.rank_slice.num_written_heads
        self.kernel = self._device.kernels.gather
        self._released_event: Event | None = None
        self._released = False
        self._last_copies: dict[int, Event] = {}  # by copy stream
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

    def queue(self, may_go_on: Callable[[], bool]) -> bool:
        if self.path == "direct":
            self._released_event = self._queue_direct()
            events: tuple[Event, ...] = (self._released_event,)
        elif self._queue_chunks(may_go_on):
            events = tuple(self._last_copies.values())
        else:
            return False
        self._done_events = events
        return True

    def _prepare(self) -> None:
        self._host.write_identities(self.pages)
        self._bindings = self._host.sum_bindings(self.pages)

    def _queue_chunks(self, may_go_on: Callable[[], bool]) -> bool:
        ring = self._direction.ring
        if not self._num_queued:
            self.keep_slots()
            self._join_caller()
        while True:
            # One segment first, so that copies begin; then all that there is room for by one kernel, so that slots
            # are released while the first segment is still on its way; then as room comes back.
            rest = -(-(len(self.pages) - self._num_queued) // ring.pages_per_segment)
            if not self._num_queued:
                segments = ring.take(1)
            elif ring.next_is_free():
                segments = ring.take(rest, only_free=True)
            else:
                segments = ring.take(min(rest, CHUNK_SEGMENTS, max(1, ring.num_segments // 2)))
            for event in segments.busy:
                self._device.wait(self._direction.kernel_stream, event)
            num_pages = min(segments.num_pages, len(self.pages) - self._num_queued)
            gathered = self._launch(self._num_queued, num_pages, segments)
            for group in segments.split(CHUNK_SEGMENTS):
                copied, which = self._copy(group, [gathered], to_host=True)
                group.busy = [copied]
                self._last_copies[which] = copied
                self._direction.chunk_is_queued(copied)
                if not self._num_queued:
                    self._upload_slots()
                self._num_queued = min(self._num_queued + group.num_pages, len(self.pages))
            if self._num_queued == len(self.pages):
                self._released_event = gathered
                return True
            if not may_go_on():
                return False

    def _complete(self) -> None:
        if self._block is not None:  # else this rank has no heads to write
            self._host.write_sums(self.pages, self._found_sums(), self._bindings)
