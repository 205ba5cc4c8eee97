"""The disk tier: pages in one preallocated file, crash-safe, bounded, there again after a restart.

A page is written in the order: its slot's old row goes, the bytes are written, the new row comes. So at whatever
moment the process is killed, a row names bytes that were completely handed over. What the order cannot promise (a
power cut, a rotten disk, a truncated file) the page's own header and checksums do: a header that is not the one
that the row promises is a miss here, and damage further in is found by whoever loads the page.
"""

from __future__ import annotations

import heapq
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from mlkv.errors import ConfigError, TierUnavailable
from mlkv.page import IDENTITY_BYTES, peek_headers
from mlkv.store.tiers import naming
from mlkv.store.tiers.base import ReadOnlyPages, StoredPage, Tier, TierStats, WritablePages
from mlkv.store.tiers.catalog import max_catalog_bytes
from mlkv.store.tiers.disk_index import Intent
from mlkv.store.tiers.disk_volume import DiskVolume, max_slots
from mlkv.store.tiers.slab import BLOCK_BYTES, Outcome

log = logging.getLogger(__name__)

_BATCH_BYTES = 64 << 20
"""A call moves about this much: enough to keep every thread busy, short enough for its deadline on a slow disk."""

_MAX_UNSAVED_USES = 256
"""Uses are written to the catalog with the next write, or once there are this many; a kill loses as many."""


class DiskTier(Tier):
    """Pages in a folder of this host, which one process uses at a time. See `Tier` for the contract.

    Attributes:
        pages_damaged: reads that found something else than the page, or no bytes, since the start.
    """

    name: ClassVar[str] = "disk"

    def __init__(
        self,
        directory: Path,
        page_bytes: int,
        limit_bytes: int,
        *,
        threads: int = 8,
        concurrency: int = 4,
        deadline_s: float = 10.0,
    ) -> None:
        """Nothing is opened before `connect`.

        Args:
            directory: made if missing. Pages of other sizes in it are kept apart.
            page_bytes: a multiple of 4096.
            limit_bytes: what everything in `directory` that is the tier's may occupy: slab, catalog, and what
                earlier runs left there, of this page size or another.
            threads: how many requests are with the disk at once, over all calls.

        Raises ConfigError, naming the argument.
        """
        if page_bytes < BLOCK_BYTES or page_bytes % BLOCK_BYTES:
            raise ConfigError(f"page_bytes={page_bytes} must be a positive multiple of {BLOCK_BYTES}")
        if max_slots(limit_bytes, page_bytes) < 1:
            raise ConfigError(
                f"limit_bytes={limit_bytes} of the disk tier is too small: one page and the catalog need "
                f"{max_catalog_bytes(1) + page_bytes}"
            )
        if threads < 1 or concurrency < 1 or deadline_s <= 0:
            raise ConfigError(
                f"threads={threads}, concurrency={concurrency} and deadline_s={deadline_s} of the disk tier "
                "must be positive"
            )
        self.concurrency = concurrency
        self.batch_pages = min(512, max(16, _BATCH_BYTES // page_bytes))
        self.deadline_s = deadline_s
        self.pages_damaged = 0
        self._directory = directory
        self._page_bytes = page_bytes
        self._limit_bytes = limit_bytes
        self._threads = threads
        self._names = naming.Names(page_bytes)
        self._opened: DiskVolume | None = None

    @property
    def is_direct(self) -> bool:
        """Whether pages go around the page cache. False as well while nothing is open."""
        volume = self._opened
        return volume is not None and volume.slab.is_direct

    def connect(self, pool: memoryview) -> None:
        """Open the folder, or open it anew when files were removed or the catalog broke. See `Tier.connect`.

        Raises TierUnavailable: another process uses the folder, the disk has no room, or a file is unusable.
        """
        volume = self._opened
        if volume is not None:
            if volume.is_sound():
                return
            if volume.num_calls:
                raise TierUnavailable(f"{volume.num_calls} calls still hang in the disk folder {self._directory}")
            self._opened = None
            volume.close()
        self._opened = DiskVolume(self._directory, self._page_bytes, self._limit_bytes, self._threads)

    def contains(self, keys: Sequence[bytes]) -> int:
        volume = self._volume()
        with volume.index_lock:
            return volume.index.find(keys)

    def read(self, keys: Sequence[bytes], pages: WritablePages) -> NDArray[np.bool_]:
        """See `Tier.read`. A page that cannot be read, or is not the page it should be, is forgotten.

        Raises TierUnavailable when the disk failed for every page that is here.
        """
        give_up_at = time.monotonic() + self.deadline_s
        self._check_pages(keys, pages)
        done = np.zeros(len(keys), np.bool_)
        with self._call() as volume:
            with volume.index_lock:
                slots = volume.index.begin_read(keys)
            here = [(place, slot) for place, slot in enumerate(slots) if slot is not None]
            read_slots = [slot for _, slot in here]
            bad: list[int] = []
            try:
                into = [pages[place] for place, _ in here]
                outcomes = volume.slab.read(read_slots, into, give_up_at)
                headers = peek_headers(_headers(into))
                is_right = (headers.is_valid & volume.index.is_expected_in(read_slots, headers)).tolist()
                for (place, slot), outcome, right in zip(here, outcomes, is_right, strict=True):
                    if outcome is None and right:
                        done[place] = True
                    elif not isinstance(outcome, TimeoutError):
                        bad.append(slot)
            finally:
                with volume.index_lock:
                    volume.index.end_read(read_slots, bad)
                    self.pages_damaged += len(bad)
                    is_due = bool(bad) or volume.index.recency.num_unsaved >= _MAX_UNSAVED_USES
            if bad:
                log.warning(
                    "%s: %d of %d pages were not readable as written", volume.slab.path, len(bad), len(here)
                )
            if is_due:
                self._save(volume)
            _raise_if_all_failed(outcomes, "read", volume)
        return done

    def write(self, stored: Sequence[StoredPage], pages: ReadOnlyPages) -> NDArray[np.bool_]:
        """See `Tier.write`. A page of another generation is replaced. A key that is being written is refused.

        Raises TierUnavailable when the disk failed for every page, the catalog failed, or files were removed.
        """
        give_up_at = time.monotonic() + self.deadline_s
        self._check_pages(stored, pages)
        view_of = dict(zip((page.key for page in reversed(stored)), reversed(pages), strict=True))
        with self._call() as volume:
            if not volume.is_sound():
                raise TierUnavailable(f"files of the disk folder {self._directory} were removed or are broken")
            with volume.index_lock:
                intents = volume.index.intend(stored)
            try:
                placed = self._place(volume, intents)
                slots = [intent.slot for intent in placed if intent.slot is not None]
                outcomes = volume.slab.write(slots, [view_of[intent.page.key] for intent in placed], give_up_at)
            except BaseException:
                with volume.index_lock:
                    volume.index.give_up(intents)
                raise
            self._publish(volume, intents, outcomes)
            _raise_if_all_failed(outcomes, "write", volume)
            with volume.index_lock:
                return np.array([volume.index.has(page.key, page.generation) for page in stored], np.bool_)

    def delete(self, keys: Sequence[bytes]) -> None:
        with self._call() as volume, volume.catalog_lock:
            with volume.index_lock:
                volume.index.forget(keys)
            volume.commit()

    def clear(self) -> None:
        with self._call() as volume, volume.catalog_lock:
            volume.clear()

    def scan(self, after: bytes, limit: int) -> list[bytes]:
        volume = self._volume()
        with volume.index_lock:
            keys = volume.index.keys()
        return heapq.nsmallest(limit, (key for key in keys if key > after))

    def load_note(self, name: str) -> bytes | None:
        with self._call() as volume, volume.catalog_lock:
            return volume.load_note(self._names.note(name))

    def store_note(self, name: str, value: bytes) -> None:
        """See `Tier.store_note`. It survives a power cut from now on, but not a damaged catalog."""
        naming.check_note(value)
        with self._call() as volume, volume.catalog_lock:
            volume.store_note(self._names.note(name), value)

    def stats(self) -> TierStats:
        """Used bytes are those of the pages; the limit is what the folder may occupy, catalog included."""
        volume = self._opened
        if volume is None:
            return TierStats(limit_bytes=self._limit_bytes, pages_damaged=self.pages_damaged)
        with volume.index_lock:
            num_pages, pages_evicted = len(volume.index), volume.index.pages_evicted
            pages_damaged = self.pages_damaged
        used_bytes = num_pages * self._page_bytes
        return TierStats(num_pages, used_bytes, self._limit_bytes, pages_evicted, pages_damaged)

    def close(self) -> None:
        volume, self._opened = self._opened, None
        if volume is None:
            return
        if volume.num_calls:
            # Closing a descriptor that a stuck call uses could lead its bytes into another file.
            log.warning(
                "%s: %d calls hang; the folder stays locked until this process ends",
                self._directory,
                volume.num_calls,
            )
            return
        volume.close()

    def _check_pages(self, names: Sequence[object], pages: Sequence[memoryview]) -> None:
        """A view of another size would shift everything behind it in its request."""
        if len(names) != len(pages):
            raise ValueError(f"{len(names)} keys for {len(pages)} pages")
        if any(page.nbytes != self._page_bytes for page in pages):
            raise ValueError(f"every page of the disk tier has {self._page_bytes} bytes")

    def _place(self, volume: DiskVolume, intents: list[Intent]) -> list[Intent]:
        """Give the intents slots whose rows are gone; returns those that got one."""
        with volume.catalog_lock:
            volume.make_room(len(intents))
            with volume.index_lock:
                volume.index.take_slots(intents)
        return [intent for intent in intents if intent.slot is not None]

    def _publish(self, volume: DiskVolume, intents: list[Intent], outcomes: list[Outcome]) -> None:
        """Make visible what was written and is still wanted: first in the catalog, then in the index."""
        placed = [intent for intent in intents if intent.slot is not None]
        written = [intent for intent, outcome in zip(placed, outcomes, strict=True) if outcome is None]
        # Deletions take the same lock: one comes before the row, and then prevents it, or after it is visible.
        with volume.catalog_lock:
            with volume.index_lock:
                ready = [intent for intent in written if intent.is_wanted]
                volume.index.give_up(set(intents).difference(ready))
                rows = volume.index.rows_for(ready)
            try:
                volume.commit(rows)
            except BaseException:
                with volume.index_lock:
                    volume.index.give_up(ready, may_have_rows=True)
                raise
            with volume.index_lock:
                volume.index.publish(ready, rows)

    def _save(self, volume: DiskVolume) -> None:
        """Write to the catalog what a read has changed. What fails here is done with the next write."""
        try:
            with volume.catalog_lock:
                volume.commit()
        except TierUnavailable as error:
            log.warning("%s", error)

    @contextmanager
    def _call(self) -> Iterator[DiskVolume]:
        volume = self._volume()
        with volume.call():
            yield volume

    def _volume(self) -> DiskVolume:
        volume = self._opened
        if volume is None:
            raise TierUnavailable(f"the disk tier in {self._directory} is not connected")
        return volume


def _headers(pages: Sequence[memoryview]) -> NDArray[np.uint8]:
    """Copies of what the pages begin with, uint8 `[n, IDENTITY_BYTES]`."""
    return np.frombuffer(b"".join([page[:IDENTITY_BYTES] for page in pages]), np.uint8).reshape(-1, IDENTITY_BYTES)


def _raise_if_all_failed(outcomes: list[Outcome], verb: str, volume: DiskVolume) -> None:
    """Some failures are the pages' own; failures only are the disk's."""
    errors = [outcome for outcome in outcomes if outcome is not None]
    if errors and len(errors) == len(outcomes):
        raise TierUnavailable(f"cannot {verb} {len(errors)} pages at {volume.slab.path}: {errors[0]}") from errors[
            0
        ]
