"""What every message between clients and the owner is."""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray


class Message(msgspec.Struct, frozen=True, tag=str.lower):
    """One msgpack map; its type travels in the field "type"."""


class NamesPages:
    """Of messages with a field of page ids, as they travel."""

    __slots__ = ()

    pages: bytes

    @property
    def page_ids(self) -> NDArray[np.int32]:
        """int32 [num_pages], read-only."""
        return np.frombuffer(self.pages, "<i4")


class NamesWrites(NamesPages):
    """Of messages that name pages together with the generation of each."""

    __slots__ = ()

    generations: bytes

    @property
    def page_generations(self) -> NDArray[np.uint64]:
        """uint64 [num_pages], read-only."""
        return np.frombuffer(self.generations, "<u8")
