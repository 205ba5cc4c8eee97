"""Which open file is behind a piece of memory, so that another process can map the same."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mlkv.errors import ConfigError


@dataclass(frozen=True)
class MappedFile:
    """A descriptor (the caller's to close), and where in its file the memory begins."""

    fd: int
    offset: int


def address_of(memory: memoryview) -> int:
    """Where the bytes lie in this process."""
    return int(np.frombuffer(memory, np.uint8).__array_interface__["data"][0])


def file_behind(memory: memoryview) -> MappedFile:
    """The file that `memory` is a shared mapping of.

    Raises ConfigError if it is not one, or if this process has the file open no more.
    """
    address = address_of(memory)
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, access, offset, device, inode = line.split(maxsplit=5)[:5]
        start, end = (int(part, 16) for part in span.split("-"))
        if not (start <= address < end and access.endswith("s") and inode != "0"):
            continue
        major, minor = (int(part, 16) for part in device.split(":"))
        fd = _open_descriptor(os.makedev(major, minor), int(inode))
        if fd is not None:
            return MappedFile(fd, int(offset, 16) + address - start)
    raise ConfigError("this memory is not a mapping of a file that other processes can map as well")


def _open_descriptor(device: int, inode: int) -> int | None:
    """A duplicate of a descriptor that this process has of the file."""
    for name in os.listdir("/proc/self/fd"):
        try:
            status = os.fstat(int(name))
            if (status.st_dev, status.st_ino) == (device, inode):
                return os.dup(int(name))
        except OSError:
            continue  # closed meanwhile, such as the descriptor of this very listing
    return None
