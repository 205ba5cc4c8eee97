"""Loads and offloads of CPU pools run on threads: who waits for whom, and what a failing thread leaves."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from cpu_site import LAYOUT, Site
from kernel_cases import (
    POISON,
    batch,
    finish_load,
    finish_offload,
    reference_page,
    same_bytes,
    wait_until,
)

from mlkv.errors import CacheUsageError, DeadlineExceeded
from mlkv.kernels import cpu


@pytest.fixture
def site() -> Site:
    return Site()


class Latch:
    """Stops whoever calls it until opened, and tells that somebody has come."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self._open = threading.Event()

    def wait(self) -> None:
        self.reached.set()
        assert self._open.wait(20), "latch was never opened"

    def open(self) -> None:
        self._open.set()


def hold(monkeypatch: pytest.MonkeyPatch, name: str, *, after: bool = False) -> Latch:
    """Put a latch before (or after) a function that the worker threads call."""
    latch, real = Latch(), getattr(cpu, name)

    def held(*args: object) -> object:
        if after:
            result = real(*args)
            latch.wait()
            return result
        latch.wait()
        return real(*args)

    monkeypatch.setattr(cpu, name, held)
    return latch


def test_a_held_offload_blocks_neither_its_caller_nor_a_load(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    latch = hold(monkeypatch, "gather")
    offload = site.engine.offload(batch([0]), torch.arange(4))
    assert latch.reached.wait(20)
    assert not offload.poll()
    assert not offload.poll_released()
    assert finish_load(site.engine, site.pages, site.free_slots) == (2, None)
    latch.open()
    wait_until(offload.poll)
    assert offload.poll_released()


def test_slots_are_released_once_gathered_and_may_then_change(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    latch = hold(monkeypatch, "payload_checksums")
    expected = reference_page(site.case.pool, [0, 1, 2, 3], 3)
    offload = site.engine.offload(batch([0]), torch.arange(4))
    wait_until(offload.poll_released)
    assert not offload.poll()
    for storage in site.case.storages:
        storage.fill_(-1)
    latch.open()
    wait_until(offload.poll)
    layout = site.layout
    payload = site.page(0)[layout.header_bytes : layout.header_bytes + layout.payload_bytes]
    np.testing.assert_array_equal(payload.reshape(3, -1), expected)
    assert finish_load(site.engine, batch([0]), torch.arange(4)) == (1, None)


def test_slots_are_not_released_before_the_last_of_them_is_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    site = Site(staging_bytes=LAYOUT.payload_bytes)  # a page at a time
    gathered, latch, real = [], Latch(), cpu.gather

    def held(*args: object) -> None:
        gathered.append(args)
        if len(gathered) == 3:
            latch.wait()
        real(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(cpu, "gather", held)
    offload = site.engine.offload(batch([0, 2, 3]), torch.arange(12))
    assert latch.reached.wait(20)
    assert not offload.poll_released()
    latch.open()
    wait_until(offload.poll)
    assert offload.poll_released()


def test_nothing_is_attached_before_it_verified(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    latch = hold(monkeypatch, "payload_checksums", after=True)
    load = site.engine.load(site.pages, site.free_slots)
    assert latch.reached.wait(20)
    assert same_bytes(site.before, site.case.storages)
    site.page(4)[site.layout.header_bytes] ^= 1  # the verified copy is what counts, not memory changed since
    latch.open()
    wait_until(load.poll)
    assert load.num_good == 2


def test_slots_may_be_changed_by_the_caller_right_after_submission(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    latch = hold(monkeypatch, "payload_checksums")
    target = site.free_slots.clone()
    load = site.engine.load(site.pages, target)
    target.fill_(0)
    latch.open()
    wait_until(load.poll)
    have = site.case.pool.views[0][0].flatten(0, 1).view(torch.int32)
    assert torch.equal(have[site.free_slots], site.before[0].view(torch.int32).flatten(0, 1)[site.slots])


@pytest.mark.parametrize("error", [RuntimeError("bad cell"), SystemExit(3), MemoryError("no room")])
def test_a_worker_survives_whatever_a_transfer_raises(
    site: Site, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def fail(*args: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(cpu, "gather", fail)
        offload = site.engine.offload(batch([0]), torch.arange(4))
        wait_until(offload.poll)
        assert offload.poll_released()
        assert offload.error is not None
        assert type(error).__name__ in offload.error
        patch.setattr(cpu, "scatter", fail)
        num_good, reason = finish_load(site.engine, site.pages, site.free_slots)
        assert num_good == 0
        assert reason is not None
        assert str(error) in reason
    assert finish_offload(site.engine, batch([0]), torch.arange(4)) is None
    assert finish_load(site.engine, site.pages, site.free_slots) == (2, None)


def test_a_load_that_raises_half_way_keeps_the_pages_before(monkeypatch: pytest.MonkeyPatch) -> None:
    site = Site(staging_bytes=LAYOUT.payload_bytes)
    calls = []

    def second_fails(*args: object) -> None:
        calls.append(args)
        if len(calls) == 2:
            raise OSError("second page")

    monkeypatch.setattr(cpu, "scatter", second_fails)
    num_good, reason = finish_load(site.engine, site.pages, site.free_slots)
    assert num_good == 1
    assert reason == "OSError: second page"


def test_a_full_queue_refuses_and_frees_again(monkeypatch: pytest.MonkeyPatch) -> None:
    site = Site(max_tasks=2)
    latch = hold(monkeypatch, "gather")
    running = site.engine.offload(batch([0]), torch.arange(4))
    assert latch.reached.wait(20)
    waiting = site.engine.offload(batch([2]), torch.arange(4))
    refused = site.engine.offload(batch([3]), torch.arange(4))
    assert refused.poll()
    assert refused.poll_released()
    assert refused.error is not None
    assert "2 transfers" in refused.error
    latch.open()
    wait_until(lambda: running.poll() and waiting.poll())
    assert (running.error, waiting.error) == (None, None)
    # A place is free again a moment after the transfer that held it is over.
    wait_until(lambda: finish_offload(site.engine, batch([3]), torch.arange(4)) is None)


def test_close_drops_what_waits_and_waits_for_what_runs(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    latch = hold(monkeypatch, "gather")
    running = site.engine.offload(batch([0]), torch.arange(4))
    assert latch.reached.wait(20)
    waiting = site.engine.offload(batch([2]), torch.arange(4))
    with pytest.raises(DeadlineExceeded, match="mlkv-offload"):
        site.engine.close(0.05)
    latch.open()
    site.engine.close(20)
    assert running.poll()
    assert running.error is None
    wait_until(waiting.poll)
    assert waiting.error is not None
    assert "closed" in waiting.error
    assert (site.page(2) == POISON).all()
    with pytest.raises(CacheUsageError, match="closed"):
        site.engine.load(site.pages, site.free_slots)
    site.engine.close(1)
