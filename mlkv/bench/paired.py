"""How much longer one thing takes than another, measured in turns, and how sure that is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

_RESAMPLES: Final = 2000
_SEED: Final = 0
_TOGETHER: Final = 10
"""Neighbouring pairs that are drawn together: what else a machine does lasts for several of them, so that they are
not independent, and an interval that takes them for it would be too narrow (a moving-block bootstrap)."""


@dataclass(frozen=True)
class Ratio:
    """A median of ratios, and between which bounds it lies with 95% confidence."""

    median: float
    low: float
    high: float

    @property
    def half_width(self) -> float:
        """How far off the median may be, the worse side of the two."""
        return max(self.high - self.median, self.median - self.low)


def paired_ratio(seconds: NDArray[np.float64], reference: NDArray[np.float64]) -> Ratio:
    """The ratio of two things that took turns: `seconds[i]` was measured right beside `reference[i]`; `[n]` each.

    What else the machine does hits both of a pair alike, and a pair of which it hit one side only does not move
    the median. The bounds are those of a bootstrap with a fixed seed.
    """
    ratios = seconds / reference
    together = min(_TOGETHER, len(ratios))
    chance = np.random.default_rng(_SEED)
    starts = chance.integers(0, len(ratios) - together + 1, (_RESAMPLES, -(-len(ratios) // together)))
    places = (starts[:, :, None] + np.arange(together)).reshape(_RESAMPLES, -1)[:, : len(ratios)]
    medians: NDArray[Any] = np.median(ratios[places], axis=1)
    low, high = np.percentile(medians, [2.5, 97.5])
    return Ratio(float(np.median(ratios)), float(low), float(high))
