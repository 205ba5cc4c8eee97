"""The states of a page in the host pool; `index.py` says how one follows the other."""

from __future__ import annotations

from typing import Final

FREE: Final = 0
RESERVED: Final = 1
READY: Final = 2
QUARANTINED: Final = 3
STATE_NAMES: Final = ("free", "reserved", "ready", "quarantined")
