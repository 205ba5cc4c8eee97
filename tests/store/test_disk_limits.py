"""How much a disk tier takes: what it may, over restarts, changed limits, full disks and other page sizes."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from disk_pages import (
    MEMORY,
    NO_POOL,
    PAGE_BYTES,
    chain_of,
    check_slots,
    keys_of,
    limit_for,
    occupied_bytes,
    opened,
    page_of,
    present,
    read,
    read_everything,
    shelf_of,
    write,
)

from mlkv.errors import TierUnavailable
from mlkv.store.tiers import disk_volume
from mlkv.store.tiers.disk import DiskTier

FOREIGN_BYTES = 4096
"""A small file of somebody else takes a block, which is not the tier's."""

SINGLES = [page_of(letter) for letter in "abcdefghijklmnopqrstuvwxyz"]


def allocated_slots(directory: Path) -> int:
    slab = (shelf_of(directory) / "slab").stat()
    assert slab.st_blocks * 512 >= slab.st_size, "every slot is reserved, not a hole"
    return slab.st_size // PAGE_BYTES


def test_what_a_previous_run_left_counts_and_is_evicted_first(tmp_path: Path) -> None:
    tier = opened(tmp_path, num_pages=10)
    assert all(write(tier, SINGLES[:8]))
    tier.close()
    tier = opened(tmp_path, num_pages=10)
    assert all(read(tier, SINGLES[:8]))
    assert all(write(tier, SINGLES[8:16]))
    assert present(tier, SINGLES[:16]) == [False] * 6 + [True] * 10
    assert tier.stats().pages_evicted == 6
    assert occupied_bytes(tmp_path) <= limit_for(10)
    assert allocated_slots(tmp_path) == 10
    check_slots(tier)
    tier.close()


def test_the_limit_holds_for_everything_on_the_disk_whatever_is_done(tmp_path: Path) -> None:
    limit = limit_for(2000)
    tier = opened(tmp_path, num_pages=2000)
    for number in range(40):
        pages = chain_of(f"{number:02}" + "x" * 98)
        tier.write(pages, MEMORY.filled(pages))
        tier.contains(keys_of(pages))
        assert occupied_bytes(tmp_path) <= limit
        if number % 10 == 9:
            tier.delete(keys_of(pages[::2]))
    assert tier.stats().num_pages > 1900
    tier.clear()
    assert occupied_bytes(tmp_path) <= limit
    tier.close()


def test_a_lower_limit_holds_from_the_start_and_keeps_what_fits(tmp_path: Path) -> None:
    tier = opened(tmp_path, num_pages=20)
    assert all(write(tier, SINGLES[:20]))
    tier.close()
    tier = opened(tmp_path, num_pages=6)
    assert occupied_bytes(tmp_path) <= limit_for(6)
    assert tier.stats().num_pages == 6
    given, refused = read_everything(tier)
    assert (len(given), len(refused)) == (6, 0)
    assert all(write(tier, SINGLES[20:23]))
    assert tier.stats().num_pages == 6
    check_slots(tier)
    tier.close()


@pytest.mark.parametrize("is_cleared", [False, True])
def test_a_much_lower_limit_makes_the_catalog_smaller_too(tmp_path: Path, is_cleared: bool) -> None:
    num_pages = 90_000
    tier = opened(tmp_path, num_pages=num_pages)
    volume = tier._opened
    assert volume is not None
    pages = [page_of(str(number)) for number in range(num_pages)]
    # Rows only: what this is about is their room, not the pages.
    volume.slab.grow(num_pages)
    rows = [disk_volume.Row(slot, page.key, page.parent, 1, slot + 1) for slot, page in enumerate(pages)]
    volume.catalog.change(insert=rows)
    assert volume.catalog.size_bytes() > 5 << 20
    if is_cleared:
        volume.catalog.clear()
    tier.close()
    tier = opened(tmp_path, num_pages=10)
    assert occupied_bytes(tmp_path) <= limit_for(10)
    assert tier.stats().num_pages == (0 if is_cleared else 10)
    tier.close()


def test_a_higher_limit_is_used(tmp_path: Path) -> None:
    tier = opened(tmp_path, num_pages=4)
    write(tier, SINGLES[:4])
    tier.close()
    tier = opened(tmp_path, num_pages=12)
    assert all(write(tier, SINGLES[4:12]))
    assert all(present(tier, SINGLES[:12]))
    tier.close()


def test_the_slab_grows_in_steps_and_only_when_it_must(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_volume, "_GROWTH_STEPS", 2)
    tier = opened(tmp_path, num_pages=10)
    sizes = []
    for page in SINGLES[:12]:
        assert write(tier, [page]) == [True]
        sizes.append(allocated_slots(tmp_path))
    assert sizes == [5] * 5 + [10] * 7
    assert tier.stats().num_pages == 10
    check_slots(tier)
    tier.close()


# Full disks


class FullDisk:
    """A disk on which files cannot grow while `is_full`; half of what was asked for stays, as on real ones."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_full = True
        self.attempts = 0
        self._real = os.posix_fallocate
        monkeypatch.setattr(os, "posix_fallocate", self._fallocate)

    def _fallocate(self, fd: int, offset: int, length: int) -> None:
        self.attempts += 1
        if self.is_full:
            self._real(fd, offset, length // 2 or 1)
            raise OSError(errno.ENOSPC, "No space left on device")
        self._real(fd, offset, length)


def test_a_disk_without_room_at_the_start_is_said_and_nothing_is_left_on_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = FullDisk(monkeypatch)
    with pytest.raises(TierUnavailable, match="no room"):
        opened(tmp_path)
    assert (shelf_of(tmp_path) / "slab").stat().st_size == 0
    disk.is_full = False
    tier = opened(tmp_path)
    assert all(write(tier, SINGLES[:4]))
    tier.close()


def test_a_disk_that_fills_up_later_leaves_the_tier_at_its_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(disk_volume, "_GROWTH_STEPS", 4)
    tier = opened(tmp_path, num_pages=16)
    disk = FullDisk(monkeypatch)
    for page in SINGLES[:10]:
        assert write(tier, [page]) == [True], "pages make room for each other"
    assert tier.stats().num_pages == 4
    assert allocated_slots(tmp_path) == 4
    assert disk.attempts == 1, "a full disk is not asked for every page"
    assert caplog.text.count("cannot grow") == 1
    disk.is_full = False
    monkeypatch.setattr(disk_volume, "_GROWTH_RETRY_S", 0.0)
    tier._opened._grow_after = 0.0  # type: ignore[union-attr]  # as if a minute had passed
    assert all(write(tier, SINGLES[:10]))
    assert tier.stats().num_pages == 10
    check_slots(tier)
    tier.close()


def test_a_higher_limit_without_room_keeps_what_there_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = opened(tmp_path, num_pages=4)
    write(tier, SINGLES[:4])
    tier.close()
    FullDisk(monkeypatch)
    tier = opened(tmp_path, num_pages=400)
    assert all(read(tier, SINGLES[:4]))
    assert write(tier, [SINGLES[5]]) == [True]
    assert tier.stats().num_pages == 4
    tier.close()


@pytest.mark.parametrize("permanent", [False, True])
def test_a_disk_that_is_full_in_the_middle_costs_only_the_pages_it_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, permanent: bool
) -> None:
    tier = opened(tmp_path, num_pages=8, threads=1)
    assert all(write(tier, SINGLES[:2]))
    real, calls = os.pwritev, []

    def fill_up(fd: int, views: list[memoryview], offset: int) -> int:
        calls.append(len(views))
        if len(calls) == 1 or permanent:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(fd, views, offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", fill_up)
        if permanent:
            for _ in range(3):
                with pytest.raises(TierUnavailable, match="No space left"):
                    write(tier, SINGLES[2:6])
            assert len(calls) <= 3 * 5, "no endless retries"
        else:
            assert write(tier, SINGLES[2:6]) == [True] * 4, "one by one they went through"
    assert present(tier, SINGLES[:6]) == [True] * 2 + [not permanent] * 4
    assert all(read(tier, SINGLES[:2]))
    check_slots(tier)
    assert all(write(tier, SINGLES[2:6]))
    tier.close()
    tier = opened(tmp_path, num_pages=8)
    assert all(read(tier, SINGLES[:6]))
    tier.close()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 16 MiB, where this user may mount one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = shutil.which("mount")
    command = [mount or "mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(folder)]
    if mount is None or os.geteuid() or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("cannot mount a small file system here")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_two_tiers_that_want_more_than_a_real_disk_has_share_what_there_is(small_disk: Path) -> None:
    wanted = (10 << 20) // PAGE_BYTES
    tiers = [opened(small_disk / name, num_pages=wanted) for name in ("one", "two")]
    pages = [page_of(str(number)) for number in range(wanted)]
    for start in range(0, wanted, 64):
        for tier in tiers:
            part = pages[start : start + 64]
            tier.write(part, MEMORY.filled(part))
    total = sum(tier.stats().num_pages for tier in tiers)
    assert (10 << 20) < total * PAGE_BYTES < (16 << 20)
    for tier in tiers:
        given, refused = read_everything(tier)
        assert len(given) == tier.stats().num_pages > 0
        assert not refused
        check_slots(tier)
    (small_disk / "filler").write_bytes(b"")
    with (small_disk / "filler").open("wb", buffering=0) as filler:
        while True:
            try:
                filler.write(b"x" * 4096)
            except OSError:
                break
    for tier in tiers:  # not a byte is free any more: their pages still make room for each other, or are refused
        with suppress(TierUnavailable):
            write(tier, SINGLES[:4])
        _, refused = read_everything(tier)
        assert not refused
    (small_disk / "filler").unlink()
    for tier in tiers:
        assert all(write(tier, SINGLES[4:8]))
        check_slots(tier)
        tier.close()


# Other page sizes and versions in the same folder


def test_pages_of_another_size_are_kept_apart_and_found_again(tmp_path: Path) -> None:
    small = opened(tmp_path, num_pages=10)
    assert all(write(small, SINGLES[:4]))
    small.store_note("era", b"1")
    small.close()
    large = DiskTier(tmp_path, 2 * PAGE_BYTES, 64 << 20)
    large.connect(NO_POOL)
    assert large.contains(keys_of(SINGLES[:1])) == 0
    assert large.scan(b"", 10) == []
    assert large.load_note("era") is None
    large.clear()
    large.close()
    small = DiskTier(tmp_path, PAGE_BYTES, 64 << 20)
    small.connect(NO_POOL)
    assert all(read(small, SINGLES[:4]))
    assert small.load_note("era") == b"1"
    small.close()


def test_what_another_page_size_left_counts_and_goes_when_there_is_no_room_for_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(disk_volume, "_MAX_GROWTH_BYTES", 8 * PAGE_BYTES)
    old = DiskTier(tmp_path, 2 * PAGE_BYTES, 64 << 20)
    old.connect(NO_POOL)
    old.close()
    (left,) = tmp_path.glob("pages-v*")
    left_bytes = occupied_bytes(left)
    (left / "foreign").write_text("mine")
    assert left_bytes > 8 * PAGE_BYTES

    limit = limit_for(24) + left_bytes - 8 * PAGE_BYTES  # room for 16 pages beside what was left
    tier = DiskTier(tmp_path, PAGE_BYTES, limit)
    tier.connect(NO_POOL)
    assert all(write(tier, SINGLES[:16]))
    assert (left / "slab").exists()
    assert occupied_bytes(tmp_path) <= limit + FOREIGN_BYTES
    assert write(tier, [SINGLES[16]]) == [True]
    assert not (left / "slab").exists()
    assert sorted(path.name for path in left.iterdir()) == ["foreign"]
    assert "another page size" in caplog.text
    assert all(read(tier, SINGLES[:17]))
    assert occupied_bytes(tmp_path) <= limit + FOREIGN_BYTES
    tier.close()


def slab_of(directory: Path, factor: int) -> Path:
    """Of pages that are so many times larger than those of the other tests."""
    return (
        shelf_of(directory).parent
        / shelf_of(directory).name.replace(str(PAGE_BYTES), str(factor * PAGE_BYTES))
        / "slab"
    )


def test_the_leftovers_used_longest_ago_go_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_volume, "_MAX_GROWTH_BYTES", 8 * PAGE_BYTES)
    for age, factor in ((30, 2), (10, 4), (20, 8)):
        tier = DiskTier(tmp_path, factor * PAGE_BYTES, 64 << 20)
        tier.connect(NO_POOL)
        tier.close()
        for file in tmp_path.glob(f"pages-v*-{factor * PAGE_BYTES}/*"):
            os.utime(file, (1e9 - age, 1e9 - age))
    left_bytes = sum(map(occupied_bytes, tmp_path.glob("pages-v*")))
    tier = DiskTier(tmp_path, PAGE_BYTES, limit_for(8) + left_bytes)
    tier.connect(NO_POOL)
    gone: list[int] = []
    for number in range(60):
        assert write(tier, [page_of(str(number))]) == [True]
        gone += [factor for factor in (2, 4, 8) if factor not in gone and not slab_of(tmp_path, factor).exists()]
        assert occupied_bytes(tmp_path) <= limit_for(8) + left_bytes
    assert gone == [2, 8, 4]
    tier.close()


def test_another_version_of_the_format_is_not_looked_into(tmp_path: Path) -> None:
    tier = opened(tmp_path, num_pages=10)
    assert all(write(tier, SINGLES[:4]))
    tier.close()
    shelf = shelf_of(tmp_path)
    future = shelf.with_name(shelf.name.replace("pages-v1.1", "pages-v9.1"))
    shelf.rename(future)
    content = (future / "slab").read_bytes()
    tier = DiskTier(tmp_path, PAGE_BYTES, 64 << 20)
    tier.connect(NO_POOL)
    assert not any(present(tier, SINGLES[:4]))
    assert all(write(tier, SINGLES[4:8]))
    tier.close()
    assert (future / "slab").read_bytes() == content
