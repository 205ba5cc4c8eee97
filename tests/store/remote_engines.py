"""What the tests of remote tiers need of each engine, in one shape: a server, tiers, a way to damage objects."""

from __future__ import annotations

import mmap
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import obstore
from pydantic import SecretStr
from remote_servers import MooncakeMaster, RedisServer, S3Server, ServerProcess

from mlkv.store.tiers import StoredPage, Tier
from mlkv.store.tiers.mooncake import MooncakeTier
from mlkv.store.tiers.mooncake_wire import Operation, Order
from mlkv.store.tiers.naming import Names
from mlkv.store.tiers.redis import RedisTier
from mlkv.store.tiers.s3 import S3Tier

PAGE_BYTES = 64 << 10
POOL_PAGES = 64


class Pool:
    """Memory like that of a host pool: of a file without a name, aligned to 4096 bytes, pages side by side."""

    def __init__(self, page_bytes: int = PAGE_BYTES, num_pages: int = POOL_PAGES) -> None:
        self.page_bytes = page_bytes
        fd = os.memfd_create("test-pool")
        os.ftruncate(fd, page_bytes * num_pages)
        self.memory = memoryview(mmap.mmap(fd, page_bytes * num_pages))
        os.close(fd)

    def page(self, at: int) -> memoryview:
        return self.memory[at * self.page_bytes : (at + 1) * self.page_bytes]

    def pages(self, start: int, stop: int) -> list[memoryview]:
        return [self.page(at) for at in range(start, stop)]

    def fill(self, start: int, stop: int, seed: int) -> None:
        """Every page gets bytes of its own."""
        for at in range(start, stop):
            content = np.random.default_rng([seed, at]).integers(0, 256, self.page_bytes, np.uint8)
            self.page(at)[:] = memoryview(content)

    def poison(self, start: int, stop: int) -> None:
        for page in self.pages(start, stop):
            page[:] = b"\xee" * self.page_bytes


def key(number: int) -> bytes:
    """Ascending with its number. Full of bytes that mean something in patterns, lines and paths."""
    return b"*?[/\r\n\x00\xff" + number.to_bytes(8, "big")


def keys(start: int, stop: int) -> list[bytes]:
    return [key(number) for number in range(start, stop)]


def stored(some: Sequence[bytes]) -> list[StoredPage]:
    """As pages of one chain."""
    parents = [b"r" * 16, *some[:-1]] if some else []
    return [StoredPage(one, parent, b"f" * 16, 7) for one, parent in zip(some, parents, strict=True)]


class Engine(ABC):
    """One kind of remote store, with a server for the tests of a module."""

    name: str
    server: ServerProcess
    lists = True
    """Whether it can tell what is stored."""
    keeps_deadlines = True
    """Whether its calls give up by themselves."""
    short_deadline_s = 0.5
    """In which its server answers when all is well, even on a busy machine."""

    @abstractmethod
    def tier(self, page_bytes: int = PAGE_BYTES, *, port: int | None = None, **options: Any) -> Tier:
        """A tier that is not connected yet. `port`: of another server than this engine's own."""

    @abstractmethod
    def put(self, name: str, value: bytes) -> None:
        """Store an object behind the tier's back, over what is there."""

    @abstractmethod
    def get(self, name: str) -> bytes:
        """An object as it lies in the store."""

    @abstractmethod
    def page_name(self, page: bytes, page_bytes: int = PAGE_BYTES) -> str:
        """The name under which a tier keeps a page."""

    def restart_empty(self) -> None:
        """As after a crash of a server that keeps nothing."""
        self.server.kill()
        self.server.start()

    def close(self) -> None:
        self.server.kill()


class RedisEngine(Engine):
    name = "redis"

    def __init__(self, folder: Path) -> None:
        self.server = RedisServer(folder)
        self.server.start()

    @staticmethod
    def missing() -> str:
        return RedisServer.missing()

    def tier(self, page_bytes: int = PAGE_BYTES, *, port: int | None = None, **options: Any) -> Tier:
        return RedisTier.from_url(f"redis://127.0.0.1:{port or self.server.port}/0", page_bytes, **options)

    def _client(self) -> Any:
        import valkey

        return valkey.Valkey(port=self.server.port, socket_timeout=10)

    def put(self, name: str, value: bytes) -> None:
        with self._client() as client:
            client.set(name.encode("latin-1"), value)

    def get(self, name: str) -> bytes:
        with self._client() as client:
            return bytes(client.get(name.encode("latin-1")))

    def page_name(self, page: bytes, page_bytes: int = PAGE_BYTES) -> str:
        return Names(page_bytes).binary_page(page).decode("latin-1")


class S3Engine(Engine):
    name = "s3"
    PREFIX = "a/prefix"
    server: S3Server
    short_deadline_s = 2.0

    def __init__(self, folder: Path) -> None:
        self.server = S3Server(folder)
        self.server.start()

    @staticmethod
    def missing() -> str:
        return S3Server.missing()

    def tier(self, page_bytes: int = PAGE_BYTES, *, port: int | None = None, **options: Any) -> Tier:
        return S3Tier.from_url(
            f"s3://{S3Server.BUCKET}/{self.PREFIX}",
            page_bytes,
            endpoint=f"http://127.0.0.1:{port or self.server.port}",
            region="us-east-1",
            access_key_id=SecretStr(S3Server.ACCESS_KEY),
            secret_access_key=SecretStr(S3Server.SECRET_KEY),
            **options,
        )

    def put(self, name: str, value: bytes) -> None:
        obstore.put(self.server.store(self.PREFIX), name, value)

    def get(self, name: str) -> bytes:
        return bytes(obstore.get(self.server.store(self.PREFIX), name).bytes())

    def page_name(self, page: bytes, page_bytes: int = PAGE_BYTES) -> str:
        return Names(page_bytes).page(page)

    def restart_empty(self) -> None:
        self.server.kill()
        self.server.forget()
        self.server.start()


class MooncakeEngine(Engine):
    """Objects are put and got behind the tier's back through the client process of a tier of its own."""

    name = "mooncake"
    server: MooncakeMaster
    keeps_deadlines = False
    short_deadline_s = 6.0  # its client is a process that has to start
    lists = False

    def __init__(self, folder: Path) -> None:
        self.server = MooncakeMaster(folder)
        self.server.start()
        self._pool = Pool(4 * PAGE_BYTES, 1)
        self._stranger: MooncakeTier | None = None  # takes seconds, and few tests need it

    @staticmethod
    def missing() -> str:
        return MooncakeMaster.missing()

    def tier(self, page_bytes: int = PAGE_BYTES, *, port: int | None = None, **options: Any) -> MooncakeTier:
        options = {"segment_bytes": 256 << 20, **options}
        return MooncakeTier.from_url(f"mooncake://127.0.0.1:{port or self.server.port}", page_bytes, **options)

    def _order(self, operation: Operation, name: str, size: int) -> list[int]:
        if self._stranger is None:
            self._stranger = self.tier(segment_bytes=0)
            self._stranger.connect(self._pool.memory)
        process = self._stranger._process
        assert process is not None
        return process.order(Order(operation, [name], [0], size), 10.0).codes

    def put(self, name: str, value: bytes) -> None:
        self._pool.memory[: len(value)] = value
        assert self._order("put", name, len(value)) == [0]

    def get(self, name: str) -> bytes:
        (size,) = self._order("get", name, len(self._pool.memory))
        assert size > 0
        return bytes(self._pool.memory[:size])

    def page_name(self, page: bytes, page_bytes: int = PAGE_BYTES) -> str:
        return Names(page_bytes).page(page)

    def close(self) -> None:
        if self._stranger is not None:
            self._stranger.close()
        super().close()


ENGINES: tuple[type[RedisEngine] | type[S3Engine] | type[MooncakeEngine], ...] = (
    RedisEngine,
    S3Engine,
    MooncakeEngine,
)
