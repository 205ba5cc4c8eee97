"""One connection to a Redis or Valkey server that receives values right where they are wanted.

The `valkey` package makes the connection (addresses, TLS). Its own parsers copy a value three times: out of the
socket's buffer, into the parser's, into a `bytes`. Here the kernel writes a value into the page it is for.
"""

from __future__ import annotations

import select
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from pydantic import SecretStr

from mlkv.errors import ConfigError, DeadlineExceeded

_BUFFER_BYTES = 16 << 10
"""For replies that are not pages, and for the first bytes of a page, which come with the line before it."""

_NOT_REDIS = "what answers there does not speak the protocol of Redis"
_MAX_DEPTH = 4  # of arrays in arrays; SCAN answers with two


class ReplyError(Exception):
    """The server refused one command. `code` is the first word: OOM, NOAUTH, LOADING, ..."""

    @property
    def code(self) -> str:
        return str(self).partition(" ")[0]


Reply: TypeAlias = "int | bytes | ReplyError | list[Reply] | None"


@dataclass(frozen=True)
class Server:
    """Where a server is and how to log in. Its text form has no secrets."""

    host: str
    port: int = 6379
    database: int = 0
    tls: bool = False
    username: str = ""
    password: SecretStr | None = None

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'rediss' if self.tls else 'redis'}://{host}:{self.port}/{self.database}"


class Link:
    """A logged-in connection for one thread at a time. After any exception it must be closed: replies may be owed.

    Raises, besides what is said below: DeadlineExceeded, ConnectionError for a broken connection, and the errors
    of the `valkey` package while connecting.
    """

    def __init__(self, server: Server, client: Any, deadline: float) -> None:
        """Connect and log in.

        Args:
            client: what `import_client` returned.
            deadline: until when, of `time.monotonic()`; `set_deadline` moves it.

        Raises ReplyError if the server refuses the login.
        """
        self._deadline = deadline
        self._buffer = bytearray(_BUFFER_BYTES)
        self._view = memoryview(self._buffer)
        self._start = self._end = 0  # what of the buffer was received and not yet used
        self._socket: Any = None
        # A name may have several addresses, which are tried one after the other with this timeout each.
        self._connection = _new_connection(server, client, self, timeout_s=self._left_s() / 4)
        self._connection.connect()
        try:
            self._log_in(server)
        except BaseException:
            self.close()
            raise

    def set_deadline(self, deadline: float) -> None:
        """Until when, of `time.monotonic()`, the calls that follow may take, all together."""
        self._deadline = deadline

    def is_quiet(self) -> bool:
        """Whether nothing came since the last reply: no end of the connection, nothing unasked for."""
        if self._start != self._end or self._socket is None:
            return False
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return not poll.poll(0)

    def send(self, *arguments: bytes | memoryview) -> None:
        """Send one command. A long argument goes out from where it is."""
        packed = bytearray(b"*%d\r\n" % len(arguments))
        for argument in arguments:
            packed += b"$%d\r\n" % len(argument)
            if len(argument) <= _BUFFER_BYTES:
                packed += argument
            else:
                self._send_all(packed)
                self._send_all(argument)
                packed = bytearray()
            packed += b"\r\n"
        self._send_all(packed)

    def send_many(self, commands: Iterable[Sequence[bytes]]) -> None:
        """Send several short commands at once; their replies come in the same order."""
        packed = bytearray()
        for arguments in commands:
            packed += b"*%d\r\n" % len(arguments)
            for argument in arguments:
                packed += b"$%d\r\n%b\r\n" % (len(argument), argument)
        self._send_all(packed)

    def call(self, *arguments: bytes) -> Reply:
        """Send a command and wait for its reply. Raises ReplyError if the server refuses it."""
        self.send(*arguments)
        reply = self.receive()
        if isinstance(reply, ReplyError):
            raise reply
        return reply

    def receive(self, depth: int = 0) -> Reply:
        """The next reply. An error of the server is returned, not raised, since others may follow it."""
        line = self._receive_line()
        kind, rest = line[:1], line[1:]
        if kind == b"$":
            size = _integer(rest)
            return self._receive_value(size) if size >= 0 else None
        if kind == b":":
            return _integer(rest)
        if kind == b"+":
            return rest
        if kind == b"-":
            return ReplyError(rest.decode(errors="replace"))
        if kind == b"*" and depth < _MAX_DEPTH:
            return [self.receive(depth + 1) for _ in range(_integer(rest))]
        raise ConnectionError(_NOT_REDIS)

    def receive_into(self, page: memoryview) -> bool | ReplyError:
        """The next reply, a value, into `page`: whether it is there and exactly that long.

        Of a value of another size nothing is kept; `page` may have been written to all the same.
        """
        line = self._receive_line()
        if line[:1] == b"-":
            return ReplyError(line[1:].decode(errors="replace"))
        if line[:1] != b"$":
            raise ConnectionError(_NOT_REDIS)
        size = _integer(line[1:])
        if size < 0:
            return False
        if size == len(page):
            self._receive_exactly(page)
        else:
            self._skip(size)
        self._receive_line()  # a value ends with an empty line
        return size == len(page)

    def close(self) -> None:
        """Cut the connection. May be called from another thread, whose wait then ends with ConnectionError."""
        self._connection.disconnect()

    def on_connect(self, connection: Any) -> None:
        """Part of what `valkey.Connection` expects of a parser, as are the next three."""
        self._socket = connection._sock  # where parsers of that package find it, too

    def on_disconnect(self) -> None:
        self._socket = None

    def can_read(self, timeout: float) -> bool:
        return not self.is_quiet()

    def read_response(self, disable_decoding: bool = False) -> Reply:
        return self.receive()

    def _log_in(self, server: Server) -> None:
        if server.password is not None:
            secret = server.password.get_secret_value().encode()
            self.call(b"AUTH", *([server.username.encode()] if server.username else []), secret)
        if server.database:
            self.call(b"SELECT", b"%d" % server.database)
        self.call(b"PING")

    def _left_s(self) -> float:
        left_s = self._deadline - time.monotonic()
        if left_s <= 0:
            raise DeadlineExceeded("no complete answer in time")
        return left_s

    def _ready_socket(self) -> Any:
        """The socket, which gives up at the deadline."""
        ready = self._socket  # `close` of another thread may take it away
        if ready is None:
            raise ConnectionError("the connection was closed")
        ready.settimeout(self._left_s())
        return ready

    def _send_all(self, data: bytes | bytearray | memoryview) -> None:
        ready = self._ready_socket()
        try:
            ready.sendall(data)  # its timeout is for all of `data`
        except TimeoutError:
            raise DeadlineExceeded("it stopped taking what is sent to it") from None

    def _receive_some(self, into: memoryview) -> int:
        ready = self._ready_socket()
        try:
            got: int = ready.recv_into(into)
        except TimeoutError:
            raise DeadlineExceeded("no complete answer in time") from None
        if got == 0:
            raise ConnectionError("the server closed the connection")
        return got

    def _receive_line(self) -> bytes:
        while True:
            end = self._buffer.find(b"\r\n", self._start, self._end)
            if end >= 0:
                line = bytes(self._view[self._start : end])
                self._start = end + 2
                return line
            if self._start:
                self._view[: self._end - self._start] = self._view[self._start : self._end]
                self._start, self._end = 0, self._end - self._start
            if self._end == _BUFFER_BYTES:
                raise ConnectionError(_NOT_REDIS)
            self._end += self._receive_some(self._view[self._end :])

    def _take_buffered(self, into: memoryview) -> int:
        size = min(len(into), self._end - self._start)
        into[:size] = self._view[self._start : self._start + size]
        self._start += size
        return size

    def _receive_exactly(self, into: memoryview) -> None:
        got = self._take_buffered(into)
        while got < len(into):
            got += self._receive_some(into[got:])

    def _receive_value(self, size: int) -> bytes:
        value = bytearray(size)
        self._receive_exactly(memoryview(value))
        self._receive_line()
        return bytes(value)

    def _skip(self, size: int) -> None:
        scratch = memoryview(bytearray(min(size, 1 << 20)))
        while size:
            part = scratch[: min(size, len(scratch))]
            self._receive_exactly(part)
            size -= len(part)


def _integer(text: bytes) -> int:
    try:
        return int(text)
    except ValueError:
        raise ConnectionError(_NOT_REDIS) from None


def import_client() -> Any:
    """The module of the `valkey` package that makes connections. Raises ConfigError if it is not installed."""
    try:
        import valkey.connection
    except ImportError:
        raise ConfigError("a redis:// store needs the valkey package: pip install 'mlkv[redis]'") from None
    return valkey.connection


def _new_connection(server: Server, client: Any, parser: Link, timeout_s: float) -> Any:
    options: dict[str, Any] = {
        "host": server.host,
        "port": server.port,
        "socket_timeout": timeout_s,
        "socket_connect_timeout": timeout_s,
        "socket_keepalive": True,
        "parser_class": lambda socket_read_size: parser,
        # The login is ours, so that it keeps to the deadline and says what the server said.
        "valkey_connect_func": parser.on_connect,
    }
    if server.tls:
        return client.SSLConnection(ssl_check_hostname=True, **options)
    return client.Connection(**options)
