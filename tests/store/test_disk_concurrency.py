"""The disk tier when several calls are under way at once, or one hangs."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from disk_pages import (
    NO_POOL,
    PAGE_BYTES,
    Memory,
    chain_of,
    check_slots,
    keys_of,
    opened,
    opened_and_checked,
    page_of,
    read,
    verifies,
    write,
)

from mlkv.errors import TierUnavailable
from mlkv.store.tiers.disk import DiskTier

DEADLINE_S = 30.0


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[DiskTier]:
    yield from opened_and_checked(tmp_path)


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
