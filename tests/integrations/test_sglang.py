"""The HiCache backend against SGLang's own interface and factory, for each of its page layouts."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from mlkv import ConfigError
from tests.integrations.sglang_wheel import find_wheel, unpack

WHEEL = find_wheel()
pytestmark = pytest.mark.skipif(WHEEL is None, reason="set SGLANG_WHEEL to a wheel of sglang 0.5.x")

LAYERS, HEADS, DIM, PAGE, TOKENS = 3, 2, 4, 8, 64


@pytest.fixture(scope="module", autouse=True)
def _sglang(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    assert WHEEL is not None
    before = set(sys.modules)
    unpack(WHEEL, tmp_path_factory.mktemp("sglang"))
    yield
    for name in set(sys.modules) - before:
        if name.startswith(("sglang", "mlkv.integrations.sglang")):
            del sys.modules[name]


@dataclass
class HostPool:
    """A host pool with SGLang's accessors. `layer_first` scatters a page over layers, the others keep it whole."""

    layout: str
    page_size: int = PAGE
    kv: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        shape = (
            (2, LAYERS, TOKENS, HEADS, DIM) if self.layout == "layer_first" else (2, TOKENS, LAYERS, HEADS, DIM)
        )
        self.kv = torch.zeros(shape, dtype=torch.bfloat16)

    def _at(self, index: int) -> torch.Tensor:
        tokens = slice(index, index + PAGE)
        return self.kv[:, :, tokens] if self.layout == "layer_first" else self.kv[:, tokens]

    def get_data_page(self, index: int, flat: bool = True) -> torch.Tensor:
        page = self._at(index)
        return page.flatten() if flat else page

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        return torch.zeros(2 * LAYERS * PAGE * HEADS * DIM, dtype=torch.bfloat16)

    def set_from_flat_data_page(self, index: int, data_page: torch.Tensor) -> None:
        self._at(index).copy_(data_page.reshape(self._at(index).shape))


def make_storage(pool: HostPool, **changes: Any) -> Any:
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
    from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory

    mlkv = {"store": {"host_bytes": "1MiB", "linger_s": 20.0}, **changes.pop("mlkv", {})}
    options: dict[str, Any] = {
        "tp_rank": 0,
        "tp_size": 2,
        "pp_rank": 0,
        "pp_size": 1,
        "attn_cp_rank": 0,
        "attn_cp_size": 1,
        "is_mla_model": False,
        "enable_storage_metrics": False,
        "is_page_first_layout": pool.layout != "layer_first",
        "model_name": "tiny",
        **changes,
    }
    extra = {
        "backend_name": "mlkv",
        "module_path": "mlkv.integrations.sglang",
        "class_name": "MLKVStorage",
        "interface_v1": 1,
        "mlkv": mlkv,
    }
    config = HiCacheStorageConfig(extra_config=extra, **options)
    storage = StorageBackendFactory.create_backend("dynamic", config, pool)
    storage.register_mem_pool_host(pool)
    return storage


def filled(layout: str, seed: int = 0) -> HostPool:
    pool = HostPool(layout)
    pool.kv.copy_(torch.randn(pool.kv.shape, generator=torch.Generator().manual_seed(seed)))
    return pool


KEYS = [f"{n:064x}" for n in range(4)]
HERE = torch.arange(4 * PAGE)


@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_first_direct"])
def test_pages_come_back_at_other_places_and_in_another_engine(layout: str) -> None:
    pool = filled(layout)
    storage = make_storage(pool)
    assert storage.batch_exists(KEYS) == 0
    assert storage.batch_set_v1(KEYS, HERE) == [True] * 4
    storage.close()
    other_pool = HostPool(layout)
    other = make_storage(other_pool)
    assert other.batch_exists([*KEYS, "absent"]) == 4
    there = torch.cat([torch.arange(PAGE) + PAGE * page for page in (7, 5, 6, 4)])
    assert other.batch_get_v1(KEYS, there) == [True] * 4
    for page, place in enumerate((7, 5, 6, 4)):
        assert other_pool.get_data_page(place * PAGE).equal(pool.get_data_page(page * PAGE))
    assert not other_pool.get_data_page(0).any()
    other.close()


def test_the_older_interface_of_flat_tensors() -> None:
    pool = filled("page_first", 1)
    storage = make_storage(pool)
    pages = [pool.get_data_page(at * PAGE) for at in range(2)]
    assert storage.batch_set(KEYS[:2], pages)
    found = storage.batch_get(KEYS[:3], [pool.get_dummy_flat_data_page() for _ in range(3)])
    assert found[0].equal(pages[0])
    assert found[1].equal(pages[1])
    assert found[2] is None
    assert storage.exists(KEYS[0])
    assert not storage.exists(KEYS[3])
    assert storage.get(KEYS[1]).equal(pages[1])
    storage.clear()
    assert storage.batch_exists(KEYS) == 0
    storage.close()


def test_ranks_share_a_store_but_no_pages() -> None:
    pools = [filled("page_first", rank) for rank in range(2)]
    ranks = [make_storage(pool, tp_rank=rank) for rank, pool in enumerate(pools)]
    for rank in ranks:
        assert rank.batch_set_v1(KEYS, HERE) == [True] * 4
    for rank, pool in zip(ranks, pools, strict=True):
        wanted = pool.kv.clone()
        pool.kv.zero_()
        assert rank.batch_get_v1(KEYS, HERE) == [True] * 4
        assert pool.kv[:, : 4 * PAGE].equal(wanted[:, : 4 * PAGE])
        rank.close()


def test_of_replicated_latents_one_rank_writes_and_all_read() -> None:
    pools = [filled("page_first", rank) for rank in range(2)]
    ranks = [make_storage(pool, tp_rank=rank, is_mla_model=True) for rank, pool in enumerate(pools)]
    assert ranks[1].batch_set_v1(KEYS, HERE) == [True] * 4
    assert ranks[1].batch_exists(KEYS) == 0
    ranks[0].batch_set_v1(KEYS, HERE)
    assert ranks[1].batch_get_v1(KEYS, HERE) == [True] * 4
    assert pools[1].kv[:, : 4 * PAGE].equal(pools[0].kv[:, : 4 * PAGE])
    for rank in ranks:
        rank.close()


def test_a_rotten_page_is_a_miss_and_is_not_copied() -> None:
    pool = filled("page_first")
    storage = make_storage(pool, mlkv={"faults": "corrupt=all/load:1,seed=1"})
    storage.batch_set_v1(KEYS[:1], HERE[:PAGE])
    target = HostPool("page_first")
    storage.mem_pool_host = target
    assert storage.batch_get_v1(KEYS[:1], HERE[:PAGE]) == [False]
    assert not target.kv.any()
    assert storage.batch_exists(KEYS[:1]) == 0
    storage.close()


def test_settings_are_checked() -> None:
    with pytest.raises(ConfigError, match="--page-size"):
        make_storage(HostPool("page_first"), mlkv={"page_tokens": 4})
    with pytest.raises(ConfigError, match="model name"):
        make_storage(HostPool("page_first"), model_name=None)
    with pytest.raises(ConfigError, match="hostbytes"):
        make_storage(HostPool("page_first"), mlkv={"store": {"hostbytes": 3}})
