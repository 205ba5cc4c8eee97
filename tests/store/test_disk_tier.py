"""The disk tier as its callers see it: what is kept, for how long, and what goes first."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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
    opened_and_checked,
    page_of,
    present,
    read,
    verifies,
    write,
)

from mlkv.errors import ConfigError, TierUnavailable
from mlkv.store.tiers import StoredPage
from mlkv.store.tiers.disk import DiskTier


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[DiskTier]:
    yield from opened_and_checked(tmp_path)


def test_pages_come_back_byte_for_byte(tier: DiskTier) -> None:
    pages = chain_of("abcdefgh")
    assert write(tier, pages) == [True] * 8
    views = MEMORY.blank(8)
    assert tier.read(keys_of(pages), views).all()
    assert [bytes(view) for view in views] == [bytes_of(page) for page in pages]


def test_pages_can_be_read_in_any_order_and_twice(tier: DiskTier) -> None:
    pages = chain_of("abcdefgh")
    write(tier, pages)
    assert all(read(tier, [pages[at] for at in (5, 0, 7, 5, 1, 2)]))


def test_what_is_not_here_is_not_read_and_its_memory_is_left_alone(tier: DiskTier) -> None:
    a, b, c = chain_of("abc")
    write(tier, [a, c])
    views = MEMORY.blank(3)
    assert tier.read(keys_of([a, b, c]), views).tolist() == [True, False, True]
    assert bytes(views[1]) == b"\xee" * PAGE_BYTES


def test_contains_counts_up_to_the_first_absent_key(tier: DiskTier) -> None:
    pages = chain_of("abcdef")
    write(tier, [*pages[:3], *pages[4:]])
    assert tier.contains(keys_of(pages)) == 3
    assert tier.contains(keys_of(pages[4:])) == 2
    assert tier.contains(keys_of(pages[3:])) == 0
    assert tier.contains([]) == 0


def test_empty_batches_do_nothing(tier: DiskTier) -> None:
    assert tier.read([], []).tolist() == []
    assert tier.write([], []).tolist() == []
    tier.delete([])


def test_a_key_named_twice_in_a_batch_is_written_once(tier: DiskTier) -> None:
    a, b = chain_of("ab")
    assert write(tier, [a, b, a, a]) == [True] * 4
    assert tier.stats().num_pages == 2
    assert read(tier, [a, b]) == [True, True]


def test_a_page_that_is_here_is_not_written_again(tier: DiskTier, monkeypatch: pytest.MonkeyPatch) -> None:
    pages = chain_of("abc")
    write(tier, pages)
    monkeypatch.setattr(os, "pwritev", None)
    assert write(tier, pages) == [True] * 3


def test_a_newer_write_of_a_key_replaces_the_old_one(tmp_path: Path) -> None:
    tier = opened(tmp_path)
    write(tier, chain_of("abc"))
    newer = page_of("ab", generation=2**64 - 1)
    assert write(tier, [newer]) == [True]
    assert tier.stats().num_pages == 3
    assert read(tier, [page_of("a"), newer, page_of("abc")]) == [True] * 3
    check_slots(tier)
    tier.close()
    tier = opened(tmp_path)
    assert read(tier, [page_of("a"), newer, page_of("abc")]) == [True] * 3
    tier.close()


def test_everything_is_there_again_after_a_restart(tmp_path: Path) -> None:
    tier = opened(tmp_path)
    write(tier, chain_of("abcdefgh"))
    tier.store_note("era", b"\x00\xff7")
    tier.close()
    tier = opened(tmp_path)
    assert tier.contains(keys_of(chain_of("abcdefgh"))) == 8
    assert all(read(tier, chain_of("abcdefgh")))
    assert tier.load_note("era") == b"\x00\xff7"
    check_slots(tier)
    tier.close()


def test_deleted_pages_are_gone_at_once_and_after_a_restart(tmp_path: Path) -> None:
    tier = opened(tmp_path)
    pages = chain_of("abcd")
    write(tier, pages)
    tier.delete([pages[1].key, b"absent".ljust(16)])
    for _ in range(2):
        assert tier.contains(keys_of(pages)) == 1
        assert read(tier, pages) == [True, False, True, True]
        check_slots(tier)
        tier.close()
        tier = opened(tmp_path)
    assert write(tier, [pages[1]]) == [True]
    assert tier.contains(keys_of(pages)) == 4
    tier.close()


def test_clear_forgets_pages_now_and_after_a_restart_and_keeps_notes(tmp_path: Path) -> None:
    tier = opened(tmp_path)
    write(tier, chain_of("abcd"))
    tier.store_note("era", b"5")
    tier.clear()
    for _ in range(2):
        assert tier.contains(keys_of(chain_of("a"))) == 0
        assert not any(read(tier, chain_of("abcd")))
        assert tier.load_note("era") == b"5"
        assert tier.stats().num_pages == 0
        tier.close()
        tier = opened(tmp_path)
    assert all(write(tier, chain_of("abcd")))
    check_slots(tier)
    tier.close()


def test_notes_are_replaced_and_bounded(tier: DiskTier) -> None:
    assert tier.load_note("never-stored") is None
    for value in (b"first", b"", b"x" * 1024):
        tier.store_note("a-note-7", value)
        assert tier.load_note("a-note-7") == value
    with pytest.raises(ValueError, match="1024"):
        tier.store_note("note", b"x" * 1025)
    with pytest.raises(ValueError, match="letters"):
        tier.store_note("no/path", b"")


def test_scan_lists_all_keys_in_order_by_pieces(tier: DiskTier) -> None:
    pages = chain_of("abcdefghij")
    write(tier, pages)
    found: list[bytes] = []
    while piece := tier.scan(found[-1] if found else b"", 3):
        found += piece
    assert found == sorted(keys_of(pages))


def test_views_of_another_size_are_refused(tier: DiskTier) -> None:
    (page,) = chain_of("a")
    (view,) = MEMORY.blank(1)
    with pytest.raises(ValueError, match="4096"):
        tier.write([page], [view[:-1]])
    with pytest.raises(ValueError, match="4096"):
        tier.read([page.key], [view[:512]])
    assert tier.contains([page.key]) == 0


def test_settings_that_cannot_work_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="page_bytes=5000"):
        DiskTier(tmp_path, 5000, 1 << 30)
    with pytest.raises(ConfigError, match="limit_bytes="):
        DiskTier(tmp_path, PAGE_BYTES, limit_for(1) - 1)
    with pytest.raises(ConfigError, match="threads=0"):
        DiskTier(tmp_path, PAGE_BYTES, 1 << 30, threads=0)
    assert list(tmp_path.iterdir()) == []


def test_a_closed_or_unconnected_tier_says_so(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, PAGE_BYTES, 1 << 30)
    assert tier.stats().num_pages == -1
    for _ in range(2):
        with pytest.raises(TierUnavailable, match="not connected"):
            tier.contains([])
        tier.connect(NO_POOL)
        tier.close()


# Eviction


def test_suffixes_go_before_their_prefixes(tmp_path: Path) -> None:
    tier = opened(tmp_path, num_pages=6)
    write(tier, chain_of("abcdef"))
    for count, text in enumerate("uvwx", start=1):
        assert write(tier, chain_of(text)) == [True]
        assert present(tier, chain_of("abcdef")) == [True] * (6 - count) + [False] * count
        check_slots(tier)
    assert tier.stats().pages_evicted == 4
    assert all(read(tier, [*chain_of("ab"), *map(page_of, "uvwx")]))
    tier.close()


def test_what_was_used_last_stays_longest(tmp_path: Path) -> None:
    tier = opened(tmp_path, num_pages=6)
    write(tier, chain_of("abc"))
    write(tier, chain_of("xyz"))
    assert tier.contains(keys_of(chain_of("abc"))) == 3
    write(tier, chain_of("uv"))
    assert tier.contains(keys_of(chain_of("abc"))) == 3
    assert tier.contains(keys_of(chain_of("xyz"))) == 1
    read(tier, chain_of("x"))
    write(tier, chain_of("uvw"))
    assert tier.contains(keys_of(chain_of("x"))) == 1
    assert tier.contains(keys_of(chain_of("abc"))) == 2
    tier.close()


def test_the_use_of_a_page_that_was_deleted_stays_with_its_prefix(tmp_path: Path) -> None:
    tier = opened(tmp_path, num_pages=6)
    write(tier, chain_of("abc"))
    write(tier, chain_of("xyz"))
    tier.contains(keys_of(chain_of("abc")))
    tier.delete([page_of("abc").key])
    tier.close()
    tier = opened(tmp_path, num_pages=6)
    write(tier, chain_of("uvw"))
    assert present(tier, chain_of("ab")) == [True, True]
    assert present(tier, chain_of("xyz")) == [True, False, False]
    tier.close()


def test_the_order_of_use_survives_a_restart(tmp_path: Path) -> None:
    tier = opened(tmp_path, num_pages=6)
    write(tier, chain_of("abc"))
    write(tier, chain_of("xyz"))
    tier.contains(keys_of(chain_of("abc")))
    tier.close()
    tier = opened(tmp_path, num_pages=6)
    write(tier, chain_of("uvw"))
    assert tier.contains(keys_of(chain_of("abc"))) == 3
    assert tier.contains(keys_of(chain_of("xyz"))) == 0
    tier.close()


def test_a_chain_does_not_make_room_for_itself(tmp_path: Path) -> None:
    tier = opened(tmp_path, num_pages=4)
    pages = chain_of("abcdefgh")
    assert write(tier, pages) == [True] * 4 + [False] * 4
    assert write(tier, pages[4:6]) == [False] * 2
    assert tier.contains(keys_of(pages)) == 4
    check_slots(tier)
    tier.close()


def test_the_prefix_of_what_is_written_is_not_evicted_for_it(tmp_path: Path) -> None:
    tier = opened(tmp_path, num_pages=4)
    write(tier, chain_of("ab"))
    write(tier, chain_of("xy"))
    assert write(tier, chain_of("abcd")) == [True] * 4
    assert tier.contains(keys_of(chain_of("abcd"))) == 4
    check_slots(tier)
    tier.close()


def test_a_page_without_its_prefix_can_be_evicted(tmp_path: Path) -> None:
    tier = opened(tmp_path, num_pages=3)
    write(tier, chain_of("abc")[1:])
    write(tier, chain_of("xyz"))
    assert tier.contains(keys_of(chain_of("xyz"))) == 3
    check_slots(tier)
    tier.close()


def test_a_connection_is_kept_when_nothing_is_wrong_with_it(tier: DiskTier) -> None:
    write(tier, chain_of("abc"))
    volume = tier._opened
    tier.connect(NO_POOL)
    assert tier._opened is volume
    assert tier.contains(keys_of(chain_of("abc"))) == 3


def test_pages_of_a_chain_are_written_and_read_in_few_large_requests(
    tier: DiskTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    for name in ("preadv", "pwritev"):
        real = getattr(os, name)

        def counted(fd: int, views: list[memoryview], offset: int, real: Any = real) -> int:
            sizes.append(sum(map(len, views)))
            return int(real(fd, views, offset))

        monkeypatch.setattr(os, name, counted)
    pages = chain_of("abcdefghijklmnop")
    assert all(write(tier, pages))
    assert all(read(tier, list(reversed(pages))))
    assert sizes == [16 * PAGE_BYTES] * 2


def test_the_layout_of_the_tests_leaves_no_byte_unchecked() -> None:
    page = StoredPage(b"k" * 16, b"p" * 16, b"n" * 16, 9)
    whole = bytes_of(page)
    assert len(whole) == LAYOUT.page_bytes
    assert verifies(memoryview(whole), page)
