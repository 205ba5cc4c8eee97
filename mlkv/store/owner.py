"""The owner process of a host: one thread that serves the store to the ranks of this host over a Unix socket.

Started by the first client (see spawn.py), or by hand so that the cache outlives engines:

    python -m mlkv.store.owner --socket /run/user/1000/mlkv/store --host-bytes 8589934592 --page-bytes 65536 --keep
"""

from __future__ import annotations

import gc
import logging
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress

from mlkv.errors import ConfigError, MLKVError, StoreError
from mlkv.store import wire
from mlkv.store.arguments import parse_arguments
from mlkv.store.connection import Client, process_handle
from mlkv.store.index import Index
from mlkv.store.lower import LowerTiers
from mlkv.store.metrics import MetricsFeed
from mlkv.store.policy import POLICIES, Policy
from mlkv.store.pool import HostPool, create_pool_file, pool_pages
from mlkv.store.quotas import Quotas
from mlkv.store.rendezvous import SocketLock, is_listening, private_folder
from mlkv.store.service import StoreService
from mlkv.store.settings import OwnerSettings
from mlkv.store.spawn import CONFIG_ERROR, READY
from mlkv.store.tiers.open import open_tiers
from mlkv.store.transport import FramedSocket, PeerGone, peer_credentials

_MAX_CLIENTS = 256
"""Two descriptors each, so that they fit into the usual limit of 1024."""

_FIRST_CLIENT_S = 30.0
"""An owner whose starter died before it connected stays this long."""

_ORPHAN_S = 1.0
"""The same if it is known that the starter is dead: others of its job may be about to connect."""

_HELLO_S = 10.0
"""A connection that has not said Hello by then is closed."""

_DRAIN_S = 10.0
"""At its end it still writes to the lower tiers what waits for them, for at most this long."""

_CLOSE_S = 2.0
"""Calls of lower tiers that have not returned by then are left behind."""

_SWITCH_S = 0.0005
"""How long a thread of a tier may keep the interpreter from the loop that engines wait for. By default it is 5 ms,
and that more than once in a turn."""

_RETRY_S = 0.02
_STOP_LOCK_S = 1.0

_log = logging.getLogger("mlkv.store")


class Owner:
    """Accepts clients, feeds their requests to the service, and sees to it that nothing of a client is reclaimed
    while its process could still touch it.

    A client leaves its group when it says Bye, or when its connection has ended *and* its process is gone: a
    process that lost its connection may have copies under way for a while.
    """

    def __init__(
        self,
        settings: OwnerSettings,
        service: StoreService,
        lower: LowerTiers | None,
        listener: socket.socket,
        pool_fd: int,
    ) -> None:
        self._settings = settings
        self._service = service
        self._lower = lower
        self._listener = listener
        self._pool_fd = pool_fd
        self._num_pages = pool_pages(settings.host_bytes, settings.page_bytes)
        self._clients: dict[int, Client] = {}
        self._last_client_id = 0
        self._late: list[tuple[Client, int, wire.Reply]] = []  # answers that waited for lower tiers
        self._feed = MetricsFeed(settings.metrics, service.report) if settings.metrics.port else None
        self._stopping = False
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ, self._accept)
        for tier_fd in lower.fds if lower is not None else ():
            # All tiers are polled once for each turn of the loop, and at their deadlines too.
            self._selector.register(tier_fd, selectors.EVENT_READ, lambda _mask: None)
        self._leave_at = time.monotonic() + max(_FIRST_CLIENT_S, settings.linger_s)

    def watch_starter(self, pidfd: int) -> None:
        """It may die, or be dead already, between our being ready and its connecting."""
        self._selector.register(pidfd, selectors.EVENT_READ, lambda _mask: self._on_starter_end(pidfd))

    def _on_starter_end(self, pidfd: int) -> None:
        self._selector.unregister(pidfd)
        os.close(pidfd)
        self.starter_is_gone()

    def starter_is_gone(self) -> None:
        """Do not wait for it to connect."""
        self._leave_at = min(self._leave_at, time.monotonic() + max(_ORPHAN_S, self._settings.linger_s))

    def serve(self) -> bool:
        """Until the last client is gone (unless kept), or SIGTERM. False if a thread still hangs in a tier."""
        sys.setswitchinterval(_SWITCH_S)
        gc.collect()
        gc.freeze()  # what is here now stays: no collection has to go through it again
        wake_read, wake_write = socket.socketpair()
        wake_read.setblocking(False)
        wake_write.setblocking(False)
        self._selector.register(wake_read, selectors.EVENT_READ, lambda _mask: wake_read.recv(64))
        signal.set_wakeup_fd(wake_write.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, self._stop)
        # The terminal sends Ctrl-C to everybody; the owner ends when its clients have.
        signal.signal(signal.SIGINT, self._stop if self._settings.keep else signal.SIG_IGN)
        try:
            while not self._stopping and not self._left():
                self._turn(self._timeout_s())
        except MemoryError:
            # Outside of any client's request: what was half done then, with tiers for example, nobody can tell.
            _log.critical("there is no memory left, the store ends", exc_info=True)
            self._stopping = True
        if self._stopping:
            self._remove_files()
        self._listener.close()
        for client in list(self._clients.values()):
            client.channel.close()
        if self._feed is not None:
            self._feed.close()
        return self._lower is None or self._end_tiers(self._lower)

    def _turn(self, timeout_s: float | None) -> None:
        for key, mask in self._selector.select(timeout_s):
            key.data(mask)
        if self._lower is not None:
            self._lower.poll()
        self._service.poll()
        if self._feed is not None:
            self._feed.poll()
        self._send_late()
        self._close_silent()

    def _end_tiers(self, lower: LowerTiers) -> bool:
        """Write what is still to be written, in bounded time, and leave the tiers."""
        give_up_at = time.monotonic() + _DRAIN_S
        with selectors.DefaultSelector() as selector:
            for fd in lower.fds:
                selector.register(fd, selectors.EVENT_READ)
            while lower.is_busy and time.monotonic() < give_up_at:
                due_at = lower.due_at
                selector.select(_RETRY_S if due_at is None else min(_RETRY_S, max(0.0, due_at - time.monotonic())))
                lower.poll()
        return lower.close(_CLOSE_S)

    # Clients

    def _accept(self, _mask: int) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError as error:
            _log.warning("a client could not connect: %s", error)
            return
        if len(self._clients) >= _MAX_CLIENTS:
            _log.warning("refused a client: there are %d already", _MAX_CLIENTS)
            sock.close()
            return
        peer = peer_credentials(sock)
        pidfd, refusal = process_handle(sock, peer.pid)
        if peer.uid != os.geteuid():
            refusal = f"this store belongs to uid {os.geteuid()}, not to {peer.uid}"
        self._last_client_id += 1
        channel = FramedSocket(sock)
        client = Client(self._last_client_id, channel, peer.pid, pidfd, refusal, time.monotonic() + _HELLO_S)
        self._clients[client.id] = client
        self._selector.register(channel, selectors.EVENT_READ, lambda mask: self._on_client(client, mask))

    def _on_client(self, client: Client, mask: int) -> None:
        try:
            if mask & selectors.EVENT_WRITE:
                client.channel.flush()
            if mask & selectors.EVENT_READ:
                for ticket, body in client.channel.receive():
                    self._answer(client, ticket, wire.decode_request(body))
        except (PeerGone, wire.WireError) as error:
            self._disconnect(client, str(error))
            return
        except MemoryError:
            # Of what it sent, or was to be told, something is missing. It can do without a store.
            self._disconnect(client, "there was no memory to serve it")
            return
        self._watch(client)

    def _watch(self, client: Client) -> None:
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if client.channel.has_unsent else 0)
        key = self._selector.get_key(client.channel)
        if key.events != events:
            self._selector.modify(client.channel, events, key.data)

    def _answer(self, client: Client, ticket: int, request: wire.Request) -> None:
        pass_fd: int | None = None
        try:
            if client.left:
                raise wire.WireError("it sent a request after Bye")
            if client.group is None:
                reply = self._admit(client, request)
                pass_fd = self._pool_fd
            elif isinstance(request, wire.Bye):
                self._leave(client)
                reply = wire.Done()
            elif isinstance(request, wire.SlowRequest) or (isinstance(request, wire.Match) and request.wait_s > 0):
                self._service.handle_later(
                    client.group, client.id, request, lambda reply: self._late.append((client, ticket, reply))
                )
                return
            else:
                reply = self._service.handle(client.group, request)
        except wire.WireError:
            raise
        except StoreError as refusal:
            reply = wire.Failed(str(refusal))
        except Exception as error:
            # One client's request must not end the store for all. The index checks requests before it changes
            # anything; should a bug have broken it all the same, serving on could hand out the wrong pages.
            _log.exception("%s of %s failed", type(request).__name__, client)
            reply = wire.Failed(f"the owner of the store failed on a {type(request).__name__}: {error!r}")
            if self._is_broken():
                self._stopping = True
        client.channel.send(wire.encode_frame(ticket, reply), pass_fd)
        if client.group is None:
            raise PeerGone("it was not admitted")

    def _is_broken(self) -> bool:
        try:
            problem = self._service.check()
        except Exception as error:
            # A check that fails otherwise has met what it did not expect, or no memory: serving on is too risky.
            problem = f"it cannot be checked: {error!r}"
        if problem:
            _log.critical("the index is broken, the store ends: %s", problem)
        return bool(problem)

    def _send_late(self) -> None:
        late, self._late = self._late, []
        for client, ticket, reply in late:
            if client.closed or client.left:
                continue  # what it was granted goes with its group
            try:
                client.channel.send(wire.encode_frame(ticket, reply))
            except PeerGone as error:
                self._disconnect(client, str(error))
            else:
                self._watch(client)

    def _admit(self, client: Client, request: wire.Request) -> wire.Reply:
        if not isinstance(request, wire.Hello):
            raise wire.WireError(f"its first request is a {type(request).__name__}, not a Hello")
        if request.protocol != wire.PROTOCOL:
            raise StoreError(
                f"the store at {self._settings.socket_path} speaks protocol {wire.PROTOCOL}, this client "
                f"{request.protocol}: use one version of mlkv for both, or another store"
            )
        if request.page_bytes not in (0, self._settings.page_bytes):
            raise StoreError(
                f"the store at {self._settings.socket_path} has pages of {self._settings.page_bytes} bytes, this "
                f"client needs {request.page_bytes}: use the same model, dtype and page_tokens, or another store"
            )
        if client.refusal:
            raise StoreError(client.refusal)
        client.group, client.rank = request.group, request.rank
        self._service.join(client.group, client.id)
        tiers = [] if self._lower is None else self._lower.names
        return wire.Welcome(self._num_pages, self._settings.page_bytes, tiers)

    def _disconnect(self, client: Client, why: str) -> None:
        """Close a connection. What its process may still touch is kept until the process is gone."""
        self._selector.unregister(client.channel)
        client.channel.close()
        client.closed = True
        if client.group is not None:
            self._service.stop_waiting(client.group, client.id)
        if client.group is None or client.left:
            self._remove(client)
            return
        _log.warning("lost %s: %s; waiting for its process to end", client, why)
        self._selector.register(client.pidfd, selectors.EVENT_READ, lambda _mask: self._on_process_end(client))

    def _on_process_end(self, client: Client) -> None:
        self._selector.unregister(client.pidfd)
        self._leave(client)
        self._remove(client)

    def _leave(self, client: Client) -> None:
        assert client.group is not None
        client.left = True
        self._service.leave(client.group, client.id)

    def _remove(self, client: Client) -> None:
        if client.pidfd >= 0:
            os.close(client.pidfd)
        del self._clients[client.id]
        # One that never joined only looked whether we are here; our starter may still be to come.
        if client.group is not None:
            self._leave_at = time.monotonic() + self._settings.linger_s

    def _close_silent(self) -> None:
        now = time.monotonic()
        for client in [c for c in self._clients.values() if c.group is None and now >= c.hello_by]:
            self._disconnect(client, "it never said Hello")

    # The end

    def _stop(self, _signal: int, _frame: object) -> None:
        self._stopping = True

    def _timeout_s(self) -> float | None:
        """Until the next thing that happens by itself."""
        now = time.monotonic()
        due = [client.hello_by for client in self._clients.values() if client.group is None]
        if not self._clients and not self._settings.keep:
            due.append(max(self._leave_at, now + _RETRY_S))
        for part in (self._lower, self._service, self._feed):
            if part is not None and part.due_at is not None:
                due.append(part.due_at)
        return max(0.0, min(due) - now) if due else None

    def _left(self) -> bool:
        """Whether the time has come to go, and the files are gone already.

        Under the lock nobody else makes or removes the socket. A client that connected just before without it
        finds its connection closed, and starts over.
        """
        if self._settings.keep or self._clients or time.monotonic() < self._leave_at:
            return False
        try:
            lock = SocketLock.try_acquire(self._settings.socket_path)
        except StoreError as error:
            _log.warning("nobody can find this owner any more: %s", error)
            return True
        if lock is None:
            return False  # somebody is about to connect, or to find that we are gone
        self._settings.socket_path.unlink(missing_ok=True)
        lock.release(remove=True)
        return True

    def _remove_files(self) -> None:
        try:
            lock = SocketLock.acquire(self._settings.socket_path, _STOP_LOCK_S)
        except MLKVError as error:
            _log.warning("leaves its socket behind, to be replaced by the next owner: %s", error)
            return
        self._settings.socket_path.unlink(missing_ok=True)
        lock.release(remove=True)


def start(settings: OwnerSettings) -> Owner:
    """Make pool, index, tiers and socket. The caller holds the lock of the socket.

    Raises ConfigError for a pool, a tier or a socket path that cannot be, StoreError if another owner listens
    there, TierUnavailable if the disk cannot be used.
    """
    if is_listening(settings.socket_path):
        raise StoreError(f"another owner serves {settings.socket_path} already")
    settings.socket_path.unlink(missing_ok=True)
    num_pages = pool_pages(settings.host_bytes, settings.page_bytes)
    pool_fd = create_pool_file(num_pages, settings.page_bytes, interleaved=settings.interleave)
    pool = HostPool(pool_fd, num_pages, settings.page_bytes)
    # Pages of earlier owners lie in the tiers. No owner writes a page each nanosecond, so none of those has a
    # generation that this one will give.
    policy: Policy = POLICIES[settings.policy](num_pages)
    quotas = Quotas(settings.quotas, settings.page_bytes, num_pages, policy) if settings.quotas else None
    index = Index(
        num_pages,
        policy if quotas is None else quotas.policy,
        first_generation=time.time_ns(),
        free=None if quotas is None else quotas.free,
    )
    runners = open_tiers(settings, pool)
    lower = LowerTiers(index, pool, runners, settings.admission) if runners else None
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    umask = os.umask(0o177)
    try:
        listener.bind(os.fspath(settings.socket_path))
    finally:
        os.umask(umask)
    listener.listen(_MAX_CLIENTS)
    listener.setblocking(False)
    below = "".join(f", {runner.name} below" for runner in runners)
    _log.info("serves %d pages of %d bytes at %s%s", num_pages, settings.page_bytes, settings.socket_path, below)
    return Owner(settings, StoreService(index, lower, pool, quotas), lower, listener, pool_fd)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point. With --lock-fd and --ready-fd (from spawn.py) it detaches, and reports through the pipe."""
    arguments = parse_arguments(argv)
    starter_fd: int | None = None
    if arguments.lock_fd is not None:
        with suppress(OSError):  # without pidfd, an owner of a dead starter waits longer for a client
            starter_fd = os.pidfd_open(os.getppid())
        if os.fork():
            # The engine gets no child of ours: it could wait for any of its children, and would owe us a wait.
            os._exit(0)
    return run(arguments.settings, arguments.lock_fd, arguments.ready_fd, starter_fd)


def run(
    settings: OwnerSettings,
    lock_fd: int | None = None,
    ready_fd: int | None = None,
    starter_fd: int | None = None,
) -> int:
    """Be the owner, until it ends. Returns the exit status of the process.

    Args:
        lock_fd: of the lock of the socket, if the starter holds it.
        ready_fd: to tell the starter that it listens, or why it cannot; default: standard error says why.
        starter_fd: a pidfd of the starter.
    """
    try:
        logging.basicConfig(
            level=logging.INFO if settings.keep or settings.log_file else logging.WARNING,
            format=f"%(asctime)s mlkv store {os.getpid()}: %(message)s",
            filename=settings.log_file,
        )
        private_folder(settings.socket_path)
        if lock_fd is None:
            lock = SocketLock.acquire(settings.socket_path, _STOP_LOCK_S)
        else:
            lock = SocketLock.inherited(settings.socket_path, lock_fd)
        owner = start(settings)
        lock.release()
    except (MLKVError, OSError) as error:
        if ready_fd is None:
            print(f"mlkv store: {error}", file=sys.stderr)
        else:
            kind = CONFIG_ERROR if isinstance(error, ConfigError) else b""
            os.write(ready_fd, kind + str(error).encode())
        return 2 if isinstance(error, ConfigError) else 1
    if ready_fd is not None:
        try:
            os.write(ready_fd, READY)
        except BrokenPipeError:
            owner.starter_is_gone()
        os.close(ready_fd)
    if starter_fd is not None:
        owner.watch_starter(starter_fd)
    have_returned = owner.serve()
    _log.info("ends")
    if not have_returned:
        # A client library may have threads that Python would wait for; what hangs in them hangs for ever.
        logging.shutdown()
        os._exit(0)
    return 0


if __name__ == "__main__":
    sys.exit(main())
