"""A Redis or Valkey server as a tier: every page is a string value under a binary key."""

from __future__ import annotations

import contextlib
import heapq
import os
import threading
import time
from collections.abc import Iterator, Sequence
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import SecretStr

from mlkv.errors import ConfigError, DeadlineExceeded, TierUnavailable
from mlkv.keys import KEY_BYTES
from mlkv.store.tiers import naming
from mlkv.store.tiers.base import ReadOnlyPages, StoredPage, Tier, TierStats, WritablePages
from mlkv.store.tiers.resp import Link, Reply, ReplyError, Server, import_client

_FORM = "redis://HOST[:PORT][/DATABASE], or rediss:// for TLS"
_PASSWORD_VARIABLES = ("REDISCLI_AUTH", "VALKEYCLI_AUTH")
_DEADLINE_SHARE = 0.95  # so that a call gives up before it is given up on, and its pages are free again at once
_KEYS_PER_COMMAND = 512
_SCAN_COUNT = b"1000"
_WINDOW_BYTES = 32 << 20
"""What a read has asked for and not yet received: the server builds that many bytes of answers in its memory."""


class RedisTier(Tier):
    """Pages in a Redis or Valkey server.

    Eviction is the server's: with `maxmemory` and a policy such as `allkeys-lru` it makes room by itself; with
    `noeviction` a full server refuses pages, which is no failure of the tier. A call takes at most `deadline_s`,
    except for the system's look-up of the host name.
    """

    name: ClassVar[str] = "redis"
    shared = True

    def __init__(self, page_bytes: int, server: Server, *, deadline_s: float = 10.0) -> None:
        self.page_bytes = page_bytes
        self.deadline_s = deadline_s
        self.batch_pages = naming.batch_pages(page_bytes)
        self._server = server
        self._client = import_client()
        self._names = naming.Names(page_bytes)
        self._lock = threading.Lock()
        self._idle: list[Link] = []
        self._busy: set[Link] = set()
        self._closed = False

    @classmethod
    def from_url(
        cls,
        url: str,
        page_bytes: int,
        *,
        username: str = "",
        password: SecretStr | None = None,
        deadline_s: float = 10.0,
    ) -> RedisTier:
        """A tier for `redis://HOST[:PORT][/DATABASE]`, or `rediss://` for TLS.

        Args:
            password: default: what redis-cli and valkey-cli take, `REDISCLI_AUTH` or `VALKEYCLI_AUTH`.

        Raises ConfigError for a malformed URL.
        """
        parts = naming.split_url(url, ("redis", "rediss"), _FORM)
        database = parts.path.strip("/") or "0"
        if not database.isdecimal() or "/" in parts.path[1:]:
            raise ConfigError(f"{url!r}: the path is the number of a database; expected {_FORM}")
        if password is None:
            found = next((os.environ[name] for name in _PASSWORD_VARIABLES if os.environ.get(name)), None)
            password = SecretStr(found) if found else None
        if username and password is None:
            raise ConfigError(f"{url!r}: there is a username ({username!r}) but no password")
        server = Server(
            host=parts.hostname or "",
            port=parts.port or 6379,
            database=int(database),
            tls=parts.scheme == "rediss",
            username=username,
            password=password,
        )
        return cls(page_bytes, server, deadline_s=deadline_s)

    def __repr__(self) -> str:
        return f"RedisTier({self._server}, page_bytes={self.page_bytes})"

    def connect(self, pool: memoryview) -> None:
        with self._lock:
            stale, self._idle = self._idle, []
        for link in stale:
            link.close()
        with self._link():
            pass  # it answered a PING

    def contains(self, keys: Sequence[bytes]) -> int:
        names = [self._names.binary_page(key) for key in keys]
        found = 0
        with self._link() as link:
            for at in range(0, len(names), _KEYS_PER_COMMAND):
                chunk = names[at : at + _KEYS_PER_COMMAND]
                # TOUCH is EXISTS that counts as a use. First for all: most chunks are there as a whole.
                if link.call(b"TOUCH", *chunk) == len(chunk):
                    found += len(chunk)
                    continue
                link.send_many([(b"EXISTS", name) for name in chunk])
                replies = [link.receive() for _ in chunk]
                return found + _leading_ones(replies)
        return found

    def read(self, keys: Sequence[bytes], pages: WritablePages) -> NDArray[np.bool_]:
        outcome: list[bool | ReplyError] = []
        ahead = max(2, _WINDOW_BYTES // self.page_bytes)
        commands = [(b"GET", self._names.binary_page(key)) for key in keys]
        with self._link() as link:
            link.send_many(commands[:ahead])
            for at, page in enumerate(pages):
                outcome.append(link.receive_into(page))
                if at + ahead < len(commands):
                    link.send(*commands[at + ahead])
        return self._judge(outcome, "read")

    def write(self, stored: Sequence[StoredPage], pages: ReadOnlyPages) -> NDArray[np.bool_]:
        # A present key is overwritten: nothing cheaper than that heals a damaged or outdated value.
        with self._link() as link:
            for what, page in zip(stored, pages, strict=True):
                if len(page) != self.page_bytes:
                    raise ValueError(f"a page of {len(page)} bytes where pages have {self.page_bytes}")
                link.send(b"SET", self._names.binary_page(what.key), page)
            replies = [link.receive() for _ in pages]
        outcome = [reply if isinstance(reply, ReplyError) else reply == b"OK" for reply in replies]
        return self._judge(outcome, "written")

    def delete(self, keys: Sequence[bytes]) -> None:
        names = [self._names.binary_page(key) for key in keys]
        with self._link() as link:
            for at in range(0, len(names), _KEYS_PER_COMMAND):
                link.call(b"UNLINK", *names[at : at + _KEYS_PER_COMMAND])

    def clear(self) -> None:
        """Forget this deployment's pages, and nothing else that is in the database."""
        removed = 0
        with self._link() as link:
            try:
                for names in self._all_names(link):
                    link.call(b"UNLINK", *names)
                    removed += len(names)
            except DeadlineExceeded:
                raise TierUnavailable(
                    f"{self._server}: {removed} pages were removed within {self.deadline_s:g} s and more are "
                    "left; clear again"
                ) from None

    def scan(self, after: bytes, limit: int) -> list[bytes]:
        """Looks at every name in the database each time, since the server lists them in no order."""
        start = len(self._names.pages)
        with self._link() as link:
            keys = (name[start:] for names in self._all_names(link) for name in names)
            # An answer of SCAN may repeat what an earlier one told.
            return heapq.nsmallest(limit, {key for key in keys if key > after})

    def load_note(self, name: str) -> bytes | None:
        with self._link() as link:
            value = link.call(b"GET", self._names.note(name).encode())
        return value if isinstance(value, bytes) else None

    def store_note(self, name: str, value: bytes) -> None:
        naming.check_note(value)
        with self._link() as link:
            link.call(b"SET", self._names.note(name).encode(), value)

    def stats(self) -> TierStats:
        return TierStats()

    def close(self) -> None:
        """Stop; calls that still run end with TierUnavailable."""
        with self._lock:
            self._closed = True
            links = [*self._idle, *self._busy]
            self._idle = []
        for link in links:
            link.close()

    def _all_names(self, link: Link) -> Iterator[list[bytes]]:
        """The names of this deployment's pages, as they come."""
        prefix = self._names.pages.encode()
        cursor = b"0"
        while True:
            reply = link.call(b"SCAN", cursor, b"MATCH", prefix + b"*", b"COUNT", _SCAN_COUNT)
            if not (isinstance(reply, list) and len(reply) == 2 and isinstance(reply[1], list)):
                raise ConnectionError("an answer to SCAN that is none")
            names = [name for name in reply[1] if isinstance(name, bytes) and len(name) == len(prefix) + KEY_BYTES]
            if names:
                yield names
            if reply[0] == b"0" or not isinstance(reply[0], bytes):
                return
            cursor = reply[0]

    def _judge(self, outcome: list[bool | ReplyError], verb: str) -> NDArray[np.bool_]:
        """Per page, unless the server refused all of them for another reason than that it is full."""
        refused = [one for one in outcome if isinstance(one, ReplyError)]
        if len(refused) == len(outcome) and any(one.code != "OOM" for one in refused):
            raise TierUnavailable(f"{self._server}: no page could be {verb}: {refused[0]}")
        return np.array([one is True for one in outcome], np.bool_)

    @contextlib.contextmanager
    def _link(self) -> Iterator[Link]:
        """A connection for one call. All trouble with it comes out as TierUnavailable."""
        deadline = time.monotonic() + _DEADLINE_SHARE * self.deadline_s
        link = None
        try:
            link = self._take(deadline)
            yield link
        except BaseException as error:
            if link is not None:
                with self._lock:
                    self._busy.discard(link)
                link.close()
            if isinstance(error, DeadlineExceeded):
                raise TierUnavailable(f"{self._server}: {error} ({self.deadline_s:g} s)") from None
            if isinstance(error, ReplyError):
                raise TierUnavailable(f"{self._server}: refused: {error}") from None
            if isinstance(error, OSError) or type(error).__module__.startswith("valkey."):
                raise TierUnavailable(f"{self._server}: {error}") from error
            raise
        with self._lock:
            self._busy.discard(link)
            if not self._closed:
                self._idle.append(link)
                return
        link.close()

    def _take(self, deadline: float) -> Link:
        while True:
            with self._lock:
                if self._closed:
                    raise TierUnavailable(f"{self._server}: this tier was closed")
                link = self._idle.pop() if self._idle else None
                if link is not None:
                    self._busy.add(link)
            if link is None:
                link = Link(self._server, self._client, deadline)
                with self._lock:
                    self._busy.add(link)
                    closed = self._closed
                if closed:
                    raise TierUnavailable(f"{self._server}: this tier was closed")
                return link
            if link.is_quiet():
                link.set_deadline(deadline)
                return link
            # The server was restarted, or dropped an idle connection.
            with self._lock:
                self._busy.discard(link)
            link.close()


def _leading_ones(replies: list[Reply]) -> int:
    for at, reply in enumerate(replies):
        if isinstance(reply, ReplyError):
            raise reply
        if reply != 1:
            return at
    return len(replies)
