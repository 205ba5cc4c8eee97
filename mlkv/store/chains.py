"""Chains of keys as they travel: one bytes object, 16 bytes a key."""

from __future__ import annotations

from mlkv.store.index import KEY_BYTES


def split_keys(keys: bytes, start: int = 0, end: int | None = None) -> list[bytes]:
    """The keys `start` to `end` of a chain, one by one."""
    last = len(keys) if end is None else end * KEY_BYTES
    return [keys[at : at + KEY_BYTES] for at in range(start * KEY_BYTES, last, KEY_BYTES)]
