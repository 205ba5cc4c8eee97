"""A disk folder in use: its lock, slab, catalog and index, which are opened and closed together."""

from __future__ import annotations

import errno
import logging
import os
import sqlite3
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from mlkv.errors import TierUnavailable
from mlkv.store.tiers.catalog import Catalog, CatalogDamaged, Row, max_catalog_bytes, remove_catalog
from mlkv.store.tiers.disk_folder import DiskFolder
from mlkv.store.tiers.disk_index import DiskIndex
from mlkv.store.tiers.slab import Slab

log = logging.getLogger(__name__)

_MAX_GROWTH_BYTES = 1 << 30
_GROWTH_STEPS = 16
"""The slab grows by this part of its limit, so that a large limit costs neither time nor room before it is needed,
and what another page size has left stays as long as there is room for both."""

_GROWTH_RETRY_S = 60.0
"""A disk that had no room is not asked again before this has passed; meanwhile pages make room for each other."""


class DiskVolume:
    """What is open between two calls of `connect`.

    Two locks. `catalog_lock` orders changes on disk: whoever holds it may use the catalog. `index_lock` guards the
    index; it is held for moments only and never while something waits for the disk, so that no lookup waits for a
    transaction. Whoever needs both takes `catalog_lock` first.
    """

    def __init__(self, directory: Path, page_bytes: int, limit_bytes: int, num_threads: int) -> None:
        """Lock and open everything, and recover what a previous run has committed.

        Raises TierUnavailable when the folder cannot be used; then nothing stays open.
        """
        self.catalog_lock = threading.Lock()
        self.index_lock = threading.Lock()
        self._limit_bytes = limit_bytes
        self._page_bytes = page_bytes
        self.max_slots = max_slots(limit_bytes, page_bytes)
        self.num_calls = 0
        self._grow_after = 0.0
        with ExitStack() as opened:
            try:
                self.folder = DiskFolder(directory, page_bytes)
                opened.callback(self.folder.release)
                self.slab = Slab(self.folder.slab_path, page_bytes, num_threads)
                opened.callback(self.slab.close)
                self.catalog = _open_catalog(self.folder.catalog_path)
                opened.callback(lambda: self.catalog.close())  # by then it may be another one
                self._leftovers = self.folder.leftovers()
                self._recover()
            except (OSError, sqlite3.Error, CatalogDamaged) as error:
                raise TierUnavailable(f"cannot use the disk folder {directory}: {error}") from error
            self._opened = opened.pop_all()

    @contextmanager
    def call(self) -> Iterator[None]:
        """Around every use of the slab: what is in use is not closed."""
        with self.index_lock:
            self.num_calls += 1
        try:
            yield
        finally:
            with self.index_lock:
                self.num_calls -= 1

    def is_sound(self) -> bool:
        """Whether all files are there and can be written; if not, the volume must be opened anew."""
        in_place = self.folder.is_in_place() and self.slab.is_in_place() and self.catalog.is_in_place()
        return in_place and not self.catalog.is_damaged

    def commit(self, insert: Sequence[Row] = ()) -> None:
        """One transaction: rows of condemned slots go, `insert` comes. The caller holds `catalog_lock`.

        Raises TierUnavailable when it failed. Then it is unknown whether `insert` came; the condemned slots remain
        so.
        """
        with self.index_lock:
            condemned = self.index.condemned()
            used = self.index.recency.take_unsaved()  # lost if this fails, which costs order only
        if not (condemned or insert or used):
            return
        with self._catalog_errors():
            self.catalog.change(delete=condemned, insert=insert, used=used)
        with self.index_lock:
            self.index.cleaned(condemned)

    def clear(self) -> None:
        """Forget every page, durably. The caller holds `catalog_lock`."""
        with self.index_lock:
            self.index.forget_all()
            condemned = self.index.condemned()
        with self._catalog_errors():
            self.catalog.clear()
        with self.index_lock:
            self.index.cleaned(condemned)

    def load_note(self, name: str) -> bytes | None:
        """The caller holds `catalog_lock`."""
        with self._catalog_errors():
            return self.catalog.load_note(name)

    def store_note(self, name: str, value: bytes) -> None:
        """Returns once it is on the medium. The caller holds `catalog_lock`."""
        with self._catalog_errors():
            self.catalog.store_note(name, value)

    def make_room(self, num_pages: int) -> None:
        """Have `num_pages` free slots, or as many as can be had. The caller holds `catalog_lock`.

        The slab grows as long as the limit and the disk allow; after that pages are evicted.
        """
        while self.index.num_free < num_pages and self._grow():
            pass
        with self.index_lock:
            missing = num_pages - self.index.num_free
            evicted = self.index.evict(missing) if missing > 0 else 0
        if evicted:
            self.commit()

    def close(self) -> None:
        """Save what is unsaved and let go of everything. No call may be running."""
        # If the last changes cannot be saved, only the order of use is lost.
        with self.catalog_lock, self._opened, suppress(TierUnavailable):
            if self.is_sound():
                self.commit()

    def _grow(self) -> bool:
        """Make the slab one step larger; False if it has its final size or there is no room now."""
        old_slots = self.slab.num_slots
        step = min(self.max_slots // _GROWTH_STEPS, _MAX_GROWTH_BYTES // self._page_bytes)
        new_slots = min(self.max_slots, old_slots + max(1, step))
        if new_slots <= old_slots or time.monotonic() < self._grow_after:
            return False
        self._remove_leftovers(new_slots)
        try:
            self._check_room(new_slots)
            self.slab.grow(new_slots)
        except OSError as error:
            if self._grow_after == 0.0:
                log.warning(
                    "%s: cannot grow to %d bytes (%s); going on with %d bytes, of a limit of %d",
                    self.slab.path,
                    new_slots * self._page_bytes,
                    error.strerror,
                    old_slots * self._page_bytes,
                    self._limit_bytes,
                )
            self._grow_after = time.monotonic() + _GROWTH_RETRY_S
            return False
        self._grow_after = 0.0
        with self.index_lock:
            self.index.grow(new_slots)
        return True

    def _check_room(self, num_slots: int) -> None:
        """Raise OSError unless the disk has room for so many slots and for the catalog of them.

        A slab that takes the last byte would leave none for the rows of its pages, nor for deleting them.
        """
        missing_bytes = (num_slots - self.slab.num_slots) * self._page_bytes
        missing_bytes += max(0, max_catalog_bytes(num_slots) - self.catalog.size_bytes())
        disk = os.statvfs(self.slab.path)
        if disk.f_bavail * disk.f_frsize < missing_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _remove_leftovers(self, num_slots: int) -> None:
        """Make the limit hold for a slab of `num_slots` together with what other page sizes have left."""
        ours_bytes = max_catalog_bytes(num_slots) + num_slots * self._page_bytes
        while (
            self._leftovers and ours_bytes + sum(left.used_bytes for left in self._leftovers) > self._limit_bytes
        ):
            oldest = self._leftovers.pop(0)
            log.warning(
                "%s: removed, to stay within the limit: %d bytes of another page size or version",
                oldest.path,
                oldest.used_bytes,
            )
            oldest.remove()

    def _recover(self) -> None:
        """Make slab, catalog and index agree with each other and with the limit."""
        if self.slab.num_slots > self.max_slots:
            log.warning(
                "%s: shrunk from %d to %d pages, because the limit is %d bytes now",
                self.slab.path,
                self.slab.num_slots,
                self.max_slots,
                self._limit_bytes,
            )
            self.slab.shrink(self.max_slots)
        self.index = DiskIndex(self.max_slots)
        try:
            self.catalog.drop_from(self.slab.num_slots)
            self.index.load(self.catalog.rows(), self.slab.num_slots)
        except sqlite3.DatabaseError as error:
            if not self.catalog.is_damaged:
                raise
            self.catalog.close()
            self.catalog = _new_catalog(self.catalog.path, error)
            self.index = DiskIndex(self.max_slots)
            self.index.load((), self.slab.num_slots)
        self._remove_leftovers(self.slab.num_slots)
        if not self.slab.num_slots and not self._grow():
            raise TierUnavailable(
                f"no room on the disk of {self.slab.path} for {self._page_bytes * self.max_slots} bytes"
            )

    @contextmanager
    def _catalog_errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            if self.catalog.is_damaged:
                log.warning("%s: damaged (%s); the disk tier will begin empty", self.catalog.path, error)
            raise TierUnavailable(f"the disk tier's catalog {self.catalog.path} failed: {error}") from error


def max_slots(limit_bytes: int, page_bytes: int) -> int:
    """How many pages fit into a limit, together with their catalog. May be less than 1."""
    fixed_bytes = max_catalog_bytes(0)
    return (limit_bytes - fixed_bytes) // (page_bytes + max_catalog_bytes(1) - fixed_bytes)


def _open_catalog(path: Path) -> Catalog:
    try:
        return Catalog(path)
    except CatalogDamaged as error:
        return _new_catalog(path, error)


def _new_catalog(path: Path, why: Exception) -> Catalog:
    """An empty catalog in place of one that cannot be read."""
    log.warning("%s: cannot be read (%s); the disk tier begins empty", path, why)
    remove_catalog(path)
    return Catalog(path)
