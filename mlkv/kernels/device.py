"""What staged transfers need of a device: streams, events, a copy engine and two kernels.

`cuda.CudaDevice` is the real one. The interface is this narrow so that tests can stand behind it with streams that
are stepped by hand: a missing dependency between two streams then shows as wrong bytes, without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch

S = TypeVar("S")
"""The device's kind of stream: work queued on one runs in order, work on two in any order but for events."""


class Event(Protocol):
    """A point in a stream."""

    def query(self) -> bool:
        """Whether everything queued on the stream before the event was recorded is complete."""
        ...


class Words:
    """A run of 64-bit integers in device or pinned memory, as an address or, only when asked for, as a tensor.

    Args:
        base: int64, one dimension, contiguous; kept alive.
        start, length: which part of it, by default all.
    """

    # Plain slots and a known address, because several are made for each chunk and slicing a tensor takes
    # longer than queueing a kernel.
    __slots__ = ("_base", "_start", "address", "length")

    def __init__(self, base: torch.Tensor, start: int = 0, length: int | None = None, address: int = 0) -> None:
        self._base = base
        self._start = start
        self.length = len(base) if length is None else length
        self.address = address or base.data_ptr() + 8 * start

    def part(self, start: int, length: int) -> Words:
        return Words(self._base, self._start + start, length, self.address + 8 * start)

    @property
    def tensor(self) -> torch.Tensor:
        return self._base[self._start : self._start + self.length]


class Staging(Protocol):
    """Contiguous device memory that holds the runs of some pages side by side: uint8, and its address."""

    @property
    def address(self) -> int: ...

    @property
    def memory(self) -> torch.Tensor: ...


class PageKernels(Protocol):
    """Gather and scatter between pool and pages, with checksums of what they move.

    Attributes:
        num_parts: partial sums that add up to the checksum of one head slice.
        reaches_host: whether pages may be given as addresses in pinned host memory.
        takes_stream: whether kernels go to the stream given, and never make the calling thread wait; else they
            go to torch's current one, and may.
    """

    num_parts: int
    reaches_host: bool
    takes_stream: bool

    def fetch(self, source: Words, target: Words, stream: int) -> None:
        """Copy pinned words into as many words of device memory."""
        ...

    def gather(self, num_pages: int, slots: Words, pages: Staging | Words, sums: Words, stream: int) -> None:
        """Copy slots of the pool into pages.

        Args:
            slots: at least `num_pages * page_tokens`, in device memory or pinned, all valid.
            pages: staging that takes the pages' runs of written heads side by side; or, where the kernels reach
                the host, a page's run itself, or pinned words with the address of each page's run.
            sums: `num_pages * num_written_heads * num_parts` pinned words, overwritten.
            stream: raw handle.
        """
        ...

    def scatter(self, num_pages: int, slots: Words, pages: Staging | Words, sums: Words, stream: int) -> None:
        """Copy pages into slots of the pool, those of -1 left out. Arguments as above, over the heads read."""
        ...


class Device(Protocol[S]):
    """One device, as a rank's transfers use it. Methods that take a stream queue work on it and return.

    They are called within `current()`, or on a thread of `run_thread`.

    Attributes:
        kernels: run with `launch`.
    """

    kernels: PageKernels

    @property
    def host_is_pinned(self) -> bool:
        """Whether copies from and to host pages leave the calling thread free."""
        ...

    def current(self) -> AbstractContextManager[None]:
        """Makes this device the calling thread's current one."""
        ...

    def new_stream(self) -> S: ...

    def current_stream(self) -> S:
        """The stream on which the calling thread now queues its own work."""
        ...

    def is_idle(self, stream: S) -> bool: ...

    def record(self, stream: S) -> Event: ...

    def wait(self, stream: S, event: Event) -> None:
        """Work queued on the stream from now on begins after the event."""
        ...

    def staging(self, num_bytes: int) -> torch.Tensor:
        """Device memory: uint8 `[num_bytes]`, aligned to 512 bytes."""
        ...

    def pinned(self, num_words: int) -> torch.Tensor:
        """Host memory that the device reads and writes in place: int64 `[num_words]`, aligned to 16 bytes."""
        ...

    def copy(
        self,
        stream: S,
        targets: npt.NDArray[np.int64],
        sources: npt.NDArray[np.int64],
        piece_bytes: int,
        *,
        to_host: bool,
    ) -> None:
        """Copy `n` pieces of equal size between addresses `int64 [n]`, one side device, one host memory.

        What goes to the device lies in host memory already and stays there until the copy is over.
        """
        ...

    def launch(self, stream: S, kernel: Callable[[int], None]) -> None:
        """Call `kernel`, one of `kernels` with all arguments bound but the stream, so that it queues there."""
        ...

    def run_thread(self, loop: Callable[[], None]) -> None:
        """Run a thread's loop with this device current on that thread."""
        ...

    def close(self) -> None:
        """Let go of the host pool. Nothing is in flight."""
        ...
