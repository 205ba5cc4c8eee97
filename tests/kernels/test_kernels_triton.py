"""The Triton kernels against the plain reference: on a GPU where there is one, else in Triton's interpreter."""

from __future__ import annotations

import functools
import random

import numpy as np
import pytest
import torch
from kernel_cases import (
    DTYPES,
    FINGERPRINT,
    SHAPES,
    batch,
    build_pool,
    gqa,
    host_pool,
    int8_with_scales,
    random_slots,
    reference_page,
    reference_scatter,
    same_bytes,
    with_page_state,
)
from sim_device import sim_engine

from mlkv.kernels.device import Words
from mlkv.kernels.pool_table import plane_groups
from mlkv.layout import KVLayout, KVPool, RankSlice
from mlkv.page import payload_checksum

pytest.importorskip("triton", reason="Triton is not installed")

from mlkv.kernels.triton_kernels import TritonKernels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NUM_PAGES = 2


def pinned(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.pin_memory() if DEVICE == "cuda" else tensor


def sums_of(kernels: TritonKernels, heads: int) -> torch.Tensor:
    return pinned(torch.full((NUM_PAGES, heads, kernels.num_parts), -1, dtype=torch.int64))


def words(sums: torch.Tensor) -> Words:
    return Words(sums.view(-1))


class Staging:
    """Pages as they lie in a part of the staging ring."""

    def __init__(self, pages: torch.Tensor) -> None:
        self.memory, self.address = pages.view(-1), pages.data_ptr()


def stream() -> int:
    return torch.cuda.current_stream().cuda_stream if DEVICE == "cuda" else 0


def finish() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def check_sums(sums: torch.Tensor, slices: torch.Tensor) -> None:
    found = sums.numpy().view(np.uint64).sum(axis=-1, dtype=np.uint64)
    expected = [[payload_checksum(head.numpy()) for head in page] for page in slices.cpu()]
    np.testing.assert_array_equal(found, np.array(expected, np.uint64).reshape(found.shape))


def check_both_ways(
    layout: KVLayout,
    shape: str,
    block_tokens: int,
    local_heads: int,
    rank_slice: RankSlice,
    *,
    seed: int,
    direct: bool = False,
    item_bytes: int = 32 << 10,
    max_programs: int = 128,
) -> None:
    num_blocks = 3 * layout.page_tokens // block_tokens
    build = functools.partial(
        build_pool,
        shape,
        layout,
        num_blocks=num_blocks,
        block_tokens=block_tokens,
        local_heads=local_heads,
        device=DEVICE,
    )
    source = build(seed=seed)
    kernels = TritonKernels(source.pool, rank_slice, item_bytes=item_bytes, max_programs=max_programs)
    slots = random_slots(NUM_PAGES, layout, num_blocks, block_tokens, seed)
    written = rank_slice.num_written_heads
    page_shape = (NUM_PAGES, written, layout.head_bytes)
    pages = torch.full(page_shape, 0xA5, dtype=torch.uint8)
    sums = sums_of(kernels, written)
    if direct:
        pages, given_slots = pinned(pages), pinned(slots)
        rows = [pages[at].data_ptr() for at in range(NUM_PAGES)]
        kernels.gather(NUM_PAGES, Words(given_slots), Words(pinned(torch.tensor(rows))), words(sums), stream())
    else:
        pages, given_slots = pages.to(DEVICE), slots.to(DEVICE)
        kernels.gather(NUM_PAGES, Words(given_slots), Staging(pages), words(sums), stream())
    finish()
    for page, page_slots in enumerate(slots.view(NUM_PAGES, -1).tolist()):
        np.testing.assert_array_equal(pages[page].cpu().numpy(), reference_page(source.pool, page_slots, written))
    check_sums(sums, pages)

    heads = rank_slice.num_heads
    pages = torch.randint(0, 256, (NUM_PAGES, heads, layout.head_bytes), dtype=torch.uint8)
    target = build(seed=seed + 1)
    expected = build(storages=[storage.clone() for storage in target.storages])
    kernels = TritonKernels(target.pool, rank_slice, item_bytes=item_bytes, max_programs=max_programs)
    slots = random_slots(NUM_PAGES, layout, num_blocks, block_tokens, seed + 2)
    slots[torch.rand(len(slots), generator=torch.Generator().manual_seed(seed)) < 0.3] = -1
    sums = sums_of(kernels, heads)
    if direct:
        pages, given_slots = pinned(pages), pinned(slots)
        rows = [pages[at].data_ptr() for at in range(NUM_PAGES)]
        kernels.scatter(NUM_PAGES, Words(given_slots), Words(pinned(torch.tensor(rows))), words(sums), stream())
    else:
        given_slots, given_pages = slots.to(DEVICE), pages.to(DEVICE)
        kernels.scatter(NUM_PAGES, Words(given_slots), Staging(given_pages), words(sums), stream())
    finish()
    for page, page_slots in enumerate(slots.view(NUM_PAGES, -1).tolist()):
        reference_scatter(expected.pool, page_slots, pages[page].numpy())
    assert same_bytes(target.storages, expected.storages)
    check_sums(sums, pages)


@pytest.mark.parametrize("direct", [False, True], ids=["staged", "direct"])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_pool_shape_moves_bit_exactly_and_is_summed(shape: str, direct: bool) -> None:
    check_both_ways(gqa(heads=2, page_tokens=8), shape, 4, 2, RankSlice(0, 2, 2), seed=1, direct=direct)


@pytest.mark.parametrize("block_tokens", [1, 2, 16])
def test_every_block_size_moves_bit_exactly(block_tokens: int) -> None:
    check_both_ways(gqa(layers=1, heads=2), "head_major", block_tokens, 2, RankSlice(0, 2, 2), seed=2)


@pytest.mark.parametrize("dim", [8, 5])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_element_type_moves_bit_exactly_at_any_alignment(dtype: str, dim: int) -> None:
    layout = gqa(dtype, layers=1, heads=1, dim=dim, page_tokens=4)
    check_both_ways(layout, "separate", 4, 1, RankSlice(0, 1, 1), seed=3)


@pytest.mark.parametrize(
    ("local_heads", "rank_slice"),
    [(2, RankSlice(2, 2, 2)), (2, RankSlice(2, 1, 1)), (1, RankSlice(3, 1, 1))],
)
def test_slices_of_ranks_touch_only_their_real_heads(local_heads: int, rank_slice: RankSlice) -> None:
    check_both_ways(gqa(layers=1, page_tokens=4), "separate", 4, local_heads, rank_slice, seed=4)


@pytest.mark.parametrize("page_tokens", [1, 12, 24])
def test_pages_whose_length_is_no_power_of_two_move_bit_exactly(page_tokens: int) -> None:
    check_both_ways(gqa(layers=1, heads=1, page_tokens=page_tokens), "separate", 1, 1, RankSlice(0, 1, 1), seed=5)


def test_scale_planes_and_their_data_move_bit_exactly() -> None:
    for direct in (False, True):
        layout = int8_with_scales(heads=1, page_tokens=8)
        check_both_ways(layout, "head_major", 4, 1, RankSlice(0, 1, 1), seed=6, direct=direct)


def test_planes_kept_per_page_are_copied_whole() -> None:
    for direct in (False, True):
        layout = with_page_state(heads=1, page_tokens=8)
        check_both_ways(layout, "separate", 4, 1, RankSlice(0, 1, 1), seed=7, direct=direct)


def test_rows_longer_than_a_tile_move_bit_exactly() -> None:
    layout = KVLayout.mla(num_layers=1, latent_dim=4608, dtype=torch.bfloat16, page_tokens=2)
    check_both_ways(layout, "separate", 1, 1, RankSlice(0, 1, 1), seed=8)
    layout = KVLayout.mla(num_layers=2, latent_dim=576, dtype=torch.bfloat16, page_tokens=8)
    check_both_ways(layout, "separate", 8, 1, RankSlice(0, 1, 1), seed=9)


def test_work_is_split_into_items_and_programs_in_any_way() -> None:
    layout = gqa(layers=3, heads=1, page_tokens=4)  # planes of 64 bytes
    for item_bytes, max_programs in ((1, 128), (150, 1), (200, 3), (1 << 20, 128), (1, 5)):
        part = RankSlice(0, 1, 1)
        check_both_ways(layout, "separate", 4, 1, part, seed=10, item_bytes=item_bytes, max_programs=max_programs)


def test_rows_with_gaps_are_refused() -> None:
    layout = gqa("fp16", layers=1, heads=2, page_tokens=4)
    wide = torch.zeros(3, 4, 2, 16).half()
    pool = KVPool(layout, [[wide[..., ::2], wide[..., 1::2]]])
    with pytest.raises(ValueError, match="side by side"):
        TritonKernels(pool, RankSlice(0, 2, 2))


def test_the_table_knows_how_wide_accesses_may_be() -> None:
    def unit(layout: KVLayout, shape: str = "separate") -> list[tuple[int, bool]]:
        pool = build_pool(shape, layout, num_blocks=4, block_tokens=4, local_heads=2).pool
        return [(group.unit_bytes, group.is_aligned) for group in plane_groups(pool)]

    assert unit(gqa("bf16", dim=8)) == [(4, True)]
    assert unit(gqa("bf16", dim=6)) == [(4, False)]
    assert unit(gqa("bf16", dim=5)) == [(2, False)]
    assert unit(gqa("int8", dim=7)) == [(1, False)]
    assert unit(int8_with_scales(dim=16)) == [(4, True), (2, False), (4, False)]
    assert unit(with_page_state()) == [(4, True), (4, True), (2, False)]


@pytest.mark.skipif(DEVICE == "cuda", reason="the simulated device runs kernels on CPU tensors")
@pytest.mark.parametrize("transfer", ["staged", "direct"])
def test_transfers_through_these_kernels_verify_what_they_move(transfer: str) -> None:
    layout = gqa(layers=1, heads=2, page_tokens=4)
    build = functools.partial(build_pool, "separate", layout, num_blocks=12, block_tokens=4, local_heads=2)
    case, host, whole = build(seed=12), host_pool(layout, 4), RankSlice(0, 2, 2)
    engine, device = sim_engine(
        case.pool,
        host,
        whole,
        fingerprint=FINGERPRINT,
        kernels=TritonKernels(case.pool, whole),
        transfer=transfer,
    )
    pages, slots = batch([3, 1, 0]), torch.arange(12)
    order = random.Random(5)
    offload = engine.offload(pages, slots)
    device.run_until(offload.poll, order)
    assert offload.error is None
    load = engine.load(pages, slots + 20)
    device.run_until(load.poll, order)
    assert (load.num_good, load.error) == (3, None)
    for page_slots in slots.view(3, 4):
        np.testing.assert_array_equal(
            reference_page(case.pool, page_slots.tolist(), 2),
            reference_page(case.pool, (page_slots + 20).tolist(), 2),
        )
    host[layout.page_bytes + layout.header_bytes + 3] ^= 1
    load = engine.load(pages, slots + 20)
    device.run_until(load.poll, order)
    assert (load.num_good, load.error) == (1, None)
