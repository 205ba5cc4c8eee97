"""A rank's connection to the store of its host."""

from __future__ import annotations

import os
import select
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import NoReturn, overload

from mlkv.errors import DeadlineExceeded, MLKVError, StoreError, StoreLost
from mlkv.metrics_config import MetricsConfig
from mlkv.store import wire
from mlkv.store.policy import DEFAULT_POLICY, PolicyName
from mlkv.store.pool import HostPool, pool_pages
from mlkv.store.rendezvous import SocketLock, is_listening, private_folder, remove_stale_socket
from mlkv.store.settings import OwnerSettings
from mlkv.store.spawn import spawn_owner
from mlkv.store.transport import FramedSocket, PeerGone, peer_credentials
from mlkv.store.wire_tools import (
    Fetch,
    Fetched,
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
    TierKeys,
    Unpin,
)
from mlkv.store_config import Admission, DiskConfig, RemoteConfig

MAX_OUTSTANDING = 4096
"""Requests without an answer yet. An owner that is alive answers thousands in a step."""

_GOODBYE_S = 1.0
_RETRY_S = 0.01


class _NoOwner(Exception):
    """Nobody serves the socket, or whoever did is just leaving."""


class StoreClient:
    """Maps the host pool and talks to the owner. Not thread-safe: one thread at a time calls it.

    `submit` and `poll` never wait; `call` waits until its deadline. When the owner is lost, the call that notices
    raises StoreLost; from then on `submit` and `call` raise it at once and `poll` has nothing to tell. The
    mapping stays valid until `close`, so copies under way can end.

    Attributes:
        num_pages, page_bytes: geometry of the pool.
        pool: the pool, writable memoryview of uint8 [num_pages * page_bytes], shared with every rank of this host.
        owner_pid: process id of the owner.
        tiers: names of the tiers below the pool, the nearest one first.
    """

    def __init__(
        self,
        channel: FramedSocket,
        pool: HostPool,
        owner_pid: int,
        socket_path: Path,
        tiers: Sequence[str] = (),
    ) -> None:
        """Of an established connection; use `connect`."""
        self._channel = channel
        self._pool = pool
        self._socket_path = socket_path
        self.owner_pid = owner_pid
        self.tiers = tuple(tiers)
        self.num_pages = pool.num_pages
        self.page_bytes = pool.page_bytes
        self._last_ticket = 0
        self._outstanding: set[int] = set()
        self._abandoned: set[int] = set()
        self._replies: dict[int, wire.Reply] = {}
        self._lost = ""
        self._closed = False

    @classmethod
    def connect(
        cls,
        socket_path: str | os.PathLike[str],
        *,
        host_bytes: int,
        page_bytes: int,
        group: bytes,
        rank: int,
        deadline_s: float,
        linger_s: float = 0.0,
        log_file: str | os.PathLike[str] | None = None,
        disk: DiskConfig | None = None,
        remote: RemoteConfig | None = None,
        admission: Admission = "write",
        policy: PolicyName = DEFAULT_POLICY,
        interleave: bool = True,
        quotas: Mapping[str, int] | None = None,
        metrics: MetricsConfig | None = None,
    ) -> StoreClient:
        """Join the store of this host, starting its owner if there is none.

        Args:
            socket_path: in a folder that only this user can enter; it is made if absent.
            host_bytes: size of the pool if it has to be made; an owner that runs keeps its own.
            page_bytes: must be that of the owner.
            group: token of the replica, equal on all of its ranks and on no others.
            rank: group rank, for messages.
            deadline_s: for all of it.
            linger_s, log_file, disk, remote, admission, policy, interleave, quotas, metrics: for an owner that has
                to be started, see OwnerSettings and StoreConfig.

        Raises ConfigError for settings that cannot be, StoreError when the owner refuses or does not start,
        DeadlineExceeded when it takes too long.
        """
        path = Path(socket_path).absolute()
        pool_pages(host_bytes, page_bytes)
        private_folder(path)
        settings = OwnerSettings(
            socket_path=path,
            host_bytes=host_bytes,
            page_bytes=page_bytes,
            linger_s=linger_s,
            log_file=None if log_file is None else Path(log_file).absolute(),
            disk=disk,
            remote=remote,
            admission=admission,
            policy=policy,
            interleave=interleave,
            quotas=dict(quotas or {}),
            metrics=metrics or MetricsConfig(),
        )
        hello = wire.Hello(wire.PROTOCOL, page_bytes, group, rank)
        give_up_at = time.monotonic() + deadline_s
        while True:
            try:
                return cls._join(path, hello, give_up_at)
            except _NoOwner:
                pass
            lock = SocketLock.acquire(path, _left_s(give_up_at))
            try:
                if is_listening(path):
                    time.sleep(_RETRY_S)  # another client was first; or the old owner is on its way out
                else:
                    spawn_owner(settings, lock, _left_s(give_up_at))
            except BaseException:
                lock.release(remove=True)  # no owner will take the file along
                raise
            lock.release()
            if not _left_s(give_up_at):
                raise DeadlineExceeded(f"no owner let us in at {path} within {deadline_s:.1f} s")

    @classmethod
    def find(cls, socket_path: str | os.PathLike[str], *, group: bytes, deadline_s: float) -> StoreClient:
        """Join a store that runs, whatever the size of its pages; for tools.

        Raises StoreError when nobody serves it or it refuses, DeadlineExceeded when it does not answer.
        """
        path = Path(socket_path).absolute()
        try:
            return cls._join(path, wire.Hello(wire.PROTOCOL, 0, group), time.monotonic() + deadline_s)
        except _NoOwner:
            raise StoreError(f"no store runs at {path}") from None

    @classmethod
    def _join(cls, path: Path, hello: wire.Hello, give_up_at: float) -> StoreClient:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        fds: list[int] = []
        try:
            sock.settimeout(max(_RETRY_S, _left_s(give_up_at)))
            sock.connect(os.fspath(path))
            owner = peer_credentials(sock)
            if owner.uid != os.geteuid():
                raise StoreError(f"the store at {path} belongs to uid {owner.uid}, not to us")
            channel = FramedSocket(sock)
            channel.send(wire.encode_frame(0, hello))
            if not _wait(channel, give_up_at):
                raise DeadlineExceeded(f"the owner of the store at {path} (pid {owner.pid}) does not answer")
            frames, fds = channel.receive_with_fd()
            # The owner's first reply is a few bytes sent at once, so it arrives whole.
            welcome = wire.decode_reply(frames[0][1]) if frames else None
            if isinstance(welcome, wire.Failed):
                raise StoreError(welcome.message)
            if not isinstance(welcome, wire.Welcome) or not fds:
                raise wire.WireError(f"the process {owner.pid} at {path} does not speak as a store does")
            pool = HostPool(fds[0], welcome.num_pages, welcome.page_bytes)
            return cls(channel, pool, owner.pid, path, welcome.tiers)
        except (FileNotFoundError, ConnectionError, PeerGone):
            sock.close()
            raise _NoOwner from None
        except TimeoutError as error:
            sock.close()
            if isinstance(error, MLKVError):
                raise
            raise DeadlineExceeded(f"the owner of the store at {path} does not accept connections") from None
        except BaseException:
            sock.close()
            raise
        finally:
            for fd in fds:
                os.close(fd)

    @property
    def pool(self) -> memoryview:
        return self._pool.buffer

    # Requests

    def submit(self, request: wire.Request) -> int:
        """Send a request without waiting. Returns the ticket under which `poll` will bring the reply.

        Raises StoreLost, or StoreError when too many requests wait for an answer.
        """
        if self._lost:
            raise StoreLost(self._lost)
        if len(self._outstanding) >= MAX_OUTSTANDING:
            raise StoreError(f"{MAX_OUTSTANDING} requests wait for the owner (pid {self.owner_pid}); it is stuck")
        self._last_ticket += 1
        frame = wire.encode_frame(self._last_ticket, request)
        try:
            self._channel.send(frame)
        except PeerGone as error:
            self._lose(error)
        self._outstanding.add(self._last_ticket)
        return self._last_ticket

    def poll(self) -> list[tuple[int, wire.Reply]]:
        """(ticket, reply) of what has arrived; refused requests as wire.Failed. Does not wait.

        Raises StoreLost once. What arrived before the loss is still returned, by the call before it or after it.
        """
        if not self._lost:
            self._pump()
        replies = list(self._replies.items())
        self._replies.clear()
        return replies

    def abandon(self, ticket: int) -> None:
        """The reply to this ticket is not wanted any more. A lease or reservation that it brings is given back."""
        reply = self._replies.pop(ticket, None)
        if reply is not None:
            self._undo(reply)
        elif ticket in self._outstanding:
            self._abandoned.add(ticket)

    @overload
    def call(self, request: wire.Match, deadline_s: float) -> wire.Matched: ...
    @overload
    def call(self, request: wire.Reserve, deadline_s: float) -> wire.Reserved: ...
    @overload
    def call(self, request: wire.Commit, deadline_s: float) -> wire.Published: ...
    @overload
    def call(self, request: wire.Stats, deadline_s: float) -> wire.Report: ...
    @overload
    def call(self, request: Open | Invalidate, deadline_s: float) -> Opened: ...
    @overload
    def call(self, request: ListPages, deadline_s: float) -> PageList: ...
    @overload
    def call(self, request: Namespaces, deadline_s: float) -> NamespaceList: ...
    @overload
    def call(self, request: Pin | Unpin | Pins, deadline_s: float) -> Pinned: ...
    @overload
    def call(self, request: ListTier, deadline_s: float) -> TierKeys: ...
    @overload
    def call(self, request: Fetch, deadline_s: float) -> Fetched: ...
    @overload
    def call(self, request: wire.Request, deadline_s: float) -> wire.Reply: ...

    def call(self, request: wire.Request, deadline_s: float) -> wire.Reply:
        """Send a request and wait for its reply.

        Raises StoreError when it is refused, StoreLost, or DeadlineExceeded; then the request is abandoned.
        """
        ticket = self.submit(request)
        give_up_at = time.monotonic() + deadline_s
        while ticket not in self._replies:
            if not _wait(self._channel, give_up_at):
                self.abandon(ticket)
                raise DeadlineExceeded(
                    f"the owner of the store (pid {self.owner_pid}) did not answer a {type(request).__name__} "
                    f"within {deadline_s:.1f} s"
                )
            self._pump()
        reply = self._replies.pop(ticket)
        if isinstance(reply, wire.Failed):
            raise StoreError(reply.message)
        return reply

    def close(self) -> None:
        """Take leave: from here on this process touches no page. Idempotent; never raises for a lost owner."""
        if self._closed:
            return
        self._closed = True
        if not self._lost:
            try:
                self._give_back_unread(_GOODBYE_S)
                self.call(wire.Bye(), _GOODBYE_S)
            except (StoreError, DeadlineExceeded) as error:
                # An owner that hangs or is gone cannot be told; it learns of us when our process ends.
                self._lost = self._lost or str(error)
        self._channel.close()
        if self._lost:
            remove_stale_socket(self._socket_path)
        self._lost = self._lost or "this client is closed"
        self._pool.close()

    def __enter__(self) -> StoreClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # Inside

    def _pump(self) -> None:
        """Take in what has arrived, send on what is queued."""
        try:
            for ticket, body in self._channel.receive():
                reply = wire.decode_reply(body)
                if ticket not in self._outstanding:
                    raise wire.WireError(f"a reply came for ticket {ticket}, which waits for none")
                self._outstanding.discard(ticket)
                if ticket in self._abandoned:
                    self._abandoned.discard(ticket)
                    self._undo(reply)
                else:
                    self._replies[ticket] = reply
            self._channel.flush()
        except (PeerGone, wire.WireError) as error:
            self._lose(error)

    def _undo(self, reply: wire.Reply) -> None:
        if isinstance(reply, wire.Matched) and reply.lease:
            self._abandoned.add(self.submit(wire.Release([reply.lease])))
        elif isinstance(reply, wire.Reserved) and reply.reservation:
            # Nobody has heard of these pages, so nobody can be writing them.
            self._abandoned.add(self.submit(wire.Cancel(reply.reservation)))

    def _give_back_unread(self, deadline_s: float) -> None:
        """Abandon every request, and wait for the replies: other ranks of the group keep its leases alive."""
        for ticket in [*self._replies, *self._outstanding]:
            self.abandon(ticket)
        give_up_at = time.monotonic() + deadline_s
        while self._outstanding and _wait(self._channel, give_up_at):
            self._pump()

    def _lose(self, error: Exception) -> NoReturn:
        self._lost = (
            f"the owner of the store at {self._socket_path} (pid {self.owner_pid}) is lost: {error}; "
            "its pages cannot be reached any more, connect again for a new one"
        )
        self._outstanding.clear()
        self._abandoned.clear()
        self._channel.close()
        raise StoreLost(self._lost)


def _left_s(give_up_at: float) -> float:
    return max(0.0, give_up_at - time.monotonic())


def _wait(channel: FramedSocket, give_up_at: float) -> bool:
    """Wait until the channel has something to read, or room for what is unsent; False at the deadline."""
    poll = select.poll()
    poll.register(channel, select.POLLIN | (select.POLLOUT if channel.has_unsent else 0))
    return bool(poll.poll(_left_s(give_up_at) * 1000))
