"""Where the clients and the owner of a host meet: the socket's folder, and the lock for making and removing it."""

from __future__ import annotations

import fcntl
import os
import socket
import stat
import time
from pathlib import Path

from mlkv.errors import ConfigError, DeadlineExceeded, StoreError

_MAX_SOCKET_PATH_BYTES = 107  # sun_path without its terminator
_POLL_S = 0.01


def private_folder(socket_path: Path) -> None:
    """Make the folder of `socket_path` with mode 0700. Raises ConfigError if others could reach into it.

    The socket gives access to the prompts of everybody who uses the store, and a folder that somebody else can
    write to lets them put their own socket there.
    """
    if len(os.fsencode(socket_path)) > _MAX_SOCKET_PATH_BYTES:
        raise ConfigError(
            f"socket path {socket_path} is longer than {_MAX_SOCKET_PATH_BYTES} bytes; use a shorter folder"
        )
    folder = socket_path.parent
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.lstat()
    except OSError as error:
        raise ConfigError(f"cannot make the folder {folder} for the store's socket: {error.strerror}") from error
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise ConfigError(
            f"the folder {folder} of the store's socket must be a folder of yours with mode 0700; "
            f"it has mode {stat.S_IMODE(status.st_mode):04o} and belongs to uid {status.st_uid}"
        )


class SocketLock:
    """Exclusive lock beside a socket path: held to make the socket, by whoever makes it, and to remove it.

    The lock is an flock on "<socket>.lock", so it is free again when its holders are dead. It belongs to the
    open file: a child that inherits the descriptor holds it together with its parent.
    """

    def __init__(self, fd: int, path: Path) -> None:
        """Of a descriptor that holds the lock; use `acquire`, `try_acquire` or `inherited`."""
        self._fd = fd
        self._path = path

    @classmethod
    def inherited(cls, socket_path: Path, fd: int) -> SocketLock:
        """The lock that the process which started this one holds on descriptor `fd`."""
        return cls(fd, lock_path(socket_path))

    @classmethod
    def try_acquire(cls, socket_path: Path) -> SocketLock | None:
        """The lock, or None if somebody has it. Raises StoreError when its file cannot be made."""
        path = lock_path(socket_path)
        while True:
            try:
                fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            except OSError as error:
                raise StoreError(f"cannot make the lock {path} of the store: {error.strerror}") from error
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # The file is removed by its holder, so the one that was opened may be another than the next to
                # come will find. Only the lock on the file that has the name counts.
                current = os.fstat(fd).st_ino == os.stat(path).st_ino
            except BlockingIOError:
                os.close(fd)
                return None
            except FileNotFoundError:
                current = False
            except BaseException:
                os.close(fd)
                raise
            if current:
                return cls(fd, path)
            os.close(fd)

    @classmethod
    def acquire(cls, socket_path: Path, deadline_s: float) -> SocketLock:
        """The lock. Raises DeadlineExceeded after `deadline_s` seconds."""
        give_up_at = time.monotonic() + deadline_s
        while True:
            lock = cls.try_acquire(socket_path)
            if lock is not None:
                return lock
            if time.monotonic() >= give_up_at:
                raise DeadlineExceeded(
                    f"{lock_path(socket_path)} was held for {deadline_s:.1f} s: a store is starting or stuck there"
                )
            time.sleep(_POLL_S)

    def fileno(self) -> int:
        return self._fd

    def release(self, remove: bool = False) -> None:
        """Let go; with `remove`, also remove the lock file (a later holder makes a new one)."""
        if remove:
            self._path.unlink(missing_ok=True)
        os.close(self._fd)


def lock_path(socket_path: Path) -> Path:
    """Where the lock of a socket lies."""
    return socket_path.with_name(socket_path.name + ".lock")


def is_listening(socket_path: Path) -> bool:
    """Whether a process accepts connections there. A socket file alone proves nothing: it outlives its owner."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(os.fspath(socket_path))
        except BlockingIOError:
            return True  # its queue is full
        except (FileNotFoundError, ConnectionRefusedError):
            return False
        return True


def remove_stale_socket(socket_path: Path) -> None:
    """Clean up behind an owner that was killed, unless another has taken its place or somebody is at it."""
    if not socket_path.parent.is_dir():
        return
    lock = SocketLock.try_acquire(socket_path)
    if lock is None:
        return
    stale = not is_listening(socket_path)
    if stale:
        socket_path.unlink(missing_ok=True)
    lock.release(remove=stale)
