"""The host pool: one anonymous shared memory file, mapped by every client.

It has no name: it reaches clients as a file descriptor and its memory goes back to the system when the last
process that maps it is gone, however it went. Where it is a memfd its size is sealed, so that nobody can shrink it
under a reader (which would be a SIGBUS) or grow it.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mlkv.errors import ConfigError, StoreError
from mlkv.store.numa import interleave, memory_nodes
from mlkv.store.shared_memory import create_shared_memory, is_shared_memory, map_shared_memory

PAGE_ALIGN_BYTES = 4096
"""Pages begin at multiples of this: the memory page, and what O_DIRECT and the copy engine want."""


def pool_pages(host_bytes: int, page_bytes: int) -> int:
    """Number of pages in a pool. Raises ConfigError, naming the field, when it is not at least one."""
    if page_bytes < PAGE_ALIGN_BYTES or page_bytes % PAGE_ALIGN_BYTES:
        raise ConfigError(f"page_bytes={page_bytes} must be a positive multiple of {PAGE_ALIGN_BYTES}")
    num_pages = host_bytes // page_bytes
    if num_pages < 1:
        raise ConfigError(
            f"store.host_bytes={host_bytes} is smaller than one page of {page_bytes} bytes; "
            "raise it, or lower page_tokens"
        )
    return num_pages


class HostPool:
    """A mapping of the pool of a host. `buffer` is writable and shared by all processes that map it.

    Attributes:
        num_pages, page_bytes: its geometry.
        buffer: memoryview of uint8, num_pages * page_bytes long.
    """

    def __init__(self, fd: int, num_pages: int, page_bytes: int) -> None:
        """Map the pool behind `fd`, which stays the caller's. Raises StoreError if it is not such a pool."""
        self.num_pages = num_pages
        self.page_bytes = page_bytes
        size_bytes = num_pages * page_bytes
        try:
            actual_bytes = os.fstat(fd).st_size
            if not is_shared_memory(fd) or actual_bytes != size_bytes:
                raise StoreError(f"the host pool has {actual_bytes} bytes, not {size_bytes} of a fixed size")
            self._mapping = map_shared_memory(fd, size_bytes)
        except OSError as error:
            raise StoreError(f"cannot map the host pool of {size_bytes} bytes: {error.strerror}") from error
        self.buffer = memoryview(self._mapping)

    def headers(self, pages: NDArray[np.int32], num_bytes: int) -> NDArray[np.uint8]:
        """Copies of the first bytes of pages: uint8 `[n, num_bytes]`."""
        every = np.frombuffer(self.buffer, np.uint8).reshape(self.num_pages, self.page_bytes)
        return every[pages, :num_bytes]

    def page(self, number: int) -> memoryview:
        """The bytes of one page, writable."""
        return self.buffer[number * self.page_bytes : (number + 1) * self.page_bytes]

    def close(self) -> None:
        """Unmap, unless somebody still has a view (a tensor on it, say): then it lives as long as that."""
        try:
            self.buffer.release()
            self._mapping.close()
        except BufferError:
            # mmap refuses to pull memory from under an exported view; the last view unmaps it when collected.
            return


def create_pool_file(num_pages: int, page_bytes: int, *, interleaved: bool = False) -> int:
    """Shared memory for a pool, `interleaved` over the memory nodes of the host. Returns its descriptor.

    Raises ConfigError when this host cannot hold it: memory is taken page by page as it is first written, so a
    pool that is too large would otherwise end in the kernel killing somebody in the middle of the work.
    """
    size_bytes = num_pages * page_bytes
    available_bytes, limit = available_host_bytes()
    if size_bytes > available_bytes:
        raise ConfigError(
            f"store.host_bytes asks for a pool of {size_bytes} bytes, but only {available_bytes} are available "
            f"({limit}); lower it"
        )
    try:
        fd = create_shared_memory("mlkv-pool", size_bytes)
    except OSError as error:
        raise ConfigError(
            f"store.host_bytes: cannot make a pool of {size_bytes} bytes: {error.strerror}"
        ) from error
    nodes = memory_nodes() if interleaved else []
    if len(nodes) > 1:
        interleave(fd, size_bytes, nodes)
    return fd


def available_host_bytes() -> tuple[int, str]:
    """Memory that this process could still take, and which limit says so."""
    limits = [(_meminfo_available_bytes(), "MemAvailable in /proc/meminfo")]
    for folder in _cgroup_folders():
        limits += _cgroup_available_bytes(folder)
    return min(limits)


def _meminfo_available_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise StoreError("/proc/meminfo has no MemAvailable; Linux 3.14 or later is needed")


def _cgroup_folders() -> list[Path]:
    """Folders of the memory control groups of this process, its own and those above it, in both versions."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    folders: list[Path] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root = Path("/sys/fs/cgroup")
        elif "memory" in controllers.split(","):
            root = Path("/sys/fs/cgroup/memory")
        else:
            continue
        inner = root / path.lstrip("/")
        folders += [folder for folder in (inner, *inner.parents) if folder == root or root in folder.parents]
    return folders


def _cgroup_available_bytes(folder: Path) -> list[tuple[int, str]]:
    """What one control group leaves: [] when it sets no limit. Its page cache counts as free: it is given back."""
    for limit_name, usage_name, cache_name in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        try:
            limit_text = (folder / limit_name).read_text().strip()
            used_bytes = int((folder / usage_name).read_text())
            cache_bytes = 0
            for line in (folder / "memory.stat").read_text().splitlines():
                name, value = line.split()
                if name == cache_name:
                    cache_bytes = int(value)
        except (OSError, ValueError):
            continue  # not of this version, or not visible from here
        if limit_text != "max":
            return [(max(0, int(limit_text) - used_bytes + cache_bytes), f"{folder / limit_name}")]
    return []
