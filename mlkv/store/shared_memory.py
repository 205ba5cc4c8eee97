"""Memory that processes share through a descriptor, of large pages where the system lets us have them.

In pages of 4 KiB memory is scattered, a few of them in a row. A disk then gets a request of 1 MiB in up to 256
pieces, which costs the kernel more CPU time than all else, and fills the queue of a virtual disk with one request;
a large page (2 MiB on x86) is one piece. `mlkv bench disk` on one machine, two cores, ext4, pages of 1 MiB: writes
2.5 instead of 1.8 GiB/s, reads 1.5 instead of 1.0, 0.05 instead of 0.11 CPU-s/GiB. Threads or libaio, and requests
of 256 KiB or 4 MiB, made no such difference.
"""

from __future__ import annotations

import ctypes
import fcntl
import logging
import mmap
import os
import platform
import re
from contextlib import suppress
from pathlib import Path
from typing import Final

_log = logging.getLogger("mlkv.store")

_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL

_THP: Final = Path("/sys/kernel/mm/transparent_hugepage")

# Linux 5.2; their numbers are the same on both, and linux/mount.h names the constants.
_MACHINES: Final = ("x86_64", "aarch64")
_SYS_FSOPEN, _SYS_FSCONFIG, _SYS_FSMOUNT = 430, 431, 432
_FSOPEN_CLOEXEC: Final = 1
_FSCONFIG_SET_STRING: Final = 1
_FSCONFIG_CMD_CREATE: Final = 6
_FSMOUNT_CLOEXEC: Final = 1


def create_shared_memory(name: str, size_bytes: int) -> int:
    """A descriptor of zeroed memory of a fixed size, which goes back to the system with the last that maps it.

    It is a sealed memfd, unless the system denies large pages to those (`shmem_enabled` is "never", as it is by
    default) and lets this process have a file system in memory of its own, which may have them all the same. That
    one is never attached to a folder, and its file has no name. It cannot be sealed, so a process that has the
    descriptor could cut it; only processes of this user are given it.

    Args:
        name: what /proc shows for it.

    Raises OSError when there can be no memory of this size.
    """
    if _setting() == "never":
        with suppress(OSError):  # no right to mount, or an older kernel
            return _file_of_own_mount(name, size_bytes)
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size_bytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(fd)
        raise
    return fd


def is_shared_memory(fd: int) -> bool:
    """Whether a descriptor is of such memory. Raises OSError if it is of no memory at all."""
    seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    is_of_own_mount = seals == fcntl.F_SEAL_SEAL and os.fstat(fd).st_nlink == 0
    return is_of_own_mount or seals & _SEALS == _SEALS


def map_shared_memory(fd: int, size_bytes: int) -> mmap.mmap:
    """Map it, writable. Large pages are taken by whoever touches them first, through a mapping made here."""
    mapping = mmap.mmap(fd, size_bytes, flags=mmap.MAP_SHARED)
    with suppress(OSError):  # a kernel built without them
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return mapping


def large_page_bytes(memory: memoryview) -> int:
    """How much of the mapping that begins with `memory` this process has in large pages; 0 if nobody can tell."""
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    try:
        smaps = Path("/proc/self/smaps").read_text()
    except OSError:
        return 0
    found = re.search(rf"^0*{start:x}-.*?^ShmemPmdMapped: *(\d+) kB", smaps, re.MULTILINE | re.DOTALL)
    return int(found[1]) * 1024 if found else 0


def _setting() -> str:
    """When the system gives large pages to shared memory: "never", "advise", ...; "" without support for them."""
    try:
        words = (_THP / "shmem_enabled").read_text()
    except OSError:
        return ""
    chosen = re.search(r"\[(\w+)\]", words)
    return chosen[1] if chosen else ""


def _file_of_own_mount(name: str, size_bytes: int) -> int:
    """A nameless file of a tmpfs that has nothing else in it. Raises OSError where that is not allowed."""
    if platform.machine() not in _MACHINES:
        raise OSError(f"unknown on {platform.machine()}")
    # The limit counts whole large pages; without room for the last one it would be made of small ones.
    large = int((_THP / "hpage_pmd_size").read_text())
    limit_bytes = -(-size_bytes // large) * large
    mount = _mount_tmpfs({"huge": "advise", "size": str(limit_bytes), "mode": "0700"})
    try:
        fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=mount)
        try:
            os.unlink(name, dir_fd=mount)
            os.ftruncate(fd, size_bytes)
        except BaseException:
            os.close(fd)
            raise
    finally:
        os.close(mount)  # the file keeps the file system
    return fd


def _mount_tmpfs(options: dict[str, str]) -> int:
    """A descriptor of the root of a new tmpfs, which no folder leads to."""
    context = _call(_SYS_FSOPEN, b"tmpfs", ctypes.c_uint(_FSOPEN_CLOEXEC))
    try:
        for key, value in options.items():
            command = ctypes.c_uint(_FSCONFIG_SET_STRING)
            _call(_SYS_FSCONFIG, ctypes.c_int(context), command, key.encode(), value.encode(), ctypes.c_int(0))
        command = ctypes.c_uint(_FSCONFIG_CMD_CREATE)
        _call(_SYS_FSCONFIG, ctypes.c_int(context), command, None, None, ctypes.c_int(0))
        no_attributes = ctypes.c_uint(0)
        return _call(_SYS_FSMOUNT, ctypes.c_int(context), ctypes.c_uint(_FSMOUNT_CLOEXEC), no_attributes)
    finally:
        os.close(context)


def _call(number: int, *arguments: object) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    result: int = libc.syscall(ctypes.c_long(number), *arguments)
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result
