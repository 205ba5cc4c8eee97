"""Pools in engines' own shapes: a slot of the engine is a slot of the pool."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from kernel_cases import DTYPES, gqa, random_bytes, random_slots, row_bytes

from mlkv.errors import ConfigError
from mlkv.kernels.paged import gather, scatter
from mlkv.layout import KVLayout, KVPool, Plane, RankSlice
from mlkv.pool_shapes import lightllm_pool, sglang_pool, vllm_pool

LAYERS, BLOCKS, BLOCK, HEADS, DIM = 2, 6, 4, 2, 8
Read = Callable[[int, int, int, int], torch.Tensor]
"""The engine's own way to find K (0) or V (1) of a layer, slot and head."""


def layout(dtype: str = "bf16") -> KVLayout:
    return gqa(dtype, layers=LAYERS, heads=HEADS, dim=DIM, page_tokens=8)


def tensors(shape: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    return [random_bytes(shape, dtype, seed) for seed in range(LAYERS)]


def vllm_flash_attention() -> tuple[KVPool, Read]:
    caches = tensors((2, BLOCKS, BLOCK, HEADS, DIM))
    return vllm_pool(layout(), caches), lambda layer, kv, slot, head: caches[layer][
        kv, slot // BLOCK, slot % BLOCK, head
    ]


def vllm_flashinfer() -> tuple[KVPool, Read]:
    caches = tensors((BLOCKS, 2, BLOCK, HEADS, DIM))
    return vllm_pool(layout(), caches), lambda layer, kv, slot, head: caches[layer][
        slot // BLOCK, kv, slot % BLOCK, head
    ]


def vllm_flashinfer_head_major() -> tuple[KVPool, Read]:
    raw = tensors((BLOCKS, 2, HEADS, BLOCK, DIM))
    caches = [cache.permute(0, 1, 3, 2, 4) for cache in raw]
    return vllm_pool(layout(), caches), lambda layer, kv, slot, head: raw[layer][
        slot // BLOCK, kv, head, slot % BLOCK
    ]


def vllm_cpu() -> tuple[KVPool, Read]:
    caches = tensors((BLOCKS, HEADS, BLOCK, 2 * DIM))
    return vllm_pool(layout(), caches), lambda layer, kv, slot, head: caches[layer][
        slot // BLOCK, head, slot % BLOCK, kv * DIM : kv * DIM + DIM
    ]


def sglang() -> tuple[KVPool, Read]:
    k, v = tensors((BLOCKS * BLOCK, HEADS, DIM)), [t.flip(0) for t in tensors((BLOCKS * BLOCK, HEADS, DIM))]
    pool = sglang_pool(layout(), k=k, v=v, block_tokens=BLOCK)
    return pool, lambda layer, kv, slot, head: (k, v)[kv][layer][slot, head]


def lightllm() -> tuple[KVPool, Read]:
    whole = random_bytes((LAYERS, BLOCKS * BLOCK + 1, 2 * HEADS, DIM), torch.bfloat16, 5)
    pool = lightllm_pool(layout(), whole)
    return pool, lambda layer, kv, slot, head: whole[layer, slot, kv * HEADS + head]


ENGINES = [vllm_flash_attention, vllm_flashinfer, vllm_flashinfer_head_major, vllm_cpu, sglang, lightllm]


@pytest.mark.parametrize("engine", ENGINES)
def test_pages_hold_what_the_engine_has_in_its_slots(engine: Callable[[], tuple[KVPool, Read]]) -> None:
    pool, read = engine()
    shape, part = pool.layout, RankSlice(0, HEADS, HEADS)
    slots = random_slots(2, shape, BLOCKS, BLOCK, seed=9)
    pages = torch.full((2, HEADS, shape.head_bytes), 0xA5, dtype=torch.uint8)
    gather(pool, slots, part, pages)
    for page, page_slots in enumerate(slots.view(2, -1).tolist()):
        for head in range(HEADS):
            rows = [
                row_bytes(read(layer, kv, slot, head))
                for layer in range(LAYERS)
                for kv in range(2)
                for slot in page_slots
            ]
            assert pages[page, head].numpy().tobytes() == b"".join(rows)
    other = torch.randint(0, 256, pages.shape, dtype=torch.uint8)
    scatter(pool, slots, part, other)
    for page, page_slots in enumerate(slots.view(2, -1).tolist()):
        row = other[page, 1].numpy().reshape(LAYERS, 2, 8, -1)
        for token, slot in enumerate(page_slots):
            assert row_bytes(read(1, 1, slot, 1)) == row[1, 1, token].tobytes()


def test_latents_of_every_engine_are_one_head() -> None:
    shape = KVLayout.mla(num_layers=LAYERS, latent_dim=12, dtype=torch.float16, page_tokens=8)
    vllm = tensors((BLOCKS, BLOCK, 12), torch.float16)
    rows = [cache.flatten(0, 1).unsqueeze(1) for cache in vllm]
    slots = random_slots(1, shape, BLOCKS, BLOCK, seed=10)
    expected = b"".join(row_bytes(cache[slots]) for cache in rows)
    for pool in (
        vllm_pool(shape, vllm),
        sglang_pool(shape, latent=rows, block_tokens=BLOCK),
        lightllm_pool(shape, rows),
    ):
        page = torch.empty((1, 1, shape.head_bytes), dtype=torch.uint8)
        gather(pool, slots, RankSlice(0, 1, 1), page)
        assert page.numpy().tobytes() == expected


def test_lightllm_int8_pools_bring_their_scales() -> None:
    planes = (
        Plane("k", torch.int8, 16),
        Plane("v", torch.int8, 16),
        Plane("k_scale", torch.float16, 2),
        Plane("v_scale", torch.float16, 2),
    )
    shape = KVLayout(LAYERS, HEADS, 8, planes)
    data, scales = tensors((24, 2 * HEADS, 16), torch.int8), tensors((24, 2 * HEADS, 2), torch.float16)
    pool = lightllm_pool(shape, data, scales=scales)
    page = torch.empty((1, HEADS, shape.head_bytes), dtype=torch.uint8)
    gather(pool, torch.arange(8), RankSlice(0, HEADS, HEADS), page)
    layer = page[0, 1].numpy().reshape(LAYERS, -1)[1]
    assert layer[128:256].tobytes() == row_bytes(data[1][:8, HEADS + 1])
    assert layer[shape.plane_offsets[3] :][:32].tobytes() == row_bytes(scales[1][:8, HEADS + 1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_element_type_has_a_pool(dtype: str) -> None:
    caches = tensors((2, BLOCKS, BLOCK, HEADS, DIM), DTYPES[dtype])
    pool = vllm_pool(layout(dtype), caches)
    assert pool.num_slots == BLOCKS * BLOCK
    assert pool.local_heads == HEADS
    np.testing.assert_equal(pool.block_tokens, BLOCK)


@pytest.mark.parametrize(
    ("shape", "order", "message"),
    [
        ((2, 2, BLOCK, HEADS, DIM), "auto", "could be kv_first or block_first"),
        ((3, 3, BLOCK, HEADS, DIM), "auto", "no known order"),
        ((BLOCKS, BLOCK, HEADS, DIM), "auto", "no known order"),
        ((2, BLOCKS, BLOCK, HEADS, DIM), "block_first", "not of order 'block_first'"),
        ((2, BLOCKS, BLOCK, HEADS, DIM + 8), "auto", "expected"),
    ],
)
def test_a_vllm_cache_of_another_shape_is_refused(shape: tuple[int, ...], order: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        vllm_pool(layout(), tensors(shape), order=order)  # type: ignore[arg-type]


def test_an_ambiguous_vllm_cache_is_taken_as_said() -> None:
    caches = tensors((2, 2, BLOCK, HEADS, DIM))
    first, second = vllm_pool(layout(), caches, order="kv_first"), vllm_pool(layout(), caches, order="block_first")
    assert first.views[0][1].data_ptr() == caches[0][1].data_ptr()
    assert second.views[0][1].data_ptr() == caches[0][:, 1].data_ptr()


def test_buffers_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ConfigError, match="k and v, or latent"):
        sglang_pool(layout())
    with pytest.raises(ConfigError, match="whole blocks of 4"):
        sglang_pool(layout(), latent=tensors((10, 1, DIM)), block_tokens=4)
    with pytest.raises(ConfigError, match="2 \\* heads"):
        lightllm_pool(layout(), tensors((10, 3, DIM)))
