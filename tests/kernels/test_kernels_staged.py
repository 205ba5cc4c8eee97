"""The staged pipeline over simulated streams: every order that events allow must give the same bytes."""

from __future__ import annotations

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
    page_of,
    random_slots,
    reference_page,
    reference_scatter,
    same_bytes,
)
from sim_device import SimDevice, SimEvent, SimStream
from sim_site import LAYOUT, NUM_BLOCKS, SMALL, Site

from mlkv.kernels.host_pages import PageBatch
from mlkv.layout import KVLayout
from mlkv.page import checksum_table, verify_page


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


def _verifies(site: Site, pages: PageBatch, index: int) -> bool:
    key, generation = pages.keys[16 * index : 16 * index + 16], int(pages.generations[index])
    return verify_page(page_of(site.host, LAYOUT, index), LAYOUT, key, FINGERPRINT, generation)


def test_a_page_verifies_only_when_its_bytes_are_there() -> None:
    """In every order of the streams; sums are written while later pages of a transfer are still on their way."""
    seen_early = False
    for seed in range(20):
        site = Site(seed, staging_pages=2, segment_pages=1)
        slots = random_slots(4, LAYOUT, NUM_BLOCKS, 4, seed).view(4, 4)
        wanted = [reference_page(site.case.pool, page_slots.tolist(), 2) for page_slots in slots]
        pages = batch([0, 1, 2, 3])
        transfer = site.engine.offload(pages, slots.flatten())
        while not transfer.poll():
            good = [index for index in range(4) if _verifies(site, pages, index)]
            seen_early = seen_early or bool(good)
            for index in range(4):
                table = checksum_table(page_of(site.host, LAYOUT, index), LAYOUT)
                assert index in good or (table.view(np.uint8) == POISON).all()
            for index in good:
                np.testing.assert_array_equal(site.payload(index), wanted[index])
            site.device.step_any(site.order)
        assert all(_verifies(site, pages, index) for index in range(4))
    assert seen_early, "the first pages are complete before the transfer is over"
