"""What clients and the owner say to each other.

A frame is a header (u32 length of the body, u64 ticket, little endian) and a body: one msgpack map with its type
in the field "type". The owner answers every request with one reply under the same ticket: in order, except that
others overtake one that waits for lower tiers. Arrays travel as bytes objects: keys 16 bytes each, page ids
int32, generations uint64, both little endian.
"""

from __future__ import annotations

import struct
from typing import Final, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from mlkv.errors import StoreError
from mlkv.store.wire_base import Message, NamesWrites
from mlkv.store.wire_tools import (
    Fetch,
    Fetched,
    Forget,
    Invalidate,
    ListPages,
    ListTier,
    NamespaceList,
    Namespaces,
    Open,
    Opened,
    PageList,
    Pin,
    Pinned,
    Pins,
    Stale,
    TierKeys,
    Unpin,
)

PROTOCOL: Final = 3
"""Raised when a frame, a request or a reply changes its meaning. Both ends must have the same."""

MAX_BODY_BYTES: Final = 16 << 20
"""Keys of a million pages, or pages and generations of 1.3 million."""

_HEADER: Final = struct.Struct("<IQ")


class WireError(StoreError):
    """The other end sent something that is not this protocol. The connection is of no further use."""


# Requests


class Hello(Message, frozen=True):
    """First request of every client. Only `protocol` must be there: it decides whether the rest is understood."""

    protocol: int
    page_bytes: int = 0
    """0: whatever the pool has; for tools, which take pages as they are."""
    group: bytes = b""
    """Token of the replica: leases and reservations belong to it, not to one of its ranks."""
    rank: int = 0
    """Group rank, for messages to people."""


class Match(Message, frozen=True):
    """Lease the longest complete prefix of a chain, at most `limit` pages. Answer: Matched, or Stale."""

    keys: bytes
    limit: int
    wait_s: float = 0.0
    """How long the answer may wait for lower tiers to make the prefix longer. With 0.0 it comes at once, and what
    the tiers bring is for a later Match."""
    epoch: int = 0
    """Of the namespace that the group has opened, if it has."""


class Reserve(Message, frozen=True):
    """Reserve pages for the missing rest of a chain, from `start` at the earliest. Answer: Reserved, or Stale."""

    keys: bytes
    start: int = 0
    epoch: int = 0


class Commit(Message, frozen=True):
    """End a reservation: its first `num_good` pages are complete on every rank, the rest is given back.

    Nobody may still write any of its pages. Answer: Published.
    """

    reservation: int
    num_good: int


class Cancel(Message, frozen=True):
    """End a reservation with nothing to publish. Nobody may still write its pages. Answer: Done."""

    reservation: int


class Release(Message, frozen=True):
    """Give leases back: all of them, or none if one does not exist. Answer: Done."""

    leases: list[int]


class Quarantine(Message, frozen=True):
    """These pages were found bad, with these generations. Answer: Done."""

    pages: bytes
    generations: bytes


class Clear(Message, frozen=True):
    """Forget every key, in every tier. Answer: Done."""


class Stats(Message, frozen=True):
    """Count everything; with `audit`, also check the whole index (O(pages)). Answer: Report."""

    audit: bool = False


class Bye(Message, frozen=True):
    """Last request: this client touches no page any more. Answer: Done."""


ToolRequest: TypeAlias = Namespaces | ListPages | Pin | Unpin | Pins | Forget
SlowRequest: TypeAlias = Open | Invalidate | ListTier | Fetch
"""Answered later: they wait for lower tiers."""

Request: TypeAlias = (
    Hello
    | Match
    | Reserve
    | Commit
    | Cancel
    | Release
    | Quarantine
    | Clear
    | Stats
    | Bye
    | ToolRequest
    | SlowRequest
)


# Replies


class Welcome(Message, frozen=True):
    """The client is admitted. The descriptor of the pool travels with this frame."""

    num_pages: int
    page_bytes: int
    tiers: list[str] = msgspec.field(default_factory=list)
    """Names of the tiers below the pool, the nearest one first."""


class Matched(Message, NamesWrites, frozen=True):
    """`lease` is 0 when nothing was found. `num_coming` further pages of the chain are being written now."""

    lease: int
    pages: bytes
    generations: bytes
    num_coming: int
    sources: bytes = b""
    """For each page a byte: n if the n-th tier of the Welcome brought it and this is the first match that finds
    it, else 0. Empty where there are no tiers."""


class Reserved(Message, NamesWrites, frozen=True):
    """Pages to write for keys[first : first + len(page_ids)]; `reservation` is 0 when there are none.

    keys[:num_ready] are readable now; keys[num_ready:first] are being written by others. Each generation goes into
    the header of its page.
    """

    reservation: int
    first: int
    num_ready: int
    pages: bytes
    generations: bytes


class Published(Message, frozen=True):
    """`num_good` pages were published; the first `num_readable` keys of the chain can be matched now."""

    num_good: int
    num_readable: int


class Done(Message, frozen=True):
    """Nothing more to say."""


class Latency(msgspec.Struct, frozen=True):
    """Durations: counts by bucket, see `mlkv.histogram`, and their total."""

    counts: list[int] = msgspec.field(default_factory=list)
    total_s: float = 0.0


class TierReport(msgspec.Struct, frozen=True):
    """One lower tier: what has come of it since the start, and how it is now. Totals only grow."""

    name: str
    breaker: str
    """closed (it works), open (it is left alone for a while), half-open (it is tried)."""
    connected: bool
    pages_hit: int
    """Pages of answered matches that this tier had brought, each counted when it was first matched."""
    pages_promoted: int
    """Pages that it brought into the host pool."""
    pages_bad: int
    """Pages that it had, but which were not what their key names, or could not be read."""
    hits: int
    """Pages that it read."""
    misses: int
    """Pages that it was asked for and did not have."""
    bytes_read: int
    bytes_written: int
    pages_refused: int
    """By the tier itself: it had no room, or could not keep them."""
    dropped_writes: int
    """Pages that it was not given, because too many waited for it or it was out of order."""
    openings: int
    """Times that the breaker opened."""
    failures: dict[str, int]
    """Failed calls by cause: "timeout", or the name of an error."""
    calls: dict[str, int]
    """Calls that returned, by kind (connect, contains, read, write, delete, clear)."""
    seconds: dict[str, float]
    """Time spent in them, by kind."""
    latency: dict[str, Latency]
    """The same by kind and duration."""
    queued_loads: int
    queued_pages: int
    """Pages that wait to be written."""
    running: int
    hung: int
    """Calls that were given up on and have not returned; they keep their pages."""
    erasures: int
    """Deletions that have not reached it yet; until then what they name counts as absent."""
    num_pages: int
    """Of its own account, as the next three; -1 where it cannot tell."""
    used_bytes: int
    limit_bytes: int
    pages_evicted: int


class Report(Message, frozen=True):
    """Pages by state (free + reserved + ready + quarantined == num_pages), holders, and totals since the start.

    `problem` is "" unless the audit found a rule of the index violated.
    """

    num_pages: int
    free: int
    reserved: int
    ready: int
    quarantined: int
    leases: int
    reservations: int
    clients: int
    """Clients that can still touch pages, connected or not."""
    pages_asked: int
    pages_hit: int
    pages_evicted: int
    pages_written: int
    pages_bad: int
    problem: str
    lookup_latency: Latency = msgspec.field(default_factory=Latency)
    """From a lookup to its answer."""
    tiers: list[TierReport] = msgspec.field(default_factory=list)
    """The lower tiers, the nearest one first."""


class Failed(Message, frozen=True):
    """The request was refused and changed nothing."""

    message: str


Reply: TypeAlias = (
    Welcome
    | Matched
    | Reserved
    | Published
    | Done
    | Report
    | Failed
    | Opened
    | Stale
    | NamespaceList
    | PageList
    | Pinned
    | TierKeys
    | Fetched
)

_encoder = msgspec.msgpack.Encoder()
_request_decoder: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_reply_decoder: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)


def encode_frame(ticket: int, message: Request | Reply) -> bytes:
    """One frame. Raises StoreError for a message that is too long for one."""
    body = _encoder.encode(message)
    if len(body) > MAX_BODY_BYTES:
        raise StoreError(f"a {type(message).__name__} of {len(body)} bytes exceeds {MAX_BODY_BYTES}; ask for less")
    return _HEADER.pack(len(body), ticket) + body


def decode_request(body: bytes) -> Request:
    """Raises WireError for a body that is no request."""
    try:
        return _request_decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"not a request: {error}") from None


def decode_reply(body: bytes) -> Reply:
    """Raises WireError for a body that is no reply."""
    try:
        return _reply_decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"not a reply: {error}") from None


class FrameReader:
    """Cuts a stream of bytes into frames. Holds less than one frame plus what was fed last."""

    def __init__(self) -> None:
        self._pending = bytearray()

    def feed(self, data: bytes) -> list[tuple[int, bytes]]:
        """(ticket, body) of every frame that is complete now. Raises WireError for an oversized one."""
        self._pending += data
        frames: list[tuple[int, bytes]] = []
        at = 0
        while len(self._pending) - at >= _HEADER.size:
            body_bytes, ticket = _HEADER.unpack_from(self._pending, at)
            if body_bytes > MAX_BODY_BYTES:
                raise WireError(f"a frame of {body_bytes} bytes exceeds {MAX_BODY_BYTES}")
            end = at + _HEADER.size + body_bytes
            if len(self._pending) < end:
                break
            frames.append((ticket, bytes(self._pending[at + _HEADER.size : end])))
            at = end
        del self._pending[:at]
        return frames


def page_bytes_of(pages: NDArray[np.int32]) -> bytes:
    """Page ids as they travel."""
    return pages.astype("<i4", copy=False).tobytes()


def generation_bytes_of(generations: NDArray[np.uint64]) -> bytes:
    """Generations as they travel."""
    return generations.astype("<u8", copy=False).tobytes()
