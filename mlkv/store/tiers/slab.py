"""One file that holds pages in numbered slots, and the only code that moves page bytes to and from a disk.

Page n of the file is slot n; there is no header of the file, since every page says itself what it is. Blocks are
reserved before they are used, so that a disk that is full says so when the file grows and not in the middle of a
page. Access goes around the page cache where the file system allows that (O_DIRECT): pages are cached in the host
pool already, and a copy by the kernel costs a core at the rate of a fast disk.
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from mlkv.errors import ConfigError, TierUnavailable

log = logging.getLogger(__name__)

BLOCK_BYTES = 4096
"""Offsets, lengths and addresses under O_DIRECT are multiples of this, the largest logical block of disks."""

_MAX_REQUEST_BYTES = 8 << 20
"""Neighbouring slots are joined into requests of up to this size; a larger page is one request of its own.

The rate is the same from 1 MiB on, with 8 threads; the CPU time is not: 0.065, 0.038, 0.030 s/GiB with 1, 4, 8 MiB
on two cores and large pages of memory. Larger ones would keep a slow disk busy for longer after a deadline.
"""

_MAX_REQUEST_PAGES = 512  # well below IOV_MAX, 1024

_MAX_STALLS = 64
"""Interrupted calls, and calls that moved less than a block, after which a request counts as failed."""

Outcome: TypeAlias = "OSError | None"
"""What became of a page: None when all of its bytes were moved; a TimeoutError when its turn came too late."""

_Syscall: TypeAlias = Callable[[int, list[memoryview], int], int]


@dataclass(frozen=True)
class _Request:
    """Neighbouring slots, moved by one system call. `members`: places in the caller's batch, one for each slot."""

    first_slot: int
    members: list[int]


class Slab:
    """A file of `num_slots` pages of `page_bytes` each. Thread-safe; nobody may write a slot that is in use.

    Attributes:
        is_direct: whether the page cache is bypassed.
    """

    def __init__(self, path: Path, page_bytes: int, num_threads: int) -> None:
        """Open or make the file.

        Args:
            page_bytes: a multiple of 4096.
            num_threads: how many requests are with the disk at once.

        Raises:
            ConfigError: for another `page_bytes`.
            TierUnavailable: when there is something at `path` that is not a file of this user's to write.
        """
        if page_bytes < BLOCK_BYTES or page_bytes % BLOCK_BYTES:
            raise ConfigError(f"page_bytes={page_bytes} must be a positive multiple of {BLOCK_BYTES}")
        self.path = path
        self.page_bytes = page_bytes
        try:
            # Allocation uses a descriptor of its own: glibc emulates it with small writes where the file system
            # has none, and those would be refused under O_DIRECT.
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise TierUnavailable(f"cannot open the slab {path}: {error.strerror}") from error
        self._direct_fd = -1
        try:
            self.num_slots = os.fstat(self._fd).st_size // page_bytes
            self._direct_fd = _open_direct(path)
        except BaseException:
            os.close(self._fd)
            raise
        self.is_direct = self._direct_fd >= 0
        if not self.is_direct:
            log.warning("%s: no O_DIRECT here; pages pass through the page cache, which costs CPU time", path)
        self._num_threads = num_threads
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="mlkv-disk")

    def is_in_place(self) -> bool:
        """Whether the open file is still the one that has the name, and as long as it should be."""
        # Another call may change the length meanwhile. Slots are there before they are counted and are counted no
        # more before they go, so the smaller of the counts before and after the look is what must be there.
        before = self.num_slots
        try:
            found = os.stat(self.path, follow_symlinks=False)
        except OSError:
            return False
        opened = os.fstat(self._fd)
        same = (found.st_dev, found.st_ino) == (opened.st_dev, opened.st_ino)
        return same and opened.st_size >= min(before, self.num_slots) * self.page_bytes

    def grow(self, num_slots: int) -> None:
        """Reserve the blocks of `num_slots` slots. On failure the file is as before, and OSError is raised."""
        old_bytes, new_bytes = self.num_slots * self.page_bytes, num_slots * self.page_bytes
        try:
            os.posix_fallocate(self._fd, old_bytes, new_bytes - old_bytes)
        except OSError:
            # Some file systems keep what they could reserve. It is beyond the last slot, so nobody would use it.
            with suppress(OSError):
                os.ftruncate(self._fd, old_bytes)
            raise
        self.num_slots = num_slots

    def shrink(self, num_slots: int) -> None:
        """Give back the blocks from slot `num_slots` on."""
        self.num_slots = num_slots
        os.ftruncate(self._fd, num_slots * self.page_bytes)

    def read(self, slots: Sequence[int], pages: Sequence[memoryview], give_up_at: float) -> list[Outcome]:
        """Fill `pages[i]` from `slots[i]`. `give_up_at`: of time.monotonic; no request starts after it."""
        return self._move(os.preadv, slots, pages, give_up_at)

    def write(self, slots: Sequence[int], pages: Sequence[memoryview], give_up_at: float) -> list[Outcome]:
        """Write `pages[i]` to `slots[i]`, which must be different. `give_up_at` as for `read`."""
        return self._move(os.pwritev, slots, pages, give_up_at)

    def close(self) -> None:
        """Close the file. No call may be running."""
        self._threads.shutdown()
        os.close(self._fd)
        if self.is_direct:
            os.close(self._direct_fd)

    def _move(
        self, syscall: _Syscall, slots: Sequence[int], pages: Sequence[memoryview], give_up_at: float
    ) -> list[Outcome]:
        outcomes: list[Outcome] = [None] * len(slots)
        requests = deque(_join_neighbours(slots, self.page_bytes))

        def work() -> None:
            while requests:
                try:
                    request = requests.popleft()
                except IndexError:
                    return  # another thread took the last one
                self._perform(syscall, request, pages, give_up_at, outcomes)

        if len(requests) == 1:
            work()
            return outcomes
        futures = [self._threads.submit(work) for _ in range(min(len(requests), self._num_threads))]
        # The views are lent until this returns, so every thread must be through, also when one has failed.
        wait(futures)
        for future in futures:
            future.result()
        return outcomes

    def _perform(
        self,
        syscall: _Syscall,
        request: _Request,
        pages: Sequence[memoryview],
        give_up_at: float,
        outcomes: list[Outcome],
    ) -> None:
        views = [pages[member] for member in request.members]
        try:
            if time.monotonic() > give_up_at:
                raise TimeoutError(errno.ETIMEDOUT, "the disk was too slow for this page")
            self._move_fully(syscall, views, request.first_slot * self.page_bytes)
        except OSError as error:
            if len(views) == 1 or isinstance(error, TimeoutError):
                for member in request.members:
                    outcomes[member] = error
                return
            # One bad sector should not cost its neighbours.
            for place, member in enumerate(request.members):
                single = _Request(request.first_slot + place, [member])
                self._perform(syscall, single, pages, give_up_at, outcomes)

    def _move_fully(self, syscall: _Syscall, views: list[memoryview], offset_bytes: int) -> None:
        """Repeat the system call until all bytes of `views` are moved, or raise OSError."""
        fd, unit = (self._direct_fd, BLOCK_BYTES) if self.is_direct else (self._fd, 1)
        stalls = 0
        while views:
            moved = 0
            with suppress(InterruptedError):
                moved = syscall(fd, views, offset_bytes)
                if moved == 0:
                    raise OSError(errno.EIO, f"the slab {self.path} ends inside a page")
            # O_DIRECT goes on at a block's border only: the beginning of a block is moved again with its rest.
            moved -= moved % unit
            if moved == 0:
                stalls += 1
                if stalls > _MAX_STALLS:
                    raise OSError(errno.EIO, f"the slab {self.path} makes no progress at byte {offset_bytes}")
                continue
            offset_bytes += moved
            views = _after(views, moved)


def _open_direct(path: Path) -> int:
    """A descriptor with O_DIRECT that really reads, or -1. Some file systems refuse only when it is used."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return -1
    probe = mmap.mmap(-1, BLOCK_BYTES)  # aligned, which a bytearray is not
    try:
        os.preadv(fd, [probe], 0)
    except OSError:
        os.close(fd)
        return -1
    finally:
        probe.close()
    return fd


def _join_neighbours(slots: Sequence[int], page_bytes: int) -> list[_Request]:
    """Requests that cover `slots`, each for a run of neighbours and of bounded size, in the order of the file."""
    max_pages = min(_MAX_REQUEST_PAGES, max(1, _MAX_REQUEST_BYTES // page_bytes))
    requests: list[_Request] = []
    members: list[int] = []
    next_slot = -1
    for member in sorted(range(len(slots)), key=slots.__getitem__):
        slot = slots[member]
        if slot == next_slot and len(members) < max_pages:
            members.append(member)
        else:
            members = [member]
            requests.append(_Request(slot, members))
        next_slot = slot + 1
    return requests


def _after(views: list[memoryview], moved_bytes: int) -> list[memoryview]:
    """What is left of `views` after the first `moved_bytes` bytes."""
    for place, view in enumerate(views):
        if moved_bytes < len(view):
            return [view[moved_bytes:], *views[place + 1 :]]
        moved_bytes -= len(view)
    return []
