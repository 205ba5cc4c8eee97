"""Memory that transfers pass through: a bounded ring on the device, and blocks of pinned integers on the host."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from mlkv.kernels.device import Event, Segment, Words

_ALIGN_BYTES = 512  # of segments: what torch aligns allocations to, and more than any access needs


class StagingRing:
    """Segments handed out in turn.

    Args:
        allocate: makes device memory, uint8 of the given length.
        total_bytes: bound of the memory taken.
        run_bytes: one page's bytes; a segment holds whole ones.
        segment_bytes: wanted size of a segment; never less than one run.
    """

    def __init__(
        self, allocate: Callable[[int], torch.Tensor], *, total_bytes: int, run_bytes: int, segment_bytes: int
    ) -> None:
        # Two segments at least where they fit, or copies and kernels would take turns.
        wanted = min(segment_bytes, max(run_bytes, total_bytes // 2))
        self.pages_per_segment = max(1, wanted // run_bytes)
        used = self.pages_per_segment * run_bytes
        size = -(-used // _ALIGN_BYTES) * _ALIGN_BYTES
        count = max(1, total_bytes // size)
        self._memory = allocate(count * size)
        start = self._memory.data_ptr()
        self._segments = [Segment(self._memory[at : at + size], start + at) for at in range(0, count * size, size)]
        self._are_adjacent = used == size  # without padding, runs go on from one segment to the next
        self._next = 0

    @property
    def num_segments(self) -> int:
        return len(self._segments)

    def take(self) -> Segment:
        """The next segment. The caller waits for `busy` on the stream that overwrites it, then sets it anew."""
        segment = self._segments[self._next]
        self._next = (self._next + 1) % len(self._segments)
        return segment

    def take_free(self, most: int) -> list[Segment]:
        """The next segment, and as many right behind it as are free already, `most` in all.

        One kernel may fill them all through `joined`.
        """
        taken = [self.take()]
        while (
            len(taken) < most
            and self._are_adjacent
            and self._next
            and all(event.query() for event in self._segments[self._next].busy)
        ):
            taken.append(self.take())
        return taken

    def joined(self, segments: list[Segment]) -> Segment:
        """Segments of `take_free` as one."""
        if len(segments) == 1:
            return segments[0]
        start = segments[0].address - self._memory.data_ptr()
        end = segments[-1].address - self._memory.data_ptr() + len(segments[-1].memory)
        return Segment(self._memory[start:end], segments[0].address)

    def distrust(self, events: tuple[Event, ...]) -> None:
        """After work was queued only in part: no segment is used again before these events."""
        for segment in self._segments:
            segment.busy = events


class PinnedBlock:
    """Pinned integers of one task: slots, addresses and sums. `array` is the host's view of `words`."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.words = Words(memory)
        self.array: npt.NDArray[np.int64] = memory.numpy()


class PinnedBlocks:
    """Blocks kept for small tasks, so that these need no allocation; larger tasks get one of their own.

    Args:
        allocate: makes pinned memory, int64 of the given length.
    """

    _KEPT_WORDS = 8192  # 64 KiB: slots and sums of a few pages
    _NUM_KEPT = 16  # small tasks in flight at once

    def __init__(self, allocate: Callable[[int], torch.Tensor]) -> None:
        self._allocate = allocate
        memory = allocate(self._NUM_KEPT * self._KEPT_WORDS)
        self._kept = [
            PinnedBlock(memory[at : at + self._KEPT_WORDS]) for at in range(0, len(memory), self._KEPT_WORDS)
        ]

    def take(self, num_words: int) -> PinnedBlock:
        if num_words <= self._KEPT_WORDS and self._kept:
            return self._kept.pop()
        return PinnedBlock(self._allocate(num_words))

    def give(self, block: PinnedBlock) -> None:
        """Back from a task that the device has finished with."""
        if block.words.length == self._KEPT_WORDS and len(self._kept) < self._NUM_KEPT:
            self._kept.append(block)
