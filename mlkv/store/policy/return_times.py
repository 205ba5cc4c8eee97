"""What is known about how soon chains of pages are asked for again."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

NUM_AGES: Final = 40
"""Ages are counted by powers of two of pages written meanwhile; no store lives to see 2**40 of them."""

_MIN_BEGUN: Final = 10.0
"""Chains of a class that it takes until its own share of returns counts as much as that of all classes."""

_MIN_RETURNED: Final = 20.0
"""Returns of a class that it takes until their own ages count as much as those of all classes. Ages fill a table,
a share is one number: they need more to tell chance from habit."""

_MEMORY: Final = 4000.0
"""Requests after which what was learned before counts half, so that the policy follows a changing load. A few
thousand fill every cell of the table that matters; fewer make it noisy, more make it slow to follow."""

_MAX_SHARE: Final = 0.98
"""No class is taken to return for certain."""

_EXPONENT_BIT: Final = 52
_EXPONENT_BIAS: Final = 1023
"""Of a float64 as IEEE 754 has it: its exponent is the place of the highest bit of an integer below 2**53."""

_WIDTHS: Final[NDArray[np.float64]] = np.concatenate(([2.0], 2.0 ** np.arange(1, NUM_AGES)))
"""Pages written while an age is in each cell: [0, 2), [2, 4), [4, 8), ..."""


def age_cells(ages: NDArray[np.int64]) -> NDArray[np.intp]:
    """The column of each age in a table of densities."""
    exponents = ((ages | 1).astype(np.float64).view(np.int64) >> _EXPONENT_BIT) - _EXPONENT_BIAS
    cells: NDArray[np.intp] = np.minimum(exponents, NUM_AGES - 1)
    return cells


class ReturnTimes:
    """Learns from requests how likely, and when, a chain of each class is asked for again.

    For each class it counts which share of the chains returns, and how old they are then. Where a class has shown
    little yet, what holds for all of them stands in. All counts fade slowly. From them follows the *density* of a
    chain of a class and an age: the hits per page and per time that it will give if it is kept for the best length
    of time from now on,

        max over t of P(asked for within t) / E[time it is kept, at most t]

    which is what a page of cache is worth if it is given to this chain (the index of an optimal stopping problem;
    the same idea as in LHD, Beckmann et al., NSDI 2018). Time is counted in pages written, since a kept page
    takes the place of one of those.
    """

    def __init__(self, num_classes: int) -> None:
        self._num_begun = np.zeros(num_classes)
        self._ages = np.zeros((num_classes, NUM_AGES))

    def begin(self, kind: int) -> None:
        """A chain of class `kind` was used and from now on can return."""
        self._num_begun[kind] += 1.0

    def come_back(self, kind: int, age: int) -> None:
        """A chain of class `kind` was asked for again after `age` pages were written."""
        self._ages[kind, min((age | 1).bit_length(), NUM_AGES) - 1] += 1.0

    def densities(self) -> NDArray[np.float64]:
        """The density of each class at each age, float64 `[num_classes, NUM_AGES]`; and let the past fade."""
        begun, returned = self._num_begun.sum(), self._ages.sum()
        if not returned:
            return np.zeros(self._ages.shape)
        num_returned = self._ages.sum(axis=1)
        usual_share = (returned + 1.0) / (begun + 2.0)
        share = (num_returned + _MIN_BEGUN * usual_share) / (self._num_begun + _MIN_BEGUN)
        usual_ages = self._ages.sum(axis=0) / returned
        ages = (self._ages + _MIN_RETURNED * usual_ages) / (num_returned[:, None] + _MIN_RETURNED)
        in_cell = np.minimum(share, _MAX_SHARE)[:, None] * ages
        left = 1.0 - np.cumsum(in_cell, axis=1) + 0.5 * in_cell  # in the middle of each cell
        hits = np.cumsum(np.pad(in_cell, ((0, 0), (1, 0))), axis=1)
        cost = np.cumsum(np.pad(_WIDTHS * left, ((0, 0), (1, 0))), axis=1)
        # [class, from, until]: what is gained and paid from the start of one cell to the end of another.
        gained = hits[:, None, 1:] - hits[:, :-1, None]
        paid = cost[:, None, 1:] - cost[:, :-1, None]
        later = np.triu(np.ones((NUM_AGES, NUM_AGES), np.bool_))
        densities: NDArray[np.float64] = np.where(later, gained / np.where(later, paid, 1.0), 0.0).max(axis=2)
        if begun > _MEMORY:
            self._num_begun *= 0.5
            self._ages *= 0.5
        return densities
