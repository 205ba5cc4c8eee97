"""Every system call and every statement of a disk tier fails once; what it says afterwards is true."""

from __future__ import annotations

import errno
import os
import sqlite3
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from disk_pages import (
    MEMORY,
    NO_POOL,
    PAGE_BYTES,
    bytes_of,
    chain_of,
    check_slots,
    keys_of,
    opened,
    page_of,
    read,
    read_everything,
    write,
)

from mlkv.errors import TierUnavailable
from mlkv.store.tiers import slab as slab_module
from mlkv.store.tiers.disk import DiskTier
from mlkv.store.tiers.slab import Slab

PAGES = chain_of("abcdefgh")
NEVER = float("inf")


class Short:
    """Moves fewer bytes than asked for: in turn a half, an odd number, none (interrupted), all."""

    def __init__(self, real: Callable[..., int]) -> None:
        self._real = real
        self.calls = 0

    def __call__(self, fd: int, views: list[memoryview], offset: int) -> int:
        self.calls += 1
        turn = self.calls % 4
        if turn == 3:
            raise InterruptedError(errno.EINTR, "Interrupted system call")
        moved = self._real(fd, views, offset)
        if turn == 0:
            return moved
        claimed = moved // 2 if turn == 1 else moved // 4 + 8
        if self._real is REAL_PREADV:
            poison_after(views, claimed)
        return claimed


REAL_PREADV = os.preadv


def poison_after(views: list[memoryview], num_bytes: int) -> None:
    """As if only the first `num_bytes` had been read."""
    for view in views:
        kept = min(num_bytes, len(view))
        view[kept:] = b"\xee" * (len(view) - kept)
        num_bytes -= kept


@pytest.mark.parametrize("direct", [True, False])
def test_short_and_interrupted_calls_are_continued_where_they_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, direct: bool
) -> None:
    if not direct:
        monkeypatch.setattr(slab_module, "_open_direct", lambda path: -1)
    tier = opened(tmp_path)
    assert tier.is_direct == direct
    shorts = {}
    for name in ("preadv", "pwritev"):
        shorts[name] = Short(getattr(os, name))
        monkeypatch.setattr(os, name, shorts[name])
    assert write(tier, PAGES) == [True] * 8
    assert read(tier, PAGES) == [True] * 8
    assert all(short.calls >= 4 for short in shorts.values())
    monkeypatch.undo()
    assert read(tier, PAGES) == [True] * 8
    tier.close()


def test_the_end_of_the_file_within_a_page_is_a_failure_and_not_a_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = opened(tmp_path)
    write(tier, PAGES)
    monkeypatch.setattr(os, "preadv", lambda fd, views, offset: 0)
    with pytest.raises(TierUnavailable, match="ends inside a page"):
        read(tier, PAGES)
    monkeypatch.undo()
    assert tier.contains(keys_of(PAGES)) == 0
    check_slots(tier)
    tier.close()


def test_calls_that_never_get_anywhere_are_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = opened(tmp_path)
    calls: list[int] = []

    def interrupted(fd: int, views: list[memoryview], offset: int) -> int:
        calls.append(offset)
        raise InterruptedError(errno.EINTR, "Interrupted system call")

    monkeypatch.setattr(os, "pwritev", interrupted)
    with pytest.raises(TierUnavailable, match="no progress"):
        write(tier, PAGES)
    assert len(calls) < 1000
    check_slots(tier)
    tier.close()


def test_one_bad_sector_costs_one_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = opened(tmp_path)
    assert all(write(tier, PAGES))
    real = os.preadv

    def bad_sector(fd: int, views: list[memoryview], offset: int) -> int:
        if offset <= 3 * PAGE_BYTES < offset + sum(map(len, views)):
            raise OSError(errno.EIO, "Input/output error")
        return real(fd, views, offset)

    monkeypatch.setattr(os, "preadv", bad_sector)
    assert read(tier, PAGES) == [page != PAGES[3] for page in PAGES]
    assert tier.contains(keys_of(PAGES)) == 3, "it is not offered again"
    tier.close()


class FailsAt:
    """Makes the n-th event fail, before or after it was done."""

    def __init__(self, number: int, error: Callable[[], Exception], after: bool) -> None:
        self._left, self._error, self._after = number, error, after
        self.has_failed = False

    def wrap(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            self._left -= 1
            fails = self._left == -1
            self.has_failed |= fails
            if fails and not self._after:
                raise self._error()
            result = real(*arguments, **options)
            if fails:
                raise self._error()
            return result

        return call


class FailingDatabase:
    """A connection of which every statement is an event."""

    def __init__(self, real: Any, fails: FailsAt) -> None:
        self._real, self._fails = real, fails

    def __getattr__(self, name: str) -> Any:
        return self._fails.wrap(getattr(self._real, name))


STEPS: tuple[Callable[[DiskTier], object], ...] = (
    lambda tier: write(tier, chain_of("abcd")),
    lambda tier: read(tier, chain_of("abcd")),
    lambda tier: tier.contains(keys_of(chain_of("abcd"))),
    lambda tier: tier.delete([page_of("abcd").key]),
    lambda tier: write(tier, chain_of("abcxyz")),
    lambda tier: write(tier, [page_of("abc", generation=2)]),
    lambda tier: read(tier, chain_of("abcxyz")),
    lambda tier: tier.store_note("era", b"1"),
    lambda tier: tier.load_note("era"),
    lambda tier: tier.clear(),
    lambda tier: write(tier, chain_of("pq")),
)


def disk_error() -> Exception:
    return OSError(errno.EIO, "Input/output error")


def full_catalog() -> Exception:
    return sqlite3.OperationalError("database or disk is full")


@pytest.mark.parametrize(
    ("what", "error", "after"),
    [
        ("preadv", disk_error, False),
        ("pwritev", disk_error, False),
        ("pwritev", disk_error, True),
        ("catalog", full_catalog, False),
        ("catalog", full_catalog, True),
    ],
)
def test_whatever_fails_costs_pages_and_never_the_truth(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, error: Callable[[], Exception], after: bool
) -> None:
    number = 0
    while True:
        directory = tmp_path / str(number)
        tier = opened(directory, num_pages=6, threads=1)
        volume: Any = tier._opened
        fails = FailsAt(number, error, after)
        with monkeypatch.context() as patch:
            if what == "catalog":
                volume.catalog._database = FailingDatabase(volume.catalog._database, fails)
            else:
                patch.setattr(os, what, fails.wrap(getattr(os, what)))
            for step in STEPS:
                with suppress(TierUnavailable):
                    step(tier)
            if what == "catalog":
                volume.catalog._database = volume.catalog._database._real
        check_slots(tier)
        before = set(tier.scan(b"", 100))
        given, refused = read_everything(tier)
        assert given == before
        assert not refused
        assert all(write(tier, chain_of("mn"))), "it works again without being connected anew"
        kept = set(tier.scan(b"", 100))
        tier.close()
        tier = opened(directory, num_pages=6)
        check_slots(tier)
        assert set(tier.scan(b"", 100)) == kept, "memory and disk had drifted apart"
        assert read_everything(tier) == (kept, set())
        tier.close()
        if not fails.has_failed:
            break
        number += 1
    assert number >= (2 if what == "preadv" else 4), "nothing was made to fail"


@pytest.mark.parametrize("what", ["delete", "clear"])
def test_a_deletion_that_the_catalog_refused_holds_in_memory_and_is_made_up_for(tmp_path: Path, what: str) -> None:
    tier = opened(tmp_path)
    write(tier, PAGES)
    volume: Any = tier._opened
    real = volume.catalog._database
    volume.catalog._database = FailingDatabase(real, FailsAt(1, full_catalog, after=False))
    forget = tier.clear if what == "clear" else lambda: tier.delete(keys_of(PAGES[2:]))
    with pytest.raises(TierUnavailable, match="full"):
        forget()
    volume.catalog._database = real
    left = 2 if what == "delete" else 0
    assert tier.contains(keys_of(PAGES)) == left
    assert write(tier, [page_of("x")]) == [True]
    tier.close()
    tier = opened(tmp_path)
    assert tier.contains(keys_of(PAGES)) == left
    check_slots(tier)
    tier.close()


def test_every_step_of_opening_may_fail_and_leaves_nothing_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = opened(tmp_path)
    write(tier, PAGES)
    tier.close()
    for name in ("open", "fstat", "preadv", "ftruncate", "pwrite", "stat", "statvfs", "posix_fallocate"):
        number = 0
        while True:
            fails = FailsAt(number, disk_error, after=False)
            with monkeypatch.context() as patch:
                patch.setattr(os, name, fails.wrap(getattr(os, name)))
                tier = DiskTier(tmp_path, PAGE_BYTES, 64 << 20)
                try:
                    tier.connect(NO_POOL)
                except TierUnavailable:
                    assert fails.has_failed
            tier.close()
            tier = opened(tmp_path)
            assert all(read(tier, PAGES)), f"after a failure of {name}"
            tier.close()
            if not fails.has_failed:
                break
            number += 1
            assert number < 50


def test_open_files_do_not_add_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened(tmp_path).close()
    before = len(os.listdir("/proc/self/fd"))
    for number in range(12):
        opened(tmp_path).close()
        with monkeypatch.context() as patch:
            for name in ("fstat", "stat"):
                patch.setattr(os, name, FailsAt(number // 2, disk_error, after=False).wrap(getattr(os, name)))
            with suppress(TierUnavailable):
                opened(tmp_path).close()
    assert len(os.listdir("/proc/self/fd")) <= before


@pytest.mark.parametrize("name", ["preadv", "pwritev"])
def test_even_an_exit_in_one_of_its_threads_gives_everything_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    tier = opened(tmp_path, threads=2)
    apart = [page_of(letter) for letter in "abcdef"]
    write(tier, apart)
    tier.delete(keys_of(apart[::2]))  # so that there are several requests

    def leave() -> Exception:
        raise SystemExit(3)

    move = read if name == "preadv" else write
    pages = apart[1::2] if name == "preadv" else apart[::2]
    with monkeypatch.context() as patch:
        patch.setattr(os, name, FailsAt(1, leave, after=False).wrap(getattr(os, name)))
        with pytest.raises(SystemExit):
            move(tier, pages)
    check_slots(tier)
    assert move(tier, pages) == [True] * 3
    tier.close()


def test_slots_beyond_four_gib_are_where_they_should_be(tmp_path: Path) -> None:
    slab = Slab(tmp_path / "slab", PAGE_BYTES, num_threads=2)
    far = (5 << 30) // PAGE_BYTES
    os.truncate(tmp_path / "slab", (far + 2) * PAGE_BYTES)  # a hole: takes no room
    slots = [0, far % (1 << 20), far, far + 1]
    assert slab.write(slots, MEMORY.filled(PAGES[:4]), NEVER) == [None] * 4
    views = MEMORY.blank(4)
    assert slab.read(slots, views, NEVER) == [None] * 4
    assert [bytes(view) for view in views] == [bytes_of(page) for page in PAGES[:4]]
    slab.close()


def test_a_batch_that_fails_does_not_spoil_another_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import threading

    tier = opened(tmp_path, threads=4)
    good, bad = chain_of("abcdefgh"), [page_of(f"bad{number}") for number in range(8)]
    assert all(write(tier, good))
    assert all(write(tier, bad))
    volume: Any = tier._opened
    first_bad = min(volume.index._slot_of[page.key] for page in bad) * PAGE_BYTES
    real = os.preadv

    def half_dead(fd: int, views: list[memoryview], offset: int) -> int:
        if offset >= first_bad:
            raise OSError(errno.EIO, "Input/output error")
        return real(fd, views, offset)

    monkeypatch.setattr(os, "preadv", half_dead)
    results: list[Any] = []

    def read_good() -> None:
        results.append([read(tier, good) for _ in range(20)])

    thread = threading.Thread(target=read_good, daemon=True)
    thread.start()
    for page in bad:
        with pytest.raises(TierUnavailable, match="Input/output error"):
            read(tier, [page])
    thread.join(60)
    assert results == [[[True] * 8] * 20]
    check_slots(tier)
    tier.close()
