"""Where the runs of the chaos campaign take place, what one of them is, and what it finds."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import chaos_engine
from chaos_engine import LAYOUT
from pydantic import ByteSize, SecretStr

from mlkv import Namespace
from mlkv.keys import KEY_BYTES, page_keys
from mlkv.store.tiers.base import Tier
from mlkv.store.tiers.open import open_remote
from mlkv.store_config import Admission, RemoteConfig
from tests.store.remote_servers import MooncakeMaster, RedisServer, S3Server, ServerProcess, remote_memory

MODEL = "chaos"
HOST_PAGES = 64
DISK_BYTES = (4 << 20) + 160 * (LAYOUT.page_bytes + 128)
"""Room for fewer than half of the pages that the prompts have."""

_LENT_BYTES = 16 << 20
"""Memory that each owner lends to Mooncake, and loses with its life, and that the site lends and keeps."""

Victim = Literal["owner", "rank", "ranks", "both"]
Moment = Literal["start", "traffic", "end"]
Remote = Literal["redis", "s3", "mooncake", "none"]


@dataclass(frozen=True)
class Case:
    """One run; `number` seeds all that is drawn in it.

    Attributes:
        tp: ranks of the one replica, or 1 for `engines` engines that share the owner.
        embedded: the first rank starts the owner, instead of somebody by hand.
        damage: bytes of the disk's files are changed before the restart.
    """

    number: str
    victim: Victim
    moment: Moment
    tp: int
    engines: int
    embedded: bool
    remote: Remote
    admission: Admission
    damage: bool


@dataclass
class Ending:
    """What a run has found. `struck`: whether the victims still lived; `problems`: what should not be."""

    struck: bool = False
    problems: list[str] = field(default_factory=list)
    engines_ended: dict[str, int] = field(default_factory=dict)
    requests: int = 0
    pages_loaded: int = 0
    pages_by_tier: dict[str, int] = field(default_factory=dict)
    pages_after_restart: dict[str, int] = field(default_factory=dict)
    pages_compared: dict[str, int] = field(default_factory=dict)
    damaged: str = ""
    bad_found: int = 0
    seconds: float = 0.0


class Site:
    """What outlives the runs: the disk's folder and the remote servers."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.disk = folder / "disk"
        self._servers: dict[Remote, ServerProcess] = {}
        self._mooncake: tuple[Tier, memoryview] | None = None
        self.namespace = Namespace(MODEL, LAYOUT)
        keys: set[bytes] = set()
        for number in range(chaos_engine.NUM_PROMPTS):
            chain = page_keys(chaos_engine.prompt(number), LAYOUT.page_tokens, self.namespace.root())
            keys.update(chain[at : at + KEY_BYTES] for at in range(0, len(chain), KEY_BYTES))
        self.keys = keys
        self.baseline = set(descendants())

    def remote(self, kind: Remote) -> RemoteConfig | None:
        """Settings of a remote store that runs; it is started when it is first asked for."""
        if kind == "none":
            return None
        if kind not in self._servers:
            if kind == "redis":
                # Room for most of the pages, so that the server evicts.
                settings = "maxmemory 2300kb\nmaxmemory-policy allkeys-lru"
                self._servers[kind] = RedisServer(self.folder / "redis", settings=settings)
            elif kind == "s3":
                self._servers[kind] = S3Server(self.folder / "s3")
            else:
                self._servers[kind] = MooncakeMaster(self.folder / "mooncake")
            self._servers[kind].start()
            if kind == "mooncake":
                self._mooncake = self._lend(self._config(kind))
            self.baseline |= set(descendants())
        return self._config(kind)

    def _config(self, kind: Remote) -> RemoteConfig:
        server = self._servers[kind]
        if isinstance(server, RedisServer):
            return RemoteConfig(url=server.url)
        if isinstance(server, MooncakeMaster):
            return RemoteConfig(url=server.url, segment_bytes=ByteSize(_LENT_BYTES))
        assert isinstance(server, S3Server)
        return RemoteConfig(
            url=f"s3://{server.BUCKET}/kv",
            endpoint=server.endpoint,
            access_key_id=SecretStr(server.ACCESS_KEY),
            secret_access_key=SecretStr(server.SECRET_KEY),
        )

    @contextlib.contextmanager
    def look_into(self, kind: Remote) -> Iterator[tuple[Tier, memoryview]]:
        """The remote tier without an owner, and a page to read into."""
        if kind == "mooncake":
            assert self._mooncake is not None
            yield self._mooncake
            return
        tier = open_remote(self._config(kind), LAYOUT.page_bytes)
        tier.connect(memoryview(b""))
        try:
            yield tier, memoryview(bytearray(LAYOUT.page_bytes))
        finally:
            tier.close()

    def _lend(self, remote: RemoteConfig) -> tuple[Tier, memoryview]:
        """A client of Mooncake that stays: what it lends outlives the owners, and it reads what there is."""
        page = remote_memory(LAYOUT.page_bytes)
        tier = open_remote(remote, LAYOUT.page_bytes)
        tier.connect(page)
        return tier, page

    def close(self) -> None:
        if self._mooncake is not None:
            self._mooncake[0].close()
        for server in self._servers.values():
            server.kill()


def descendants(parent: int | None = None) -> Iterator[int]:
    """Processes below this one that have not ended; its own that have are waited for."""
    for task in Path(f"/proc/{parent or 'self'}/task").glob("*/children"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            for pid in map(int, task.read_text().split()):
                if not _has_ended(pid, reap=parent is None):
                    yield pid
                    yield from descendants(pid)


def _has_ended(pid: int, reap: bool) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        if state != "Z":
            return False
        # Not one that somebody here waits for: those are known by their objects.
        if reap and "forkserver" not in command_line(pid):
            os.waitpid(pid, os.WNOHANG)
    except (FileNotFoundError, ProcessLookupError, ChildProcessError):
        pass
    return True


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return ""
