"""The shared memory of a `ledger` channel: where its words lie and how they prove themselves.

::

    header        magic, version, number of ranks and slots, session, checksum
    decision      one cache line: the token of the newest decided step
    rank r        one cache line each for its token and its cursor; then its report; then its farewell
    ring          slots of SLOT_BYTES: token, checksum, length of the whole message, piece of the message

A *token* is one aligned 64-bit word made of session, step and kind; an aligned word is never seen half written.
Everything longer carries a checksum seeded with the token that announces it. A reader accepts what it finds only
if both are the ones it waits for, and otherwise looks again: so it does not matter in which order the stores of
another core become visible, or whether a copy was interrupted half way. Nothing here waits.
"""

from __future__ import annotations

import mmap
import os
import struct
import zlib
from enum import IntEnum

from mlkv.dist.futex import WordWaits
from mlkv.dist.protocol import REPORT_BYTES
from mlkv.errors import MLKVError

SLOT_BYTES = 1024
NUM_SLOTS = 256
"""Ring of 256 KiB. A step with nothing to tell uses no slot; a hit of 80 pages uses one."""

FAREWELL_BYTES = 568
"""Longest farewell."""

_MAGIC = b"mlkvldg1"
_HEADER = struct.Struct("<8sIIqI")  # magic, ranks, slots, session, checksum of what is before
_LINE = 64  # bytes that caches move between cores together; words of different writers stay apart
_CHECK = struct.Struct("<II")  # checksum, length
_LENGTH = struct.Struct("<I")
_SLOT = struct.Struct("<QIII4x")  # token, checksum, bytes in this piece, bytes in the whole message
_SLOT_LENGTHS = struct.Struct("<II")
PIECE_BYTES = SLOT_BYTES - _SLOT.size

MASK = (1 << 64) - 1
"""Tokens are numbers modulo 2^64."""
# Any odd number spreads neighbouring steps over all bits, so that no flipped byte turns one step's token into
# another's; this one is 2^64 divided by the golden ratio (Knuth, TAOCP vol. 3, 6.4).
_SPREAD = 0x9E3779B97F4A7C15
TOKEN_OF_NEXT_KIND = _SPREAD
TOKEN_OF_NEXT_STEP = 4 * _SPREAD & MASK
"""Added to a token they give that of the next kind in the same step, and that of the same kind in the next step."""
_UNSPREAD = pow(_SPREAD, -1, 1 << 64)
_REPORT_AT = 2 * _LINE  # within a rank's part, behind the lines of its token and its cursor
_FAREWELL_AT = _REPORT_AT + -(-(_CHECK.size + REPORT_BYTES) // _LINE) * _LINE
_RANK_BYTES = _FAREWELL_AT + -(-(_CHECK.size + FAREWELL_BYTES) // _LINE) * _LINE
_RING = 0x5851F42D4C957F2D  # makes the tokens of slots others than those of steps


class Kind(IntEnum):
    """What a token announces."""

    SAME = 0  # as in the step before, for a report; nothing, for a decision
    FULL = 1  # bytes written in this step
    LEFT = 2  # the rank takes no further step; see its farewell
    LOST = 3  # a decision: a rank was lost, the bytes say which


class Ledger:
    """A mapping of the memory. Not thread-safe. Every rank writes its own part; the master also the rest."""

    def __init__(self, memory: mmap.mmap, size: int, session: int) -> None:
        self.size = size
        self._session = session & MASK
        self._memory = memory
        self._bytes = memoryview(memory)
        self.words = self._bytes.cast("Q")
        self.decision_at = _LINE // 8
        self._starts = [2 * _LINE + rank * _RANK_BYTES for rank in range(size)]
        self.token_at = [start // 8 for start in self._starts]
        self._ring = 2 * _LINE + size * _RANK_BYTES

    @classmethod
    def create(cls, size: int, session: int) -> tuple[int, Ledger]:
        """New memory and the file descriptor by which others find it; the caller closes it when they have."""
        fd = os.memfd_create("mlkv-ledger", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, _total_bytes(size))
            memory = mmap.mmap(fd, _total_bytes(size))
        except OSError as error:
            os.close(fd)
            raise MLKVError(f"cannot make {_total_bytes(size)} bytes of shared memory: {error.strerror}") from None
        head = _HEADER.pack(_MAGIC, size, NUM_SLOTS, session, 0)[:-4]
        memory[: _HEADER.size] = head + zlib.crc32(head).to_bytes(4, "little")
        ledger = cls(memory, size, session)
        ledger.words[ledger.decision_at] = ledger.token(0, Kind.SAME)
        for at in ledger.token_at:
            ledger.words[at] = ledger.token(0, Kind.SAME)
        return fd, ledger

    @classmethod
    def attach(cls, path: str, size: int, session: int) -> Ledger:
        """Map the memory at `path`. Raises MLKVError when it cannot be opened or is not of this session."""
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                if os.fstat(fd).st_size != _total_bytes(size):
                    raise MLKVError(f"{path} is not a ledger of {size} ranks")
                memory = mmap.mmap(fd, _total_bytes(size))
            finally:
                os.close(fd)
        except OSError as error:
            raise MLKVError(f"cannot open the master's ledger at {path}: {error.strerror}") from None
        found = bytes(memory[: _HEADER.size])
        magic, ranks, slots, owner, check = _HEADER.unpack(found)
        if (magic, ranks, slots, owner) != (_MAGIC, size, NUM_SLOTS, session) or check != zlib.crc32(found[:-4]):
            memory.close()
            raise MLKVError(f"{path} is not the ledger of this session of the replica")
        return cls(memory, size, session)

    def close(self) -> None:
        self.words.release()
        self._bytes.release()
        self._memory.close()

    def waits(self) -> WordWaits | None:
        """For sleeping on its words, where that can be done. To be closed before the ledger."""
        return WordWaits.of(self._memory)

    # -- tokens --------------------------------------------------------------------------------------------

    def token(self, step: int, kind: int) -> int:
        return ((step << 2 | kind) * _SPREAD + self._session) & MASK

    def read_token(self, word: int) -> tuple[int, Kind]:
        """Step and kind of a token. A word that is none gives a step that no rank reaches (above 2^40) mostly."""
        value = (word - self._session) * _UNSPREAD & MASK
        return value >> 2, Kind(value & 3)

    # -- reports and farewells -----------------------------------------------------------------------------

    def put_report(self, rank: int, step: int, report: bytes) -> None:
        self._put(rank, _REPORT_AT, self.token(step, Kind.FULL), report)

    def get_report(self, rank: int, step: int) -> bytes | None:
        """The report behind the token of this step; None while it does not prove itself."""
        report = self._get(rank, _REPORT_AT, self.token(step, Kind.FULL), REPORT_BYTES)
        return report if report is not None and len(report) == REPORT_BYTES else None

    def put_farewell(self, rank: int, step: int, text: bytes) -> None:
        """At most FAREWELL_BYTES."""
        self._put(rank, _FAREWELL_AT, self.token(step, Kind.LEFT), text)

    def get_farewell(self, rank: int, step: int) -> bytes | None:
        return self._get(rank, _FAREWELL_AT, self.token(step, Kind.LEFT), FAREWELL_BYTES)

    def _put(self, rank: int, offset: int, token: int, data: bytes) -> None:
        start = self._starts[rank] + offset
        check = zlib.crc32(data, zlib.crc32(_LENGTH.pack(len(data)), token >> 32))
        self._bytes[start : start + 8 + len(data)] = _CHECK.pack(check, len(data)) + data
        self.words[self.token_at[rank]] = token

    def _get(self, rank: int, offset: int, token: int, room: int) -> bytes | None:
        start = self._starts[rank] + offset
        check, length = _CHECK.unpack_from(self._bytes, start)
        if length > room:
            return None
        data = bytes(self._bytes[start + 8 : start + 8 + length])
        return data if zlib.crc32(data, zlib.crc32(_LENGTH.pack(length), token >> 32)) == check else None

    # -- the ring ------------------------------------------------------------------------------------------

    def put_piece(self, number: int, message: memoryview, offset: int) -> None:
        """Write the part of a message from `offset` into slot `number` (counted on for ever)."""
        start = self._ring + number % NUM_SLOTS * SLOT_BYTES
        piece = bytes(message[offset : offset + PIECE_BYTES])
        token = self._slot_token(number)
        check = _slot_check(token, len(message), piece)
        entry = _SLOT.pack(token, check, len(piece), len(message)) + piece
        self._bytes[start + 8 : start + len(entry)] = entry[8:]
        self.words[start // 8] = token

    def get_piece(self, number: int) -> tuple[int, bytes] | None:
        """(length of the whole message, this piece) of slot `number`; None while it does not prove itself."""
        start = self._ring + number % NUM_SLOTS * SLOT_BYTES
        token = self._slot_token(number)
        found, check, length, total = _SLOT.unpack_from(self._bytes, start)
        if found != token or length > PIECE_BYTES:
            return None
        piece = bytes(self._bytes[start + _SLOT.size : start + _SLOT.size + length])
        return (total, piece) if _slot_check(token, total, piece) == check else None

    def put_cursor(self, rank: int, number: int) -> None:
        """`rank` has read every slot before `number`."""
        self.words[self.token_at[rank] + _LINE // 8] = number

    def cursor(self, rank: int) -> int:
        return self.words[self.token_at[rank] + _LINE // 8]

    def _slot_token(self, number: int) -> int:
        return (number * _SPREAD + (self._session ^ _RING)) & MASK


def _slot_check(token: int, total: int, piece: bytes) -> int:
    return zlib.crc32(piece, zlib.crc32(_SLOT_LENGTHS.pack(len(piece), total), token >> 32))


def _total_bytes(size: int) -> int:
    return 2 * _LINE + size * _RANK_BYTES + NUM_SLOTS * SLOT_BYTES
