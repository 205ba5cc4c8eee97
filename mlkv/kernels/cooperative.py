"""Loads of bytes that several ranks of one host need alike: each brings a part over its own link.

Where KV is replicated (one latent for all ranks, or fewer KV heads than ranks), every rank would bring the same
bytes over its own host link. In a cooperative load each brings 1/size of the pages of a chunk into its part of the
staging, an all-gather between the devices completes the staging in place, and every rank scatters and verifies all
of it as in any load::

    copy stream       part of chunk 0 | part of chunk 1 | part of chunk 2 | ...
    exchange stream                   | gather 0        | gather 1        | ...
    kernel stream                              | scatter 0       | scatter 1

An all-gather needs every rank, so nothing that differs between ranks may decide about one: whether a load is
cooperative and how it is cut into chunks follows from its number of pages and from sizes that all ranks share. A
rank on which something fails - its slots, a copy, a kernel - reports a failed load, but brings what it can and
takes part in every gather of it, so the others are not held up; if it could not bring its part, that does not
verify, on any rank. When gathering itself fails, or the others do not come before the deadline, the rank gives up
cooperating for good: the load in question fails there, later ones it brings alone. The others then wait in vain
once, for the same deadline, and do the same.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Generic, Protocol, TypeVar

import numpy as np
import torch

from mlkv.errors import DeadlineExceeded, MLKVError
from mlkv.kernels.device import Device, Event, S
from mlkv.kernels.direction import Direction
from mlkv.kernels.host_pages import PageBatch
from mlkv.kernels.staged_tasks import StagedLoad
from mlkv.kernels.staging import Segments

log = logging.getLogger(__name__)

S_contra = TypeVar("S_contra", contravariant=True)

COOPERATIVE_BYTES = 16 << 20
"""Loads below this are brought alone: what they would save, 0.3 ms of a link of 55 GB/s at most, is of the size of
the wait for a rank that comes later, and on an idle device they take the direct path."""

_RANK_SEGMENTS = 8
"""Segments of a chunk for each rank, at most: a gather costs every rank the wait for the last one."""

_MEASURE_BYTES = 64 << 20
_MEASURE_PAGES = 2048
"""Bounds of what is brought to measure: long enough for a rate, 1.2 ms of a link of 55 GB/s, and few pieces."""

_MEASURE_REPEATS = 4  # of which the quickest counts, as what is measured is the hardware


class Exchange(Protocol[S_contra]):
    """All-gathers among the ranks that read the same heads, on a communicator that nobody else uses.

    Attributes:
        rank: of this process among them.
        size: how many they are.
    """

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_gather(self, out: torch.Tensor, part: torch.Tensor, stream: S_contra) -> None:
        """Queue on `stream`: bring `part` of every rank into `out` of every rank, in the order of the ranks.

        Args:
            out: uint8 `[size * n]` on the device.
            part: uint8 `[n]`, the place of this rank in `out`.

        Raises RuntimeError when it cannot be queued or, where collectives make their caller wait, has failed.
        """
        ...

    def abort(self) -> None:
        """End what is under way, wherever the other ranks are. No all-gather follows."""
        ...


class Cooperation(Generic[S]):
    """What the cooperative loads of one rank share.

    Off until `begin` is called, which all ranks of the exchange do alike, or none.

    Args:
        direction: that of loads. Its staging is equally large on all ranks.
        deadline_s: how long a gather may wait for the other ranks.
    """

    def __init__(self, direction: Direction[S], exchange: Exchange[S], *, deadline_s: float) -> None:
        self.rank, self.size = exchange.rank, exchange.size
        self.given_up = ""  # why, once this rank no longer takes part
        self._direction = direction
        self._device: Device[S] = direction.device
        self._exchange = exchange
        self._deadline_s = deadline_s
        self._stream = direction.device.new_stream()
        self._gathers: deque[Event] = deque()  # queued and perhaps not over
        self._progress_at = 0.0  # when one was last seen to end, or the first of `_gathers` was queued
        self._least_bytes: int | None = None

    @property
    def is_on(self) -> bool:
        return self._least_bytes is not None and not self.given_up

    @property
    def fits(self) -> bool:
        """Whether the staging holds a page of each rank."""
        ring = self._direction.ring
        return ring.num_segments * ring.pages_per_segment >= self.size

    def begin(self, least_bytes: int) -> None:
        """From now on, loads of at least so many bytes are cooperative."""
        self._least_bytes = least_bytes

    def takes(self, num_pages: int) -> bool:
        """Whether a load is cooperative. Equal on all ranks, but for one that has given up."""
        if self._least_bytes is None or self.given_up:
            return False
        return num_pages > 0 and num_pages * self._direction.run_bytes >= self._least_bytes

    def chunk_segments(self, num_pages: int) -> int:
        """Segments that a chunk of a load of so many pages takes at most."""
        ring = self._direction.ring
        least = -(-self.size // ring.pages_per_segment)
        # Eighths of the load, so that there are several to go on at the same time; and thirds of the ring, because
        # each is copied, gathered and scattered.
        eighth = -(-num_pages // (8 * ring.pages_per_segment))
        return max(least, min(self.size * _RANK_SEGMENTS, eighth, ring.num_segments // 3))

    def gather(self, memory: torch.Tensor, after: list[Event]) -> Event:
        """Queue a gather that completes `memory`, `size` equal parts, behind events. Returns the one after it.

        To be called within `device.current()`.

        Raises MLKVError, RuntimeError: when this rank has given up, or does so now.
        """
        if self.given_up:
            raise MLKVError(self.given_up)
        part_bytes = len(memory) // self.size
        part = memory[self.rank * part_bytes : (self.rank + 1) * part_bytes]
        try:
            for event in after:
                self._device.wait(self._stream, event)
            self._exchange.all_gather(memory, part, self._stream)
            gathered = self._device.record(self._stream)
        except Exception as error:
            self.give_up(f"an all-gather failed: {type(error).__name__}: {error}")
            raise
        if not self._gathers:
            self._progress_at = time.monotonic()
        self._gathers.append(gathered)
        return gathered

    def watch(self) -> None:
        """Give up when the other ranks have kept a gather waiting for too long. Never blocks."""
        if not self._gathers or self.given_up:
            return
        try:
            while self._gathers and self._gathers[0].query():
                self._gathers.popleft()
                self._progress_at = time.monotonic()
        except Exception:  # the device is in error: loads say so themselves
            self._gathers.clear()
        if self._gathers and time.monotonic() - self._progress_at > self._deadline_s:
            self.give_up(f"other ranks kept an all-gather waiting for more than {self._deadline_s:g} s")

    def hurry(self, deadline_s: float) -> None:
        """Wait for other ranks no longer than this from now on."""
        self._deadline_s = min(self._deadline_s, deadline_s)

    def give_up(self, why: str) -> None:
        """Take part in no gather any more, and end those under way."""
        if self.given_up:
            return
        self.given_up = f"cooperative loads were given up: {why}"
        log.warning("%s; this rank brings its loads alone from now on", self.given_up)
        self._gathers.clear()
        self._exchange.abort()

    def measure(self, deadline_s: float) -> tuple[float, float]:
        """Seconds that up to a chunk of pages takes to come alone and cooperatively, on all ranks at once.

        Collective over the exchange. Nothing else is in flight.

        Raises DeadlineExceeded, RuntimeError: when a rank does not take part, or gathering fails.
        """
        end = time.monotonic() + deadline_s
        ring, host = self._direction.ring, self._direction.host
        segments = ring.take_whole(self.chunk_segments(8 * ring.num_segments * ring.pages_per_segment))
        most_pages = min(segments.num_pages, _MEASURE_PAGES, _MEASURE_BYTES // self._direction.run_bytes)
        part_pages = max(1, most_pages // self.size)
        num_pages = part_pages * self.size
        indices = np.arange(num_pages, dtype=np.int32) % np.int32(host.num_pages)  # whatever is in them
        pages = PageBatch(indices, bytes(16 * num_pages), b"", np.zeros(num_pages, np.uint64))
        sources = host.run_addresses(pages)
        first = self.rank * part_pages
        memory = segments.memory[: num_pages * self._direction.run_bytes]

        def bring(part: slice) -> Event:
            copier = self._direction.copy_streams[0]
            targets = segments.addresses[part]
            self._device.copy(copier, targets, sources[part], self._direction.run_bytes, to_host=False)
            return self._device.record(copier)

        def alone() -> Event:
            return bring(slice(num_pages))

        def together() -> Event:
            return self.gather(memory, [bring(slice(first, first + part_pages))])

        def seconds(way: Callable[[], Event]) -> float:
            _wait(self.gather(memory, []), end)  # so that all ranks begin at once
            start = time.perf_counter()
            _wait(way(), end)
            return time.perf_counter() - start

        with self._device.current():
            seconds(together)  # communicators and copies are made ready by their first use
            both = [(seconds(alone), seconds(together)) for _ in range(_MEASURE_REPEATS)]
        self.watch()
        return min(pair[0] for pair in both), min(pair[1] for pair in both)

    def close(self) -> None:
        """No load is in flight. Not collective."""
        self.given_up = self.given_up or "the transfer engine is closed"
        self._exchange.abort()


class CooperativeLoad(StagedLoad[S]):
    """See `LoadTransfer`, and the head of this file."""

    def __init__(
        self, direction: Direction[S], pages: PageBatch, slots: torch.Tensor, cooperation: Cooperation[S]
    ) -> None:
        super().__init__(direction, pages, slots)
        self._cooperation = cooperation
        self._chunk_segments = cooperation.chunk_segments(len(pages))

    def attempt(self, work: Callable[[], Event | None]) -> Event | None:
        """Do what only this rank needs. If that raises, its load has failed, and it goes on for the others."""
        try:
            return work()
        except Exception as error:
            self.error = self.error or f"{type(error).__name__}: {error}"
            return None

    def keep_slots(self, most: int | None = None) -> None:
        try:
            super().keep_slots(most)
        except BaseException:
            self._block = None  # half filled; the load goes on without slots
            raise

    def poll(self) -> bool:
        self._cooperation.watch()
        return super().poll()

    def _queue_chunks(self, may_go_on: Callable[[], bool]) -> bool:
        while True:
            over = self._queue_chunk()
            self._arrivals.append((over, self._num_queued))
            if self._num_queued == len(self.pages):
                if self.error is not None:
                    self._await_everything()
                return True
            if not may_go_on():
                return False

    def _queue_chunk(self) -> Event:
        """Returns the event after which its staging is free again."""
        size, rank = self._cooperation.size, self._cooperation.rank
        segments = self._direction.ring.take_whole(self._next_segments())
        num_pages = min(segments.num_pages // size * size, len(self.pages) - self._num_queued)
        # Equal parts; the last ones may reach past the last page, and what is gathered there is not looked at.
        part_pages = -(-num_pages // size)
        start = min(rank * part_pages, num_pages)
        mine = slice(start, min(start + part_pages, num_pages))
        copied = self.attempt(partial(self._copy_part, segments, mine)) if start < num_pages else None
        memory = segments.memory[: size * part_pages * self._direction.run_bytes]
        gathered = self._cooperation.gather(memory, segments.busy if copied is None else [copied])
        over = self.attempt(partial(self._scatter, segments, num_pages, gathered)) or gathered
        segments.busy = [over]
        self._direction.chunk_is_queued(over)
        self._num_queued += num_pages
        return over

    def _next_segments(self) -> int:
        """How many segments the next chunk takes."""
        # The first is small, so that something is there to be gathered early; the last ones are ever smaller, as
        # nothing is copied beside the last gather and scatter.
        few = min(self._chunk_segments, self._cooperation.size)
        if not self._num_queued:
            return few
        rest = -(-(len(self.pages) - self._num_queued) // self._direction.ring.pages_per_segment)
        return min(self._chunk_segments, max(few, -(-rest // 2)))

    def _copy_part(self, segments: Segments, mine: slice) -> Event:
        """Queue the copies of this rank's pages of the chunk, a slice of the chunk's pages."""
        copier = self._direction.copy_streams[0]
        for event in segments.busy:
            self._device.wait(copier, event)
        sources = self._paged[self._num_queued :][mine]
        targets = segments.addresses[mine]
        self._device.copy(copier, targets, sources, self._direction.run_bytes, to_host=False)
        return self._device.record(copier)

    def _scatter(self, segments: Segments, num_pages: int, gathered: Event) -> Event:
        """Queue the scatter of the chunk, if this rank's load has not failed yet."""
        if self.error is None and not self._num_queued:
            self._upload_slots(beyond=self._direction.ring.pages_per_segment)
            self._join_caller()
        self._device.wait(self._direction.kernel_stream, gathered)
        if self.error is None:
            return self._launch(self._num_queued, num_pages, segments)
        return self._device.record(self._direction.kernel_stream)

    def _complete(self, first: int, end: int) -> None:
        super()._complete(first, end)
        if end == len(self.pages) and self.num_good < len(self.pages) and self._cooperation.given_up:
            self.error = self._cooperation.given_up


def _wait(event: Event, end: float) -> None:
    while not event.query():
        if time.monotonic() > end:
            raise DeadlineExceeded("an all-gather with the other ranks of this host did not end")
        time.sleep(0)
