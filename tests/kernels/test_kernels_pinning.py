"""Pinning in pieces: all of it or none, with one warning."""

from __future__ import annotations

import ctypes
import gc
import logging
import mmap
import os
import threading

import numpy as np
import pytest

from mlkv.kernels.copy_engine import CopyEngine
from mlkv.kernels.pinning import PinnedMemory


class Driver:
    """Registers memory unless told to refuse: the n-th call, or pieces above a size."""

    def __init__(self, refuse_call: int | None = None, largest: int = 1 << 60) -> None:
        self.registered: dict[int, int] = {}
        self.calls = 0
        self.unregistered: list[int] = []
        self._refuse_call, self._largest = refuse_call, largest
        self._lock = threading.Lock()

    def register(self, address: int, num_bytes: int) -> int:
        with self._lock:
            self.calls += 1
            if self.calls == self._refuse_call or num_bytes > self._largest:
                return 2
            assert num_bytes > 0
            self.registered[address] = num_bytes
            return 0

    def unregister(self, address: int) -> int:
        del self.registered[address]
        self.unregistered.append(address)
        return 0


def test_pieces_cover_the_memory_exactly_and_progress_is_told() -> None:
    driver, told = Driver(), []
    memory = PinnedMemory(4096, 1000, driver, piece_bytes=300, progress=lambda *args: told.append(args))
    assert driver.registered == {4096: 300, 4396: 300, 4696: 300, 4996: 100}
    assert told == [(300, 1000), (600, 1000), (900, 1000), (1000, 1000)]
    assert memory.is_pinned
    memory.close()
    memory.close()
    assert not driver.registered
    assert driver.unregistered == [4996, 4696, 4396, 4096]
    assert not memory.is_pinned


@pytest.mark.parametrize(("unit_bytes", "first"), [(1, 300), (7, 294), (100, 300), (250, 250), (400, 400)])
def test_no_unit_lies_in_two_registrations(unit_bytes: int, first: int) -> None:
    driver = Driver()
    memory = PinnedMemory(4096, 1000, driver, unit_bytes=unit_bytes, piece_bytes=300)
    assert memory.is_pinned
    assert driver.registered[4096] == first
    assert sum(driver.registered.values()) == 1000
    assert all((address - 4096) % unit_bytes == 0 for address in driver.registered)


@pytest.mark.parametrize("refuse_call", [1, 2, 5, 10])
def test_a_refused_piece_rolls_back_the_others_and_warns_once(
    refuse_call: int, caplog: pytest.LogCaptureFixture
) -> None:
    driver = Driver(refuse_call=refuse_call)
    with caplog.at_level(logging.WARNING):
        memory = PinnedMemory(0, 1000, driver, piece_bytes=100)
    assert not memory.is_pinned
    assert not driver.registered
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "memlock" in caplog.text
    memory.close()


def test_too_large_pieces_are_not_tried_to_the_end() -> None:
    driver = Driver(largest=50)
    assert not PinnedMemory(0, 100 * 1000, driver, piece_bytes=100).is_pinned
    assert driver.calls < 20, "once one piece is refused the rest is pointless"


def test_memory_of_an_owner_that_was_dropped_does_not_stay_registered() -> None:
    driver = Driver()
    memory = PinnedMemory(4096, 1000, driver, piece_bytes=300)
    assert len(driver.registered) == 4
    del memory
    gc.collect()
    assert not driver.registered


def test_no_bytes_register_nothing() -> None:
    driver = Driver()
    assert PinnedMemory(0, 0, driver).is_pinned
    assert not driver.calls


Batch = ctypes.CFUNCTYPE(
    ctypes.c_int,
    *[ctypes.c_void_p] * 3,
    ctypes.c_size_t,
    *[ctypes.c_void_p] * 2,
    ctypes.c_size_t,
    ctypes.c_void_p,
)


One = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p)


def numbers(address: int, count: int, kind: type = ctypes.c_uint64) -> list[int]:
    return list((kind * count).from_address(address))


class Library:
    """A CUDA driver that copies at once, with the functions that its version has."""

    def __init__(self, *, batched: bool, status: int = 0) -> None:
        self.orders: list[int] = []
        self.num_calls = 0
        self._status = status
        if batched:
            self.cuMemcpyBatchAsync_v2 = Batch(self._batch)
        self.cuMemcpyAsync = One(self._one)

    def _one(self, target: int, source: int, size: int, stream: int) -> int:
        assert stream == 77
        self.num_calls += 1
        if not self._status:
            ctypes.memmove(target, source, size)
        return self._status

    def cuGetErrorString(self, status: int, text: object) -> int:
        ctypes.cast(text, ctypes.POINTER(ctypes.c_char_p))[0] = b"invalid argument"
        return 0

    def _batch(self, targets, sources, sizes, count, attributes, first, num_attributes, stream):  # type: ignore[no-untyped-def]
        assert (num_attributes, numbers(first, 1), stream) == (1, [0], 77)
        self.num_calls += 1
        self.orders += numbers(attributes, 1, ctypes.c_int)
        pieces = (numbers(address, count) for address in (targets, sources, sizes))
        for target, source, size in zip(*pieces, strict=True):
            ctypes.memmove(target, source, size)
        return self._status


@pytest.mark.parametrize("batched", [True, False])
def test_copies_reach_the_driver_in_batches_or_one_by_one(batched: bool) -> None:
    library = Library(batched=batched)
    engine = CopyEngine(library)  # type: ignore[arg-type]
    source = np.random.default_rng(1).integers(0, 256, (4, 48), np.uint8)
    target = np.zeros((4, 64), np.uint8)
    rows = np.arange(4, dtype=np.int64)[::-1]
    addresses = (target.ctypes.data + rows * 64, source.ctypes.data + np.arange(4, dtype=np.int64) * 48)
    engine.copy(77, *addresses, 48, sources_are_final=True)
    np.testing.assert_array_equal(target[::-1, :48], source)
    assert not target[:, 48:].any()
    assert library.num_calls == (1 if batched else 4)
    engine.copy(77, *addresses, 48, sources_are_final=False)
    assert library.orders == ([3, 1] if batched else [])


def test_one_piece_is_no_batch() -> None:
    library = Library(batched=True)
    source, target = np.arange(16, dtype=np.uint8), np.zeros(16, np.uint8)
    addresses = (np.array([array.ctypes.data], np.int64) for array in (target, source))
    CopyEngine(library).copy(77, *addresses, 16, sources_are_final=True)  # type: ignore[arg-type]
    np.testing.assert_array_equal(target, source)
    assert (library.num_calls, library.orders) == (1, [])


@pytest.mark.parametrize("batched", [True, False])
def test_a_refused_copy_raises_with_the_drivers_words(batched: bool) -> None:
    engine = CopyEngine(Library(batched=batched, status=1))  # type: ignore[arg-type]
    two = np.zeros(32, np.uint8)
    addresses = two.ctypes.data + np.array([0, 16], np.int64)
    with pytest.raises(RuntimeError, match=r"invalid argument \(1\)"):
        engine.copy(77, addresses, addresses, 16, sources_are_final=True)


def test_memory_is_taken_before_it_is_registered() -> None:
    """Or the driver would have it taken page by page, under a lock that everybody waits for."""
    num_bytes, taken = 1 << 20, []
    fd = os.memfd_create("pinning-test")
    os.ftruncate(fd, num_bytes)

    class Watching(Driver):
        def register(self, address: int, num_bytes: int) -> int:
            taken.append(512 * os.fstat(fd).st_blocks)
            return super().register(address, num_bytes)

    with mmap.mmap(fd, num_bytes) as mapping:
        address = np.frombuffer(mapping, np.uint8).ctypes.data
        PinnedMemory(address, num_bytes, Watching(), piece_bytes=num_bytes).close()
    os.close(fd)
    assert taken == [num_bytes]
