"""Mooncake Store as a tier: memory of many machines behind one master. Pages go straight from and to the pool."""

from __future__ import annotations

import importlib.util
import ipaddress
import os
import re
import socket
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from mlkv.errors import ConfigError, TierUnavailable
from mlkv.store.tiers import naming
from mlkv.store.tiers.base import ReadOnlyPages, StoredPage, Tier, TierStats, WritablePages
from mlkv.store.tiers.mapped_file import address_of, file_behind
from mlkv.store.tiers.mooncake_process import MooncakeProcess
from mlkv.store.tiers.mooncake_wire import Operation, Order, Outcome, Setup

_FORM = "mooncake://HOST:PORT, of its master"
_PEER_TO_PEER = "P2PHANDSHAKE"
_CLOSE_S = 5.0

_START_SHARE = 0.8
"""Of a deadline, for the client process to start and join; so that `connect` ends before it is given up on."""

_HANG_FACTOR = 3
"""A client that is silent for so many deadlines is killed. Killing it loses the memory that this host lends to the
store, so calls that a dead peer holds up, for 4 s in 0.3.13, get their time."""

# Mooncake's codes (ErrorCode in mooncake-store/include/types.h of 0.3.13) that concern one object, not the store:
# no room, a buffer too small for it, not there, still being written, leased, lease expired.
_ABSENT = -704
_OF_ONE_OBJECT = frozenset({-200, -600, -703, _ABSENT, -705, -706, -707})


@dataclass(frozen=True)
class MooncakeCluster:
    """Which store to join, and what to bring along.

    Attributes:
        master: `HOST:PORT`.
        metadata: how clients find each other's memory: P2PHANDSHAKE (from each other), or a metadata server's URL.
        segment_bytes: memory of this host that is lent to the store.
        protocol, devices: "tcp", or "rdma" and its devices.
        local_host: the address at which other hosts reach this one; "": that which faces the master.
    """

    master: str
    metadata: str = _PEER_TO_PEER
    segment_bytes: int = 4 << 30
    protocol: str = "tcp"
    devices: str = ""
    local_host: str = ""

    def __str__(self) -> str:
        return f"mooncake://{self.master}"


class MooncakeTier(Tier):
    """Pages in a Mooncake store.

    The store is memory: what a host lends to it is lost when that host's owner ends. It evicts by itself, and
    says of pages that found no room that they were written. A call whose answer stays out is noticed by the
    runner after `deadline_s`, and returns itself after three times that, when the client is killed; pages are
    not touched after that.
    """

    name: ClassVar[str] = "mooncake"
    shared = True

    def __init__(self, page_bytes: int, cluster: MooncakeCluster, *, deadline_s: float = 10.0) -> None:
        # The package itself is imported in the client process only, see mooncake_client.py.
        if importlib.util.find_spec("mooncake") is None:
            raise ConfigError(
                "a mooncake:// store needs Mooncake's client: pip install 'mlkv[mooncake]', or the package "
                "mooncake-transfer-engine that fits this machine's CUDA"
            )
        self.page_bytes = page_bytes
        self.deadline_s = deadline_s
        self.batch_pages = naming.batch_pages(page_bytes)
        self._cluster = cluster
        self._names = naming.Names(page_bytes)
        self._lock = threading.Lock()
        self._process: MooncakeProcess | None = None
        self._pool_address = self._pool_bytes = 0
        self._is_closed = False

    @classmethod
    def from_url(
        cls,
        url: str,
        page_bytes: int,
        *,
        metadata: str = _PEER_TO_PEER,
        segment_bytes: int = 4 << 30,
        protocol: str = "tcp",
        devices: str = "",
        local_host: str = "",
        deadline_s: float = 10.0,
    ) -> MooncakeTier:
        """A tier for `mooncake://HOST:PORT`. For the arguments see `MooncakeCluster`.

        Raises ConfigError for a malformed URL or setting.
        """
        parts = naming.split_url(url, ("mooncake",), _FORM)
        if parts.port is None or parts.path.strip("/"):
            raise ConfigError(f"{url!r} does not name a port, or names more than that; expected {_FORM}")
        if protocol not in ("tcp", "rdma"):
            raise ConfigError(f"Mooncake's protocol is tcp or rdma, not {protocol!r}")
        if segment_bytes < 0:
            raise ConfigError(f"segment_bytes={segment_bytes} must not be negative")
        if metadata != _PEER_TO_PEER and "://" not in metadata:
            raise ConfigError(
                f"Mooncake's metadata is {_PEER_TO_PEER} or the URL of a metadata server, not {metadata!r}"
            )
        cluster = MooncakeCluster(parts.netloc, metadata, segment_bytes, protocol, devices, local_host)
        return cls(page_bytes, cluster, deadline_s=deadline_s)

    def __repr__(self) -> str:
        return f"MooncakeTier({self._cluster}, page_bytes={self.page_bytes})"

    def connect(self, pool: memoryview) -> None:
        """Raises ConfigError if the pool is not a file's mapping: the client process has to map it as well."""
        process = self._process
        if process is None or not process.is_usable:
            process = self._start(pool)
            with self._lock:
                self._process, closed = process, self._is_closed
            if closed:
                process.kill()
                raise TierUnavailable(f"{self._cluster}: this tier was closed")
        # A client that runs finds back to a master that was restarted, and keeps what this host lends.
        self._raise_for(self._order("exist", [self._names.note("connected")]).codes)

    def contains(self, keys: Sequence[bytes]) -> int:
        codes = self._order("exist", [self._names.page(key) for key in keys]).codes
        self._raise_for(codes)
        return next((at for at, code in enumerate(codes) if code != 1), len(codes))

    def read(self, keys: Sequence[bytes], pages: WritablePages) -> NDArray[np.bool_]:
        codes = self._order("get", [self._names.page(key) for key in keys], pages).codes
        good: NDArray[np.bool_] = np.array(codes, np.int64) == self.page_bytes
        if not good.any():
            self._raise_for(codes)
        return good

    def write(self, stored: Sequence[StoredPage], pages: ReadOnlyPages) -> NDArray[np.bool_]:
        codes = self._order("put", [self._names.page(what.key) for what in stored], pages).codes
        good: NDArray[np.bool_] = np.array(codes, np.int64) == 0
        if not good.any():
            self._raise_for(codes)
        return good

    def delete(self, keys: Sequence[bytes]) -> None:
        self._raise_for(self._order("remove", [self._names.page(key) for key in keys]).codes)

    def clear(self) -> None:
        """Forget this deployment's pages, and nothing else that is in the store."""
        self._raise_for(self._order("clear", [f"^{re.escape(self._names.pages)}[0-9a-f]+$"]).codes)

    def scan(self, after: bytes, limit: int) -> list[bytes]:
        raise NotImplementedError("Mooncake's client does not list what is stored")

    def load_note(self, name: str) -> bytes | None:
        outcome = self._order("load_note", [self._names.note(name)])
        self._raise_for(outcome.codes)
        return outcome.value if outcome.codes[0] > 0 else None

    def store_note(self, name: str, value: bytes) -> None:
        """The note is not evicted, and lost with the host in whose memory it lies."""
        naming.check_note(value)
        (code,) = self._order("store_note", [self._names.note(name)], value=value).codes
        if code != 0:
            raise TierUnavailable(f"{self._cluster}: it does not keep the note {name!r} (code {code})")

    def stats(self) -> TierStats:
        return TierStats()

    def close(self) -> None:
        """Leave the store, so that others do not look for pages here; calls that still run fail."""
        with self._lock:
            self._is_closed = True
            process, self._process = self._process, None
        if process is None or not process.is_usable:
            return
        try:
            process.order(Order("close"), min(_CLOSE_S, self.deadline_s))
        except TierUnavailable:
            pass  # it is killed in any case; without a farewell others notice a little later
        finally:
            process.kill()

    def _start(self, pool: memoryview) -> MooncakeProcess:
        mapped = file_behind(pool)
        try:
            setup = Setup(
                master=self._cluster.master,
                local_host=self._cluster.local_host or _address_facing(self._cluster),
                metadata=self._cluster.metadata,
                protocol=self._cluster.protocol,
                devices=self._cluster.devices,
                segment_bytes=self._cluster.segment_bytes,
                pool_offset=mapped.offset,
                pool_bytes=len(pool),
                deadline_s=_START_SHARE * self.deadline_s,
            )
            self._pool_address, self._pool_bytes = address_of(pool), len(pool)
            return MooncakeProcess(setup, mapped.fd, self.concurrency)
        finally:
            os.close(mapped.fd)

    def _order(
        self, operation: Operation, names: list[str], pages: Sequence[memoryview] = (), value: bytes = b""
    ) -> Outcome:
        process = self._process
        if process is None or not process.is_usable:
            raise TierUnavailable(f"{self._cluster}: not connected")
        if not names:
            return Outcome()
        offsets = [self._offset(page) for page in pages]
        order = Order(operation, names, offsets, self.page_bytes, value)
        return process.order(order, _HANG_FACTOR * self.deadline_s)

    def _offset(self, page: memoryview) -> int:
        offset = address_of(page) - self._pool_address
        if len(page) != self.page_bytes or not 0 <= offset <= self._pool_bytes - self.page_bytes:
            raise ValueError(f"a page of {len(page)} bytes at offset {offset} is none of the pool's")
        return offset

    def _raise_for(self, codes: list[int]) -> None:
        """Raise TierUnavailable if a code tells of trouble with the store."""
        trouble = next((code for code in codes if code < 0 and code not in _OF_ONE_OBJECT), None)
        if trouble is not None:
            raise TierUnavailable(f"{self._cluster}: Mooncake's client failed with code {trouble}")


def _address_facing(cluster: MooncakeCluster) -> str:
    """This host's address on the way to the master. Raises TierUnavailable if there is no such way."""
    host, _, port = cluster.master.rpartition(":")
    try:
        family, _, _, _, address = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)  # of a datagram socket: sends nothing
            return str(ipaddress.ip_address(probe.getsockname()[0].partition("%")[0]))
    except OSError as error:
        raise TierUnavailable(f"{cluster}: there is no way to it: {error.strerror}") from None
