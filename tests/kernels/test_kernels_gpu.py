"""Transfers of a CUDA device: bytes, order with the model's streams, memory that cannot be pinned."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from kernel_cases import (
    DTYPES,
    FINGERPRINT,
    POISON,
    SHAPES,
    PoolCase,
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
    same_bytes,
    wait_until,
    with_page_state,
)

from mlkv.kernels import TransferEngine
from mlkv.kernels.cuda import CudaDevice
from mlkv.kernels.driver import driver
from mlkv.kernels.host_pages import HostPages
from mlkv.kernels.paged import gather, scatter
from mlkv.kernels.pinning import CudaRegistrar, PinnedMemory
from mlkv.kernels.staged import StagedTransferEngine
from mlkv.kernels.torch_kernels import TorchKernels
from mlkv.layout import KVLayout, KVPool, RankSlice
from mlkv.page import verify_page

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

PATHS = ["staged", "direct"]
NUM_PAGES = 5


def on_cpu(case: PoolCase, build: Callable[..., PoolCase]) -> PoolCase:
    return build(storages=[storage.cpu() for storage in case.storages], device="cpu")


def check_round_trip(
    layout: KVLayout, shape: str, block_tokens: int, *, transfer: str, seed: int, staging_pages: int = 2
) -> None:
    """Offload and load on the GPU against gather and scatter of CPU copies of the pools."""
    heads = layout.num_kv_heads
    num_blocks = 2 * NUM_PAGES * layout.page_tokens // block_tokens
    build = functools.partial(
        build_pool, shape, layout, num_blocks=num_blocks, block_tokens=block_tokens, local_heads=heads
    )
    source, target = build(seed=seed, device="cuda"), build(seed=seed + 1, device="cuda")
    whole, host = RankSlice(0, heads, heads), host_pool(layout, 8)
    staging_bytes = staging_pages * layout.payload_bytes
    engine = make_engine(source.pool, host, whole, transfer=transfer, staging_bytes=staging_bytes)
    pages = batch([6, 1, 3, 0, 7])
    slots = random_slots(NUM_PAGES, layout, num_blocks, block_tokens, seed)
    expected = torch.empty((NUM_PAGES, heads, layout.head_bytes), dtype=torch.uint8)
    gather(on_cpu(source, build).pool, slots, whole, expected)
    assert finish_offload(engine, pages, slots) is None
    engine.close(20)
    for at, index in enumerate(pages.indices):
        page = page_of(host, layout, index)
        payload = page[layout.header_bytes : layout.header_bytes + layout.payload_bytes]
        np.testing.assert_array_equal(payload, expected[at].numpy().ravel())
        assert verify_page(page, layout, pages.keys[16 * at : 16 * at + 16], FINGERPRINT, 7 + at)
    for index in (2, 4, 5):
        assert (page_of(host, layout, index) == POISON).all()

    engine = make_engine(target.pool, host, whole, transfer=transfer, staging_bytes=staging_bytes)
    after = on_cpu(target, build)
    slots = random_slots(NUM_PAGES, layout, num_blocks, block_tokens, seed + 2)
    slots[torch.rand(len(slots), generator=torch.Generator().manual_seed(seed)) < 0.2] = -1
    scatter(after.pool, slots, whole, expected)
    # Slots of a load may come from the device as well.
    assert finish_load(engine, pages, slots.cuda() if seed % 2 else slots) == (NUM_PAGES, None)
    engine.close(20)
    assert same_bytes(target.storages, after.storages)


@pytest.mark.parametrize("transfer", PATHS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_and_element_type_moves_bit_exactly(shape: str, dtype: str, transfer: str) -> None:
    check_round_trip(gqa(dtype, dim=64, page_tokens=32), shape, 16, transfer=transfer, seed=1)


@pytest.mark.parametrize("transfer", PATHS)
@pytest.mark.parametrize("block_tokens", [1, 2, 32, 256])
def test_every_block_size_moves_bit_exactly(block_tokens: int, transfer: str) -> None:
    check_round_trip(gqa(heads=2, dim=32, page_tokens=256), "head_major", block_tokens, transfer=transfer, seed=2)


@pytest.mark.parametrize("transfer", PATHS)
@pytest.mark.parametrize(
    "layout",
    [
        int8_with_scales(dim=64, page_tokens=32),
        with_page_state(page_tokens=32),
        KVLayout.mla(num_layers=4, latent_dim=576, dtype=torch.bfloat16, page_tokens=64),
        gqa("bf16", dim=5, page_tokens=4),
        gqa("int8", dim=7, page_tokens=4),
        gqa("fp8", layers=3, heads=3, dim=80, page_tokens=48),
    ],
    ids=["int8 and scales", "page state", "mla", "odd bf16", "odd int8", "fp8 of 48 tokens"],
)
def test_every_layout_moves_bit_exactly(layout: KVLayout, transfer: str) -> None:
    check_round_trip(layout, "separate", 4, transfer=transfer, seed=3)


def test_llama_geometry_moves_bit_exactly_in_many_chunks() -> None:
    layout = KVLayout.gqa(num_layers=32, num_kv_heads=8, head_dim=128, dtype=torch.bfloat16, page_tokens=64)
    check_round_trip(layout, "separate", 16, transfer="staged", seed=4, staging_pages=3)


@pytest.mark.parametrize("transfer", PATHS)
def test_ranks_of_any_tp_size_read_what_others_wrote(transfer: str) -> None:
    layout = gqa(layers=3, heads=3, dim=64, page_tokens=16)
    whole = [[torch.randint(0, 256, (160, 3, 128), dtype=torch.uint8) for _ in range(2)] for _ in range(3)]
    host, pages, slots = host_pool(layout, 6), batch([4, 2]), torch.arange(32) + 64

    def pool(tp: int, part: RankSlice, *, fill: bool) -> KVPool:
        local = RankSlice.local_kv_heads(3, tp)
        views = []
        for layer in whole:
            planes = []
            for data in layer:
                raw = torch.full((160, local, 128), POISON, dtype=torch.uint8)
                if fill:
                    raw[:, : part.num_heads] = data[:, part.head_start : part.head_start + part.num_heads]
                planes.append(raw.cuda().view(torch.bfloat16).view(-1, 16, local, 64))
            views.append(planes)
        return KVPool(layout, views)

    for rank in range(2):
        part = RankSlice.of_rank(3, 2, rank)
        engine = make_engine(pool(2, part, fill=True), host, part, writes_identity=rank == 0, transfer=transfer)
        assert finish_offload(engine, pages, slots) is None
        engine.close(20)
    for tp in (1, 3, 4, 6):
        for rank in range(tp):
            part = RankSlice.of_rank(3, tp, rank)
            target = pool(tp, part, fill=False)
            engine = make_engine(target, host, part, transfer=transfer)
            assert finish_load(engine, pages, slots - 64) == (2, None)
            engine.close(20)
            for layer, data in zip(target.views, whole, strict=True):
                for view, want in zip(layer, data, strict=True):
                    have = view.flatten(0, 1).cpu().view(torch.uint8)
                    expected = want[64:96, part.head_start : part.head_start + part.num_heads]
                    assert torch.equal(have[:32, : part.num_heads], expected)
                    assert (have[32:] == POISON).all()
                    assert (have[:, part.num_heads :] == POISON).all()


class Site:
    """A pool on the GPU with an engine, and a stream on which a model computes."""

    def __init__(self, transfer: str, *, default_stream: bool) -> None:
        self.layout = gqa(layers=4, heads=2, dim=64, page_tokens=16)
        self.case = build_pool(
            "separate", self.layout, num_blocks=32, block_tokens=16, local_heads=2, device="cuda"
        )
        self.host = host_pool(self.layout, 8)
        self.engine = make_engine(self.case.pool, self.host, RankSlice(0, 2, 2), transfer=transfer)
        self.stream = torch.cuda.default_stream() if default_stream else torch.cuda.Stream()
        torch.cuda.synchronize()

    def fill(self, block: int, value: int) -> None:
        for storage in self.case.storages:
            storage[block].view(torch.uint8).fill_(value)

    def slots(self, block: int) -> torch.Tensor:
        return torch.arange(16) + 16 * block

    def payload(self, index: int) -> np.ndarray:
        start = self.layout.header_bytes
        return page_of(self.host, self.layout, index)[start : start + self.layout.payload_bytes]

    def block(self, block: int) -> list[torch.Tensor]:
        return [storage[block].clone() for storage in self.case.storages]


@pytest.fixture(params=[(path, default) for path in PATHS for default in (True, False)], ids=str)
def site(request: pytest.FixtureRequest) -> Iterator[Site]:
    made = Site(request.param[0], default_stream=request.param[1])
    yield made
    torch.cuda.synchronize()
    made.engine.close(20)


SPIN_CYCLES = 4_000_000
"""About 2 ms: longer than queueing and copying a small page."""


def offload_sees_what_compute_wrote(site: Site, value: int) -> bool:
    with torch.cuda.stream(site.stream):
        torch.cuda._sleep(SPIN_CYCLES)
        site.fill(3, value)
        transfer = site.engine.offload(batch([0]), site.slots(3))
    wait_until(transfer.poll)
    return transfer.error is None and bool((site.payload(0) == value).all())


def load_leaves_what_compute_still_reads(site: Site, value: int) -> bool:
    with torch.cuda.stream(site.stream):
        site.fill(5, value)
        assert finish_offload(site.engine, batch([1]), site.slots(5)) is None
        site.fill(7, value ^ 0xFF)
        torch.cuda._sleep(SPIN_CYCLES)
        seen = site.block(7)
        load = site.engine.load(batch([1]), site.slots(7))
    wait_until(load.poll)
    torch.cuda.synchronize()
    old = all(bool((tensor.view(torch.uint8) == value ^ 0xFF).all()) for tensor in seen)
    new = all(bool((tensor.view(torch.uint8) == value).all()) for tensor in site.block(7))
    return load.num_good == 1 and old and new


def chain_of_store_load_store_keeps_each_content(site: Site, value: int) -> bool:
    other = torch.cuda.Stream()
    with torch.cuda.stream(site.stream):
        site.fill(9, value ^ 0x0F)
        assert finish_offload(site.engine, batch([3]), site.slots(9)) is None
        torch.cuda._sleep(SPIN_CYCLES)
        site.fill(8, value)
        first = site.engine.offload(batch([2]), site.slots(8))
    wait_until(first.poll_released)
    with torch.cuda.stream(other):
        load = site.engine.load(batch([3]), site.slots(8))
    wait_until(load.poll)
    with torch.cuda.stream(site.stream):
        torch.cuda._sleep(SPIN_CYCLES)
        site.case.storages[0][8].view(torch.uint8).fill_(value ^ 0xF0)
        second = site.engine.offload(batch([4]), site.slots(8))
    wait_until(lambda: first.poll() and second.poll())
    layout, last = site.layout, site.payload(4)
    plane = layout.plane_offsets[1]
    changed, kept = last[:plane], last[plane : layout.head_bytes]
    return (
        bool((site.payload(2) == value).all())
        and bool((changed == value ^ 0xF0).all())
        and bool((kept == value ^ 0x0F).all())
    )


ORDERINGS = (
    offload_sees_what_compute_wrote,
    load_leaves_what_compute_still_reads,
    chain_of_store_load_store_keeps_each_content,
)


@pytest.mark.parametrize("scenario", ORDERINGS)
def test_transfers_are_ordered_with_the_model(site: Site, scenario: Callable[[Site, int], bool]) -> None:
    for attempt in range(25):
        assert scenario(site, 1 + attempt), f"attempt {attempt}"


@pytest.mark.parametrize("scenario", ORDERINGS)
def test_these_orderings_are_wrong_without_the_event_of_the_caller(
    scenario: Callable[[Site, int], bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tests above can fail: let the engine wait for a stream on which nothing is queued."""
    site = Site("staged", default_stream=False)
    monkeypatch.setattr(CudaDevice, "current_stream", lambda self: self.new_stream())
    assert not all(scenario(site, 1 + attempt) for attempt in range(10))
    torch.cuda.synchronize()


def test_a_thousand_pages_of_many_tasks_in_flight_stay_exact() -> None:
    """Loads and offloads of different sizes side by side on small rings."""
    layout = gqa(layers=4, heads=2, dim=64, page_tokens=16)
    case = build_pool("separate", layout, num_blocks=256, block_tokens=16, local_heads=2, device="cuda")
    host = host_pool(layout, 256)
    engine = make_engine(
        case.pool, host, RankSlice(0, 2, 2), transfer="staged", staging_bytes=5 * layout.payload_bytes
    )
    generator = np.random.default_rng(3)
    before = [storage.clone() for storage in case.storages]
    stored = batch(list(range(128)))
    assert finish_offload(engine, stored, torch.arange(128 * 16)) is None
    running = []
    for _ in range(60):
        first, count = int(generator.integers(0, 120)), int(generator.integers(1, 9))
        pages = stored[first : first + count]
        slots = torch.arange(first * 16, (first + count) * 16)
        # Both ends hold the same bytes, so any order is right and any torn copy is not.
        running.append((engine.load(pages, slots + 128 * 16), count))
        mirror = batch(list(range(128 + first, 128 + first + count)))
        running.append((engine.offload(mirror, slots), None))
    wait_until(lambda: all([transfer.poll() for transfer, _ in running]))  # noqa: C419
    for transfer, count in running:
        assert transfer.error is None
        if count is not None:
            assert transfer.num_good == count
    touched = [storage[128:] for storage in case.storages]
    for now, old in zip(touched, before, strict=True):
        for block in range(128):
            now_bytes, old_bytes = now[block].view(torch.uint8), old[block].view(torch.uint8)
            untouched = old[128 + block].view(torch.uint8)
            assert torch.equal(now_bytes, old_bytes) or torch.equal(now_bytes, untouched)
    engine.close(20)


@pytest.mark.parametrize("transfer", PATHS)
def test_any_flipped_byte_is_a_miss(transfer: str) -> None:
    site = Site(transfer, default_stream=True)
    layout = site.layout
    pages = batch([0, 1, 2])
    assert finish_offload(site.engine, pages, torch.arange(48)) is None
    offsets = [0, 20, 40, 72, 128, layout.header_bytes, layout.head_offset(1) + 77]
    offsets.append(layout.header_bytes + layout.payload_bytes - 1)
    for offset in offsets:
        page_of(site.host, layout, 1)[offset] ^= 0x40
        assert finish_load(site.engine, pages, torch.arange(48) + 100) == (1, None), offset
        page_of(site.host, layout, 1)[offset] ^= 0x40
    assert finish_load(site.engine, pages, torch.arange(48) + 100) == (3, None)
    site.engine.close(20)


def test_slots_are_released_long_before_the_last_byte_has_left() -> None:
    layout = KVLayout.gqa(num_layers=32, num_kv_heads=8, head_dim=128, dtype=torch.bfloat16, page_tokens=64)
    case = build_pool("separate", layout, num_blocks=24 * 64, block_tokens=1, local_heads=8, device="cuda")
    host = host_pool(layout, 24)
    engine = make_engine(case.pool, host, RankSlice(0, 8, 8), staging_bytes=256 << 20)
    pages, slots = batch(list(range(24))), torch.arange(24 * 64)
    fractions = []
    for _ in range(4):
        torch.cuda.synchronize()
        start = time.perf_counter()
        transfer = engine.offload(pages, slots)
        while not transfer.poll_released():
            pass
        released_s = time.perf_counter() - start
        assert not transfer.poll()
        while not transfer.poll():
            pass
        fractions.append(released_s / (time.perf_counter() - start))
    assert min(fractions) < 0.25, fractions
    engine.close(20)


def test_memory_that_cannot_be_pinned_is_copied_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    layout = gqa(layers=2, heads=2, dim=64, page_tokens=16)
    case = build_pool("separate", layout, num_blocks=32, block_tokens=16, local_heads=2, device="cuda")
    host = host_pool(layout, 8)
    # Registered already: the driver refuses a second registration.
    taken = PinnedMemory(host.ctypes.data, host.nbytes, CudaRegistrar(driver(), torch.device("cuda", 0)))
    assert taken.is_pinned
    with caplog.at_level(logging.WARNING):
        engine = make_engine(case.pool, host, RankSlice(0, 2, 2), transfer="direct")
    assert len([record for record in caplog.records if "could not be pinned" in record.message]) == 1
    taken.close()
    assert float(torch.ones(4, device="cuda").sum()) == 4.0, "a pending CUDA error was left behind"
    pages = batch([0, 5])
    assert finish_offload(engine, pages, torch.arange(32)) is None
    assert finish_load(engine, pages, torch.arange(32) + 64) == (2, None)
    torch.cuda.synchronize()
    for storage in case.storages:
        assert torch.equal(storage[:2].view(torch.int16), storage[4:6].view(torch.int16))
    engine.close(20)


def test_a_pool_is_pinned_in_pieces_and_let_go() -> None:
    host = host_pool(gqa(), 1024)
    for _ in range(2):
        told: list[tuple[int, int]] = []
        memory = PinnedMemory(
            host.ctypes.data,
            host.nbytes,
            CudaRegistrar(driver(), torch.device("cuda", 0)),
            piece_bytes=1 << 20,
            progress=lambda done, total, told=told: told.append((done, total)),  # type: ignore[misc]
        )
        assert memory.is_pinned
        assert told[-1] == (host.nbytes, host.nbytes)
        memory.close()


@pytest.mark.parametrize("variant", ["torch kernels", "single copies", "three copy streams"])
def test_other_ways_of_doing_it_give_the_same_pages(variant: str) -> None:
    layout = gqa(layers=2, heads=2, dim=64, page_tokens=16)
    case = build_pool("head_major", layout, num_blocks=32, block_tokens=16, local_heads=2, device="cuda")
    host, whole = host_pool(layout, 16), RankSlice(0, 2, 2)
    usual = make_engine(case.pool, host, whole)
    assert finish_offload(usual, batch([3, 4, 5, 6]), torch.arange(64)) is None
    expected = host.copy()
    usual.close(20)
    host[:] = POISON

    pages = HostPages(host, layout, whole, FINGERPRINT, writes_identity=True)
    if variant == "torch kernels":
        kernels = TorchKernels(case.pool, whole)
    else:
        from mlkv.kernels.triton_kernels import TritonKernels

        kernels = TritonKernels(case.pool, whole)  # type: ignore[assignment]
    device = CudaDevice(case.pool.device, pages, kernels, batched_copies=variant != "single copies")
    engine: TransferEngine = StagedTransferEngine(
        case.pool,
        pages,
        device,
        staging_bytes=2 * layout.payload_bytes,
        max_tasks=8,
        transfer="staged",
        num_copy_streams=3 if variant == "three copy streams" else 1,
    )
    assert finish_offload(engine, batch([3, 4, 5, 6]), torch.arange(64)) is None
    np.testing.assert_array_equal(host, expected)
    assert finish_load(engine, batch([3, 4, 5, 6]), torch.arange(64) + 128) == (4, None)
    for storage in case.storages:
        assert torch.equal(storage[:4].view(torch.int16), storage[8:12].view(torch.int16))
    engine.close(20)


def test_streams_are_nobody_elses_and_used_again_after_close() -> None:
    layout = gqa(layers=2, heads=2, dim=64, page_tokens=16)
    case = build_pool("separate", layout, num_blocks=32, block_tokens=16, local_heads=2, device="cuda")
    pages = HostPages(host_pool(layout, 8), layout, RankSlice(0, 2, 2), FINGERPRINT, writes_identity=True)
    of_torch = {torch.cuda.Stream(priority=-1).cuda_stream for _ in range(64)}
    used = []
    for _ in range(2):
        kernels = TorchKernels(case.pool, RankSlice(0, 2, 2))
        device = CudaDevice(case.pool.device, pages, kernels, priority=-2)  # which no other test has
        used.append([device.new_stream() for _ in range(3)])
        device.close()
    assert len({*used[0]}) == 3
    assert not of_torch.intersection(used[0])
    assert used[0] == used[1]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("transfer", PATHS)
def test_the_device_need_not_be_the_callers_current_one(transfer: str) -> None:
    """In small chunks, most of which are queued by `poll`, while the model's stream is not idle."""
    layout = gqa(layers=4, heads=2, dim=64, page_tokens=16)
    case = build_pool("separate", layout, num_blocks=256, block_tokens=16, local_heads=2, device="cuda:1")
    host = host_pool(layout, 64)
    engine = make_engine(
        case.pool, host, RankSlice(0, 2, 2), transfer=transfer, staging_bytes=2 * layout.payload_bytes
    )
    torch.cuda.set_device(0)
    pages, slots = batch(list(range(64))), torch.arange(64 * 16)
    busy = torch.randn(4096, 4096, device="cuda:1")
    for _ in range(20):
        busy = busy @ busy
    assert finish_offload(engine, pages, slots) is None
    assert finish_load(engine, pages, slots + 128 * 16) == (64, None)
    assert torch.cuda.current_device() == 0
    torch.cuda.synchronize(1)
    for storage in case.storages:
        assert torch.equal(storage[:64].view(torch.uint8), storage[128:192].view(torch.uint8))
    engine.close(20)
