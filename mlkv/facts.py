"""Facts: what only the master learns from its store, told to every rank in the decision of a step.

Most facts refer to a facade call by its number, which is the same on every rank.
"""

from __future__ import annotations

from typing import Union

import msgspec


class HitFact(msgspec.Struct, frozen=True, array_like=True, tag="hit"):
    """Lookup `call` found `num_pages` pages; of those to load, their indices (int32) and generations (uint64)."""

    call: int
    num_pages: int
    indices: bytes
    generations: bytes


class ReserveFact(msgspec.Struct, frozen=True, array_like=True, tag="reserve"):
    """Offload `call` is to write the pages from `first` on: indices (int32), generations (uint64); maybe none."""

    call: int
    first: int
    indices: bytes
    generations: bytes


class StoredFact(msgspec.Struct, frozen=True, array_like=True, tag="stored"):
    """The pages of offload `call` are settled: `num_pages` from the front are readable; `reason` if not all."""

    call: int
    num_pages: int
    reason: str


class EpochFact(msgspec.Struct, frozen=True, array_like=True, tag="epoch"):
    """Others have invalidated the namespace: it is in this epoch now."""

    epoch: int


Fact = Union[HitFact, ReserveFact, StoredFact, EpochFact]  # noqa: UP007 - msgspec decodes it at run time on Python 3.10

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Fact] = msgspec.msgpack.Decoder(Fact)


def encode(fact: Fact) -> bytes:
    return _encoder.encode(fact)


def decode(data: bytes) -> Fact:
    return _decoder.decode(data)
