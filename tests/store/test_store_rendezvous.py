from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from store_helpers import environment

from mlkv.errors import ConfigError, DeadlineExceeded, StoreError
from mlkv.store.rendezvous import SocketLock, lock_path, private_folder, remove_stale_socket

HOLD_LOCK = """
import sys, time
from pathlib import Path
from mlkv.store.rendezvous import SocketLock
lock = SocketLock.try_acquire(Path(sys.argv[1]))
print("held" if lock else "refused", flush=True)
sys.stdin.read()
"""


def test_one_holder_at_a_time_and_waiting_has_a_deadline(socket_path: Path):
    lock = SocketLock.acquire(socket_path, 1.0)
    assert SocketLock.try_acquire(socket_path) is None
    with pytest.raises(DeadlineExceeded, match="was held for"):
        SocketLock.acquire(socket_path, 0.05)
    lock.release()
    SocketLock.acquire(socket_path, 1.0).release(remove=True)
    assert not lock_path(socket_path).exists()


def test_lock_of_a_killed_holder_is_free(socket_path: Path):
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD_LOCK, str(socket_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment(),
        text=True,
    )
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        assert SocketLock.try_acquire(socket_path) is None
        holder.kill()
    SocketLock.acquire(socket_path, 5.0).release()


def test_lock_on_a_file_that_was_replaced_does_not_count(socket_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The file is removed between open and lock, and somebody else locks a new one: only one may hold it."""
    from mlkv.store import rendezvous

    true_flock = rendezvous.fcntl.flock
    others: list[SocketLock | None] = []

    def flock_after_another_was_faster(fd: int, operation: int) -> None:
        if not others:
            others.append(None)
            lock_path(socket_path).unlink()
            others.append(SocketLock.try_acquire(socket_path))
        true_flock(fd, operation)

    monkeypatch.setattr(rendezvous.fcntl, "flock", flock_after_another_was_faster)
    assert SocketLock.try_acquire(socket_path) is None
    assert others[1] is not None
    others[1].release()


def test_lock_that_cannot_be_made_says_so(socket_path: Path):
    with pytest.raises(StoreError, match="cannot make the lock"):
        SocketLock.try_acquire(socket_path.parent / "absent" / "store.sock")
    remove_stale_socket(socket_path.parent / "absent" / "store.sock")


def test_folder_that_is_a_link_or_a_file_is_refused(socket_path: Path):
    link = socket_path.parent / "link"
    link.symlink_to(socket_path.parent)
    with pytest.raises(ConfigError, match="must be a folder of yours"):
        private_folder(link / "store.sock")
    (socket_path.parent / "file").write_text("")
    with pytest.raises(ConfigError):
        private_folder(socket_path.parent / "file" / "store.sock")
