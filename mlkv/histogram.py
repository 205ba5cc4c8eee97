"""Counts of durations by their size."""

from __future__ import annotations

from bisect import bisect_left
from typing import Final

BOUNDS_S: Final = tuple(1e-4 * 2**power for power in range(18))
"""Upper bounds of all buckets but the last, which has none: from 0.1 ms, a fast lookup, to 13 s, beyond every
default deadline of a call, by powers of two."""


class Histogram:
    """`counts[i]`: durations in bucket i. Only grows. One thread at a time adds to it; others may read."""

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS_S) + 1)
        self.total_s = 0.0

    def observe(self, duration_s: float) -> None:
        self.counts[bisect_left(BOUNDS_S, duration_s)] += 1
        self.total_s += duration_s
