"""The self-describing bytes of a host page: header, checksum table, and how both are verified.

Header (little endian, at the start of every page)::

    offset size field
         0    4 magic "MLKV"
         4    2 format version
         6    2 number of KV heads (entries in the checksum table)
         8    4 number of tokens
        12    4 bytes of one head slice
        16    8 generation: unique for each time a page is written
        24   16 namespace fingerprint
        40   16 key
        56   16 parent key
        72    4 crc32 of bytes 0..72
       128  8*n checksum of each head slice, bound to key and generation

The checksum of a slice is `payload_checksum(slice) + binding(key, generation, head)` modulo 2**64. Because the
binding differs for every write, a page whose header is new and whose payload is still the old one (a rank that
has not copied yet, a torn write) does not verify.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:  # the store's owner reads headers, and has no use for torch
    from mlkv.layout import KVLayout

HEADER_IDENTITY_BYTES = 128
"""Space for the identity part of the header; the table of checksums (8 bytes a head) follows it."""

_HEADER_ALIGN_BYTES = 512

MAGIC = b"MLKV"
FORMAT_VERSION = 1

_IDENTITY = struct.Struct("<4sHHIIQ16s16s16s")
_CRC = struct.Struct("<I")
_IDENTITY_RECORD = np.dtype(
    [
        ("magic", "S4"),
        ("version", "<u2"),
        ("heads", "<u2"),
        ("tokens", "<u4"),
        ("head_bytes", "<u4"),
        ("generation", "<u8"),
        ("fingerprint", "V16"),
        ("key", "V16"),
        ("parent", "V16"),
        ("crc", "<u4"),
    ]
)
"""The same fields as `_IDENTITY` and the crc, for whole batches of headers at once."""

IDENTITY_BYTES = _IDENTITY_RECORD.itemsize
"""Bytes of the identity part of a header that are written and checked."""

_MASK64 = (1 << 64) - 1
# Odd 64-bit constants from SplitMix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number generators",
# 2014) spread the small counters over all bits.
_GENERATION_MIX = 0x9E3779B97F4A7C15
_HEAD_MIX = 0xBF58476D1CE4E5B9
_GENERATION_MIX_64 = np.uint64(_GENERATION_MIX)
_CHUNK_WORDS = 1 << 16  # summed at a time, so that temporaries stay in cache

assert _IDENTITY.size + _CRC.size == IDENTITY_BYTES <= HEADER_IDENTITY_BYTES

ByteArray = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class PageIdentity:
    """Whose bytes a page holds: `key` and `parent` are page keys, `fingerprint` the namespace, 16 bytes each."""

    key: bytes
    parent: bytes
    fingerprint: bytes
    generation: int


@dataclass(frozen=True)
class PageHeader:
    """All that a page says about itself before its checksums: whose bytes it holds, and how they are cut."""

    identity: PageIdentity
    num_kv_heads: int
    page_tokens: int
    head_bytes: int

    @property
    def header_bytes(self) -> int:
        return header_bytes(self.num_kv_heads)

    @property
    def used_bytes(self) -> int:
        """Where the last head slice ends."""
        return self.header_bytes + self.num_kv_heads * self.head_bytes


def header_bytes(num_kv_heads: int) -> int:
    """Length of a header: the identity and the table of checksums, up to a whole number of 512 bytes."""
    return -(-(HEADER_IDENTITY_BYTES + 8 * num_kv_heads) // _HEADER_ALIGN_BYTES) * _HEADER_ALIGN_BYTES


def write_identity(page: ByteArray, layout: KVLayout, identity: PageIdentity) -> None:
    """Write the identity part of the header. `page`: uint8 of at least `layout.header_bytes`."""
    packed = _IDENTITY.pack(
        MAGIC,
        FORMAT_VERSION,
        layout.num_kv_heads,
        layout.page_tokens,
        layout.head_bytes,
        identity.generation,
        identity.fingerprint,
        identity.key,
        identity.parent,
    )
    packed += _CRC.pack(zlib.crc32(packed))
    page[: len(packed)] = np.frombuffer(packed, np.uint8)


def _intact_fields(page: ByteArray) -> tuple[Any, ...] | None:
    """The fields of `_IDENTITY` at the start of a page; None when their crc is another."""
    packed = page[:IDENTITY_BYTES].tobytes()
    fields = packed[: _IDENTITY.size]
    return _IDENTITY.unpack(fields) if packed[_IDENTITY.size :] == _CRC.pack(zlib.crc32(fields)) else None


def peek_header(page: ByteArray) -> PageHeader | None:
    """The header of a page of any geometry, or None when it is none of this format.

    `page`: uint8, at least the first 76 bytes of the page. Whether the rest is as long as the header says is
    for the caller to compare with `used_bytes`.
    """
    fields = _intact_fields(page)
    if fields is None:
        return None
    magic, version, heads, tokens, head_bytes, generation, fingerprint, key, parent = fields
    if (magic, version) != (MAGIC, FORMAT_VERSION):
        return None
    found = PageHeader(PageIdentity(key, parent, fingerprint, generation), heads, tokens, head_bytes)
    if not heads or not tokens or not head_bytes or head_bytes % 4:
        return None
    return found


@dataclass(frozen=True)
class PageHeaders:
    """`PageHeader` for a batch of n pages; what is not valid has no meaning in the other fields.

    Attributes:
        is_valid: bool `[n]`, whether each is a header of this format.
        keys, parents, fingerprints: `16 * n` bytes each, one after the other.
        generations: uint64 `[n]`.
        used_bytes: int64 `[n]`, where the last head slice of each page ends.
    """

    is_valid: npt.NDArray[np.bool_]
    keys: bytes
    parents: bytes
    fingerprints: bytes
    generations: npt.NDArray[np.uint64]
    used_bytes: npt.NDArray[np.int64]


def peek_headers(headers: ByteArray) -> PageHeaders:
    """`peek_header` for a batch. `headers`: uint8 `[n, at least 76]`."""
    records = np.ascontiguousarray(identity_records(headers))
    heads, head_bytes = records["heads"].astype(np.int64), records["head_bytes"].astype(np.int64)
    is_valid: npt.NDArray[np.bool_] = (
        (records["magic"] == MAGIC)
        & (records["version"] == FORMAT_VERSION)
        & (heads > 0)
        & (records["tokens"] > 0)
        & (head_bytes > 0)
        & (head_bytes % 4 == 0)
        & (records["crc"] == _record_crcs(records))
    )
    ends = (
        -(-(HEADER_IDENTITY_BYTES + 8 * heads) // _HEADER_ALIGN_BYTES) * _HEADER_ALIGN_BYTES + heads * head_bytes
    )
    return PageHeaders(
        is_valid,
        records["key"].tobytes(),
        records["parent"].tobytes(),
        records["fingerprint"].tobytes(),
        records["generation"],
        ends,
    )


def read_identity(page: ByteArray, layout: KVLayout) -> PageIdentity | None:
    """The identity of a page, or None when the header is not one of this format and geometry."""
    found = peek_header(page)
    if found is None or (found.num_kv_heads, found.page_tokens, found.head_bytes) != (
        layout.num_kv_heads,
        layout.page_tokens,
        layout.head_bytes,
    ):
        return None
    return found.identity


def identity_matches(page: ByteArray, layout: KVLayout, key: bytes, fingerprint: bytes, generation: int) -> bool:
    """Whether a page says that it holds exactly this write of this key."""
    # Not by way of `read_identity`: this is on the way of every small load.
    fields = _intact_fields(page)
    geometry = (layout.num_kv_heads, layout.page_tokens, layout.head_bytes)
    wanted = (MAGIC, FORMAT_VERSION, *geometry, generation, fingerprint, key)
    return fields is not None and fields[: len(wanted)] == wanted  # all but the parent


def identity_records(pages: ByteArray) -> npt.NDArray[np.void]:
    """The identities of pages `[n, at least 76]`, any strides between them, as a view: records `[n]`."""
    return pages[:, :IDENTITY_BYTES].view(_IDENTITY_RECORD)[:, 0]


def checksum_tables(pages: ByteArray, layout: KVLayout) -> npt.NDArray[np.uint64]:
    """`checksum_table` of whole pages `[n, page_bytes]`, as a view: uint64 `[n, num_kv_heads]`."""
    end = HEADER_IDENTITY_BYTES + 8 * layout.num_kv_heads
    return pages[:, HEADER_IDENTITY_BYTES:end].view(np.uint64)


def pack_identities(
    layout: KVLayout,
    *,
    keys: bytes,
    parents: bytes,
    fingerprint: bytes,
    generations: npt.NDArray[np.uint64],
) -> npt.NDArray[np.void]:
    """The bytes that `write_identity` writes, for a batch: records `[n]`.

    Args:
        keys, parents: `16 * n` bytes, one key after the other.
        generations: uint64 `[n]`.
    """
    records = np.zeros(len(generations), _IDENTITY_RECORD)
    records["magic"] = MAGIC
    records["version"] = FORMAT_VERSION
    records["heads"] = layout.num_kv_heads
    records["tokens"] = layout.page_tokens
    records["head_bytes"] = layout.head_bytes
    records["generation"] = generations
    records["fingerprint"] = np.void(fingerprint)
    records["key"] = np.frombuffer(keys, "V16")
    records["parent"] = np.frombuffer(parents, "V16")
    records["crc"] = _record_crcs(records)
    return records


def identities_match(
    records: npt.NDArray[np.void],
    layout: KVLayout,
    *,
    keys: bytes,
    fingerprint: bytes,
    generations: npt.NDArray[np.uint64],
) -> npt.NDArray[np.bool_]:
    """`identity_matches` for a batch: bool `[n]`. `records`: contiguous `[n]`, arguments as above."""
    same: npt.NDArray[np.bool_] = (
        (records["magic"] == MAGIC)
        & (records["version"] == FORMAT_VERSION)
        & (records["heads"] == layout.num_kv_heads)
        & (records["tokens"] == layout.page_tokens)
        & (records["head_bytes"] == layout.head_bytes)
        & (records["generation"] == generations)
        & (records["fingerprint"] == np.void(fingerprint))
        & (records["key"] == np.frombuffer(keys, "V16"))
        & (records["crc"] == _record_crcs(records))
    )
    return same


def _record_crcs(records: npt.NDArray[np.void]) -> npt.NDArray[np.uint32]:
    packed, size = memoryview(records.tobytes()), IDENTITY_BYTES
    return np.fromiter(
        (zlib.crc32(packed[at : at + _IDENTITY.size]) for at in range(0, len(packed), size)), np.uint32
    )


def checksum_table(page: ByteArray, layout: KVLayout) -> npt.NDArray[np.uint64]:
    """The table of head checksums as a writable view: uint64 `[num_kv_heads]`."""
    end = HEADER_IDENTITY_BYTES + 8 * layout.num_kv_heads
    return page[HEADER_IDENTITY_BYTES:end].view(np.uint64)


def binding(key: bytes, generation: int, head: int) -> int:
    """64 bits that tie a head's checksum to one write of one key; added to the payload's checksum."""
    mixed = generation * _GENERATION_MIX + (head + 1) * _HEAD_MIX
    return (int.from_bytes(key[:8], "little") ^ int.from_bytes(key[8:], "little")) + mixed & _MASK64


def bindings(
    keys: bytes, generations: npt.NDArray[np.uint64], head_start: int, num_heads: int
) -> npt.NDArray[np.uint64]:
    """`binding` for a batch of writes and a run of heads: uint64 `[n, num_heads]`."""
    halves = np.frombuffer(keys, np.uint64)
    folded = (halves[::2] ^ halves[1::2]) + generations * _GENERATION_MIX_64
    mixed: npt.NDArray[np.uint64] = folded[:, None] + _head_mixes(head_start, num_heads)
    return mixed


@lru_cache(maxsize=64)
def _head_mixes(head_start: int, num_heads: int) -> npt.NDArray[np.uint64]:
    """What the heads of a run bring to their bindings: uint64 `[num_heads]`."""
    mixes = np.arange(head_start + 1, head_start + 1 + num_heads, dtype=np.uint64) * np.uint64(_HEAD_MIX)
    mixes.setflags(write=False)
    return mixes


@lru_cache(maxsize=8)
def checksum_weights(num_words: int) -> npt.NDArray[np.uint64]:
    """Odd 32-bit weight of each 32-bit word of a slice, as uint64 `[num_words]`.

    The weight of word i is `fmix32(i) | 1`, the finaliser of MurmurHash3 (Appleby, public domain), which a GPU
    kernel computes without memory.
    """
    x = np.arange(num_words, dtype=np.uint32)
    x ^= x >> np.uint32(16)
    x *= np.uint32(0x85EBCA6B)
    x ^= x >> np.uint32(13)
    x *= np.uint32(0xC2B2AE35)
    x ^= x >> np.uint32(16)
    weights = (x | np.uint32(1)).astype(np.uint64)
    weights.setflags(write=False)
    return weights


def payload_checksum(data: ByteArray) -> int:
    """Checksum of one head slice: the sum of its 32-bit words, each times its weight, modulo 2**64.

    A 32-bit word times a 32-bit weight is summed in 64 bits, so no single changed word and no flipped pair of
    equal bits cancels out. `data`: contiguous uint8, a multiple of 4 bytes.
    """
    words = data.view(np.uint32)
    weights = checksum_weights(len(words))
    total = 0
    for at in range(0, len(words), _CHUNK_WORDS):
        part = words[at : at + _CHUNK_WORDS].astype(np.uint64)
        part *= weights[at : at + _CHUNK_WORDS]
        total += int(part.sum(dtype=np.uint64))
    return total & _MASK64


def verify_page(page: ByteArray, layout: KVLayout, key: bytes, fingerprint: bytes, generation: int) -> bool:
    """Whether the whole page (identity and every head) is what was written under this key."""
    return identity_matches(page, layout, key, fingerprint, generation) and verify_own_header(page) is not None


def verify_own_header(page: ByteArray) -> PageHeader | None:
    """The header of a page of any geometry if every head is what that header says; None for a damaged page.

    For tools that know no layout: the page may still be of another key than the one that it was found under.
    """
    found = peek_header(page)
    if found is None or found.used_bytes > len(page):
        return None
    table = page[HEADER_IDENTITY_BYTES : HEADER_IDENTITY_BYTES + 8 * found.num_kv_heads].view(np.uint64)
    for head in range(found.num_kv_heads):
        start = found.header_bytes + head * found.head_bytes
        have = payload_checksum(page[start : start + found.head_bytes])
        have += binding(found.identity.key, found.identity.generation, head)
        if have & _MASK64 != int(table[head]):
            return None
    return found
