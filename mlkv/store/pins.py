"""Pages that people pinned: they are not evicted before they are unpinned, or this owner ends."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from mlkv.errors import StoreError
from mlkv.store.chains import split_keys
from mlkv.store.index import KEY_BYTES, Index
from mlkv.store.wire_tools import Pinned

MAX_PINS: Final = 1024
"""Each is a lease for as long as the owner runs."""

_POOL_SHARE: Final = 4
"""One page in so many may be pinned: the others are needed for what engines do."""


@dataclass(frozen=True)
class _Pin:
    """`pages`: the pinned one, its parent, and so on."""

    lease: int
    pages: NDArray[np.int32]


class Pins:
    """A pin is a lease of a page and of the prefix above it that belongs to nobody."""

    def __init__(self, index: Index) -> None:
        self._index = index
        self._pins: dict[bytes, _Pin] = {}  # by the last key
        self._max_pages = max(1, index.num_pages // _POOL_SHARE)

    def pin_chain(self, keys: bytes) -> None:
        """Pin the longest readable prefix of a chain. Raises StoreError when there is none, or no room for it."""
        lease = self._index.match(keys, len(keys) // KEY_BYTES, is_use=False)
        if not lease.id:
            raise StoreError("no page of this prefix is in host memory")
        end = len(lease.pages) * KEY_BYTES
        self._keep(keys[end - KEY_BYTES : end], _Pin(lease.id, lease.pages[::-1]))

    def pin_key(self, key: bytes) -> None:
        """Pin the page with this key, and its prefix. Raises StoreError as `pin_chain`."""
        page = self._index.find(key)
        if page is None:
            raise StoreError(f"no page in host memory has the key {key.hex()}")
        pages = [page]
        while (above := self._index.parent(pages[-1])) is not None:
            pages.append(above)
        self._keep(key, _Pin(self._index.hold(page), np.array(pages, np.int32)))

    def unpin(self, keys: bytes) -> None:
        """Undo pins by their last keys; all of them if none is named. Raises StoreError for one that is none."""
        self.prune()
        named = split_keys(keys) if keys else list(self._pins)
        unknown = [key.hex() for key in named if key not in self._pins]
        if unknown:
            raise StoreError(f"not pinned: {', '.join(unknown)}")
        self._index.release([self._pins.pop(key).lease for key in dict.fromkeys(named)])

    def prune(self) -> None:
        """Give up pins whose page was cleared, invalidated or found bad: they would only keep its memory."""
        lost = [key for key, pin in self._pins.items() if self._index.find(key) not in pin.pages[:1]]
        self._index.release([self._pins.pop(key).lease for key in lost])

    def report(self) -> Pinned:
        self.prune()
        lengths = [len(pin.pages) for pin in self._pins.values()]
        return Pinned(b"".join(self._pins), lengths, _count_pages(self._pins.values()))

    def _keep(self, key: bytes, pin: _Pin) -> None:
        self.prune()
        others = [held for name, held in self._pins.items() if name != key]
        num_pages = _count_pages([*others, pin])
        if len(others) >= MAX_PINS or num_pages > self._max_pages:
            self._index.release([pin.lease])
            raise StoreError(
                f"{len(others)} pins hold {_count_pages(others)} pages; at most {MAX_PINS} pins and "
                f"{self._max_pages} pages can be pinned, and this one would make it {num_pages} pages"
            )
        old = self._pins.get(key)
        self._pins[key] = pin
        if old is not None:
            self._index.release([old.lease])


def _count_pages(pins: Iterable[_Pin]) -> int:
    """Of all pins together: they may share prefixes."""
    pages = [pin.pages for pin in pins]
    return len(np.unique(np.concatenate(pages))) if pages else 0
