"""A bounded ring of device memory through which pages pass between the copy engine and the kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from mlkv.kernels.device import Event

_ALIGN_BYTES = 512  # of segments: what torch aligns allocations to, and more than any access needs


@dataclass
class Segment:
    """One piece of the ring. `busy`: events after which its previous content is no longer needed."""

    memory: torch.Tensor
    address: int
    busy: tuple[Event, ...] = ()


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
        size = -(-self.pages_per_segment * run_bytes // _ALIGN_BYTES) * _ALIGN_BYTES
        count = max(1, total_bytes // size)
        memory = allocate(count * size)
        start = memory.data_ptr()
        self._segments = [Segment(memory[at : at + size], start + at) for at in range(0, count * size, size)]
        self._next = 0

    @property
    def num_segments(self) -> int:
        return len(self._segments)

    def take(self) -> Segment:
        """The next segment. The caller waits for `busy` on the stream that overwrites it, then sets it anew."""
        segment = self._segments[self._next]
        self._next = (self._next + 1) % len(self._segments)
        return segment

    def distrust(self, events: tuple[Event, ...]) -> None:
        """After work was queued only in part: no segment is used again before these events."""
        for segment in self._segments:
            segment.busy = events
