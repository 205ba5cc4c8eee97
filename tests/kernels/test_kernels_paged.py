"""Gather and scatter in torch operations against the plain reference."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from kernel_cases import (
    DTYPES,
    SHAPES,
    build_pool,
    gqa,
    int8_with_scales,
    random_slots,
    reference_page,
    reference_scatter,
    same_bytes,
    with_page_state,
)

from mlkv.errors import ConfigError
from mlkv.kernels.checksum import payload_checksums
from mlkv.kernels.paged import gather, scatter
from mlkv.layout import KVLayout, KVPool, Plane, RankSlice
from mlkv.page import payload_checksum

NUM_PAGES = 3


def check_gather_and_scatter(
    layout: KVLayout, shape: str, block_tokens: int, local_heads: int, rank_slice: RankSlice, seed: int
) -> None:
    num_blocks = 5 * layout.page_tokens // block_tokens
    build = functools.partial(
        build_pool, shape, layout, num_blocks=num_blocks, block_tokens=block_tokens, local_heads=local_heads
    )
    source = build(seed=seed)
    slots = random_slots(NUM_PAGES, layout, num_blocks, block_tokens, seed)
    by_page = slots.view(NUM_PAGES, layout.page_tokens).tolist()

    # Poisoned staging with a gap between pages, which must stay as it is.
    written = rank_slice.num_written_heads
    staging = torch.full((NUM_PAGES, written * layout.head_bytes + 64), 0xA5, dtype=torch.uint8)
    out = staging[:, : written * layout.head_bytes].view(NUM_PAGES, written, layout.head_bytes)
    gather(source.pool, slots, rank_slice, out)
    for page in range(NUM_PAGES):
        np.testing.assert_array_equal(out[page].numpy(), reference_page(source.pool, by_page[page], written))
    assert (staging[:, written * layout.head_bytes :] == 0xA5).all()

    # Scatter into other memory, in another order, with holes; every byte of the pool is compared.
    heads = rank_slice.num_heads
    pages = torch.randint(0, 256, (NUM_PAGES, heads, layout.head_bytes), dtype=torch.uint8)
    target = build(seed=seed + 1)
    expected = build(storages=[storage.clone() for storage in target.storages])
    slots = random_slots(NUM_PAGES, layout, num_blocks, block_tokens, seed + 2)
    slots[torch.rand(len(slots), generator=torch.Generator().manual_seed(seed)) < 0.3] = -1
    slots[layout.page_tokens] = -1
    scatter(target.pool, slots, rank_slice, pages)
    for page, page_slots in enumerate(slots.view(NUM_PAGES, -1).tolist()):
        reference_scatter(expected.pool, page_slots, pages[page].numpy())
    assert same_bytes(target.storages, expected.storages)


@pytest.mark.parametrize("block_tokens", [1, 4, 16])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_pool_shape_and_block_size_moves_bit_exactly(shape: str, block_tokens: int) -> None:
    check_gather_and_scatter(gqa(), shape, block_tokens, 4, RankSlice(0, 4, 4), seed=1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_element_type_moves_bit_exactly(dtype: str) -> None:
    for dim in (8, 5):  # 5: rows that only the element's own width divides, and padding after planes
        check_gather_and_scatter(
            gqa(dtype, dim=dim, page_tokens=4), "head_major", 4, 4, RankSlice(0, 4, 4), seed=2
        )


@pytest.mark.parametrize(
    ("local_heads", "rank_slice"),
    [
        (2, RankSlice(2, 2, 2)),  # even: heads 2 and 3 of 4
        (2, RankSlice(2, 1, 1)),  # uneven: one real head, one of padding
        (1, RankSlice(0, 1, 0)),  # replicated, written by another rank
        (2, RankSlice(4, 0, 0)),  # only padding
    ],
)
def test_slices_of_ranks_touch_only_their_real_heads(local_heads: int, rank_slice: RankSlice) -> None:
    check_gather_and_scatter(gqa(), "separate", 4, local_heads, rank_slice, seed=3)


@pytest.mark.parametrize("shape", ["separate", "head_major", "joined_dim"])
def test_scale_planes_move_with_their_data(shape: str) -> None:
    check_gather_and_scatter(int8_with_scales(), shape, 4, 4, RankSlice(0, 4, 4), seed=4)


@pytest.mark.parametrize("block_tokens", [1, 4, 16])
def test_planes_kept_per_page_are_copied_whole(block_tokens: int) -> None:
    check_gather_and_scatter(with_page_state(), "separate", block_tokens, 2, RankSlice(0, 2, 2), seed=5)


def test_mla_latent_moves_as_one_head() -> None:
    layout = KVLayout.mla(num_layers=2, latent_dim=36, dtype=torch.bfloat16, page_tokens=8)
    check_gather_and_scatter(layout, "separate", 8, 1, RankSlice(0, 1, 1), seed=6)


def test_a_last_dimension_with_gaps_still_moves() -> None:
    layout = gqa("fp16", heads=2, page_tokens=4)
    wide = [torch.randn(5, 4, 2, 16).half() for _ in range(4)]
    pool = KVPool(layout, [[wide[0][..., ::2], wide[1][..., ::2]], [wide[2][..., 1::2], wide[3][..., 1::2]]])
    slots = random_slots(2, layout, 5, 4, seed=7)
    out = torch.empty((2, 2, layout.head_bytes), dtype=torch.uint8)
    gather(pool, slots, RankSlice(0, 2, 2), out)
    for page, page_slots in enumerate(slots.view(2, 4).tolist()):
        np.testing.assert_array_equal(out[page].numpy(), reference_page(pool, page_slots, 2))


@pytest.mark.parametrize("head_bytes", [16, 4096, 262144 + 16, 1 << 21])
def test_batched_checksums_equal_those_of_single_slices(head_bytes: int) -> None:
    room = torch.randint(0, 256, (3, 2 * head_bytes + 32), dtype=torch.uint8)
    room[0, :64] = 0xFF  # words above 2**31
    slices = room[:, 16 : 16 + 2 * head_bytes].view(3, 2, head_bytes)
    sums = payload_checksums(slices).numpy().view(np.uint64)
    expected = [[payload_checksum(head.numpy()) for head in page] for page in slices]
    np.testing.assert_array_equal(sums, np.array(expected, np.uint64))


def test_checksums_of_no_heads_are_empty() -> None:
    assert payload_checksums(torch.empty((3, 0, 64), dtype=torch.uint8)).shape == (3, 0)


def test_a_pool_of_page_states_only_says_how_long_its_blocks_are() -> None:
    layout = KVLayout(1, 2, 16, (Plane("state", torch.float32, 8, per="page"),))
    view = torch.zeros(4, 2, 8)
    with pytest.raises(ConfigError, match="block_tokens"):
        KVPool(layout, [[view]])
    pool = KVPool(layout, [[view]], block_tokens=16)
    assert (pool.num_blocks, pool.num_slots, pool.local_heads) == (4, 64, 2)
