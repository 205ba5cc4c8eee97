"""A device whose streams are queues that a test steps by hand or in random order.

Nothing runs when it is queued. Work on one stream runs in order; work on two streams in whatever order the test
takes, held back by events alone. So a dependency that the engine forgot shows as wrong bytes under some order.
"""

from __future__ import annotations

import ctypes
import random
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch

from mlkv.kernels.device import Event, PageKernels
from mlkv.kernels.host_pages import HostPages
from mlkv.kernels.staged import StagedTransferEngine
from mlkv.kernels.torch_kernels import TorchKernels
from mlkv.layout import KVPool, RankSlice


class SimKernels(TorchKernels):
    """Run when their stream is stepped, so whoever queues them never waits."""

    takes_stream = True


class SimEvent:
    def __init__(self) -> None:
        self.done = False

    def query(self) -> bool:
        return self.done


class SimStream:
    def __init__(self, name: str) -> None:
        self.name = name
        self.work: deque[tuple[Callable[[], None] | None, SimEvent | None]] = deque()  # do, or wait for an event

    def can_step(self) -> bool:
        return bool(self.work) and (self.work[0][1] is None or self.work[0][1].done)

    def step(self) -> None:
        work, _ = self.work.popleft()
        if work is not None:
            with torch.inference_mode():  # as the engine queued it
                work()

    def run(self, work: Callable[[], None]) -> None:
        self.work.append((work, None))


class SimDevice:
    """See `mlkv.kernels.device.Device`. `compute` is the stream that the test's own model runs on."""

    def __init__(self, kernels: PageKernels, *, host_is_pinned: bool = True) -> None:
        self.kernels = kernels
        self.host_is_pinned = host_is_pinned
        self.compute = SimStream("compute")
        self.streams = [self.compute]
        self.fail_at: int | None = None  # which queued piece of work from now on raises while it is queued
        self.closed = False
        self.copied_to_host: list[int] = []
        self._lock = threading.Lock()
        self._current = threading.local()  # `depth`, if this device is the thread's current one

    @contextmanager
    def current(self) -> Iterator[None]:
        self._current.depth = self._depth + 1
        try:
            yield
        finally:
            self._current.depth -= 1

    @property
    def _depth(self) -> int:
        return getattr(self._current, "depth", 0)

    def _check_current(self) -> None:
        assert self._depth, "another device may be the current one of this thread"

    def new_stream(self) -> SimStream:
        self.streams.append(SimStream(f"stream {len(self.streams)}"))
        return self.streams[-1]

    def current_stream(self) -> SimStream:
        return self.compute

    def is_idle(self, stream: SimStream) -> bool:
        self._check_current()
        return not stream.work

    def record(self, stream: SimStream) -> Event:
        event = SimEvent()
        self._queue(stream, lambda: setattr(event, "done", True))
        return event

    def wait(self, stream: SimStream, event: Event) -> None:
        assert isinstance(event, SimEvent)
        self._check_current()
        with self._lock:
            stream.work.append((None, event))

    def staging(self, num_bytes: int) -> torch.Tensor:
        return torch.full((num_bytes,), 0xEE, dtype=torch.uint8)

    def pinned(self, num_words: int) -> torch.Tensor:
        return torch.full((num_words,), -77, dtype=torch.int64)

    def copy(
        self, stream: SimStream, targets: np.ndarray, sources: np.ndarray, piece_bytes: int, *, to_host: bool
    ) -> None:
        self._count_down()
        pairs = list(zip(targets.tolist(), sources.tolist(), strict=True))
        for target, source in pairs:
            self._queue(stream, lambda t=target, s=source: ctypes.memmove(t, s, piece_bytes))

    def launch(self, stream: SimStream, kernel: Callable[[int], None]) -> None:
        self._count_down()
        self._queue(stream, lambda: kernel(0))

    def run_thread(self, loop: Callable[[], None]) -> None:
        with self.current():
            loop()

    def close(self) -> None:
        self.closed = True

    # What tests do with it.

    def step_any(self, order: random.Random) -> bool:
        """One piece of work of a random stream that is not held back. False when there is none."""
        with self._lock:
            ready = [stream for stream in self.streams if stream.can_step()]
            if not ready:
                return False
            order.choice(ready).step()
            return True

    def run_until(self, condition: Callable[[], bool], order: random.Random) -> None:
        while not condition():
            assert self.step_any(order), "nothing can go on: a stream waits for what never comes"

    def run_all(self, order: random.Random) -> None:
        while self.step_any(order):
            pass
        assert not any(stream.work for stream in self.streams), "a stream waits for what never comes"

    def _queue(self, stream: SimStream, work: Callable[[], None]) -> None:
        self._check_current()
        with self._lock:
            stream.run(work)

    def _count_down(self) -> None:
        if self.fail_at is not None:
            self.fail_at -= 1
            if self.fail_at < 0:
                self.fail_at = None
                raise RuntimeError("device refuses")


def sim_engine(
    pool: KVPool,
    host: np.ndarray,
    rank_slice: RankSlice,
    *,
    fingerprint: bytes,
    staging_pages: int = 4,
    segment_pages: int = 1,
    max_tasks: int = 16,
    chunks_ahead: int = 1 << 30,
    num_copy_streams: int = 1,
    kernels: PageKernels | None = None,
    host_is_pinned: bool = True,
    transfer: str = "staged",
) -> tuple[StagedTransferEngine[SimStream], SimDevice]:
    pages = HostPages(host, pool.layout, rank_slice, fingerprint, writes_identity=True)
    device = SimDevice(kernels or SimKernels(pool, rank_slice), host_is_pinned=host_is_pinned)
    engine = StagedTransferEngine(
        pool,
        pages,
        device,
        staging_bytes=staging_pages * -(-pages.read_bytes // 512) * 512,
        max_tasks=max_tasks,
        transfer=transfer,  # type: ignore[arg-type]
        segment_bytes=segment_pages * pages.read_bytes,
        chunks_ahead=chunks_ahead,
        num_copy_streams=num_copy_streams,
    )
    return engine, device
