"""Memory that transfers pass through: a bounded ring on the device, and blocks of pinned integers on the host."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch

from mlkv.kernels.device import Event, Words


class StagingRing:
    """Device memory in segments of whole pages, handed out in turn.

    Args:
        allocate: makes device memory, uint8 of the given length.
        total_bytes: bound of the memory taken, at least one run.
        run_bytes: one page's bytes, a multiple of 16.
        segment_bytes: wanted size of a segment; never less than one run.
    """

    def __init__(
        self, allocate: Callable[[int], torch.Tensor], *, total_bytes: int, run_bytes: int, segment_bytes: int
    ) -> None:
        # Two segments at least where they fit, or copies and kernels would take turns.
        wanted = min(segment_bytes, max(run_bytes, total_bytes // 2))
        self.pages_per_segment = max(1, wanted // run_bytes)
        # No padding: pages go on from one segment to the next, so that one kernel may work on several.
        self._segment_bytes = self.pages_per_segment * run_bytes
        self.num_segments = max(1, total_bytes // self._segment_bytes)
        self._memory = allocate(self.num_segments * self._segment_bytes)
        num_runs = self.num_segments * self.pages_per_segment
        self._addresses = self._memory.data_ptr() + np.arange(num_runs, dtype=np.int64) * run_bytes
        self._busy: list[tuple[Event, ...]] = [()] * self.num_segments
        self._next = 0

    def take(self, most: int, *, only_free: bool = False) -> Segments:
        """The next segment, and those right behind it in memory, `most` in all.

        The caller waits for their `busy` events on the stream that overwrites them, and then sets new ones.

        Args:
            only_free: after the first, take only what nothing uses any more.
        """
        start, count = self._next, 1
        looked_at: tuple[Event, ...] = ()
        while count < most and start + count < self.num_segments:
            busy = self._busy[start + count]
            # Neighbours mostly have the same events, and each look at one costs a call of the driver.
            if only_free and busy is not looked_at and not all(event.query() for event in busy):
                break
            looked_at = busy
            count += 1
        self._next = (start + count) % self.num_segments
        return Segments(self, start, count)

    def take_whole(self, count: int) -> Segments:
        """Exactly `count` neighbouring segments, from the front again where fewer are left at the end."""
        if self._next + count > self.num_segments:
            self._next = 0
        return self.take(count)

    def next_is_free(self) -> bool:
        """Whether nothing uses the next segment any more."""
        return all(event.query() for event in self._busy[self._next])

    def distrust(self, events: tuple[Event, ...]) -> None:
        """After work was queued only in part: no segment is used again before these events."""
        self._busy = [events] * self.num_segments


class Segments:
    """Neighbouring segments of a ring, as one piece of staging memory.

    Attributes:
        addresses: int64 `[num_pages]`, of the runs that it holds.
        address: of the first one.
    """

    __slots__ = ("_count", "_ring", "_start", "address", "addresses")

    def __init__(self, ring: StagingRing, start: int, count: int) -> None:
        self._ring, self._start, self._count = ring, start, count
        first = start * ring.pages_per_segment
        self.addresses = ring._addresses[first : first + count * ring.pages_per_segment]
        self.address = int(self.addresses[0])

    @property
    def memory(self) -> torch.Tensor:
        size = self._ring._segment_bytes
        return self._ring._memory[self._start * size : (self._start + self._count) * size]

    @property
    def num_pages(self) -> int:
        return self._count * self._ring.pages_per_segment

    @property
    def busy(self) -> list[Event]:
        """Events after which the former content is no longer needed, each once."""
        busy = self._ring._busy[self._start : self._start + self._count]
        return list(dict.fromkeys(event for events in busy for event in events))

    @busy.setter
    def busy(self, events: list[Event]) -> None:
        self._ring._busy[self._start : self._start + self._count] = [tuple(events)] * self._count

    def split(self, most: int) -> list[Segments]:
        """The same memory in groups of up to `most` segments."""
        ends = range(0, self._count, most)
        return [Segments(self._ring, self._start + at, min(most, self._count - at)) for at in ends]


def _padded(num_words: int) -> int:
    """Of a part of a block, so that the next one begins on 16 bytes."""
    return num_words + num_words % 2


class PinnedBlock:
    """Pinned integers of one task: slots, addresses and sums.

    Attributes:
        array: the host's view of `words`.
        parts: what `divide` made of it.
    """

    def __init__(self, memory: torch.Tensor) -> None:
        self.words = Words(memory)
        self.array: npt.NDArray[np.int64] = memory.numpy()
        self._on_device: Words | None = None
        self._lengths: tuple[int, ...] = ()
        self.parts: tuple[Words, ...] = ()

    def divide(self, lengths: tuple[int, ...]) -> None:
        """Make parts of these lengths, each of which begins on 16 bytes. There is room for them."""
        if lengths != self._lengths:  # mostly equal to those of the last task, when tasks are small
            starts = accumulate(map(_padded, lengths), initial=0)  # one more of them than parts
            self.parts = tuple(self.words.part(*part) for part in zip(starts, lengths, strict=False))
            self._lengths = lengths

    def array_of(self, part: Words) -> npt.NDArray[np.int64]:
        """The host's view of a part."""
        start = (part.address - self.words.address) // 8
        return self.array[start : start + part.length]

    def on_device(self, allocate: Callable[[int], torch.Tensor]) -> Words:
        """As many words of device memory, kept with this block; `allocate` makes bytes of it."""
        if self._on_device is None:
            self._on_device = Words(allocate(8 * self.words.length).view(torch.int64))
        return self._on_device


class PinnedBlocks:
    """Blocks that are used again: making one takes the driver some 100 us, a third of what a small load lasts.

    Their lengths are powers of two, so that one fits many tasks. What is kept unused has a bound; a task that
    needs more than is kept gets new memory.

    Args:
        allocate: makes pinned memory, int64 of the given length.
    """

    _LEAST_WORDS = 8192  # 64 KiB: slots and sums of a few pages
    _NUM_AT_START = 16  # small tasks in flight at once
    _MOST_KEPT_WORDS = 4 << 20  # 32 MiB: of a few tasks of thousands of pages

    def __init__(self, allocate: Callable[[int], torch.Tensor]) -> None:
        self._allocate = allocate
        memory = allocate(self._NUM_AT_START * self._LEAST_WORDS)
        starts = range(0, len(memory), self._LEAST_WORDS)
        small = [PinnedBlock(memory[at : at + self._LEAST_WORDS]) for at in starts]
        self._kept: dict[int, list[PinnedBlock]] = {self._LEAST_WORDS: small}  # by length
        self._last: tuple[tuple[int, ...], int] = ((), 0)  # parts asked for, and the length of a block for them
        self._kept_words = len(memory)

    def take(self, *lengths: int) -> PinnedBlock:
        """A block in parts of these lengths."""
        if lengths != self._last[0]:
            needed = sum(map(_padded, lengths))
            self._last = (lengths, max(self._LEAST_WORDS, 1 << (needed - 1).bit_length()))
        length = self._last[1]
        kept = self._kept.get(length)
        if kept:
            self._kept_words -= length
            block = kept.pop()
        else:
            block = PinnedBlock(self._allocate(length))
        block.divide(lengths)
        return block

    def give(self, block: PinnedBlock) -> None:
        """Back from a task that the device has finished with."""
        length = block.words.length
        if self._kept_words + length <= self._MOST_KEPT_WORDS:
            self._kept_words += length
            self._kept.setdefault(length, []).append(block)
