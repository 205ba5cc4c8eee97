"""Cooperative loads on simulated ranks: every order that events allow gives every rank the same, right bytes."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import (
    PoolCase,
    batch,
    build_pool,
    gqa,
    host_pool,
    page_of,
    random_slots,
    reference_page,
    reference_scatter,
    same_bytes,
)
from sim_device import SimDevice, SimEvent, SimStream
from sim_ranks import SimExchange, SimGroup

from mlkv.errors import CacheUsageError
from mlkv.kernels import LoadTransfer
from mlkv.layout import KVLayout

HEADS = gqa("fp16", layers=1, heads=2, dim=8, page_tokens=4)
MLA = KVLayout.mla(num_layers=2, latent_dim=12, dtype=torch.bfloat16, page_tokens=4)
NUM_BLOCKS = 32
NUM_PAGES = 12


class Site:
    """Ranks with poisoned pools of their own, and a host pool with pages of known content."""

    def __init__(
        self,
        seed: int = 0,
        layout: KVLayout = HEADS,
        size: int = 2,
        *,
        num_pages: int = NUM_PAGES,
        num_blocks: int = NUM_BLOCKS,
        **options: Any,
    ) -> None:
        self.num_blocks = num_blocks
        self.layout = layout
        heads = layout.num_kv_heads
        self.build = functools.partial(
            build_pool, "separate", layout, num_blocks=num_blocks, block_tokens=4, local_heads=heads
        )
        self.host = host_pool(layout, num_pages)
        self.group = SimGroup(self.build, self.host, heads, size=size, seed=seed, **options)
        self.ranks = self.group.ranks
        slots = random_slots(num_pages, layout, num_blocks, 4, seed)
        stored = self.ranks[0].engine.offload(batch(list(range(num_pages))), slots)
        self.group.run_until(stored.poll)
        assert stored.error is None
        pool = self.ranks[0].case.pool
        self.pages = [reference_page(pool, page.tolist(), heads) for page in slots.view(-1, 4)]
        self.before = [self.copy(rank.case) for rank in self.ranks]

    def copy(self, case: PoolCase) -> PoolCase:
        return case.copy(lambda storages: self.build(storages=storages))

    def payload(self, index: int) -> np.ndarray:
        start = self.layout.header_bytes
        return page_of(self.host, self.layout, index)[start : start + self.layout.payload_bytes]

    def targets(self, num_pages: int, seed: int) -> list[torch.Tensor]:
        """Slots for so many pages, others on each rank, some of them left out."""
        found = []
        for at in range(len(self.ranks)):
            slots = random_slots(num_pages, self.layout, self.num_blocks, 4, seed + at)
            slots[torch.rand(len(slots), generator=torch.Generator().manual_seed(seed + at)) < 0.2] = -1
            found.append(slots)
        return found

    def load(self, indices: list[int], targets: list[torch.Tensor], late: int = 0) -> list[LoadTransfer]:
        """`late`: how many writes of the pages have been missed."""
        # Page i was stored as the write 7 + i.
        pages = dataclasses.replace(batch(indices), generations=np.array(indices, np.uint64) + np.uint64(7 - late))
        return [rank.engine.load(pages, slots) for rank, slots in zip(self.ranks, targets, strict=True)]

    def run(self, loads: list[LoadTransfer]) -> list[tuple[int, str | None]]:
        self.group.run_until(lambda: all([load.poll() for load in loads]))  # noqa: C419  every one is polled
        return [(load.num_good, load.error) for load in loads]

    def expect(self, indices: list[int], targets: list[torch.Tensor]) -> None:
        """Enter the pages into what pools should hold, by the plain reference."""
        for case, slots in zip(self.before, targets, strict=True):
            for index, page in zip(indices, slots.view(-1, 4), strict=True):
                reference_scatter(case.pool, page.tolist(), self.pages[index])

    def is_as_expected(self) -> bool:
        pairs = zip(self.ranks, self.before, strict=True)
        return all(same_bytes(rank.case.storages, case.storages) for rank, case in pairs)


@given(
    seed=st.integers(0, 10_000),
    size=st.integers(2, 4),
    num_pages=st.integers(1, NUM_PAGES),
    staging_pages=st.integers(4, 9),
    segment_pages=st.integers(1, 3),
    chunks_ahead=st.sampled_from([1, 2, 1 << 30]),
    layout=st.sampled_from([HEADS, MLA]),
)
@settings(max_examples=30, deadline=None)
def test_every_rank_has_all_pages_in_every_order_of_streams(
    seed: int,
    size: int,
    num_pages: int,
    staging_pages: int,
    segment_pages: int,
    chunks_ahead: int,
    layout: KVLayout,
) -> None:
    """Two loads in flight at once, of any number of pages, on rings of any size, beside loads brought alone."""
    site = Site(
        seed,
        layout,
        size,
        staging_pages=staging_pages,
        segment_pages=segment_pages,
        chunks_ahead=chunks_ahead,
    )
    if not site.ranks[0].cooperation.fits:
        return
    # One rank has brought something alone before, so that rings stand at different places.
    alone = site.ranks[-1]
    alone.cooperation.begin(1 << 40)
    slots = site.targets(3, seed + 50)
    early = alone.engine.load(batch([0, 1, 2]), slots[-1])
    site.group.run_until(early.poll)
    for index, page in zip((0, 1, 2), slots[-1].view(-1, 4), strict=True):
        reference_scatter(site.before[-1].pool, page.tolist(), site.pages[index])
    alone.cooperation.begin(0)

    chosen = site.group.order.sample(range(NUM_PAGES), num_pages)
    first, second = sorted(chosen), list(range(NUM_PAGES))
    loads = []
    for indices, salt in ((first, 0), (second, 1)):
        targets = site.targets(len(indices), seed + 7 * salt)
        loads.append((indices, site.load(indices, targets)))
        site.expect(indices, targets)
    for indices, made in loads:
        assert site.run(made) == [(len(indices), None)] * size
    assert site.is_as_expected()


def load_is_right(site: Site) -> bool:
    """Seven pages through a ring of six, twice, so that staging is used again."""
    for indices in ([0, 1, 2, 3, 4, 5, 6], [0, 1, 2, 3, 4]):
        targets = site.targets(len(indices), 3)
        if any(num_good < len(indices) for num_good, _ in site.run(site.load(indices, targets))):
            return False
        site.expect(indices, targets)
    return site.is_as_expected()


WAITS = {
    "the gather for this rank's part": ("exchange", "copy"),
    "the scatter for the gather": ("kernel", "exchange"),
    "the copy for the scatter that still reads its staging": ("copy", "kernel"),
}


@pytest.mark.parametrize("wait", WAITS)
def test_bytes_are_wrong_in_some_order_without(wait: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each dependency between streams is needed: take it away, and some order shows it."""
    waiting, awaited = WAITS[wait]
    of: dict[int, SimStream] = {}

    def role(device: SimDevice, stream: SimStream) -> str:
        for rank in site.ranks:
            if rank.device is device:
                loads = rank.engine._loads
                names = {"kernel": loads.kernel_stream, "copy": loads.copy_streams[0]}
                names["exchange"] = rank.cooperation._stream
                return next((name for name, each in names.items() if each is stream), "")
        return ""

    def remember(self: SimDevice, stream: SimStream) -> SimEvent:
        event = record(self, stream)
        assert isinstance(event, SimEvent)
        of[id(event)] = stream
        kept.append(event)
        return event

    def forgetful(self: SimDevice, stream: SimStream, event: SimEvent) -> None:
        if (role(self, stream), role(self, of[id(event)])) != (waiting, awaited):
            plain_wait(self, stream, event)

    kept: list[SimEvent] = []
    plain_wait, record = SimDevice.wait, SimDevice.record
    results = []
    for seed in range(12):
        with monkeypatch.context() as patch:
            site = Site(seed, size=3)
            assert load_is_right(site)
            site = Site(seed, size=3)
            patch.setattr(SimDevice, "wait", forgetful)
            patch.setattr(SimDevice, "record", remember)
            results.append(load_is_right(site))
    assert not all(results)


def test_a_damaged_page_ends_the_good_prefix_on_every_rank_alike() -> None:
    for damaged, heads in ((0, MLA), (3, HEADS), (6, HEADS)):  # in the part of the one rank, and of the other
        site = Site(damaged, heads)
        site.payload(damaged)[5] ^= 1
        loads = site.load(list(range(7)), site.targets(7, 1))
        assert site.run(loads) == [(damaged, None)] * 2


def test_a_foreign_page_is_a_miss_on_every_rank() -> None:
    site = Site(size=3)
    loads = site.load([0, 1, 2], site.targets(3, 1), late=1)
    assert site.run(loads) == [(0, None)] * 3


def test_each_rank_brings_only_its_part_over_its_link(monkeypatch: pytest.MonkeyPatch) -> None:
    site = Site(size=3, staging_pages=9)
    brought = {id(rank.device): 0 for rank in site.ranks}
    copy = SimDevice.copy

    def counted(self: SimDevice, stream: SimStream, targets: np.ndarray, *args: Any, **options: Any) -> None:
        if args[1] == site.layout.payload_bytes:  # not the slots
            brought[id(self)] += len(targets)
        copy(self, stream, targets, *args, **options)

    monkeypatch.setattr(SimDevice, "copy", counted)
    loads = site.load(list(range(NUM_PAGES)), site.targets(NUM_PAGES, 1))
    assert site.run(loads) == [(NUM_PAGES, None)] * 3
    assert list(brought.values()) == [4, 4, 4]


def test_chunks_are_small_at_both_ends_of_a_load(monkeypatch: pytest.MonkeyPatch) -> None:
    site = Site(size=2, num_pages=96, num_blocks=96, staging_pages=30)
    gathered: list[int] = []
    gather = SimExchange.all_gather

    def noted(self: SimExchange, out: torch.Tensor, *args: Any) -> None:
        if self.rank == 0:
            gathered.append(len(out) // site.layout.payload_bytes)
        gather(self, out, *args)

    monkeypatch.setattr(SimExchange, "all_gather", noted)
    assert site.run(site.load(list(range(96)), site.targets(96, 1))) == [(96, None)] * 2
    assert gathered == [
        2,
        *[10] * 8,
        6,
        4,
        2,
        2,
    ]  # a third of the ring, and the last 14 pages in ever smaller chunks


# -- failures of one rank ------------------------------------------------------------------------------------


def good_everywhere(site: Site, indices: list[int]) -> None:
    targets = site.targets(len(indices), 9)
    assert site.run(site.load(indices, targets)) == [(len(indices), None)] * len(site.ranks)


@pytest.mark.parametrize("fail_at", range(8))
def test_a_device_that_refuses_on_one_rank_holds_nobody_up(fail_at: int) -> None:
    for seed in range(3):
        site = Site(seed)
        site.ranks[1].device.fail_at = fail_at
        (good, error), (bad, reason) = site.run(site.load(list(range(7)), site.targets(7, seed)))
        assert (bad, reason) == (0, "RuntimeError: device refuses")
        # What the other rank has is verified; pages that did not come end its prefix, and that is no error.
        assert error is None
        assert good <= 7
        site.before = [site.copy(rank.case) for rank in site.ranks]
        good_everywhere(site, [0, 1, 2, 3])


def test_slots_that_do_not_fit_on_one_rank_fail_its_load_and_no_other() -> None:
    site = Site()
    targets = site.targets(5, 1)
    targets[1][2] = 10_000
    (good, error), (bad, reason) = site.run(site.load([0, 1, 2, 3, 4], targets))
    assert (good, error) == (5, None)
    assert bad == 0
    assert reason is not None
    assert "slots must be in" in reason
    good_everywhere(site, [0, 1, 2])


def test_pages_outside_the_pool_are_refused_on_all_ranks() -> None:
    site = Site()
    for rank in site.ranks:
        with pytest.raises(CacheUsageError, match="page indices"):
            rank.engine.load(batch([NUM_PAGES]), torch.arange(4))
    good_everywhere(site, [0, 1, 2])


def test_a_rank_without_room_for_tasks_takes_part_all_the_same() -> None:
    """How many tasks are over differs between ranks, so it must not decide about a gather."""
    site = Site()
    targets = site.targets(1, 1)
    loads = [load for _ in range(20) for load in site.load([0], targets)]
    assert site.run(loads) == [(1, None)] * 40


def test_a_rank_that_never_comes_costs_the_others_one_deadline_and_then_they_load_alone() -> None:
    site = Site(deadline_s=0.05)
    targets = site.targets(3, 1)
    load = site.ranks[0].engine.load(batch([0, 1, 2]), targets[0])
    while not load.poll():
        site.group.step_any()
    assert load.num_good < 3
    assert load.error is not None
    assert "kept an all-gather waiting for more than 0.05 s" in load.error
    assert site.ranks[0].exchange.aborted
    alone = site.ranks[0].engine.load(batch([0, 1, 2]), targets[0])
    site.group.run_until(alone.poll)
    assert (alone.num_good, alone.error) == (3, None)


def test_a_gather_that_cannot_be_queued_ends_cooperation_on_its_rank() -> None:
    site = Site()
    site.ranks[1].exchange.fails = True
    load = site.ranks[1].engine.load(batch([0, 1, 2]), site.targets(3, 1)[1])
    site.group.run_until(load.poll)
    assert (load.num_good, load.error) == (0, "RuntimeError: the communicator is broken")
    assert not site.ranks[1].cooperation.is_on
    alone = site.ranks[1].engine.load(batch([0, 1, 2]), site.targets(3, 1)[1])
    site.group.run_until(alone.poll)
    assert (alone.num_good, alone.error) == (3, None)


def test_small_loads_are_brought_alone() -> None:
    site = Site()
    cooperation = site.ranks[0].cooperation
    cooperation.begin(3 * site.layout.payload_bytes)
    assert [cooperation.takes(n) for n in (0, 2, 3, 4)] == [False, False, True, True]
    load = site.ranks[0].engine.load(batch([0, 1]), site.targets(2, 1)[0])
    site.group.run_until(load.poll)  # needs nobody else
    assert (load.num_good, load.error) == (2, None)


def test_an_engine_that_closes_waits_no_longer_than_told_for_the_others() -> None:
    site = Site()
    rank = site.ranks[0]
    load = rank.engine.load(batch([0, 1, 2]), site.targets(3, 1)[0])
    while site.group.step_any():
        pass
    assert not load.poll()
    rank.cooperation.hurry(0.01)
    while not load.poll():
        site.group.step_any()
    rank.engine.close(5.0)
    assert rank.device.closed
