"""What every message between clients and the owner is."""

from __future__ import annotations

import msgspec


class Message(msgspec.Struct, frozen=True, tag=str.lower):
    """One msgpack map; its type travels in the field "type"."""
