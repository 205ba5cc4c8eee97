"""Arrays of page numbers, in the two types that they come in."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Pages: TypeAlias = NDArray[np.int32]
"""As they are kept and told to others."""

Rows: TypeAlias = NDArray[np.intp]
"""As they are worked with: numpy converts every other type to this one each time that it indexes with it, which
takes longer than the work itself."""


def count_until(is_end: NDArray[np.bool_]) -> int:
    """How many entries come before the first that is true; all of them when none is. bool `[n]`."""
    if not len(is_end):
        return 0
    at = int(is_end.argmax())  # several times faster than any()
    return at if is_end[at] else len(is_end)
