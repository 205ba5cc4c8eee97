"""A disk tier's process is killed at every moment that matters; what it had said is true after the restart."""

from __future__ import annotations

import mmap
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from disk_pages import (
    NO_POOL,
    PAGE_BYTES,
    chain_of,
    check_slots,
    keys_of,
    limit_for,
    occupied_bytes,
    opened,
    page_of,
    read_everything,
    write,
)

from mlkv.errors import TierUnavailable
from mlkv.store.tiers.disk import DiskTier

NUM_PAGES = 6

STEPS: tuple[Callable[[DiskTier], object], ...] = (
    lambda tier: write(tier, chain_of("abcd")),
    lambda tier: write(tier, chain_of("abxy")),
    lambda tier: tier.delete([page_of("abcd").key]),
    lambda tier: write(tier, [page_of("abx", generation=2)]),  # replaces
    lambda tier: write(tier, chain_of("pqrs")),  # evicts
    lambda tier: tier.clear(),
    lambda tier: write(tier, chain_of("abcd", generation=3)),
)


class Journal:
    """How many steps a child has done, in memory that outlives it."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 4096)

    def step(self) -> None:
        self._memory[0] += 1

    @property
    def steps(self) -> int:
        return self._memory[0]


class Countdown:
    """Kills this process at the n-th moment: before, within, and after everything that reaches the disk."""

    def __init__(self, moment: int) -> None:
        self._left = moment

    def tick(self) -> None:
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        self._left -= 1

    def install(self, tier: DiskTier) -> None:
        """In a child only: nothing is put back."""
        volume: Any = tier._opened
        volume.catalog._database = TickingDatabase(volume.catalog._database, self)
        real = os.pwritev

        def pwritev(fd: int, views: list[memoryview], offset: int) -> int:
            self.tick()
            first_half = b"".join(views)[: len(views) * PAGE_BYTES // 2]
            buffered = os.open(volume.slab.path, os.O_WRONLY)
            os.pwrite(buffered, first_half, offset)
            os.close(buffered)
            self.tick()
            done = real(fd, views, offset)
            self.tick()
            return done

        os.pwritev = pwritev


class TickingDatabase:
    """A connection of which every statement counts, before and after it is executed."""

    def __init__(self, real: Any, countdown: Countdown) -> None:
        self._real, self._countdown = real, countdown

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._real, name)

        def ticking(*arguments: Any) -> Any:
            self._countdown.tick()
            result = method(*arguments)
            self._countdown.tick()
            return result

        return ticking


def fork(work: Callable[[], None]) -> int:
    """Run `work` in a child, which has only this thread and ends with it. Returns its pid."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
            os._exit(0)
        finally:
            os._exit(1)
    return pid


def is_killed(pid: int) -> bool:
    """Wait for a child. False if it came to its end."""
    _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    assert code in (0, -signal.SIGKILL), "the child failed by itself"
    return code != 0


def writes_in(tier: DiskTier) -> set[tuple[bytes, int]]:
    """Keys and generations that are there, and would be there again after a restart."""
    volume: Any = tier._opened
    found = {(key, generation) for _, key, _, generation, _ in volume.catalog.rows()}
    assert {key for key, _ in found} == set(tier.scan(b"", 1000))
    return found


def test_a_kill_at_any_moment_loses_nothing_that_was_committed_and_brings_nothing_back(tmp_path: Path) -> None:
    states: list[set[tuple[bytes, int]]] = [set()]
    tier = opened(tmp_path / "undisturbed", NUM_PAGES)
    for step in STEPS:
        step(tier)
        states.append(writes_in(tier))
    tier.close()
    assert len({frozenset(state) for state in states}) == 7, "every step changes something"

    moment = 0
    while True:
        directory, journal = tmp_path / str(moment), Journal()

        def child(directory: Path = directory, journal: Journal = journal, moment: int = moment) -> None:
            tier = opened(directory, NUM_PAGES, threads=1)
            Countdown(moment).install(tier)
            for step in STEPS:
                step(tier)
                journal.step()

        killed = is_killed(fork(child))
        before, after = states[journal.steps], states[min(journal.steps + 1, len(STEPS))]
        tier = opened(directory, NUM_PAGES)
        check_slots(tier)
        found = writes_in(tier)
        assert before & after <= found <= before | after, f"killed at moment {moment}"
        given, refused = read_everything(tier)
        assert given == {key for key, _ in found}
        assert not refused
        assert occupied_bytes(directory) <= limit_for(NUM_PAGES)
        assert all(write(tier, chain_of("vw")))
        tier.close()
        if not killed:
            break
        moment += 1
    assert moment > 80, "the moments were not all there"


def test_kills_at_random_times_with_many_threads_leave_only_whole_pages(tmp_path: Path) -> None:
    chance = random.Random(5)
    for _ in range(12):
        journal = Journal()

        def child(journal: Journal = journal, seed: int = chance.randrange(1 << 30)) -> None:
            import threading

            tier = opened(tmp_path, 24, threads=4)
            journal.step()

            def work(number: int) -> None:
                mine = random.Random(seed + number)
                while True:
                    text = "".join(mine.choices("abc", k=mine.randint(1, 6)))
                    write(tier, chain_of(text, generation=mine.randint(1, 2)))
                    if mine.random() < 0.1:
                        tier.delete([page_of(text).key])

            threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

        pid = fork(child)
        give_up_at = time.monotonic() + 30
        while not journal.steps:
            assert time.monotonic() < give_up_at
            time.sleep(0.001)
        time.sleep(chance.uniform(0.0, 0.15))
        os.kill(pid, signal.SIGKILL)
        assert is_killed(pid)
        tier = opened(tmp_path, 24)
        check_slots(tier)
        given, refused = read_everything(tier)
        assert not refused, "a row that names bytes which were not written"
        assert occupied_bytes(tmp_path) <= limit_for(24)
        tier.close()
    assert given, "the children wrote nothing"


def test_a_second_instance_is_refused_and_told_who_has_the_folder(tmp_path: Path) -> None:
    tier = opened(tmp_path)
    write(tier, chain_of("abc"))
    for limit_pages, page_bytes in ((64, PAGE_BYTES), (64, 2 * PAGE_BYTES)):
        second = DiskTier(tmp_path, page_bytes, limit_for(limit_pages, page_bytes))
        with pytest.raises(TierUnavailable, match=rf"{tmp_path} is in use by process {os.getpid()};"):
            second.connect(NO_POOL)
    assert tier.contains(keys_of(chain_of("abc"))) == 3
    tier.close()
    second = opened(tmp_path)
    assert second.contains(keys_of(chain_of("abc"))) == 3
    second.close()


def test_the_folder_of_a_killed_process_is_free_at_once(tmp_path: Path) -> None:
    ready, journal = Journal(), Journal()

    def child() -> None:
        tier = opened(tmp_path)
        write(tier, chain_of("abc"))
        ready.step()
        while not journal.steps:
            time.sleep(0.01)

    pid = fork(child)
    give_up_at = time.monotonic() + 30
    while not ready.steps:
        assert time.monotonic() < give_up_at
        time.sleep(0.001)
    with pytest.raises(TierUnavailable, match=f"in use by process {pid};"):
        opened(tmp_path)
    os.kill(pid, signal.SIGKILL)
    assert is_killed(pid)
    tier = opened(tmp_path)
    assert tier.contains(keys_of(chain_of("abc"))) == 3
    tier.close()


def test_the_lock_holds_although_its_file_was_removed_and_the_tier_notices(tmp_path: Path) -> None:
    tier = opened(tmp_path)
    (tmp_path / "lock").unlink()
    with pytest.raises(TierUnavailable, match="removed"):
        write(tier, chain_of("abc"))
    tier.connect(NO_POOL)
    assert all(write(tier, chain_of("abc")))
    tier.close()
