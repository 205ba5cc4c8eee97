"""Starts of an owner that do not go to plan leave no files behind."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mlkv import ConfigError
from mlkv.store import StoreClient
from mlkv.store.rendezvous import SocketLock, lock_path

ROOT = Path(__file__).resolve().parents[2]


def test_owner_of_a_starter_that_died_leaves_soon_and_takes_its_files_along(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    folder.mkdir(mode=0o700)
    path = folder / "x.sock"
    lock = SocketLock.acquire(path, 1.0)
    ready_read, ready_write = os.pipe()
    os.close(ready_read)  # as when the starter is gone
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "mlkv.store.owner", f"--socket={path}", "--host-bytes=65536"),
            *("--page-bytes=4096", f"--lock-fd={lock.fileno()}", f"--ready-fd={ready_write}"),
        ],
        pass_fds=(lock.fileno(), ready_write),
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(ready_write)
    os.close(lock.fileno())
    _, errors = process.communicate(timeout=20)  # until the detached owner has closed its standard error: its end
    assert errors == ""
    end = time.monotonic() + 5
    while path.exists() or lock_path(path).exists():
        assert time.monotonic() < end, list(folder.iterdir())
        time.sleep(0.01)


_STARTER = """
import os, sys, time
from pathlib import Path
from mlkv.store.rendezvous import SocketLock
from mlkv.store.spawn import OwnerSettings, spawn_owner
path = Path(sys.argv[1])
settings = OwnerSettings(socket_path=path, host_bytes=65536, page_bytes=4096)
spawn_owner(settings, SocketLock.acquire(path, 5.0), 20.0)
os._exit(0)  # ready, but it never connects
"""


def test_owner_whose_starter_dies_before_it_connects_leaves_soon_and_takes_its_files_along(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    folder.mkdir(mode=0o700)
    path = folder / "x.sock"
    subprocess.run([sys.executable, "-c", _STARTER, str(path)], check=True, timeout=60, cwd=ROOT)
    end = time.monotonic() + 10
    while path.exists() or lock_path(path).exists():
        assert time.monotonic() < end, list(folder.iterdir())
        time.sleep(0.01)


def test_starter_of_an_owner_that_refuses_leaves_no_lock_file(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    with pytest.raises(ConfigError, match="available"):
        StoreClient.connect(
            folder / "x.sock", host_bytes=1 << 60, page_bytes=4096, group=bytes(16), rank=0, deadline_s=20.0
        )
    assert list(folder.iterdir()) == []
