"""Ranks that share cores sleep until the word they wait for is written."""

from __future__ import annotations

import errno
import mmap
import os
import threading
import time
from collections.abc import Iterator

import pytest

from mlkv.dist import futex
from mlkv.dist.futex import WordWaits
from tests.dist import agreeing
from tests.dist.agreeing import Work, agreement_of
from tests.ranks import run_ranks

Words = tuple[memoryview, WordWaits]


@pytest.fixture
def words() -> Iterator[Words]:
    with mmap.mmap(-1, 4096) as memory:
        waits = WordWaits.of(memory)
        assert waits is not None
        view = memoryview(memory).cast("Q")
        yield view, waits
        waits.close()
        view.release()


def test_a_word_that_has_changed_before_the_wait_is_not_slept_for(words: Words) -> None:
    view, waits = words
    view[8] = 2
    start = time.monotonic()
    assert waits.wait(8, 1, 0.9) == errno.EAGAIN
    assert time.monotonic() - start < 0.5


def test_a_word_that_stays_is_slept_for_until_the_deadline(words: Words) -> None:
    _, waits = words
    start = time.monotonic()
    assert waits.wait(8, 0, 0.05) == errno.ETIMEDOUT
    assert time.monotonic() - start >= 0.05


def test_a_waiter_is_woken_by_the_writer(words: Words) -> None:
    view, waits = words
    asleep = threading.Event()

    def write() -> None:
        asleep.wait(5)
        view[8] = 1
        waits.wake(8)

    writer = threading.Thread(target=write)
    writer.start()
    start = time.monotonic()
    asleep.set()
    assert waits.wait(8, 0, 0.9) in (0, errno.EAGAIN)  # woken, or the writer was first
    assert time.monotonic() - start < 0.5
    writer.join()


def test_a_kernel_without_it_is_found_out_beforehand(monkeypatch: pytest.MonkeyPatch) -> None:
    with mmap.mmap(-1, 4096) as memory:
        monkeypatch.setattr(futex, "_SYSCALL", dict.fromkeys(futex._SYSCALL, 100000))  # there is no such call
        assert WordWaits.of(memory) is None
        monkeypatch.setattr(futex, "_SYSCALL", {})
        assert WordWaits.of(memory) is None


def crowded(rank: int, num_steps: int) -> tuple[bool, int]:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    agreement = agreement_of(rank, 3, agreeing.LEDGER, 20.0)
    work = Work(agreement, rank)
    for _ in range(num_steps):
        work.go_on()
        agreement.step(list)
    sleeps = agreement._channel._waits is not None
    agreement.close()
    return sleeps, agreement.member.step


def test_three_ranks_on_one_core_take_turns() -> None:
    assert run_ranks(crowded, 3, 300) == [(True, 300)] * 3
