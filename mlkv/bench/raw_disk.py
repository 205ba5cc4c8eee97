"""What a disk gives without mlkv: fio where it is installed, else plain O_DIRECT calls on threads."""

from __future__ import annotations

import json
import mmap
import os
import shutil
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mlkv.errors import MLKVError

_GIB = 1 << 30
_DEADLINE_S = 300.0  # for one pass of fio
_LARGE_PAGE_BYTES = 2 << 20
_ENGINES = ("io_uring", "libaio")  # the first that works here: containers often forbid io_uring

Direction = Literal["read", "write"]


@dataclass(frozen=True)
class Pass:
    """One pass over all bytes: its rate, and the CPU time of the process that made it."""

    gib_per_s: float
    cpu_s_per_gib: float


class RawDisk(ABC):
    """Moves a file of `size_bytes` once, `depth` requests of `request_bytes` at once, without page cache.

    Its memory is a buffer for each request, used over and over, so most of it stays in the processor's cache.

    Args:
        large_pages: have this memory in large pages, as far as the system gives any.
    """

    name: str

    def __init__(
        self, file: Path, size_bytes: int, request_bytes: int, depth: int, *, large_pages: bool = False
    ) -> None:
        self.file = file
        self.size_bytes = size_bytes
        self.request_bytes = request_bytes
        self.depth = depth
        self.large_pages = large_pages

    @abstractmethod
    def measure(self, direction: Direction) -> Pass:
        """One pass, in the order of the file. Raises MLKVError when it is impossible."""


class Fio(RawDisk):
    """The reference of its kind, with its asynchronous engines."""

    _engine: str | None = None  # once known, for all instances

    @property
    def name(self) -> str:  # type: ignore[override]
        return f"fio {Fio._engine or ''}".strip()

    def measure(self, direction: Direction) -> Pass:
        errors = []
        for engine in (Fio._engine,) if Fio._engine else _ENGINES:
            try:
                found = self._run(engine, direction)
            except MLKVError as error:
                errors.append(str(error))
                continue
            Fio._engine = engine
            return found
        raise MLKVError("; ".join(errors))

    def _run(self, engine: str, direction: Direction) -> Pass:
        command = ["fio", "--name=raw", f"--filename={self.file}", f"--rw={direction}", f"--ioengine={engine}"]
        command += [f"--bs={self.request_bytes}", f"--size={self.size_bytes}", f"--iodepth={self.depth}"]
        command += ["--direct=1", "--thread", "--output-format=json"]
        environment = dict(os.environ)
        if self.large_pages:
            # By itself fio takes only what was set apart for it. This has glibc (2.35) ask for them in malloc.
            environment["GLIBC_TUNABLES"] = "glibc.malloc.hugetlb=1"
            command.append(f"--iomem_align={_LARGE_PAGE_BYTES}")
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=_DEADLINE_S, check=False, env=environment
            )
        except subprocess.TimeoutExpired:
            raise MLKVError(f"fio took more than {_DEADLINE_S:g} s") from None
        if done.returncode:
            raise MLKVError(f"fio with {engine} failed: {(done.stderr or done.stdout).strip()[:300]}")
        # Notes may precede the document.
        job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
        runtime_s = job["job_runtime"] / 1000
        gib = job[direction]["io_bytes"] / _GIB
        cpu_s = (job["usr_cpu"] + job["sys_cpu"]) / 100 * runtime_s
        return Pass(job[direction]["bw_bytes"] / _GIB, cpu_s / gib)


class PlainThreads(RawDisk):
    """`os.preadv` and `os.pwritev` on one thread for each request in flight."""

    name = "plain threads"

    def measure(self, direction: Direction) -> Pass:
        try:
            fd = os.open(self.file, os.O_RDWR | os.O_CREAT | os.O_DIRECT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise MLKVError(
                f"{self.file}: no O_DIRECT there ({error.strerror}); nothing to compare with"
            ) from error
        try:
            os.posix_fallocate(fd, 0, self.size_bytes)
            return self._pass(fd, os.preadv if direction == "read" else os.pwritev)
        finally:
            os.close(fd)

    def _pass(self, fd: int, call: Callable[[int, list[memoryview], int], int]) -> Pass:
        # Private memory, since shared memory gets no large pages as a rule.
        mapping = mmap.mmap(-1, self.depth * self.request_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with suppress(OSError):  # a kernel built without large pages
            mapping.madvise(mmap.MADV_HUGEPAGE if self.large_pages else mmap.MADV_NOHUGEPAGE)
        memory = memoryview(mapping)
        memory[:] = b"\x5a" * len(memory)

        def work(number: int) -> None:
            view = memory[number * self.request_bytes : (number + 1) * self.request_bytes]
            step = self.depth * self.request_bytes
            for offset in range(number * self.request_bytes, self.size_bytes, step):
                if call(fd, [view], offset) != len(view):
                    raise MLKVError(f"{self.file}: a request of the raw reference was cut short")

        with ThreadPoolExecutor(self.depth) as threads:
            cpu_s, start_s = time.process_time(), time.perf_counter()
            list(threads.map(work, range(self.depth)))
            cpu_s, wall_s = time.process_time() - cpu_s, time.perf_counter() - start_s
        gib = self.size_bytes / _GIB
        return Pass(gib / wall_s, cpu_s / gib)


def raw_disk() -> type[RawDisk]:
    """The reference that this machine has."""
    return Fio if shutil.which("fio") else PlainThreads
