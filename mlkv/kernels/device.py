"""What staged transfers need of a device: streams, events, a copy engine and two kernels.

`cuda.CudaDevice` is the real one. The interface is this narrow so that tests can stand behind it with streams that
are stepped by hand: a missing dependency between two streams then shows as wrong bytes, without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
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


class PageKernels(Protocol):
    """Gather and scatter between pool and pages, with checksums of what they move.

    Attributes:
        num_parts: partial sums that add up to the checksum of one head slice.
        reaches_host: whether pages may be given as addresses of pinned host memory.
    """

    num_parts: int
    reaches_host: bool

    def gather(self, slots: torch.Tensor, pages: torch.Tensor, sums: torch.Tensor) -> None:
        """Copy slots of the pool into pages.

        Args:
            slots: int64 `[n * page_tokens]`, in device memory or pinned, all valid.
            pages: staging, uint8 `[n, num_written_heads, head_bytes]` in device memory; or, where the kernels
                reach the host, int64 `[n]` pinned: the address of this rank's run of heads in each page.
            sums: int64 `[n, num_written_heads, num_parts]` in pinned memory, overwritten.
        """
        ...

    def scatter(self, slots: torch.Tensor, pages: torch.Tensor, sums: torch.Tensor) -> None:
        """Copy pages into slots of the pool, those of -1 left out. Arguments as above, over the heads read."""
        ...


class Device(Protocol[S]):
    """One device, as a rank's transfers use it. Methods that take a stream queue work on it and return.

    Attributes:
        kernels: run with `launch`.
    """

    kernels: PageKernels

    @property
    def host_is_pinned(self) -> bool:
        """Whether copies from and to host pages leave the calling thread free."""
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

    def pinned(self, shape: tuple[int, ...]) -> torch.Tensor:
        """Host memory that the device reads and writes in place: int64 of this shape."""
        ...

    def upload(self, stream: S, host: torch.Tensor) -> torch.Tensor:
        """A copy of a pinned tensor in device memory, complete for what follows on the stream."""
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
        """Copy `n` pieces of equal size between addresses `int64 [n]`, one side device, one host memory."""
        ...

    def launch(self, stream: S, kernel: Callable[[], None]) -> None:
        """Call `kernel`, which is one of `kernels` with its arguments bound, so that it queues on the stream."""
        ...

    def run_thread(self, loop: Callable[[], None]) -> None:
        """Run a thread's loop with this device current on that thread."""
        ...

    def close(self) -> None:
        """Let go of the host pool. Nothing is in flight."""
        ...
