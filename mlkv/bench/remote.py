"""What a remote store's tier moves, as a share of what the store's own client moves in the same run.

Both write and read the same amount in the same batches, by turns, from one thread each. The client alone does what
its documentation shows: Redis a pipeline of SET and GET, S3 requests from a pool of threads, Mooncake batch calls
on registered memory. What was written is deleted at the end.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import platform
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from pydantic import ValidationError

from mlkv.errors import ConfigError, MLKVError
from mlkv.store.pool import HostPool, create_pool_file
from mlkv.store.tiers import StoredPage, Tier
from mlkv.store.tiers.open import open_remote
from mlkv.store.tiers.s3 import MAX_REQUESTS
from mlkv.store_config import RemoteConfig

_DEADLINE_S = 60.0  # of one call; it is the speed that counts here


class Client(ABC):
    """A store's own client, used as its documentation shows. Raises whatever it raises."""

    @abstractmethod
    def write(self, names: Sequence[str], pages: Sequence[memoryview]) -> None: ...

    @abstractmethod
    def read(self, names: Sequence[str], pages: Sequence[memoryview]) -> None:
        """`pages`: where clients that can put it there leave what they read."""

    @abstractmethod
    def delete(self, names: Sequence[str]) -> None: ...


class RedisClient(Client):
    def __init__(self, config: RemoteConfig) -> None:
        import valkey

        parts = urlsplit(config.url)
        password = config.password.get_secret_value() if config.password else os.environ.get("REDISCLI_AUTH")
        self._client = valkey.Valkey(
            host=parts.hostname or "",
            port=parts.port or 6379,
            db=int(parts.path.strip("/") or 0),
            username=config.username or None,
            password=password,
            ssl=parts.scheme == "rediss",
            socket_timeout=_DEADLINE_S,
        )

    def write(self, names: Sequence[str], pages: Sequence[memoryview]) -> None:
        pipeline = self._client.pipeline(transaction=False)
        for name, page in zip(names, pages, strict=True):
            pipeline.set(name, page)
        pipeline.execute()

    def read(self, names: Sequence[str], pages: Sequence[memoryview]) -> None:
        pipeline = self._client.pipeline(transaction=False)
        for name in names:
            pipeline.get(name)
        if any(len(value) != len(pages[0]) for value in pipeline.execute()):
            raise MLKVError("the client did not read what it wrote")

    def delete(self, names: Sequence[str]) -> None:
        self._client.delete(*names)


class S3Client(Client):
    def __init__(self, config: RemoteConfig) -> None:
        import obstore.store

        self._obstore: Any = obstore
        parts = urlsplit(config.url)
        endpoint = config.endpoint or os.environ.get("AWS_ENDPOINT_URL", "")
        given = {
            "endpoint": endpoint,
            "region": config.region,
            "access_key_id": config.access_key_id and config.access_key_id.get_secret_value(),
            "secret_access_key": config.secret_access_key and config.secret_access_key.get_secret_value(),
            "session_token": config.session_token and config.session_token.get_secret_value(),
        }
        self._store = self._obstore.store.S3Store(
            parts.netloc,
            prefix=parts.path.strip("/") or None,
            config={"unsigned_payload": True, **{name: value for name, value in given.items() if value}},
            client_options={"allow_http": endpoint.startswith("http://"), "timeout": f"{_DEADLINE_S:g}s"},
        )
        self._threads = ThreadPoolExecutor(MAX_REQUESTS)

    def write(self, names: Sequence[str], pages: Sequence[memoryview]) -> None:
        def put(work: tuple[str, memoryview]) -> None:
            self._obstore.put(self._store, *work, use_multipart=False)

        list(self._threads.map(put, zip(names, pages, strict=True)))

    def read(self, names: Sequence[str], pages: Sequence[memoryview]) -> None:
        def get(name: str) -> int:
            return len(self._obstore.get(self._store, name).bytes())

        if any(size != len(pages[0]) for size in self._threads.map(get, names)):
            raise MLKVError("the client did not read what it wrote")

    def delete(self, names: Sequence[str]) -> None:
        self._obstore.delete(self._store, list(names))


class MooncakeClient(Client):
    def __init__(self, config: RemoteConfig, memory: memoryview) -> None:
        from mooncake.store import MooncakeDistributedStore

        self._store: Any = MooncakeDistributedStore()
        master = urlsplit(config.url).netloc
        host = config.local_host or "127.0.0.1"
        code = self._store.setup(
            host, config.metadata, int(config.segment_bytes), 16 << 20, config.protocol, config.devices, master
        )
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        code = code or self._store.register_buffer(self._address, len(memory))
        if code != 0:
            raise MLKVError(f"the Mooncake client failed with code {code}")

    def write(self, names: Sequence[str], pages: Sequence[memoryview]) -> None:
        codes = self._store.batch_upsert_from(list(names), *self._places(pages))
        if any(code != 0 for code in codes):
            raise MLKVError(f"the Mooncake client wrote with codes {sorted(set(codes))}")

    def read(self, names: Sequence[str], pages: Sequence[memoryview]) -> None:
        codes = self._store.batch_get_into(list(names), *self._places(pages))
        if any(code != len(pages[0]) for code in codes):
            raise MLKVError(f"the Mooncake client read with codes {sorted(set(codes))}")

    def delete(self, names: Sequence[str]) -> None:
        self._store.batch_remove(list(names), True)

    def _places(self, pages: Sequence[memoryview]) -> tuple[list[int], list[int]]:
        addresses = [ctypes.addressof(ctypes.c_char.from_buffer(page)) for page in pages]
        return addresses, [len(page) for page in pages]


def run(
    url: str,
    *,
    page_bytes: int = 1 << 20,
    total_bytes: int = 64 << 20,
    rounds: int = 7,
    settings: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Run the benchmark. Returns what `--json` writes.

    Args:
        total_bytes: what each side moves in each direction, in each round.
        settings: of `RemoteConfig`, beside the URL.

    Raises ConfigError for a URL that names no store or a missing client, TierUnavailable if the store is down.
    """
    num_pages = max(1, total_bytes // page_bytes)
    pool_fd = create_pool_file(2 * num_pages, page_bytes)
    pool = HostPool(pool_fd, 2 * num_pages, page_bytes)
    os.close(pool_fd)
    random = np.random.default_rng(0)
    np.frombuffer(pool.buffer, np.uint8)[:] = random.integers(0, 256, len(pool.buffer), np.uint8)
    sources = [pool.page(at) for at in range(num_pages)]
    targets = [pool.page(at) for at in range(num_pages, 2 * num_pages)]
    own = {"segment_bytes": 0, "deadline_s": _DEADLINE_S}
    try:
        config = RemoteConfig(url=url, **{**own, **(settings or {})})
    except ValidationError as error:
        raise ConfigError(f"--url {error.errors()[0]['msg'].removeprefix('Value error, ')}") from None
    with contextlib.ExitStack() as open_tiers:
        if config.url.startswith("mooncake:"):
            # A third party lends the memory, with room for both sides twice over. Mooncake copies what lies in a
            # client's own memory without its transport, and where a page lies is chance that lasts all rounds.
            lending = config.model_copy(update={"segment_bytes": 4 * len(pool.buffer)})
            _open(lending, page_bytes, pool, open_tiers)
        tier = _open(config, page_bytes, pool, open_tiers)
        return _measure(config, tier, _client(config, pool.buffer), sources, targets, rounds)


def report(result: dict[str, Any]) -> str:
    """The result as a table for people."""
    size = f"{result['pages']} pages of {result['page_bytes'] >> 10} KiB, {result['rounds']} rounds"
    lines = [f"{result['url']}: {size}", f"{'':8}{'tier GB/s':>12}{'client GB/s':>14}{'ratio':>8}"]
    for kind in ("write", "read"):
        row = result[kind]
        lines.append(f"{kind:8}{row['tier_gb_s']:>12.2f}{row['client_gb_s']:>14.2f}{row['ratio']:>8.2f}")
    return "\n".join(lines)


def write(result: dict[str, Any], path: Path) -> None:
    path.write_text(json.dumps(result, indent=2) + "\n")


def _open(config: RemoteConfig, page_bytes: int, pool: HostPool, open_tiers: contextlib.ExitStack) -> Tier:
    tier = open_remote(config, page_bytes)
    open_tiers.callback(tier.close)
    tier.connect(pool.buffer)
    return tier


def _client(config: RemoteConfig, memory: memoryview) -> Client:
    scheme = urlsplit(config.url).scheme
    if scheme in ("redis", "rediss"):
        return RedisClient(config)
    if scheme == "s3":
        return S3Client(config)
    if scheme == "mooncake":
        return MooncakeClient(config, memory)
    raise ConfigError(f"there is no client to compare a {scheme}:// store with")


def _measure(
    config: RemoteConfig,
    tier: Tier,
    client: Client,
    sources: list[memoryview],
    targets: list[memoryview],
    rounds: int,
) -> dict[str, Any]:
    num_pages, page_bytes = len(sources), len(sources[0])
    # Names that nobody else has, since the store may be in use.
    keys = [os.urandom(16) for _ in range(num_pages)]
    stored = [StoredPage(key, bytes(16), bytes(16), 0) for key in keys]
    names = [f"mlkv-bench/{os.urandom(8).hex()}/{at}" for at in range(num_pages)]
    batches = [slice(at, at + tier.batch_pages) for at in range(0, num_pages, tier.batch_pages)]

    def tier_write(part: slice) -> None:
        if not tier.write(stored[part], sources[part]).all():
            raise MLKVError("the store did not take all pages; is it full?")

    def tier_read(part: slice) -> None:
        if not tier.read(keys[part], targets[part]).all():
            raise MLKVError("the store did not keep all pages; is it full?")

    steps: dict[tuple[str, str], Callable[[slice], None]] = {
        ("write", "tier"): tier_write,
        ("write", "client"): lambda part: client.write(names[part], sources[part]),
        ("read", "tier"): tier_read,
        ("read", "client"): lambda part: client.read(names[part], targets[part]),
    }
    seconds: dict[tuple[str, str], list[float]] = {step: [] for step in steps}
    try:
        for number in range(rounds + 1):
            order = list(steps) if number % 2 else [("write", "client"), ("write", "tier"), *list(steps)[:1:-1]]
            for step in order:
                start = time.perf_counter()
                for part in batches:
                    steps[step](part)
                if number:  # the first round makes connections and touches memory
                    seconds[step].append(time.perf_counter() - start)
    finally:
        # What failed may fail here again; the first error is the one to tell.
        with contextlib.suppress(Exception):
            tier.delete(keys)
            client.delete(names)
    result: dict[str, Any] = {
        "benchmark": "remote",
        "url": config.url,
        "page_bytes": page_bytes,
        "pages": num_pages,
        "batch_pages": tier.batch_pages,
        "rounds": rounds,
        "cores": len(os.sched_getaffinity(0)),
        "machine": platform.machine(),
        "python": platform.python_version(),
    }
    for kind in ("write", "read"):
        by_tier, by_client = (statistics.median(seconds[kind, who]) for who in ("tier", "client"))
        result[kind] = {
            "tier_gb_s": round(num_pages * page_bytes / by_tier / 1e9, 3),
            "client_gb_s": round(num_pages * page_bytes / by_client / 1e9, 3),
            "ratio": round(by_client / by_tier, 3),
        }
    return result
