"""The staged pipeline over simulated streams: what is queued when, what fails, and what is refused."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from kernel_cases import (
    FINGERPRINT,
    POISON,
    batch,
    build_pool,
    host_pool,
    page_of,
    reference_page,
    wait_until,
)
from sim_device import SimEvent, SimKernels, SimStream, sim_engine
from sim_site import LAYOUT, Site

from mlkv.errors import CacheUsageError, DeadlineExceeded
from mlkv.layout import KVLayout, RankSlice


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
