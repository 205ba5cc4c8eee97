"""A Unix stream socket that carries frames and never blocks. Both ends use it."""

from __future__ import annotations

import os
import socket
import struct
from dataclasses import dataclass
from typing import NoReturn

from mlkv.errors import StoreError
from mlkv.store.wire import FrameReader

MAX_UNSENT_BYTES = 32 << 20
"""Bound of what waits for a peer that does not read: two frames of the greatest size."""

_READ_BYTES = 1 << 18
_READS_PER_CALL = 16  # then others get their turn
_UCRED = struct.Struct("iII")


class PeerGone(StoreError):
    """The other end closed the connection, died, or does not read what is sent to it."""


@dataclass(frozen=True)
class Credentials:
    """Who is at the other end, as the kernel noted it. `pid` is 0 for a process outside of our PID namespace."""

    pid: int
    uid: int


def peer_credentials(sock: socket.socket) -> Credentials:
    """Of the process that connected (seen by a server) or that listens (seen by a client)."""
    pid, uid, _ = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return Credentials(pid, uid)


class FramedSocket:
    """Queues frames out, collects frames in. Not thread-safe.

    `receive` and `flush` do what can be done without waiting. Raises PeerGone when the connection is of no
    more use.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._reader = FrameReader()
        self._unsent = bytearray()
        self._gone = ""

    def fileno(self) -> int:
        return self._sock.fileno()

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent)

    def send(self, frame: bytes, pass_fd: int | None = None) -> None:
        """Queue a frame and send what the socket takes now. `pass_fd` travels with its first byte."""
        if len(self._unsent) + len(frame) > MAX_UNSENT_BYTES:
            self._fail(f"it left {len(self._unsent)} bytes unread")
        self._unsent += frame
        if pass_fd is None:
            self.flush()
        else:
            # Only the first frame of a connection carries a descriptor, so nothing is queued before it.
            try:
                sent = socket.send_fds(self._sock, [self._unsent], [pass_fd])
            except OSError as error:
                self._fail(os.strerror(error.errno or 0))
            del self._unsent[:sent]

    def flush(self) -> None:
        """Send what the socket takes now."""
        while self._unsent:
            try:
                sent = self._sock.send(self._unsent)
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                self._fail(os.strerror(error.errno or 0))
            del self._unsent[:sent]

    def receive(self) -> list[tuple[int, bytes]]:
        """(ticket, body) of the frames that have arrived. An end of the stream is told after the last of them.

        Raises WireError for a stream that is not made of frames.
        """
        if self._gone:
            raise PeerGone(self._gone)
        frames: list[tuple[int, bytes]] = []
        for _ in range(_READS_PER_CALL):
            try:
                data = self._sock.recv(_READ_BYTES)
            except (BlockingIOError, InterruptedError):
                break
            except OSError as error:
                self._gone = os.strerror(error.errno or 0)
                break
            if not data:
                self._gone = "it closed the connection"
                break
            frames += self._reader.feed(data)
            if len(data) < _READ_BYTES:
                break  # most likely all there is; if not, the next call finds it
        if self._gone and not frames:
            raise PeerGone(self._gone)
        return frames

    def receive_with_fd(self) -> tuple[list[tuple[int, bytes]], list[int]]:
        """As `receive`, for the one read that brings a descriptor with it. The descriptors are the caller's."""
        try:
            data, fds, _, _ = socket.recv_fds(self._sock, _READ_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
        except OSError as error:
            self._fail(os.strerror(error.errno or 0))
        if not data:
            self._fail("it closed the connection")
        return self._reader.feed(data), fds

    def close(self) -> None:
        self._sock.close()

    def _fail(self, why: str) -> NoReturn:
        self._gone = why
        raise PeerGone(why)
