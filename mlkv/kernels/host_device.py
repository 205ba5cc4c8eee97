"""The staged pipeline on CPU tensors, for cooperative loads among ranks that have no device.

Each operation is over when the call that queues it returns, so streams and events have nothing to do. Copies,
kernels and gathers make their caller wait; that is a thread of the direction, see `direction.Direction`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import numpy.typing as npt
import torch

from mlkv.kernels.cooperative import Exchange
from mlkv.kernels.device import Event, PageKernels
from mlkv.kernels.host_pages import HostPages
from mlkv.kernels.staged import StagedTransferEngine
from mlkv.kernels.torch_kernels import TorchKernels
from mlkv.layout import KVPool

_SEGMENT_BYTES = 4 << 20  # as `cpu._CHUNK_BYTES`, so that a segment stays in cache from one stage to the next
_STREAM = 0


class _Past:
    """An event that is over."""

    def query(self) -> bool:
        return True


_PAST = _Past()


class HostDevice:
    """See `device.Device`."""

    host_is_pinned = False

    def __init__(self, kernels: PageKernels) -> None:
        self.kernels = kernels

    def current(self) -> AbstractContextManager[None]:
        return nullcontext()

    def new_stream(self) -> int:
        return _STREAM

    def current_stream(self) -> int:
        return _STREAM

    def is_idle(self, stream: int) -> bool:
        return True

    def record(self, stream: int) -> Event:
        return _PAST

    def wait(self, stream: int, event: Event) -> None:
        return

    def staging(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def pinned(self, num_words: int) -> torch.Tensor:
        return torch.empty(num_words, dtype=torch.int64)

    def copy(
        self,
        stream: int,
        targets: npt.NDArray[np.int64],
        sources: npt.NDArray[np.int64],
        piece_bytes: int,
        *,
        to_host: bool,
    ) -> None:
        for target, source in zip(targets.tolist(), sources.tolist(), strict=True):
            ctypes.memmove(target, source, piece_bytes)

    def launch(self, stream: int, kernel: Callable[[int], None]) -> None:
        with torch.inference_mode():  # pools may have been made in it, and are then written in it only
            kernel(stream)

    def run_thread(self, loop: Callable[[], None]) -> None:
        loop()

    def close(self) -> None:
        return


def open_host_engine(
    pool: KVPool,
    host: HostPages,
    *,
    staging_bytes: int,
    max_tasks: int,
    exchange: Exchange[int],
    exchange_deadline_s: float,
) -> StagedTransferEngine[int]:
    """The engine of a rank with CPU tensors that may load together with others."""
    return StagedTransferEngine(
        pool,
        host,
        HostDevice(TorchKernels(pool, host.rank_slice)),
        staging_bytes=staging_bytes,
        max_tasks=max_tasks,
        segment_bytes=_SEGMENT_BYTES,
        exchange=exchange,
        exchange_deadline_s=exchange_deadline_s,
    )
