"""The disk tier as its callers see it: what is kept, for how long, and what goes first."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from disk_pages import (
    LAYOUT,
    MEMORY,
    NO_POOL,
    PAGE_BYTES,
    Memory,
    bytes_of,
    chain_of,
    check_slots,
    keys_of,
    limit_for,
    opened,
    page_of,
    present,
    read,
    verifies,
    write,
)

from mlkv.errors import ConfigError, TierUnavailable
from mlkv.store.tiers import StoredPage
from mlkv.store.tiers.disk import DiskTier

DEADLINE_S = 30.0


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[DiskTier]:
    tier = opened(tmp_path)
    yield tier
    check_slots(tier)
    tier.close()


class Gate:
    """Holds system calls of one kind until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        self.reached, self._open = threading.Event(), threading.Event()
        self._real: Callable[..., int] = getattr(os, name)
        monkeypatch.setattr(os, name, self._wait)

    def _wait(self, *arguments: Any) -> int:
        self.reached.set()
        assert self._open.wait(DEADLINE_S)
        return self._real(*arguments)

    def open(self) -> None:
        self._open.set()


def in_thread(work: Callable[[], Any]) -> Callable[[], Any]:
    """Start `work` on a thread; call what is returned for its result."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(work()), daemon=True)
    thread.start()

    def result() -> Any:
        thread.join(DEADLINE_S)
        assert results, "the call did not return, or raised"
        return results[0]

    return result


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


# Calls at the same time


def test_a_page_is_invisible_until_it_is_completely_written(
    tier: DiskTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch, "pwritev")
    written = in_thread(lambda: write(tier, chain_of("abc")))
    assert gate.reached.wait(DEADLINE_S)
    assert tier.contains(keys_of(chain_of("abc"))) == 0
    assert not any(read(tier, chain_of("abc")))
    assert write(tier, chain_of("ab")) == [False, False], "it is not here yet, and one writer is enough"
    gate.open()
    assert written() == [True] * 3
    assert tier.contains(keys_of(chain_of("abc"))) == 3


@pytest.mark.parametrize("how", ["delete", "clear"])
def test_a_write_that_began_before_a_deletion_does_not_bring_its_page_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    tier = opened(tmp_path)
    pages = chain_of("abc")
    gate = Gate(monkeypatch, "pwritev")
    written = in_thread(lambda: write(tier, pages))
    assert gate.reached.wait(DEADLINE_S)
    gone = pages[1:] if how == "delete" else pages
    if how == "delete":
        tier.delete(keys_of(gone))
    else:
        tier.clear()
    gate.open()
    assert written() == [page not in gone for page in pages]
    for _ in range(2):
        assert [tier.contains([page.key]) for page in pages] == [page not in gone for page in pages]
        check_slots(tier)
        tier.close()
        tier = opened(tmp_path)
    tier.close()


def test_a_key_deleted_while_it_is_written_can_be_written_anew_at_once(
    tier: DiskTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        gate = Gate(patch, "pwritev")
        old = in_thread(lambda: write(tier, [page_of("a")]))
        assert gate.reached.wait(DEADLINE_S)
        tier.delete([page_of("a").key])
        new = in_thread(lambda: write(tier, [page_of("a", generation=2)]))
        gate.open()
        assert old() == [False]
        assert new() == [True]
    assert read(tier, [page_of("a", generation=2)]) == [True]


@pytest.mark.parametrize("how", ["delete", "clear", "replace", "evict"])
def test_a_slot_is_not_reused_while_somebody_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    tier = opened(tmp_path, num_pages=2)
    write(tier, chain_of("ab"))
    gate = Gate(monkeypatch, "preadv")
    got = in_thread(lambda: read(tier, chain_of("ab")))
    assert gate.reached.wait(DEADLINE_S)
    if how == "delete":
        tier.delete(keys_of(chain_of("ab")))
    elif how == "clear":
        tier.clear()
    elif how == "replace":
        assert write(tier, chain_of("ab", generation=2)) == [False, False], "no slot is left for them"
        tier.delete(keys_of(chain_of("ab")))
    assert write(tier, chain_of("xy")) == [False, False]
    gate.open()
    assert got() == [True, True]
    assert tier.contains(keys_of(chain_of("ab"))) == (2 if how == "evict" else 0), "nothing made room in vain"
    tier.delete(keys_of(chain_of("ab")))
    assert write(tier, chain_of("xy")) == [True, True]
    check_slots(tier)
    tier.close()


def test_readers_and_writers_on_many_threads_get_only_what_was_written(tmp_path: Path) -> None:
    tier = opened(tmp_path, num_pages=40, threads=4)
    wrong: list[str] = []
    hits = [0] * 8
    memory = [Memory(64) for _ in hits]

    def work(seed: int) -> None:
        chance = np.random.default_rng(seed)
        try:
            for _ in range(60):
                text = "".join(chance.choice(list("abc"), size=int(chance.integers(1, 7))))
                pages = chain_of(text)
                views = memory[seed].filled(pages)
                tier.write(pages, views)
                for view in views:
                    view[:] = b"\xee" * PAGE_BYTES
                for page, view, good in zip(pages, views, tier.read(keys_of(pages), views), strict=True):
                    hits[seed] += int(good)
                    if good and not verifies(view, page):
                        wrong.append(text)
                if chance.random() < 0.2:
                    tier.delete([pages[-1].key])
                if chance.random() < 0.02:
                    tier.clear()
        except Exception as error:
            wrong.append(repr(error))

    threads = [threading.Thread(target=work, args=(seed,), daemon=True) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not any(thread.is_alive() for thread in threads)
    assert wrong == []
    assert sum(hits) > 500
    check_slots(tier)
    tier.close()


def test_a_call_gives_up_at_its_deadline_and_forgets_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = opened(tmp_path, deadline_s=0.05, threads=1)
    pages = [page_of(text) for text in "abcdef"]
    write(tier, pages)
    tier.delete(keys_of(pages[1::2]))  # what is left are no neighbours: one request each
    with monkeypatch.context() as patch:
        real = os.preadv

        def slow(*arguments: Any) -> int:
            threading.Event().wait(0.1)
            return real(*arguments)

        patch.setattr(os, "preadv", slow)
        assert read(tier, pages[::2]) == [True, False, False]
    assert read(tier, pages[::2]) == [True] * 3
    tier.close()


def test_closing_while_a_call_hangs_does_not_wait_and_keeps_others_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = opened(tmp_path)
    volume = tier._opened
    assert volume is not None
    with monkeypatch.context() as patch:
        gate = Gate(patch, "pwritev")
        written = in_thread(lambda: write(tier, chain_of("abc")))
        assert gate.reached.wait(DEADLINE_S)
        tier.connect(NO_POOL)
        assert tier._opened is volume, "a call hangs in it"
        tier.close()
        with pytest.raises(TierUnavailable, match="in use by process"):
            opened(tmp_path)
        gate.open()
        assert written() == [True] * 3, "its file was still its own"
    volume.close()
    tier = opened(tmp_path)
    assert read(tier, chain_of("abc")) == [True] * 3
    tier.close()


def test_a_broken_folder_is_not_opened_anew_while_a_call_hangs_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = opened(tmp_path)
    with monkeypatch.context() as patch:
        gate = Gate(patch, "pwritev")
        written = in_thread(lambda: write(tier, chain_of("abc")))
        assert gate.reached.wait(DEADLINE_S)
        (tmp_path / "lock").unlink()
        with pytest.raises(TierUnavailable, match="1 calls still hang"):
            tier.connect(NO_POOL)
        gate.open()
        assert written() == [True] * 3
    tier.connect(NO_POOL)
    assert read(tier, chain_of("abc")) == [True] * 3
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
