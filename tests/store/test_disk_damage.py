"""A disk tier's files are damaged, removed and mixed up; pages are missed then, and never wrong."""

from __future__ import annotations

import logging
import os
import random
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from disk_pages import (
    LAYOUT,
    MEMORY,
    NO_POOL,
    PAGE_BYTES,
    bytes_of,
    chain_of,
    check_slots,
    keys_of,
    limit_for,
    opened,
    overwrite,
    page_of,
    present,
    read,
    read_everything,
    shelf_of,
    verifies,
    write,
)

from mlkv.errors import TierUnavailable
from mlkv.page import peek_header
from mlkv.store.tiers.disk import DiskTier

PAGES = chain_of("abcdefgh")

HEADER_FIELDS = {
    "magic": 0,
    "version": 4,
    "heads": 6,
    "tokens": 8,
    "head_bytes": 12,
    "generation": 16,
    "fingerprint": 24,
    "key": 40,
    "parent": 56,
    "crc": 72,
}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A folder that a tier has left with eight pages in slots 0 to 7."""
    tier = opened(tmp_path)
    assert all(write(tier, PAGES))
    tier.close()
    return tmp_path


def flip(file: Path, offset: int, bit: int = 0) -> None:
    with file.open("rb") as opened_file:
        opened_file.seek(offset)
        (value,) = opened_file.read(1)
    overwrite(file, offset, bytes([value ^ (1 << bit)]))


@pytest.mark.parametrize("field", HEADER_FIELDS)
def test_a_flipped_bit_in_the_header_is_a_miss_that_is_counted_and_forgotten(directory: Path, field: str) -> None:
    flip(shelf_of(directory) / "slab", 3 * PAGE_BYTES + HEADER_FIELDS[field], bit=2)
    tier = opened(directory)
    assert read(tier, PAGES) == [page != PAGES[3] for page in PAGES]
    assert tier.pages_damaged == 1
    assert tier.contains(keys_of(PAGES)) == 3
    check_slots(tier)
    tier.close()
    tier = opened(directory)
    assert tier.contains(keys_of(PAGES)) == 3, "it was forgotten on the disk as well"
    assert write(tier, [PAGES[3]]) == [True]
    assert all(read(tier, PAGES))
    tier.close()


@pytest.mark.parametrize("offset", [128, 136, LAYOUT.header_bytes, LAYOUT.head_offset(1), PAGE_BYTES - 1])
def test_a_flipped_bit_further_in_is_found_by_whoever_verifies_the_page(directory: Path, offset: int) -> None:
    flip(shelf_of(directory) / "slab", 3 * PAGE_BYTES + offset, bit=7)
    tier = opened(directory)
    views = MEMORY.blank(len(PAGES))
    good = tier.read(keys_of(PAGES), views)
    assert [bool(ok) and verifies(view, page) for ok, view, page in zip(good, views, PAGES, strict=True)] == [
        page != PAGES[3] for page in PAGES
    ]
    tier.close()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("another page", bytes_of(page_of("zz"))),
        ("another write of the page", bytes_of(page_of("abcd", generation=2))),
        ("nothing", bytes(PAGE_BYTES)),
        ("noise", random.Random(1).randbytes(PAGE_BYTES)),
    ],
)
def test_a_slot_that_holds_something_else_is_a_miss(directory: Path, name: str, content: bytes) -> None:
    overwrite(shelf_of(directory) / "slab", 3 * PAGE_BYTES, content)
    tier = opened(directory)
    assert read(tier, PAGES) == [page != PAGES[3] for page in PAGES]
    tier.close()


def test_a_page_of_another_format_version_is_a_miss(directory: Path) -> None:
    import struct
    import zlib

    future = bytearray(bytes_of(PAGES[3]))
    future[4:6] = struct.pack("<H", 99)
    future[72:76] = struct.pack("<I", zlib.crc32(future[:72]))
    assert peek_header(np.frombuffer(future, np.uint8)) is None
    overwrite(shelf_of(directory) / "slab", 3 * PAGE_BYTES, bytes(future))
    tier = opened(directory)
    assert read(tier, PAGES) == [page != PAGES[3] for page in PAGES]
    tier.close()


@pytest.mark.parametrize("size", [0, 1, 3 * PAGE_BYTES, 3 * PAGE_BYTES + 100, 8 * PAGE_BYTES - 1])
def test_a_slab_that_was_truncated_gives_what_is_left(directory: Path, size: int) -> None:
    os.truncate(shelf_of(directory) / "slab", size)
    tier = opened(directory)
    whole = size // PAGE_BYTES
    assert present(tier, PAGES) == [number < whole for number in range(8)], "what cannot be there is not listed"
    assert read(tier, PAGES) == [number < whole for number in range(8)]
    assert all(write(tier, PAGES))
    assert all(read(tier, PAGES))
    check_slots(tier)
    tier.close()


def test_a_slab_that_is_truncated_under_a_running_tier_is_a_miss(directory: Path) -> None:
    tier = opened(directory)
    os.truncate(shelf_of(directory) / "slab", 3 * PAGE_BYTES + 512)
    assert read(tier, PAGES) == [True] * 3 + [False] * 5
    with pytest.raises(TierUnavailable, match="removed or are broken"):
        write(tier, PAGES)
    tier.connect(NO_POOL)
    assert all(write(tier, PAGES))
    assert all(read(tier, PAGES))
    check_slots(tier)
    tier.close()


@pytest.mark.parametrize(
    "names", [["slab"], ["catalog.sqlite3", "catalog.sqlite3-wal"], ["catalog.sqlite3"], None]
)
def test_files_removed_under_a_running_tier_are_noticed_by_the_next_write(
    directory: Path, names: list[str] | None
) -> None:
    tier = opened(directory)
    write(tier, chain_of("xy"))
    shelf = shelf_of(directory)
    for name in names or []:
        (shelf / name).unlink()
    if names is None:
        shutil.rmtree(directory)
    assert all(read(tier, PAGES)), "what is open is still there"
    with pytest.raises(TierUnavailable, match="removed or are broken"):
        write(tier, chain_of("uvw"))
    tier.connect(NO_POOL)
    assert all(write(tier, chain_of("uvw")))
    assert all(read(tier, chain_of("uvw")))
    check_slots(tier)
    read_everything(tier)
    tier.close()
    tier = opened(directory)
    assert all(read(tier, chain_of("uvw")))
    tier.close()


def test_a_removed_slab_leaves_no_rows_behind(directory: Path) -> None:
    (shelf_of(directory) / "slab").unlink()
    tier = opened(directory)
    assert not any(present(tier, PAGES))
    check_slots(tier)
    tier.close()


def test_a_removed_catalog_leaves_nothing_readable_of_the_slab(directory: Path) -> None:
    (shelf_of(directory) / "catalog.sqlite3").unlink()
    tier = opened(directory)
    assert not any(present(tier, PAGES))
    assert all(write(tier, chain_of("xyz")))
    assert all(read(tier, chain_of("xyz")))
    check_slots(tier)
    tier.close()


def test_rows_of_a_catalog_that_belongs_to_another_slab_are_misses(directory: Path, tmp_path: Path) -> None:
    tier = opened(tmp_path / "other")
    assert all(write(tier, [page_of(text) for text in "stuvwxyz"]))
    tier.close()
    shutil.copy(shelf_of(tmp_path / "other") / "catalog.sqlite3", shelf_of(directory) / "catalog.sqlite3")
    tier = opened(directory)
    assert not any(read(tier, [page_of(text) for text in "stuvwxyz"]))
    assert tier.pages_damaged == 8
    assert tier.stats().num_pages == 0
    tier.close()


def garbage(catalog: Path) -> None:
    catalog.write_bytes(random.Random(2).randbytes(8192))


def foreign_database(catalog: Path) -> None:
    catalog.unlink()
    with sqlite3.connect(catalog) as database:
        database.execute("CREATE TABLE somebody_else (x)")
    database.close()


def newer_version(catalog: Path) -> None:
    with sqlite3.connect(catalog) as database:
        database.execute("PRAGMA user_version = 99")
    database.close()


def lost_table(catalog: Path) -> None:
    with sqlite3.connect(catalog) as database:
        database.execute("ALTER TABLE pages RENAME TO elsewhere")
    database.close()


def half(catalog: Path) -> None:
    os.truncate(catalog, catalog.stat().st_size // 2)


@pytest.mark.parametrize("damage", [garbage, foreign_database, newer_version, lost_table, half])
def test_a_catalog_that_cannot_be_read_is_replaced_and_said(
    directory: Path, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    damage(shelf_of(directory) / "catalog.sqlite3")
    tier = opened(directory)
    assert "begins empty" in caplog.text
    assert tier.stats().num_pages == 0
    assert all(write(tier, PAGES))
    assert all(read(tier, PAGES))
    check_slots(tier)
    tier.close()


@pytest.mark.parametrize("offset", [0, 16, 18, 19, 20, 24, 28, 36, 44, 47, 52, 56, 60, 68, 92, 96, 100])
def test_damage_to_the_header_of_the_catalog_is_overcome_by_connecting_again(directory: Path, offset: int) -> None:
    flip(shelf_of(directory) / "catalog.sqlite3", offset)
    tier = opened(directory)
    for _ in range(3):
        try:
            read_everything(tier)
            write(tier, chain_of("xyz"))
            tier.store_note("era", b"2")
            tier.clear()
            assert all(write(tier, PAGES))
            break
        except TierUnavailable:
            tier.connect(NO_POOL)
    for _ in range(2):
        assert all(read(tier, PAGES))
        assert tier.load_note("era") == b"2"
        check_slots(tier)
        tier.close()
        tier = opened(directory)
    tier.close()


def test_damaged_text_in_the_catalog_does_not_get_in_the_way(directory: Path) -> None:
    catalog = shelf_of(directory) / "catalog.sqlite3"
    content = catalog.read_bytes()
    for text in (b"sqlite_autoindex_notes", b"CREATE TABLE pages", b"CREATE TABLE notes"):
        damaged = bytearray(content)
        damaged[content.index(text) + 9] |= 0x80
        catalog.write_bytes(damaged)
        tier = opened(directory)
        assert all(write(tier, PAGES))
        assert all(read(tier, PAGES))
        tier.close()


def test_any_damage_to_the_catalog_gives_misses_or_pages_but_nothing_wrong(directory: Path) -> None:
    whole = {name: (shelf_of(directory) / name).read_bytes() for name in ("catalog.sqlite3", "slab")}
    chance = random.Random(3)
    outcomes = set()
    for _ in range(60):
        for name, content in whole.items():
            (shelf_of(directory) / name).write_bytes(content)
        catalog = shelf_of(directory) / "catalog.sqlite3"
        for _ in range(chance.choice([1, 1, 1, 8, 64])):
            flip(catalog, chance.randrange(len(whole["catalog.sqlite3"])), chance.randrange(8))
        tier = opened(directory)
        given, _ = read_everything(tier)
        try:
            written = write(tier, chain_of("xyz"))
            assert all(write(tier, chain_of("xyz"))) or not all(written)
        except TierUnavailable:
            tier.connect(NO_POOL)  # the damage lay where only a change comes by
            written = write(tier, chain_of("xyz"))
        assert all(written)
        assert all(read(tier, chain_of("xyz")))
        outcomes.add(len(given))
        tier.close()
    assert len(outcomes) > 2, "some damage costs one page, some all, some none"


def test_foreign_files_are_left_alone_and_do_not_disturb(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "empty").touch()
    (tmp_path / "pages-vacation").mkdir()
    (tmp_path / "pages-vacation" / "photo").write_bytes(b"x" * 5000)
    tier = opened(tmp_path)
    (shelf_of(tmp_path) / "slab.tmp").write_bytes(b"x" * 100)
    assert all(write(tier, PAGES))
    tier.close()
    tier = opened(tmp_path)
    assert all(read(tier, PAGES))
    tier.close()
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert (tmp_path / "pages-vacation" / "photo").stat().st_size == 5000
    assert (shelf_of(tmp_path) / "slab.tmp").exists()


@pytest.mark.parametrize("name", ["lock", "slab", "catalog.sqlite3"])
@pytest.mark.parametrize("kind", ["folder", "link"])
def test_something_else_in_place_of_a_file_is_refused_by_name(tmp_path: Path, name: str, kind: str) -> None:
    opened(tmp_path).close()
    path = tmp_path / name if name == "lock" else shelf_of(tmp_path) / name
    path.unlink()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_bytes(b"precious")
    if kind == "folder":
        path.mkdir()
    else:
        path.symlink_to(elsewhere)
    with pytest.raises(TierUnavailable, match=str(path)):
        opened(tmp_path)
    assert elsewhere.read_bytes() == b"precious"
    if kind == "folder":
        path.rmdir()
    else:
        path.unlink()
    tier = opened(tmp_path)
    assert all(write(tier, PAGES))
    tier.close()


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(TierUnavailable, match=str(tmp_path / "file")):
        DiskTier(tmp_path / "file" / "below", PAGE_BYTES, limit_for(8)).connect(NO_POOL)


def test_without_o_direct_everything_works_and_the_log_says_it_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = os.open

    def refuse_direct(path: str, flags: int, *mode: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return real(path, flags, *mode)

    monkeypatch.setattr(os, "open", refuse_direct)
    with caplog.at_level(logging.WARNING):
        tier = opened(tmp_path)
        assert not tier.is_direct
        assert all(write(tier, PAGES))
        assert all(read(tier, PAGES))
    assert caplog.text.count("no O_DIRECT") == 1
    tier.close()
    monkeypatch.undo()
    tier = opened(tmp_path)
    assert all(read(tier, PAGES)), "both ways write the same file"
    tier.close()


def test_a_file_system_that_refuses_o_direct_only_in_use_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.preadv
    direct_fds: set[int] = set()

    def refuse_first(fd: int, views: list[memoryview], offset: int) -> int:
        if not direct_fds:
            direct_fds.add(fd)
            raise OSError(22, "Invalid argument")
        return real(fd, views, offset)

    monkeypatch.setattr(os, "preadv", refuse_first)
    tier = opened(tmp_path)
    assert direct_fds
    assert not tier.is_direct
    assert all(write(tier, PAGES))
    assert all(read(tier, PAGES))
    tier.close()


@pytest.mark.parametrize(
    "change",
    [
        "key = 'text of 16 bytes'",
        "key = x'00'",
        "parent = 5",
        "generation = 'many'",
        "used = x'00'",
        "key = (SELECT key FROM pages WHERE slot = 0)",
    ],
)
def test_a_row_that_makes_no_sense_costs_its_page_only(directory: Path, change: str) -> None:
    with sqlite3.connect(shelf_of(directory) / "catalog.sqlite3") as database:
        database.execute(f"UPDATE pages SET {change} WHERE slot = 3")
    database.close()
    tier = opened(directory)
    assert present(tier, PAGES) == [page != PAGES[3] for page in PAGES]
    assert all(write(tier, PAGES))
    assert all(read(tier, PAGES))
    check_slots(tier)
    tier.close()
