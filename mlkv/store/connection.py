"""What the owner knows of a client beside its requests."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass

from mlkv.store.transport import FramedSocket

_SO_PEERPIDFD = 77  # Linux 6.5; not in Python's socket module


@dataclass
class Client:
    """A connection, and what it has said of itself so far."""

    id: int
    channel: FramedSocket
    pid: int
    pidfd: int
    """Of the process that connected; -1 when the kernel does not give it."""
    refusal: str
    """Why this client may not join; "" if it may."""
    hello_by: float
    group: bytes | None = None
    rank: int = 0
    left: bool = False
    closed: bool = False

    def __str__(self) -> str:
        return f"rank {self.rank} (pid {self.pid})" if self.group is not None else f"pid {self.pid}"


def process_handle(sock: socket.socket, pid: int) -> tuple[int, str]:
    """(pidfd, "") of the process at the other end, or (-1, why there is none)."""
    try:
        return sock.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD), ""
    except OSError:
        # An older kernel. The peer is alive while we are in accept, or the number is of a process that is:
        # then its leases live longer than they had to.
        pass
    try:
        return os.pidfd_open(pid), ""
    except OSError as error:
        return -1, (
            f"the owner of the store cannot watch process {pid} ({error.strerror}): it must be in the same PID "
            "namespace, on Linux 5.3 or later"
        )
