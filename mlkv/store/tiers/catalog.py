"""Which page lies in which slot of a slab, remembered across restarts: a small SQLite database.

Every change is one transaction in write-ahead mode, so it is there completely or not at all after a kill at any
moment. With `synchronous=NORMAL` a transaction is in the system's hands, not on the medium: a power cut may take
the last ones back, and leaves a database that is well formed. That is enough for pages, which are verified when
they are read; a note and a clearing must not be taken back, so these wait for the medium.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

_APPLICATION_ID = 0x4D4C4B56  # "MLKV", in the database's own header
FORMAT_VERSION = 1
"""Of tables and of how a slab is used. Raised with every change; another version gets a folder of its own."""

_MAX_LOG_BYTES = 1 << 20
"""The write-ahead log is folded into the database when it has grown to this."""

_SQLITE_PAGE_BYTES = 4096

_READ_ROWS = 4096
"""Rows read at once, for loops in C instead of Python."""

# What bounds the size on disk: a row has 16 + 16 bytes of keys, up to 8 + 8 of generation and use, up to 5 of slot
# and 9 of its record header. Pages of a B-tree that rows by ascending number fill are nearly full.
_ROW_BYTES = 128
# The log up to its bound, one large transaction on top, the notes, and the database's first pages.
_FIXED_BYTES = 4 << 20

_TABLES = (
    "CREATE TABLE notes (name TEXT PRIMARY KEY, value BLOB NOT NULL)",
    "CREATE TABLE pages (slot INTEGER PRIMARY KEY, key BLOB NOT NULL, parent BLOB NOT NULL, "
    "generation INTEGER NOT NULL, used INTEGER NOT NULL)",
)
"""By name. SQLite keeps the very text, so that it can be compared."""

_MAKES_SENSE = (
    "typeof(key) = 'blob' AND length(key) = 16 AND typeof(parent) = 'blob' AND length(parent) = 16 "
    "AND typeof(generation) = 'integer' AND typeof(used) = 'integer'"
)
"""SQLite keeps any type in any column, so a flipped byte can turn one into another."""

_HALF = 1 << 63  # SQLite's integers are signed, generations are not


class CatalogDamaged(Exception):
    """The file is not a catalog of this version. What it pointed to is unreachable."""


class Row(NamedTuple):
    """One page. `used`: larger means used later."""

    slot: int
    key: bytes
    parent: bytes
    generation: int
    used: int


def max_catalog_bytes(num_slots: int) -> int:
    """What the files of a catalog of so many slots occupy at most."""
    return _FIXED_BYTES + num_slots * _ROW_BYTES


def catalog_files(path: Path) -> list[Path]:
    """Every file that SQLite may keep for the database at `path`."""
    return [path, *(path.with_name(path.name + suffix) for suffix in ("-wal", "-shm", "-journal"))]


def remove_catalog(path: Path) -> None:
    """Remove a closed catalog. What it pointed to is unreachable then: a tier may lose pages."""
    for file in catalog_files(path):
        file.unlink(missing_ok=True)


class Catalog:
    """The database. Not thread-safe: one call at a time, from any thread.

    Methods raise `sqlite3.Error` when a change could not be made; then it is unknown whether it was. `is_damaged`
    tells from then on whether the file itself is broken.
    """

    def __init__(self, path: Path) -> None:
        """Open or make it. Raises CatalogDamaged, or `sqlite3.OperationalError` when it cannot be used now."""
        self.path = path
        self.is_damaged = False
        # Made here for its mode: keys tell who asked the same things.
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))
        self._inode = os.stat(path).st_ino
        self._database = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=5.0)
        self._database.text_factory = bytes  # damaged text need not be UTF-8
        try:
            with self._damage_noted():
                self._prepare()
        except sqlite3.DatabaseError as error:
            self._database.close()
            if isinstance(error, sqlite3.OperationalError) and not _is_damage_at_start(error):
                raise
            raise CatalogDamaged(str(error)) from error
        except BaseException:
            self._database.close()
            raise

    def _prepare(self) -> None:
        execute = self._database.execute
        # Alone with the file, SQLite keeps the index of its log in memory: no shared-memory file to go wrong.
        execute("PRAGMA locking_mode = EXCLUSIVE")
        if execute("PRAGMA schema_version").fetchone() == (0,):
            execute(f"PRAGMA page_size = {_SQLITE_PAGE_BYTES}")
            execute("PRAGMA journal_mode = WAL")
            with self._transaction():
                execute(f"PRAGMA application_id = {_APPLICATION_ID}")
                execute(f"PRAGMA user_version = {FORMAT_VERSION}")
                for table in _TABLES:
                    execute(table)
        execute("PRAGMA journal_mode = WAL")
        execute("PRAGMA synchronous = NORMAL")
        execute(f"PRAGMA wal_autocheckpoint = {_MAX_LOG_BYTES // _SQLITE_PAGE_BYTES}")
        execute(f"PRAGMA journal_size_limit = {_MAX_LOG_BYTES}")
        found = (execute("PRAGMA application_id").fetchone()[0], execute("PRAGMA user_version").fetchone()[0])
        if found != (_APPLICATION_ID, FORMAT_VERSION):
            raise CatalogDamaged(f"application {found[0]:#x} version {found[1]}, not a catalog of this version")
        tables = execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL ORDER BY name").fetchall()
        if [sql for (sql,) in tables] != [table.encode() for table in _TABLES]:
            raise CatalogDamaged("its tables are not those of a catalog")
        with self._transaction():
            execute(f"PRAGMA user_version = {FORMAT_VERSION}")  # a damaged header may forbid writing

    def is_in_place(self) -> bool:
        """Whether the open file is still the one that has the name."""
        try:
            return os.stat(self.path, follow_symlinks=False).st_ino == self._inode
        except OSError:
            return False

    def size_bytes(self) -> int:
        """What its files occupy on the disk."""
        total = 0
        for file in catalog_files(self.path):
            with suppress(FileNotFoundError):
                total += os.stat(file).st_blocks * 512
        return total

    def rows(self) -> Iterator[tuple[int, bytes | None, bytes, int, int]]:
        """The fields of all rows, in no order, as plain tuples, since there may be millions.

        A row that a damaged file holds instead of what was written has None as its key, and nothing but its slot
        means anything.
        """
        with self._damage_noted():
            found = self._database.execute(
                f"SELECT slot, CASE WHEN {_MAKES_SENSE} THEN key END, parent, generation, used FROM pages"
            )
            while part := found.fetchmany(_READ_ROWS):
                slots, keys, parents, generations, uses = zip(*part, strict=True)
                yield from zip(slots, keys, parents, map(_HALF.__add__, generations), uses, strict=True)

    def change(
        self, *, delete: Iterable[int] = (), insert: Iterable[Row] = (), used: Mapping[int, int] | None = None
    ) -> None:
        """One transaction: forget the slots in `delete`, then remember the rows in `insert`.

        Args:
            used: new values of rows that stay, by slot.
        """
        with self._transaction():
            self._database.executemany("DELETE FROM pages WHERE slot = ?", ((slot,) for slot in delete))
            self._database.executemany(
                "INSERT OR REPLACE INTO pages VALUES (?, ?, ?, ?, ?)",
                ((row.slot, row.key, row.parent, row.generation - _HALF, row.used) for row in insert),
            )
            if used:
                self._database.executemany(
                    "UPDATE pages SET used = ? WHERE slot = ?", ((use, slot) for slot, use in used.items())
                )

    def clear(self) -> None:
        """Forget all pages, so that not even a power cut brings one back."""
        with self._transaction():
            self._database.execute("DELETE FROM pages")
        self._fold()

    def drop_from(self, num_slots: int) -> None:
        """Forget the pages in slots from `num_slots` on, and make the file no larger than so many rows need."""
        with self._transaction():
            dropped = self._database.execute(
                "DELETE FROM pages WHERE slot >= ? OR slot < 0", (num_slots,)
            ).rowcount
        is_too_large = self.path.stat().st_size > max_catalog_bytes(num_slots) - _FIXED_BYTES // 2
        if is_too_large:
            with self._damage_noted():
                self._database.execute("VACUUM")
        if dropped or is_too_large:
            self._fold()

    def load_note(self, name: str) -> bytes | None:
        with self._damage_noted():
            row = self._database.execute("SELECT value FROM notes WHERE name = ?", (name,)).fetchone()
        return row[0] if row is not None and isinstance(row[0], bytes) else None

    def store_note(self, name: str, value: bytes) -> None:
        """Returns once the value is on the medium."""
        with self._transaction():
            self._database.execute("INSERT OR REPLACE INTO notes VALUES (?, ?)", (name, value))
        self._fold()

    def close(self) -> None:
        """Fold the log into the database and close it. One that is damaged is removed: it would break again."""
        self._database.close()
        if self.is_damaged:
            remove_catalog(self.path)

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        with self._damage_noted():
            try:
                self._database.execute("BEGIN IMMEDIATE")
                yield
                self._database.execute("COMMIT")
            except BaseException:
                # After some errors SQLite has rolled back by itself, and says so with another error.
                with suppress(sqlite3.Error):
                    self._database.execute("ROLLBACK")
                raise

    def _fold(self) -> None:
        """Fold the log into the database, which syncs both: what was changed so far survives a power cut."""
        with self._damage_noted():
            self._database.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    @contextmanager
    def _damage_noted(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.OperationalError, sqlite3.ProgrammingError):
            raise  # a lock, a full disk, a device that failed, a mistake here: the file may be well
        except sqlite3.DatabaseError:
            self.is_damaged = True
            raise
        except UnicodeDecodeError as error:
            # SQLite's message quotes the damaged text, and Python cannot read it.
            self.is_damaged = True
            raise sqlite3.DatabaseError(f"unreadable message about it: {error.object!r}") from error


def _is_damage_at_start(error: sqlite3.OperationalError) -> bool:
    """Whether an error that may mean a lock, a full disk or a device that failed means the file's header.

    Python 3.10 gives no codes, so this looks at the words. The file was opened for writing just before: if SQLite
    will not write it, its header says that only a newer SQLite may.
    """
    return any(words in str(error) for words in ("unsupported file format", "readonly database"))
