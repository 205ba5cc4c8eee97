"""The staged pipeline over simulated streams: every order that events allow must give the same bytes."""

from __future__ import annotations

import functools
import random
import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import (
    FINGERPRINT,
    POISON,
    batch,
    build_pool,
    gqa,
    host_pool,
    page_of,
    random_slots,
    reference_page,
    reference_scatter,
    same_bytes,
    wait_until,
)
from sim_device import SimDevice, SimEvent, SimKernels, SimStream, sim_engine

from mlkv.errors import CacheUsageError, DeadlineExceeded
from mlkv.kernels.staged import DIRECT_BYTES, DIRECT_PIECE_BYTES, StagedTransferEngine, choose_path
from mlkv.kernels.staging import StagingRing
from mlkv.layout import KVLayout, RankSlice
from mlkv.page import checksum_table, verify_page

LAYOUT = gqa("fp16", layers=1, heads=2, dim=16, page_tokens=4)  # runs of 512 bytes
SMALL = gqa("fp16", layers=1, heads=2, dim=6, page_tokens=4)  # of 192
WHOLE = RankSlice(0, 2, 2)
NUM_BLOCKS = 32


class Site:
    """A simulated device with a pool, and a host pool of 16 poisoned pages."""

    def __init__(self, seed: int = 0, layout: KVLayout = LAYOUT, **options: object) -> None:
        self.layout = layout
        self.build = functools.partial(
            build_pool, "separate", layout, num_blocks=NUM_BLOCKS, block_tokens=4, local_heads=2
        )
        self.case = self.build(seed=seed)
        self.host = host_pool(layout, 16)
        self.engine: StagedTransferEngine[SimStream]
        self.device: SimDevice
        self.engine, self.device = sim_engine(
            self.case.pool,
            self.host,
            WHOLE,
            fingerprint=FINGERPRINT,
            **options,  # type: ignore[arg-type]
        )
        self.order = random.Random(seed)

    def store(self, indices: list[int], slots: torch.Tensor) -> None:
        transfer = self.engine.offload(batch(indices), slots)
        self.device.run_until(transfer.poll, self.order)
        assert transfer.error is None

    def payload(self, index: int) -> np.ndarray:
        start = self.layout.header_bytes
        return page_of(self.host, self.layout, index)[start : start + self.layout.payload_bytes].reshape(2, -1)

    def fill_slots(self, slots: torch.Tensor, value: int) -> None:
        for storage in self.case.storages:
            storage.view(torch.uint8).flatten(0, 1)[slots] = value


@given(
    seed=st.integers(0, 10_000),
    num_pages=st.integers(1, 9),
    staging_pages=st.integers(1, 5),
    segment_pages=st.integers(1, 3),
    num_copy_streams=st.integers(1, 3),
    layout=st.sampled_from([LAYOUT, SMALL]),
)
@settings(max_examples=60, deadline=None)
def test_pages_are_exact_in_every_order_of_streams(
    seed: int, num_pages: int, staging_pages: int, segment_pages: int, num_copy_streams: int, layout: KVLayout
) -> None:
    """Two offloads and two loads in flight at once, larger than the ring, in a random order of steps."""
    site = Site(
        seed,
        layout,
        staging_pages=staging_pages,
        segment_pages=segment_pages,
        num_copy_streams=num_copy_streams,
    )
    slots = random_slots(16, layout, NUM_BLOCKS, 4, seed).view(16, 4)
    stored, other = list(range(num_pages)), list(range(num_pages, min(16, 2 * num_pages)))
    expected_pages = [reference_page(site.case.pool, s.tolist(), 2) for s in slots]
    first = site.engine.offload(batch(stored), slots[stored].flatten())
    second = site.engine.offload(batch(other), slots[other].flatten())
    site.device.run_until(lambda: first.poll() and second.poll(), site.order)
    assert (first.error, second.error) == (None, None)
    for index in stored + other:
        np.testing.assert_array_equal(site.payload(index), expected_pages[index])

    expected = site.build(storages=[storage.clone() for storage in site.case.storages])
    targets = random_slots(16, layout, NUM_BLOCKS, 4, seed + 1).view(16, 4)
    targets[torch.rand(targets.shape, generator=torch.Generator().manual_seed(seed)) < 0.2] = -1
    loads = [
        site.engine.load(batch(part), targets[part].flatten())  # generations start anew in each batch
        for part in (stored, other)
    ]
    site.device.run_until(lambda: all(load.poll() for load in loads), site.order)
    for part, load in zip((stored, other), loads, strict=True):
        assert (load.num_good, load.error) == (len(part), None)
        for index in part:
            reference_scatter(expected.pool, targets[index].tolist(), expected_pages[index])
    assert same_bytes(site.case.storages, expected.storages)
    site.device.run_all(site.order)


def offload_sees_what_compute_wrote(site: Site) -> bool:
    """The model still has to write a page when its offload is submitted."""
    slots = torch.arange(4)
    site.device.compute.run(lambda: None)
    site.device.compute.run(lambda: site.fill_slots(slots, 0x33))
    transfer = site.engine.offload(batch([0]), slots)
    site.device.run_until(transfer.poll, site.order)
    return bool((site.payload(0) == 0x33).all())


def load_leaves_what_compute_still_reads(site: Site) -> bool:
    """The model still reads a page's old owner when a load into its slots is submitted."""
    slots, seen = torch.arange(4), []
    site.store([0], slots + 40)
    site.fill_slots(slots, 0x44)
    site.device.compute.run(lambda: None)
    site.device.compute.run(lambda: seen.append(reference_page(site.case.pool, slots.tolist(), 2)))
    load = site.engine.load(batch([0]), slots)
    site.device.run_until(load.poll, site.order)
    site.device.run_all(site.order)
    new = reference_page(site.case.pool, slots.tolist(), 2)
    return bool((seen[0] == 0x44).all()) and np.array_equal(new, site.payload(0))


def chain_of_store_load_store_keeps_each_content(site: Site) -> bool:
    """One set of slots is stored, loaded over, changed by the model and stored again."""
    slots, pages = torch.arange(4), [page_of(site.host, LAYOUT, index) for index in (0, 1, 2)]
    site.store([1], slots + 60)
    loaded = site.payload(1).copy()
    site.device.compute.run(lambda: site.fill_slots(slots, 0x55))
    first = site.engine.offload(batch([0]), slots)
    site.device.run_until(first.poll_released, site.order)
    load = site.engine.load(batch([1]), slots)
    site.device.run_until(load.poll, site.order)
    has_loaded = np.array_equal(reference_page(site.case.pool, slots.tolist(), 2), loaded)
    site.device.compute.run(lambda: site.fill_slots(slots[:2], 0x66))
    second = site.engine.offload(batch([2]), slots)
    site.device.run_until(lambda: first.poll() and second.poll(), site.order)
    k = LAYOUT.plane_offsets[1]
    old, changed = site.payload(0), site.payload(2)
    assert pages[0] is not None
    return (
        has_loaded
        and bool((old == 0x55).all())
        and bool((changed[:, : k // 2] == 0x66).all())
        and np.array_equal(changed[:, k // 2 : k], loaded[:, k // 2 : k])
    )


ORDERINGS = (
    offload_sees_what_compute_wrote,
    load_leaves_what_compute_still_reads,
    chain_of_store_load_store_keeps_each_content,
)


@pytest.mark.parametrize("scenario", ORDERINGS)
@pytest.mark.parametrize("transfer", ["staged"])
def test_transfers_are_ordered_with_the_model(scenario: Callable[[Site], bool], transfer: str) -> None:
    for seed in range(40):
        assert scenario(Site(seed, transfer=transfer)), f"wrong bytes with the order of seed {seed}"


@pytest.mark.parametrize("scenario", ORDERINGS)
def test_these_orderings_are_wrong_without_the_event_of_the_caller(
    scenario: Callable[[Site], bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tests above can fail: take the event away and some order shows it."""

    def unordered(self: SimDevice, stream: SimStream, event: SimEvent) -> None:
        if event not in from_compute:
            wait(self, stream, event)

    def remember(self: SimDevice, stream: SimStream) -> SimEvent:
        event = record(self, stream)
        assert isinstance(event, SimEvent)
        if stream is self.compute:
            from_compute.append(event)
        return event

    wait, record = SimDevice.wait, SimDevice.record
    from_compute: list[SimEvent] = []
    monkeypatch.setattr(SimDevice, "wait", unordered)
    monkeypatch.setattr(SimDevice, "record", remember)
    assert not all(scenario(Site(seed)) for seed in range(40))


def test_slots_are_released_once_gathered_whatever_the_copies_do() -> None:
    site = Site(staging_pages=4)
    slots = torch.arange(16)
    expected = [reference_page(site.case.pool, s.tolist(), 2) for s in slots.view(4, 4)]
    transfer = site.engine.offload(batch([0, 1, 2, 3]), slots)
    kernel_stream = site.engine._offloads.kernel_stream
    while not transfer.poll_released():
        stream = kernel_stream if kernel_stream.can_step() else site.device.compute
        stream.step()
    assert not transfer.poll()
    layout = site.case.pool.layout
    payloads = site.host.reshape(-1, layout.page_bytes)[:, layout.header_bytes :]
    assert (payloads == POISON).all(), "nothing was copied yet"
    site.fill_slots(slots, 0)
    site.device.run_until(transfer.poll, site.order)
    for index in range(4):
        np.testing.assert_array_equal(site.payload(index), expected[index])


def test_a_page_of_somebody_else_is_a_miss() -> None:
    site = Site()
    site.store([3], torch.arange(4))
    for pages, num_good in ((batch([2]), 0), (batch([3], generation=8), 0), (batch([3]), 1)):
        load = site.engine.load(pages, torch.arange(4))
        site.device.run_until(load.poll, site.order)
        assert (load.num_good, load.error) == (num_good, None)


def test_a_bad_page_ends_the_good_prefix() -> None:
    site = Site(staging_pages=2)
    slots = torch.arange(20)
    site.store([0, 1, 2, 3, 4], slots)
    site.payload(2)[1, 5] ^= 1
    load = site.engine.load(batch([0, 1, 2, 3, 4]), slots + 40)
    site.device.run_until(load.poll, site.order)
    assert (load.num_good, load.error) == (2, None)
    page_of(site.host, LAYOUT, 1)[20] ^= 1  # the generation
    load = site.engine.load(batch([0, 1, 2, 3, 4]), slots + 40)
    site.device.run_until(load.poll, site.order)
    assert (load.num_good, load.error) == (1, None)


def test_a_page_verifies_only_when_its_bytes_are_there() -> None:
    for seed in range(20):
        site = Site(seed)
        pages = batch([0, 1, 2])
        transfer = site.engine.offload(pages, torch.arange(12))
        while not transfer.poll():
            page = page_of(site.host, LAYOUT, 0)
            assert not verify_page(page, LAYOUT, pages.keys[:16], FINGERPRINT, 7)
            assert (checksum_table(page, LAYOUT).view(np.uint8) == POISON).all()
            site.device.step_any(site.order)
        for position, index in enumerate((0, 1, 2)):
            key = pages.keys[16 * position : 16 * position + 16]
            assert verify_page(page_of(site.host, LAYOUT, index), LAYOUT, key, FINGERPRINT, 7 + position)


@pytest.mark.parametrize("fail_at", [0, 1, 2, 3])
@pytest.mark.parametrize("kind", ["load", "offload"])
def test_a_device_that_refuses_in_the_middle_fails_that_transfer_only(kind: str, fail_at: int) -> None:
    for seed in range(10):
        site = Site(seed, staging_pages=2)
        slots = torch.arange(12)
        site.store([0, 1, 2], slots)
        site.device.fail_at = fail_at
        if kind == "load":
            failed = site.engine.load(batch([0, 1, 2]), slots + 40)
            assert not failed.poll() or not any(s.work for s in site.device.streams)
            site.device.run_until(failed.poll, site.order)
            assert failed.num_good == 0
        else:
            refused = site.engine.offload(batch([4, 5, 6]), slots)
            site.device.run_until(refused.poll, site.order)
            assert refused.poll_released()
            assert (page_of(site.host, LAYOUT, 4)[: LAYOUT.header_bytes] == POISON).all()
            failed = refused  # type: ignore[assignment]
        assert failed.error == "RuntimeError: device refuses"
        # What was queued of it is over before the staging it used is used again.
        before = [reference_page(site.case.pool, s.tolist(), 2) for s in slots.view(3, 4)]
        site.store([8, 9, 10], slots)
        for index, page in zip((8, 9, 10), before, strict=True):
            np.testing.assert_array_equal(site.payload(index), page)
        load = site.engine.load(batch([8, 9, 10]), slots + 60)
        site.device.run_until(load.poll, site.order)
        assert (load.num_good, load.error) == (3, None)


def test_staging_that_a_failed_transfer_still_fills_is_not_used_by_the_next() -> None:
    for seed in range(60):
        site = Site(seed, staging_pages=3, num_copy_streams=2)
        site.store([0, 1, 2], torch.arange(12))
        site.store([3, 4, 5], torch.arange(12, 24))
        site.device.fail_at = 3  # two copies and a scatter are queued; the second scatter is refused
        failed = site.engine.load(batch([0, 1, 2]), torch.arange(40, 52))
        assert failed.error is not None
        load = site.engine.load(batch([3, 4, 5]), torch.arange(60, 72))
        site.device.run_until(lambda load=load: load.poll(), site.order)  # type: ignore[misc]
        assert (load.num_good, load.error) == (3, None)
        for index in range(3):
            loaded = reference_page(site.case.pool, list(range(60 + 4 * index, 64 + 4 * index)), 2)
            np.testing.assert_array_equal(loaded, site.payload(3 + index))


def test_a_failed_transfer_is_not_over_while_its_kernels_still_run() -> None:
    site = Site(staging_pages=4)
    site.device.fail_at = 3  # gather, copy, gather are queued; the second copy is refused
    transfer = site.engine.offload(batch([0, 1, 2]), torch.arange(12))
    assert transfer.error is not None
    assert not transfer.poll_released()
    kernel_stream = site.engine._offloads.kernel_stream
    for stream in (site.device.compute, kernel_stream):
        while stream.can_step():
            stream.step()
    assert not kernel_stream.work
    assert not transfer.poll(), "the first copy still writes a page"
    site.device.run_all(site.order)
    assert transfer.poll_released()
    assert transfer.poll()


def test_an_event_that_raises_ends_the_transfer_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    site = Site()
    transfer = site.engine.offload(batch([0]), torch.arange(4))

    def broken(self: SimEvent) -> bool:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(SimEvent, "query", broken)
    assert transfer.poll_released()
    assert transfer.poll()
    assert transfer.error is not None
    assert "illegal memory access" in transfer.error


def test_an_event_that_raises_while_more_is_to_be_queued_does_not_escape(monkeypatch: pytest.MonkeyPatch) -> None:
    site = Site(chunks_ahead=1)
    transfer = site.engine.offload(batch([0, 1, 2]), torch.arange(12))

    def broken(self: SimEvent) -> bool:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(SimEvent, "query", broken)
    assert transfer.poll()
    assert transfer.error is not None


@pytest.mark.parametrize("direction", ["load", "offload"])
def test_no_more_chunks_are_queued_ahead_of_the_device_than_wanted(direction: str) -> None:
    site = Site(chunks_ahead=2)
    pages, slots = batch([2, 3, 4, 5, 6, 7]), torch.arange(24)
    site.store([2, 3, 4, 5, 6, 7], slots)
    queued: list[int] = []
    copy = site.device.copy

    def counted(
        stream: SimStream, targets: np.ndarray, sources: np.ndarray, piece_bytes: int, *, to_host: bool
    ) -> None:
        if piece_bytes != slots.numel() * 8:
            queued.append(len(targets))
        copy(stream, targets, sources, piece_bytes, to_host=to_host)

    site.device.copy = counted  # type: ignore[method-assign]
    large = site.engine.load(pages, slots) if direction == "load" else site.engine.offload(pages, slots)
    assert len(queued) == 2
    for _ in range(5):
        assert not large.poll()
    assert len(queued) == 2, "nothing ran on the device, so there is no room for more"
    wait_until(lambda: bool(site.device.step_any(site.order) or large.poll()) and large.poll())
    assert sum(queued) == 6
    assert large.error is None


def test_a_small_transfer_does_not_overtake_a_large_one_that_is_still_being_queued() -> None:
    site = Site(chunks_ahead=1)
    large = site.engine.offload(batch([2, 3, 4, 5, 6]), torch.arange(20))
    small = site.engine.offload(batch([7]), torch.arange(4))
    done: list[str] = []

    def watch() -> bool:
        for name, transfer in (("large", large), ("small", small)):
            if name not in done and transfer.poll():
                done.append(name)
        return len(done) == 2

    wait_until(lambda: bool(site.device.step_any(site.order) or True) and watch())
    assert done == ["large", "small"]
    assert (large.error, small.error) == (None, None)


@pytest.mark.parametrize("waits", ["copies", "kernels"])
def test_what_makes_its_caller_wait_is_never_queued_by_the_engines_thread(
    waits: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SimKernels, "takes_stream", waits != "kernels")
    site = Site(host_is_pinned=waits != "copies", transfer="direct")
    threads: set[int] = set()
    copy = site.device.copy
    site.device.copy = lambda *args, **options: (  # type: ignore[method-assign]
        threads.add(threading.get_ident()),
        copy(*args, **options),
    )
    transfer = site.engine.offload(batch([0]), torch.arange(4))
    wait_until(lambda: bool(site.device.step_any(site.order) or transfer.poll()) and transfer.poll())
    assert transfer.error is None
    load = site.engine.load(batch([0]), torch.arange(4))
    wait_until(lambda: bool(site.device.step_any(site.order) or load.poll()) and load.poll())
    assert load.num_good == 1
    assert threads
    assert threading.get_ident() not in threads


def test_transfers_beyond_the_bound_are_refused_and_room_comes_back() -> None:
    site = Site(max_tasks=2)
    running = [site.engine.offload(batch([index]), torch.arange(4)) for index in (0, 1)]
    refused = site.engine.offload(batch([2]), torch.arange(4))
    assert refused.poll()
    assert refused.poll_released()
    assert refused.error == "refused: 2 transfers of this direction are in flight"
    site.device.run_all(site.order)
    site.store([3], torch.arange(4))
    assert all(transfer.poll() for transfer in running)


def test_transfers_that_are_still_running_are_not_forgotten_when_others_make_room() -> None:
    site = Site(max_tasks=3)
    first, second = (site.engine.offload(batch([index]), torch.arange(4)) for index in (0, 1))
    site.device.run_all(site.order)
    third = site.engine.offload(batch([2]), torch.arange(4))
    fourth = site.engine.offload(batch([3]), torch.arange(4))  # finds that the first two are over
    with pytest.raises(DeadlineExceeded, match="2 transfers"):
        site.engine.close(0.01)
    assert first.poll()
    assert second.poll()
    site.device.run_all(site.order)
    site.engine.close(10)
    assert (third.error, fourth.error) == (None, None)


@pytest.mark.parametrize(
    ("layout", "num_stored_before", "launches"),
    [
        (LAYOUT, 0, [1, 3, 2, 1]),
        (LAYOUT, 2, [1, 1, 2, 2, 1]),  # what is free at the end of the ring and at its start is apart
    ],
)
def test_one_kernel_gathers_all_that_there_is_room_for_after_the_first_chunk(
    layout: KVLayout, num_stored_before: int, launches: list[int]
) -> None:
    site = Site(layout=layout, staging_pages=4)
    site.store(list(range(num_stored_before)), torch.arange(4 * num_stored_before))
    seen: list[int] = []
    gather = site.device.kernels.gather
    site.device.kernels.gather = lambda num_pages, *args: (  # type: ignore[method-assign]
        seen.append(num_pages),
        gather(num_pages, *args),
    )
    slots = torch.arange(28)
    expected = [reference_page(site.case.pool, s.tolist(), 2) for s in slots.view(7, 4)]
    transfer = site.engine.offload(batch(list(range(7))), slots)
    site.device.run_until(transfer.poll, site.order)
    assert seen == launches
    for index in range(7):
        np.testing.assert_array_equal(site.payload(index), expected[index])


def test_close_waits_for_what_runs_within_its_deadline() -> None:
    site = Site()
    transfer = site.engine.offload(batch([0]), torch.arange(4))
    with pytest.raises(DeadlineExceeded, match="mlkv-offload: 1 transfers"):
        site.engine.close(0.02)
    assert not site.device.closed
    site.device.run_all(site.order)
    site.engine.close(10)
    site.engine.close(10)
    assert transfer.poll()
    assert transfer.error is None
    with pytest.raises(CacheUsageError, match="closed"):
        site.engine.offload(batch([0]), torch.arange(4))


def test_empty_batches_are_done_at_once() -> None:
    site, nothing = Site(), torch.empty(0, dtype=torch.int64)
    load, offload = site.engine.load(batch([]), nothing), site.engine.offload(batch([]), nothing)
    assert load.poll()
    assert (load.num_good, load.error) == (0, None)
    assert offload.poll()
    assert offload.poll_released()
    assert offload.error is None


def test_close_fails_what_was_not_queued_yet() -> None:
    site = Site(chunks_ahead=1)
    running = site.engine.offload(batch([0]), torch.arange(4))
    waiting = site.engine.offload(batch([1]), torch.arange(4))
    with pytest.raises(DeadlineExceeded):
        site.engine.close(0.01)
    site.device.run_all(site.order)
    site.engine.close(10)
    assert running.poll()
    assert running.error is None
    assert waiting.poll()
    assert waiting.poll_released()
    assert waiting.error is not None
    assert "closed before" in waiting.error
    assert (page_of(site.host, LAYOUT, 1) == POISON).all()


@pytest.mark.parametrize("kind", ["load", "offload"])
def test_slots_may_change_also_while_the_transfer_waits_behind_a_large_one(kind: str) -> None:
    site = Site(chunks_ahead=1)
    site.store([0, 1, 2, 3], torch.arange(16))
    start = site.engine.load if kind == "load" else site.engine.offload
    expected = reference_page(site.case.pool, [12, 13, 14, 15], 2)
    large = start(batch([0, 1, 2]) if kind == "load" else batch([4, 5, 6]), torch.arange(12))
    slots = torch.arange(40, 44) if kind == "load" else torch.arange(12, 16)
    waiting = start(batch([3]) if kind == "load" else batch([7]), slots)
    slots.fill_(60)
    site.device.run_until(lambda: large.poll() and waiting.poll(), site.order)
    assert (large.error, waiting.error) == (None, None)
    if kind == "load":
        np.testing.assert_array_equal(reference_page(site.case.pool, [40, 41, 42, 43], 2), expected)
    else:
        np.testing.assert_array_equal(site.payload(7), expected)


def test_slots_may_change_once_submitted() -> None:
    site = Site()
    slots = torch.arange(4)
    expected = reference_page(site.case.pool, slots.tolist(), 2)
    transfer = site.engine.offload(batch([0]), slots)
    slots.fill_(20)
    site.device.run_until(transfer.poll, site.order)
    np.testing.assert_array_equal(site.payload(0), expected)


@pytest.mark.parametrize("part", [RankSlice(2, 0, 0), RankSlice(1, 1, 0)])
def test_a_rank_that_writes_no_head_is_done_at_once(part: RankSlice) -> None:
    case = build_pool("separate", LAYOUT, num_blocks=4, block_tokens=4, local_heads=1)
    host = host_pool(LAYOUT, 2)
    engine, device = sim_engine(case.pool, host, part, fingerprint=FINGERPRINT)
    transfer = engine.offload(batch([0]), torch.arange(4))
    assert transfer.poll_released()
    assert transfer.poll()
    assert not any(stream.work for stream in device.streams)
    if not part.num_heads:
        load = engine.load(batch([0]), torch.arange(4))
        assert load.poll()
        assert load.num_good == 1
        stale = engine.load(batch([0], generation=8), torch.arange(4))
        assert stale.poll()
        assert stale.num_good == 0


@given(total=st.integers(1, 1 << 20), run=st.integers(1, 1 << 16), segment=st.integers(1, 1 << 18))
@settings(deadline=None)
def test_staging_stays_within_its_bound(total: int, run: int, segment: int) -> None:
    run *= 16
    sizes = []

    def allocate(num_bytes: int) -> torch.Tensor:
        sizes.append(num_bytes)
        return torch.empty(num_bytes, dtype=torch.uint8)

    ring = StagingRing(allocate, total_bytes=total, run_bytes=run, segment_bytes=segment)
    assert sum(sizes) <= max(total, run)
    assert ring.num_segments >= 2 or total < 2 * run
    taken = [ring.take(1) for _ in range(ring.num_segments)]
    assert len({piece.address for piece in taken}) == ring.num_segments
    assert all(len(piece.memory) == piece.num_pages * run for piece in taken)
    assert ring.take(1).address == taken[0].address


def test_segments_are_taken_in_turn_side_by_side_and_only_free_ones_where_wanted() -> None:
    ring = StagingRing(
        lambda size: torch.zeros(size, dtype=torch.uint8), total_bytes=80, run_bytes=16, segment_bytes=16
    )
    start = ring.take(2).address
    assert ring.take(9).num_pages == 3, "not around the end"
    busy = SimEvent()
    first = ring.take(2)
    assert first.address == start
    first.busy = [busy]
    assert [group.num_pages for group in ring.take(3).split(2)] == [2, 1]
    assert ring.take(5, only_free=True).num_pages == 1, "the first is taken in any case, the second is not free"
    assert ring.take(5).busy == [busy]
    busy.done = True
    ring.distrust(())
    assert ring.take(5, only_free=True).num_pages == 5
    again = SimEvent()
    ring.distrust((again,))
    assert ring.take(2).busy == [again, again]


@pytest.mark.parametrize(
    ("piece_bytes", "num_pages", "is_idle", "is_load", "path"),
    [
        (1 << 20, 1, False, False, "direct"),
        (1 << 20, DIRECT_BYTES >> 20, False, True, "direct"),
        (8 << 20, 1, False, True, "staged"),
        (8 << 20, 1, True, True, "direct"),
        (8 << 20, 1, True, False, "staged"),
        (1 << 20, 64, True, True, "staged"),
        (DIRECT_PIECE_BYTES // 2, 4096, True, False, "direct"),
        (DIRECT_PIECE_BYTES // 2, 4096, False, True, "staged"),
        (DIRECT_PIECE_BYTES // 2, 128, False, False, "direct"),
    ],
)
def test_the_rule_sends_what_is_soon_over_direct_and_the_rest_through_staging(
    piece_bytes: int, num_pages: int, is_idle: bool, is_load: bool, path: str
) -> None:
    assert choose_path(piece_bytes, num_pages, is_idle=is_idle, is_load=is_load) == path
