"""The folder of a disk tier: who may use it, and what lies in it."""

from __future__ import annotations

import fcntl
import os
import stat
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from mlkv.errors import TierUnavailable
from mlkv.page import FORMAT_VERSION as PAGE_VERSION
from mlkv.store.tiers.catalog import FORMAT_VERSION as CATALOG_VERSION
from mlkv.store.tiers.catalog import catalog_files

_LOCK = "lock"
_SHELF = "pages-v"
_SLAB = "slab"
_CATALOG = "catalog.sqlite3"


class FolderInUse(TierUnavailable):
    """Another process has the folder now; it may be about to end."""


@dataclass(frozen=True)
class Leftover:
    """Pages of another size or format version, which lie in the same folder and count against its limit."""

    path: Path
    used_bytes: int

    def remove(self) -> None:
        """Remove its files, and the folder unless there is something in it that is not ours."""
        # The catalog first: without it nothing points into a slab that is half gone.
        for file in _files_of(self.path):
            with suppress(FileNotFoundError):
                file.unlink()
        with suppress(OSError):
            self.path.rmdir()


class DiskFolder:
    """A locked folder::

        DIRECTORY/lock                              held by the one process that uses the folder; says its pid
        DIRECTORY/pages-v<page>.<catalog>-<bytes>/  versions of both formats, and the size of a page
            slab  catalog.sqlite3  catalog.sqlite3-wal

    Pages of another size or version lie in another sub-folder, where nobody who would misread them looks. Anything
    else in the folder is left alone.

    Attributes:
        slab_path, catalog_path: where these are for this page size.
    """

    def __init__(self, directory: Path, page_bytes: int) -> None:
        """Make the folders and lock them.

        Raises TierUnavailable when that is impossible, FolderInUse when another process holds the lock: the
        message names its pid.
        """
        self._directory = directory
        self._shelf = directory / f"{_SHELF}{PAGE_VERSION}.{CATALOG_VERSION}-{page_bytes}"
        self.slab_path = self._shelf / _SLAB
        self.catalog_path = self._shelf / _CATALOG
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock_fd = _lock(directory)
        except OSError as error:
            raise TierUnavailable(f"cannot use the disk folder {directory}: {error}") from error
        try:
            self._shelf.mkdir(mode=0o700, exist_ok=True)
            if not stat.S_ISDIR(self._shelf.lstat().st_mode):
                raise TierUnavailable(f"{self._shelf} is in the way: it should be a folder; remove it")
        except OSError as error:
            os.close(self._lock_fd)
            raise TierUnavailable(f"cannot use the disk folder {self._shelf}: {error}") from error
        except BaseException:
            os.close(self._lock_fd)
            raise

    def is_in_place(self) -> bool:
        """Whether the lock still keeps others away: nobody has removed its file."""
        return _is_open_at(self._lock_fd, self._directory / _LOCK)

    def leftovers(self) -> list[Leftover]:
        """What other page sizes and versions have left here, those used longest ago first."""
        found: list[tuple[int, Leftover]] = []
        for path in self._directory.glob(f"{_SHELF}*"):
            if path == self._shelf or path.is_symlink() or not path.is_dir():
                continue
            used_bytes = last_used = 0
            for file in _files_of(path):
                with suppress(FileNotFoundError):
                    status = file.lstat()
                    used_bytes += status.st_blocks * 512
                    last_used = max(last_used, status.st_mtime_ns)
            if used_bytes:
                found.append((last_used, Leftover(path, used_bytes)))
        return [leftover for _, leftover in sorted(found, key=lambda entry: entry[0])]

    def release(self) -> None:
        """Let others use the folder."""
        os.close(self._lock_fd)


def page_sizes(directory: Path) -> list[int]:
    """Sizes in bytes of the pages that lie in a folder in this version's format, without locking it."""
    prefix = f"{_SHELF}{PAGE_VERSION}.{CATALOG_VERSION}-"
    sizes = [path.name.removeprefix(prefix) for path in directory.glob(f"{prefix}*")]
    return sorted(int(text) for text in sizes if text.isdigit())


def folder_bytes(directory: Path) -> int:
    """Length of everything of the tier in a folder, of any page size and version."""
    files = (file for path in directory.glob(f"{_SHELF}*") for file in _files_of(path))
    return sum(file.lstat().st_size for file in files if file.exists())


def _lock(directory: Path) -> int:
    """A descriptor that holds the folder's lock, with this process's id written to it."""
    path = directory / _LOCK
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_open_at(fd, path):
                os.ftruncate(fd, 0)
                os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
                return fd
        except BlockingIOError:
            holder = os.pread(fd, 32, 0).decode("ascii", "replace").strip()
            os.close(fd)
            raise FolderInUse(
                f"the disk folder {directory} is in use by process {holder or 'unknown'}; "
                "give every store on this host its own folder, or share one store (store.name)"
            ) from None
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)  # removed between opening and locking: the next to come would lock another file


def _is_open_at(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path, follow_symlinks=False))
    except OSError:
        return False


def _files_of(shelf: Path) -> list[Path]:
    return [*catalog_files(shelf / _CATALOG), shelf / _SLAB]
