"""Loads and offloads of CPU pools: bytes, verification, refusals."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import pytest
import torch
from cpu_site import LAYOUT, WHOLE, Site
from kernel_cases import (
    FINGERPRINT,
    POISON,
    batch,
    build_pool,
    finish_load,
    finish_offload,
    gqa,
    host_pool,
    int8_with_scales,
    make_engine,
    page_of,
    random_slots,
    reference_page,
    same_bytes,
    with_page_state,
)

from mlkv.errors import CacheUsageError, ConfigError
from mlkv.kernels import PageBatch, TransferEngine
from mlkv.layout import KVLayout, KVPool, RankSlice
from mlkv.page import PageIdentity, verify_page, write_identity


@pytest.fixture
def site() -> Site:
    return Site()


def global_kv(layout: KVLayout, num_slots: int, seed: int) -> list[list[torch.Tensor]]:
    """KV of the whole model: for each layer and plane `[num_slots, num_kv_heads, dim]`."""
    generator = torch.Generator().manual_seed(seed)
    return [
        [
            torch.randint(
                0,
                256,
                (num_slots, layout.num_kv_heads, p.dim * p.dtype.itemsize),
                generator=generator,
                dtype=torch.uint8,
            ).view(p.dtype)
            for p in layout.planes
        ]
        for _ in range(layout.num_layers)
    ]


def rank_pool(
    layout: KVLayout, whole: list[list[torch.Tensor]] | None, tp: int, rank: int, num_slots: int
) -> KVPool:
    """One rank's pool: its heads of `whole` (else poison), with poisoned padding heads."""
    part = RankSlice.of_rank(layout.num_kv_heads, tp, rank)
    local = RankSlice.local_kv_heads(layout.num_kv_heads, tp)
    views = []
    for layer in range(layout.num_layers):
        planes = []
        for at, plane in enumerate(layout.planes):
            raw = torch.full((num_slots, local, plane.dim * plane.dtype.itemsize), POISON, dtype=torch.uint8)
            view = raw.view(plane.dtype)
            if whole is not None:
                view[:, : part.num_heads] = whole[layer][at][:, part.head_start : part.head_start + part.num_heads]
            planes.append(view.view(-1, 1, local, plane.dim))
        views.append(planes)
    return KVPool(layout, views)


@pytest.mark.parametrize("heads", [1, 3, 4])
@pytest.mark.parametrize("written_by", [1, 2, 3, 4])
@pytest.mark.parametrize("layout_of", [gqa, int8_with_scales])
def test_pages_written_with_one_tp_size_are_read_with_any_other(
    layout_of: Callable[..., KVLayout], written_by: int, heads: int
) -> None:
    layout = layout_of(heads=heads, page_tokens=4)
    num_slots, pages = 24, batch([5, 0, 2])
    whole = global_kv(layout, num_slots, seed=heads)
    slots = random_slots(3, layout, num_slots, 1, seed=1)
    host = host_pool(layout, 6)
    for rank in range(written_by):
        part = RankSlice.of_rank(heads, written_by, rank)
        engine = make_engine(
            rank_pool(layout, whole, written_by, rank, num_slots), host, part, writes_identity=rank == 0
        )
        assert finish_offload(engine, pages, slots) is None
        engine.close(10)
    for at, index in enumerate(pages.indices):
        key, generation = pages.keys[16 * at : 16 * at + 16], int(pages.generations[at])
        assert verify_page(page_of(host, layout, index), layout, key, FINGERPRINT, generation)
    for index in (1, 3, 4):
        assert (page_of(host, layout, index) == POISON).all(), "a page that is not of this batch was written"

    for tp in (1, 2, 3, 4):
        for rank in range(tp):
            part = RankSlice.of_rank(heads, tp, rank)
            pool = rank_pool(layout, None, tp, rank, num_slots)
            engine = make_engine(pool, host, part)
            target = random_slots(3, layout, num_slots, 1, seed=tp * 10 + rank)
            assert finish_load(engine, pages, target) == (3, None)
            engine.close(10)
            untouched = torch.ones(num_slots, dtype=torch.bool)
            untouched[target] = False
            for layer in range(layout.num_layers):
                for at in range(len(layout.planes)):
                    have = pool.views[layer][at][:, 0].contiguous().view(torch.uint8)
                    want = whole[layer][at][slots, part.head_start : part.head_start + part.num_heads]
                    if part.num_heads:
                        assert torch.equal(have[target][:, : part.num_heads], want.contiguous().view(torch.uint8))
                    assert (have[:, part.num_heads :] == POISON).all(), "a padding head was written"
                    assert (have[untouched] == POISON).all(), "a slot that was not asked for was written"


def test_only_the_writers_of_replicated_heads_write() -> None:
    layout = gqa(heads=2, page_tokens=4)
    host = host_pool(layout, 2)
    pool = rank_pool(layout, global_kv(layout, 8, seed=3), 4, 1, 8)
    engine = make_engine(pool, host, RankSlice.of_rank(2, 4, 1), writes_identity=False)
    transfer = engine.offload(batch([0]), torch.arange(4))
    assert transfer.poll()
    assert transfer.poll_released()
    assert (host == POISON).all()


def test_a_rank_without_heads_is_done_at_once_and_still_writes_the_identity() -> None:
    layout = gqa(heads=2, page_tokens=4)
    host = host_pool(layout, 2)
    pool = rank_pool(layout, None, 3, 2, 8)
    empty = RankSlice.of_rank(2, 3, 2)
    assert empty.num_heads == 0
    engine = make_engine(pool, host, empty, writes_identity=True)
    assert engine.offload(batch([0]), torch.arange(4)).poll()
    for rank in range(2):
        other = rank_pool(layout, global_kv(layout, 8, seed=4), 3, rank, 8)
        writer = make_engine(other, host, RankSlice.of_rank(2, 3, rank), writes_identity=False)
        assert finish_offload(writer, batch([0]), torch.arange(4)) is None
    pages = batch([0])
    assert verify_page(page_of(host, layout, 0), layout, pages.keys, FINGERPRINT, 7)
    load = engine.load(pages, torch.arange(4))
    assert load.poll()
    assert load.num_good == 1
    load = engine.load(batch([0], generation=8), torch.arange(4))
    assert load.poll()
    assert load.num_good == 0


def test_an_offload_writes_its_own_pages_header_and_payload_exactly(site: Site) -> None:
    for at, index in enumerate(site.pages.indices):
        page, layout = site.page(index), site.layout
        slots = site.slots.view(2, -1)[at].tolist()
        payload = page[layout.header_bytes : layout.header_bytes + layout.payload_bytes]
        np.testing.assert_array_equal(
            payload.reshape(3, layout.head_bytes), reference_page(site.case.pool, slots, 3)
        )
        assert verify_page(page, layout, site.key(at), FINGERPRINT, int(site.pages.generations[at]))
        expected = np.full(layout.header_bytes, POISON, np.uint8)
        parent = site.pages.parents[16 * at : 16 * at + 16]
        write_identity(expected, layout, PageIdentity(site.key(at), parent, FINGERPRINT, 7 + at))
        np.testing.assert_array_equal(page[:128], expected[:128])
    for index in (0, 2, 3, 5):
        assert (site.page(index) == POISON).all()


def test_slots_of_minus_one_keep_what_the_device_has(site: Site) -> None:
    target = site.free_slots.clone()
    target[[0, 3, 5]] = -1
    assert finish_load(site.engine, site.pages, target) == (2, None)
    for layer in range(site.layout.num_layers):
        for at in range(2):
            view = site.case.pool.views[layer][at].flatten(0, 1).view(torch.int32)
            before = site.before[2 * layer + at].flatten(0, 1).view(torch.int32)
            for source, slot in zip(site.slots.tolist(), target.tolist(), strict=True):
                if slot >= 0:
                    assert torch.equal(view[slot], before[source])
            same = [s for s in range(64) if s not in set(target.tolist())]
            assert torch.equal(view[same], before[same])


def header_and_payload_bytes(layout: KVLayout) -> list[tuple[str, int]]:
    fields = {"magic": 0, "version": 4, "heads": 6, "tokens": 8, "head bytes": 12, "generation": 16}
    fields |= {"fingerprint": 24, "key": 40, "key end": 55, "parent": 56, "crc": 72, "crc end": 75}
    fields |= {"table of head 0": 128, "table of head 2": 128 + 8 * 2 + 7}
    fields |= {"first payload byte": layout.header_bytes, "middle": layout.head_offset(1) + 33}
    fields |= {"last payload byte": layout.header_bytes + layout.payload_bytes - 1}
    return list(fields.items())


@pytest.mark.parametrize(("field", "offset"), header_and_payload_bytes(LAYOUT))
def test_any_flipped_byte_of_a_page_is_a_miss(site: Site, field: str, offset: int) -> None:
    for bit in (0, 7):
        site.page(4)[offset] ^= 1 << bit
        assert finish_load(site.engine, site.pages, site.free_slots) == (1, None), field
        site.page(4)[offset] ^= 1 << bit
    site.page(1)[offset] ^= 0x10
    before = [storage.clone() for storage in site.case.storages]
    assert finish_load(site.engine, site.pages, site.free_slots) == (0, None), field
    assert same_bytes(before, site.case.storages), "slots were written from a page that did not verify"


def test_bytes_of_heads_that_this_rank_does_not_read_do_not_matter_to_it(site: Site) -> None:
    site.page(4)[site.layout.head_offset(2)] ^= 1
    pool = build_pool("separate", site.layout, num_blocks=16, block_tokens=4, local_heads=2).pool
    engine = make_engine(pool, site.host, RankSlice(0, 2, 2))
    assert finish_load(engine, site.pages, site.free_slots) == (2, None)
    assert finish_load(site.engine, site.pages, site.free_slots) == (1, None)


def test_stale_and_foreign_pages_are_misses(site: Site) -> None:
    pages = site.pages
    stale = PageBatch(pages.indices, pages.keys, b"", pages.generations + np.uint64(1))
    assert finish_load(site.engine, stale, site.free_slots) == (0, None)
    foreign = PageBatch(pages.indices, pages.keys[:16] + b"x" * 16, b"", pages.generations)
    assert finish_load(site.engine, foreign, site.free_slots) == (1, None)
    swapped = PageBatch(pages.indices[::-1].copy(), pages.keys, b"", pages.generations)
    assert finish_load(site.engine, swapped, site.free_slots) == (0, None)
    stranger = make_engine(site.case.pool, site.host, WHOLE, fingerprint=bytes(16))
    assert finish_load(stranger, pages, site.free_slots) == (0, None)
    unwritten = PageBatch(np.array([0, 2], np.int32), pages.keys, b"", pages.generations)
    assert finish_load(site.engine, unwritten, site.free_slots) == (0, None)


def test_a_head_that_was_never_written_under_the_new_header_is_a_miss() -> None:
    """Old payload and old checksum of one rank's heads under a header that another rank renewed."""
    layout = gqa(heads=2, page_tokens=4)
    host = host_pool(layout, 1)
    whole = global_kv(layout, 8, seed=5)
    engines = [
        make_engine(rank_pool(layout, whole, 2, r, 8), host, RankSlice.of_rank(2, 2, r), writes_identity=r == 0)
        for r in range(2)
    ]
    old, new = batch([0], generation=1), batch([0], generation=2)
    for engine in engines:
        assert finish_offload(engine, old, torch.arange(4)) is None
    assert finish_offload(engines[0], new, torch.arange(4)) is None  # the same tokens, but rank 1 is missing
    assert finish_load(engines[0], new, torch.arange(4)) == (1, None)
    assert finish_load(engines[1], new, torch.arange(4)) == (0, None)
    assert finish_offload(engines[1], new, torch.arange(4)) is None
    assert finish_load(engines[1], new, torch.arange(4)) == (1, None)


def test_tasks_larger_than_staging_go_through_in_pieces() -> None:
    layout = with_page_state(page_tokens=4)
    case = build_pool("separate", layout, num_blocks=40, block_tokens=4, local_heads=2, seed=21)
    host = host_pool(layout, 20)
    engine = make_engine(case.pool, host, RankSlice(0, 2, 2), staging_bytes=2 * layout.payload_bytes)
    pages = batch(list(range(19, -1, -1)))
    slots = torch.arange(80)
    assert finish_offload(engine, pages, slots) is None
    expected = [storage.clone() for storage in case.storages]
    for storage, old in zip(expected, case.storages, strict=True):
        storage[20:] = old[:20]
    assert finish_load(engine, pages, slots + 80) == (20, None)
    assert same_bytes(case.storages, expected)
    page_of(host, layout, 6)[-1 - (layout.page_bytes - layout.header_bytes - layout.payload_bytes)] ^= 4
    assert finish_load(engine, pages, slots + 80) == (13, None)


def test_empty_batches_are_done_at_once(site: Site) -> None:
    nothing = torch.empty(0, dtype=torch.int64)
    load, offload = site.engine.load(batch([]), nothing), site.engine.offload(batch([]), nothing)
    assert load.poll()
    assert (load.num_good, load.error) == (0, None)
    assert offload.poll()
    assert offload.poll_released()


def test_pools_made_in_inference_mode_are_served() -> None:
    with torch.inference_mode():
        case = build_pool("separate", LAYOUT, num_blocks=4, block_tokens=4, local_heads=3, seed=31)
        slots = torch.arange(4)
    host = host_pool(LAYOUT, 1)
    engine = make_engine(case.pool, host, WHOLE)
    assert finish_offload(engine, batch([0]), slots) is None
    assert finish_load(engine, batch([0]), slots + 4) == (1, None)


@pytest.mark.parametrize(
    ("pages", "slots", "message"),
    [
        (batch([0]), torch.arange(5), r"\(4,\)"),
        (batch([0]), torch.arange(4, dtype=torch.int32), "int64"),
        (batch([0]), torch.tensor([0, 1, 2, 64]), "got 0 to 64"),
        (batch([0]), torch.tensor([0, 1, 2, -1]), "got -1 to 2"),
        (batch([6]), torch.arange(4), r"\[0, 6\)"),
        (batch([-1]), torch.arange(4), r"\[0, 6\)"),
        (PageBatch(np.zeros(1, np.int32), bytes(16), b"", np.zeros(1, np.uint64)), torch.arange(4), "parent"),
    ],
)
def test_an_offload_that_does_not_fit_is_refused(
    site: Site, pages: PageBatch, slots: torch.Tensor, message: str
) -> None:
    with pytest.raises(CacheUsageError, match=message):
        site.engine.offload(pages, slots)


def test_a_load_refuses_slots_below_minus_one(site: Site) -> None:
    with pytest.raises(CacheUsageError, match="got -2"):
        site.engine.load(batch([0]), torch.tensor([0, 1, 2, -2]))


def test_a_batch_with_lengths_that_differ_is_refused() -> None:
    with pytest.raises(ValueError, match="16 bytes a page"):
        PageBatch(np.zeros(2, np.int32), bytes(16), b"", np.zeros(2, np.uint64))
    with pytest.raises(ValueError, match="int32 indices"):
        PageBatch(np.zeros(1, np.int64), bytes(16), b"", np.zeros(1, np.uint64))  # type: ignore[arg-type]


def test_an_engine_that_cannot_work_is_refused() -> None:
    case = build_pool("separate", LAYOUT, num_blocks=4, block_tokens=4, local_heads=3)
    host = host_pool(LAYOUT, 1)
    create: Callable[..., TransferEngine] = functools.partial(make_engine, case.pool, host, WHOLE)
    with pytest.raises(ConfigError, match="holds no page"):
        create(staging_bytes=LAYOUT.payload_bytes - 1)
    with pytest.raises(ConfigError, match="max_tasks"):
        create(max_tasks=0)
    with pytest.raises(ConfigError, match="16 bytes"):
        create(fingerprint=b"short")
    with pytest.raises(ConfigError, match="different layouts"):
        make_engine(case.pool, host_pool(gqa(), 1), WHOLE, layout=gqa(), staging_bytes=1 << 20)
    with pytest.raises(ConfigError, match="whole pages"):
        make_engine(case.pool, host[:-1], WHOLE)
    with pytest.raises(ConfigError, match="read-only"):
        make_engine(case.pool, np.frombuffer(bytes(LAYOUT.page_bytes), np.uint8), WHOLE)
    with pytest.raises(ConfigError, match="reaches past"):
        make_engine(case.pool, host, RankSlice(1, 3, 3))
    narrow = build_pool("separate", LAYOUT, num_blocks=4, block_tokens=4, local_heads=2)
    with pytest.raises(ConfigError, match="have 2"):
        make_engine(narrow.pool, host, WHOLE)
    with pytest.raises(ConfigError, match="auto, staged or direct"):
        create(transfer="fast")
