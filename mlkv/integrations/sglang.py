"""mlkv behind SGLang's HiCache, as a dynamic storage backend (SGLang 0.5.x)::

    --hicache-storage-backend dynamic --hicache-storage-backend-extra-config '{
        "backend_name": "mlkv", "module_path": "mlkv.integrations.sglang", "class_name": "MLKVStorage",
        "interface_v1": 1, "mlkv": {"store": {"host_bytes": "64GiB"}}}'

SGLang agrees between its ranks itself, names every page by a hash of its whole prefix, and hands out pages of one
rank as flat bytes. So each rank has a cache of its own here, in which each of SGLang's pages is a chain by itself.
The ranks of one host, and engines that come later, share one store.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b, sha256
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, HiCacheStorageConfig, HiCacheStorageExtraInfo

from mlkv import (
    CacheStats,
    ConfigError,
    KVLayout,
    KVPool,
    MLKVConfig,
    MultiLevelCache,
    Plane,
    Replica,
    StepResult,
)

log = logging.getLogger(__name__)

_WORDS = 8
"""A key is sha256 of SGLang's, taken as so many tokens of 32 bits; they make up one page."""

_BATCH_BYTES = 256 << 20
_MAX_BATCH_PAGES = 128  # as many as SGLang asks for at once
_DEADLINE_S = 30.0
_POLL_S = 0.0001


class MLKVStorage(HiCacheStorage):  # type: ignore[misc]
    """Puts and gets pages of one rank. Its methods may be called from several threads.

    Raises:
        ConfigError: for wrong settings below "mlkv" in the extra config.
        StoreError: no store could be found or started.
    """

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: dict[str, Any] | None = None) -> None:
        self._storage_config = storage_config
        self._settings = dict((storage_config.extra_config or {}).get("mlkv", {}))
        self._lock = threading.Lock()
        self._num_calls = 0
        self._cache: MultiLevelCache | None = None

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """SGLang's host pool is there: now the size of a page is known."""
        super().register_mem_pool_host(mem_pool_host)
        page = mem_pool_host.get_dummy_flat_data_page()
        self._page_bytes = page.numel() * page.element_size()
        self._page_dtype, self._page_shape = page.dtype, page.shape
        self._batch_pages = max(1, min(_MAX_BATCH_PAGES, _BATCH_BYTES // self._page_bytes))
        name = f"sglang-{mem_pool_host.layout}-{page.dtype}"
        layout = KVLayout(1, 1, _WORDS, (Plane(name, torch.uint8, self._page_bytes, per="page"),))
        self._staging = torch.zeros((self._batch_pages, 1, self._page_bytes), dtype=torch.uint8)
        pool = KVPool(layout, [[self._staging]], block_tokens=_WORDS)
        self._cache = MultiLevelCache(self._config(mem_pool_host.layout), layout, pool, Replica.single())

    def _config(self, pool_layout: str) -> MLKVConfig:
        settings, config = dict(self._settings), self._storage_config
        if "page_tokens" in settings:
            raise ConfigError("page_tokens is not a setting here; SGLang's --page-size decides")
        if not config.model_name and "model" not in settings:
            raise ConfigError('SGLang gives no model name: set "model" below "mlkv" in the extra config')
        model = settings.pop("model", config.model_name)
        # MLA keeps the same latent on every tensor-parallel rank; other ranks hold heads of their own.
        shard = "all" if config.is_mla_model and config.dcp_size == 1 else f"{config.tp_rank}/{config.tp_size}"
        place = f"tp {shard}, pp {config.pp_rank}/{config.pp_size}, cp {config.attn_cp_rank}/{config.attn_cp_size}"
        store = dict(settings.pop("store", {}))
        if not store.get("name"):
            # The ranks of a host find one store without talking to each other.
            shared = f"{model}|{pool_layout}|{self._page_bytes}"
            store["name"] = "sglang-" + blake2b(shared.encode(), digest_size=8).hexdigest()
        return MLKVConfig(model=f"{model}|{place}", page_tokens=_WORDS, store=store, **settings)

    # -- SGLang's batch interface --------------------------------------------------------------------------

    def batch_exists(self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None) -> int:
        """How many pages from the front are stored."""
        for start in range(0, len(keys), self._batch_pages):
            batch = keys[start : start + self._batch_pages]
            with self._lock:
                names, found = self._lookup(batch)
                for name in names:
                    if found.get(name):
                        self._open().decline(name)
            for at, name in enumerate(names):
                if not found.get(name):
                    return start + at
        return len(keys)

    def batch_get_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Read pages into SGLang's host pool, each at the first of its host indices."""
        page_size = self.mem_pool_host.page_size

        def keep(at: int, page: torch.Tensor) -> None:
            self.mem_pool_host.set_from_flat_data_page(int(host_indices[at * page_size]), page)

        return self._read(keys, keep)

    def batch_set_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Store pages from SGLang's host pool. Pages that are stored already count as stored."""
        page_size = self.mem_pool_host.page_size
        return self._write(
            keys, lambda at: self.mem_pool_host.get_data_page(int(host_indices[at * page_size]), flat=True)
        )

    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[torch.Tensor | None]:
        """Pages as flat tensors, into `target_locations` where given; None for what is not stored."""
        pages: list[torch.Tensor | None] = [None] * len(keys)

        def keep(at: int, page: torch.Tensor) -> None:
            if target_locations is None:
                pages[at] = page.clone()
            else:
                pages[at] = target_locations[at].copy_(page)

        self._read(keys, keep)
        return pages

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        return all(self._write(keys, lambda at: values[at]))

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> torch.Tensor | None:
        return self.batch_get([key], None if target_location is None else [target_location])[0]

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        return self.batch_set([key], [value])

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    def clear(self) -> None:
        """Forget every page of the store, other ranks' and engines' as well."""
        with self._lock:
            self._open().clear()
            self._open().step()

    def get_stats(self) -> None:
        """SGLang's own metrics have a format of their own; `stats` has ours."""

    def stats(self) -> CacheStats:
        return self._open().stats()

    def close(self) -> None:
        with self._lock:
            if self._cache is not None:
                self._cache.close()

    # -- on the facade -------------------------------------------------------------------------------------

    def _read(self, keys: Sequence[str], keep: Callable[[int, torch.Tensor], None]) -> list[bool]:
        good: list[bool] = []
        for start in range(0, len(keys), self._batch_pages):
            batch = keys[start : start + self._batch_pages]
            with self._lock:
                cache = self._open()
                names, found = self._lookup(batch)
                waiting = [name for name in names if found.get(name)]
                for name in waiting:
                    cache.load(name, self._slots(names.index(name)))
                ended = self._step_until(waiting, lambda step: {**step.loaded, **dict.fromkeys(step.failed, 0)})
                for at, name in enumerate(names):
                    good.append(bool(ended.get(name)))
                    if good[-1]:
                        keep(start + at, self._page(at))
        return good

    def _write(self, keys: Sequence[str], page_of: Callable[[int], torch.Tensor]) -> list[bool]:
        if not self._storage_config.is_storage_writer:
            return [True] * len(keys)  # another rank writes the same bytes
        good: list[bool] = []
        for start in range(0, len(keys), self._batch_pages):
            batch = keys[start : start + self._batch_pages]
            with self._lock:
                cache = self._open()
                names = self._names(len(batch))
                for at, (name, key) in enumerate(zip(names, batch, strict=True)):
                    self._page(at).copy_(page_of(start + at).reshape(self._page_shape))
                    cache.offload(name, _words(key), self._slots(at))
                ended = self._step_until(names, lambda step: {**step.offloaded, **dict.fromkeys(step.unstored, 0)})
                good += [bool(ended.get(name)) for name in names]
        return good

    def _lookup(self, keys: Sequence[str]) -> tuple[list[str], dict[str, int]]:
        """Names of the lookups, and what each found. Those that found something hold a lease."""
        names = self._names(len(keys))
        for name, key in zip(names, keys, strict=True):
            # One token more than the page, because a hit never covers the last one.
            self._open().lookup(name, np.append(_words(key), np.uint32(0)))
        return names, self._step_until(
            names, lambda step: {name: hit.num_tokens for name, hit in step.hits.items()}
        )

    def _step_until(self, names: Iterable[str], told: Callable[[StepResult], dict[str, int]]) -> dict[str, int]:
        """Step until each name was told. What takes too long is given up, and is a miss."""
        cache, missing = self._open(), dict.fromkeys(names)
        found: dict[str, int] = {}
        give_up_at = time.monotonic() + _DEADLINE_S
        while missing:
            news = told(cache.step())
            for name in missing.keys() & news.keys():
                found[name] = news[name]
                del missing[name]
            if missing and time.monotonic() > give_up_at:
                log.warning("the cache did not answer for %d pages within %g s", len(missing), _DEADLINE_S)
                self._give_up(missing)
                break
            time.sleep(_POLL_S if missing else 0.0)
        return found

    def _give_up(self, names: Iterable[str]) -> None:
        """Abort, and wait until no copy touches the staging memory, which the next batch uses."""
        cache, touched = self._open(), dict.fromkeys(names)
        for name in touched:
            cache.abort(name)
        give_up_at = time.monotonic() + _DEADLINE_S
        while touched and time.monotonic() < give_up_at:
            for name in cache.step().released:
                touched.pop(name, None)
            time.sleep(_POLL_S)
        if touched:
            self._cache = None  # from now on every call says that there is no cache
            log.error("copies of %d pages hang; mlkv is off until SGLang is restarted", len(touched))

    def _open(self) -> MultiLevelCache:
        if self._cache is None:
            raise ConfigError("no host pool is registered, or the cache was given up after copies hung")
        return self._cache

    def _names(self, count: int) -> list[str]:
        self._num_calls += 1
        return [f"{self._num_calls}/{at}" for at in range(count)]

    def _page(self, at: int) -> torch.Tensor:
        return self._staging[at, 0].view(self._page_dtype).view(self._page_shape)

    def _slots(self, at: int) -> torch.Tensor:
        return torch.arange(at * _WORDS, (at + 1) * _WORDS, dtype=torch.int64)


def _words(key: str) -> npt.NDArray[np.uint32]:
    return np.frombuffer(sha256(key.encode()).digest(), np.uint32)
