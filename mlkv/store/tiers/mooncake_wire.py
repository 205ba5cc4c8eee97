"""What the Mooncake tier and its client process say to each other."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

Operation: TypeAlias = Literal["exist", "get", "put", "remove", "clear", "load_note", "store_note", "close"]


class Setup(msgspec.Struct):
    """The first message: where the pool is, and how to join the store.

    Attributes:
        pool_offset, pool_bytes: what of the file behind the pool's descriptor is the pool.
        deadline_s: the process ends by itself if it has not joined by then.
    """

    master: str
    local_host: str
    metadata: str
    protocol: str
    devices: str
    segment_bytes: int
    pool_offset: int
    pool_bytes: int
    deadline_s: float


class Order(msgspec.Struct):
    """One call. One `Outcome` answers it.

    Attributes:
        names: of objects; for "clear" one pattern.
        offsets: in the pool, of the page of each object.
        value: of a note.
    """

    operation: Operation
    names: list[str] = []
    offsets: list[int] = []
    page_bytes: int = 0
    value: bytes = b""


class Outcome(msgspec.Struct):
    """What came of it: Mooncake's code for each name, or an error of the client process itself."""

    codes: list[int] = []
    value: bytes = b""
    error: str = ""


encode = msgspec.msgpack.Encoder().encode
decode_setup = msgspec.msgpack.Decoder(Setup).decode
decode_order = msgspec.msgpack.Decoder(Order).decode
decode_outcome = msgspec.msgpack.Decoder(Outcome).decode
