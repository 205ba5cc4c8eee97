"""Frees the pages of a namespace that was invalidated, a few at a time."""

from __future__ import annotations

import time
from collections import deque
from typing import Final

import numpy as np

from mlkv.page import peek_header
from mlkv.store.index import Index
from mlkv.store.pool import HostPool

_SLICE_S: Final = 0.002
"""Others wait for the owner at most this long and one chain at a time. Nobody can find the pages any more."""


class Sweeper:
    """Takes chains of pages out of the index. Pages that are leased stay until they are given back."""

    def __init__(self, index: Index, pool: HostPool) -> None:
        self._index = index
        self._pool = pool
        self._tops: deque[tuple[int, int]] = deque()  # first pages of chains with their generations

    def sweep(self, fingerprint: bytes) -> None:
        """Every page of a namespace that is readable now is to go."""
        for page in self._index.chain_starts().tolist():
            header = peek_header(np.frombuffer(self._pool.page(page), np.uint8))
            if header is not None and header.identity.fingerprint == fingerprint:
                self._tops.append((page, self._index.identity(page)[1]))

    @property
    def is_busy(self) -> bool:
        return bool(self._tops)

    def poll(self) -> None:
        """Free some. A page that has other content by now is left alone."""
        stop_at = time.monotonic() + _SLICE_S
        while self._tops and time.monotonic() < stop_at:
            page, generation = self._tops.popleft()
            self._index.quarantine([page], [generation])
