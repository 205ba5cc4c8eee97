"""Staged transfers on a CUDA device: torch streams and events, the driver's copy engine, Triton kernels."""

from __future__ import annotations

import logging
from collections import defaultdict, deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from mlkv.errors import ConfigError
from mlkv.kernels.cooperative import Exchange
from mlkv.kernels.copy_engine import CopyEngine
from mlkv.kernels.device import Event, PageKernels, Staging, Words
from mlkv.kernels.driver import StreamEvent, StreamEvents, create_stream, driver, quick_driver
from mlkv.kernels.host_pages import HostPages
from mlkv.kernels.pinning import CudaRegistrar, PinnedMemory
from mlkv.kernels.staged import StagedTransferEngine
from mlkv.kernels.staging import StagingRing
from mlkv.kernels.torch_kernels import TorchKernels
from mlkv.kernels.transfer import EXCHANGE_DEADLINE_S, TransferPath
from mlkv.layout import KVPool, RankSlice

log = logging.getLogger(__name__)

_NO_CHANGE = nullcontext()

_unused_streams: dict[tuple[int, int], deque[int]] = defaultdict(deque)
"""Raw handles from closed devices, by index and priority, to be used again. They are never destroyed: torch knows
on which streams it used memory, and turns to these when it frees the memory."""

STREAM_PRIORITY = -1
"""Above the model's streams: a scatter of a few microseconds that waits behind the queued blocks of a large matmul
would hold up the copies behind it, while the matmul hardly notices it."""


class CudaDevice:
    """See `device.Device`. The host pool is pinned here, and unpinned by `close`.

    Args:
        kernels: of this device.
        batched_copies: False: one driver call for each piece.
        priority: of the streams; lower is more urgent.
        on_pinned: called with (bytes pinned, bytes in all) while the host pool is pinned.

    Raises:
        ConfigError: when this process has no CUDA driver.
    """

    def __init__(
        self,
        device: torch.device,
        host: HostPages,
        kernels: PageKernels,
        *,
        batched_copies: bool = True,
        priority: int = STREAM_PRIORITY,
        on_pinned: Callable[[int, int], None] | None = None,
    ) -> None:
        try:
            library = driver()
        except OSError as error:
            raise ConfigError(f"the KV pool is on {device}, but there is no CUDA driver: {error}") from None
        self.kernels = kernels
        self._device = device
        self._priority = priority
        self._memory = PinnedMemory(
            host.address,
            host.pages.nbytes,
            CudaRegistrar(library, device),
            unit_bytes=host.layout.page_bytes,
            progress=on_pinned,
        )
        # Batches are for pinned memory only. Copies of other memory make their caller wait, a thread of ours.
        is_pinned = self._memory.is_pinned
        self._copies = CopyEngine(quick_driver() if is_pinned else library, batched=batched_copies and is_pinned)
        self._events = StreamEvents(quick_driver())
        self._streams: list[int] = []  # made here

    @property
    def host_is_pinned(self) -> bool:
        return self._memory.is_pinned

    def current(self) -> AbstractContextManager[None]:
        # The default stream has the same handle on all devices, and an event belongs to the one it is made on.
        return _NO_CHANGE if torch._C._cuda_getDevice() == self._device.index else torch.cuda.device(self._device)

    # Streams are raw handles here: torch takes 6 us to make an object of the current one.

    def new_stream(self) -> int:
        # Not one of torch's, which may be somebody else's as well and have had its first launch: see `make_ready`.
        unused = self._unused_streams()
        if not unused:
            with self.current():
                unused.append(create_stream(driver(), self._priority))
        self._streams.append(unused.popleft())
        return self._streams[-1]

    def current_stream(self) -> int:
        return int(torch._C._cuda_getCurrentRawStream(self._device.index))

    def is_idle(self, stream: int) -> bool:
        return self._events.is_idle(stream)

    def record(self, stream: int) -> StreamEvent:
        return self._events.record(stream)

    def wait(self, stream: int, event: Event) -> None:
        assert isinstance(event, StreamEvent)
        self._events.wait(stream, event)

    def staging(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)

    def pinned(self, num_words: int) -> torch.Tensor:
        return torch.empty(num_words, dtype=torch.int64, pin_memory=True)

    def copy(
        self,
        stream: int,
        targets: npt.NDArray[np.int64],
        sources: npt.NDArray[np.int64],
        piece_bytes: int,
        *,
        to_host: bool,
    ) -> None:
        # What goes to the device was complete before it was submitted. Staging is filled in stream order.
        self._copies.copy(stream, targets, sources, piece_bytes, sources_are_final=not to_host)

    def launch(self, stream: int, kernel: Callable[[int], None]) -> None:
        if self.kernels.takes_stream:
            kernel(stream)
        else:
            # Pools may have been made in inference mode, and are then written in it only.
            on = torch.cuda.ExternalStream(stream, self._device)  # type: ignore[no-untyped-call]
            with torch.cuda.stream(on), torch.inference_mode():
                kernel(stream)

    def run_thread(self, loop: Callable[[], None]) -> None:
        with torch.cuda.device(self._device):
            # A thread begins without a context, which the driver's calls need; a call of the runtime brings it.
            torch.cuda.current_stream(self._device).query()
            loop()

    def close(self) -> None:
        self._memory.close()
        self._events.close()
        self._unused_streams().extend(self._streams)
        self._streams = []

    def _unused_streams(self) -> deque[int]:
        return _unused_streams[self._device.index, self._priority]


def open_cuda_engine(
    pool: KVPool,
    host: HostPages,
    *,
    staging_bytes: int,
    max_tasks: int,
    transfer: TransferPath,
    on_pinned: Callable[[int, int], None] | None = None,
    exchange: Exchange[int] | None = None,
    exchange_deadline_s: float = EXCHANGE_DEADLINE_S,
) -> StagedTransferEngine[int]:
    """The engine for a pool on a CUDA device, with its host pool pinned and its kernels compiled."""
    kernels = choose_kernels(pool, host.rank_slice)
    device = CudaDevice(pool.device, host, kernels, on_pinned=on_pinned)
    if not (device.host_is_pinned and kernels.takes_stream):
        exchange = None  # transfers go through a thread then, and collectives of two threads have no order
    try:
        engine: StagedTransferEngine[int] = StagedTransferEngine(
            pool,
            host,
            device,
            staging_bytes=staging_bytes,
            max_tasks=max_tasks,
            transfer=transfer,
            exchange=exchange,
            exchange_deadline_s=exchange_deadline_s,
        )
        make_ready(engine, pool, host, device)
    except BaseException:
        device.close()
        raise
    return engine


def choose_kernels(pool: KVPool, rank_slice: RankSlice) -> PageKernels:
    """Triton kernels, or torch operations where Triton is missing or cannot take the pool's strides."""
    try:
        from mlkv.kernels.triton_kernels import TritonKernels

        return TritonKernels(pool, rank_slice)
    except (ImportError, ValueError) as error:
        log.warning("transfers use torch operations, several times slower than the Triton kernels: %s", error)
        return TorchKernels(pool, rank_slice)


def make_ready(engine: StagedTransferEngine[int], pool: KVPool, host: HostPages, device: CudaDevice) -> None:
    """Give the engine's streams their places beside the current one, and compile its kernels.

    The driver gives a stream its hardware queue at its first launch, and kernels on some queues get in the way of
    those on another one more than need be: nothing that CUDA documents, but on an H200 a loop of matmuls beside a
    load took 1.03 to 1.04 of its time in 6 of 6 trials in which the load's stream had its first launch right after
    one on the stream of the matmuls, and 1.08 in 12 of 12 in which that stream had been idle for long. The former
    is done here; the current stream should be the model's.

    Compiled now, they are not compiled in the first transfer: a page is gathered into scratch, and scattered to no
    slot.
    """
    layout, part = pool.layout, host.rank_slice
    if not part.num_heads or pool.num_slots < layout.page_tokens:
        return
    with device.current():
        torch.cuda.synchronize(pool.device)  # the pool's tensors may still be being made
        load_stream, offload_stream = engine.kernel_streams
        run_bytes = part.num_heads * layout.head_bytes
        in_host = torch.empty(run_bytes, dtype=torch.uint8, pin_memory=True)
        slots = device.pinned(layout.page_tokens)
        sums = Words(device.pinned(part.num_heads * device.kernels.num_parts))
        ring = StagingRing(device.staging, total_bytes=run_bytes, run_bytes=run_bytes, segment_bytes=run_bytes)
        pages: list[Staging | Words] = [ring.take(1)]
        if device.kernels.reaches_host:
            pages.append(Words(device.pinned(1).fill_(in_host.data_ptr())))
        if device.kernels.takes_stream:
            words = Words(device.staging(8 * layout.page_tokens).view(torch.int64))
            fetch = partial(device.kernels.fetch, Words(slots.fill_(-1)), words)
            for stream in engine.kernel_streams:
                device.launch(device.current_stream(), fetch)
                device.launch(stream, fetch)
                torch.cuda.synchronize(pool.device)
        for target in pages:
            if part.num_written_heads:
                slots.copy_(torch.arange(layout.page_tokens))
                device.launch(offload_stream, partial(device.kernels.gather, 1, Words(slots), target, sums))
                torch.cuda.synchronize(pool.device)
            slots.fill_(-1)
            device.launch(load_stream, partial(device.kernels.scatter, 1, Words(slots), target, sums))
            torch.cuda.synchronize(pool.device)
