"""Transfers of a device pool: copy engine and kernels, pipelined in chunks over a ring of staging memory.

A load, chunk by chunk: the copy stream waits until the segment is free and copies host pages into it; the kernel
stream waits for that copy, and (once) for the work that the caller had queued, and scatters. An offload runs the
other way: the kernel stream waits for the caller's work and gathers, as far ahead as there is staging, so that the
slots are released early; the copy stream takes chunk after chunk to the host. Kernels leave the checksums of what
they moved in pinned memory, where the host reads them once the last event of the task is done: it compares them
with the headers (load) or writes the headers (offload).

Chunks are queued ahead of the device, so a transfer needs no CPU while it runs. Queueing one takes some 50 us of
the caller's time; a transfer of more than `CHUNKS_AHEAD` is queued on by `poll`, which engines call in every step.
"""

from __future__ import annotations

import time
from typing import Generic

import torch

from mlkv.errors import CacheUsageError
from mlkv.kernels.cooperative import Cooperation, CooperativeLoad, Exchange
from mlkv.kernels.device import Device, S
from mlkv.kernels.direction import Direction
from mlkv.kernels.host_pages import HostPages, PageBatch
from mlkv.kernels.staged_tasks import StagedLoad, StagedOffload, StagedTask
from mlkv.kernels.transfer import (
    EXCHANGE_DEADLINE_S,
    LoadTransfer,
    OffloadTransfer,
    TransferEngine,
    TransferPath,
)
from mlkv.layout import KVPool

SEGMENT_BYTES = 16 << 20
"""Wanted size of a segment of staging. The first of an offload is gathered alone, 10 us of an H200, before copies
can begin; and a load of a few of them ends with the scatter of one."""

CHUNKS_AHEAD = 48
"""Chunks queued on the device at once: of a load up to 1.5 GiB or 29 ms of a link of 55 GB/s, more than most
engine steps last; of an offload four times that. Their few hundred operations are well below the about 1000 that
the driver lets wait on a stream before it makes the caller wait."""

DIRECT_BYTES = 2 << 20
DIRECT_IDLE_BYTES = 16 << 20
DIRECT_PIECE_BYTES = 128 << 10
DIRECT_TINY_PIECES_BYTES = 16 << 20
DIRECT_TINY_PIECES_IDLE_BYTES = 64 << 20
"""See `choose_path`. On an H200 batched copies reach 0.91 of the link with pieces of 1 MiB, 0.74 with 256 KiB and
0.42 with 64 KiB; a kernel that reaches into host memory has 0.93 with any, but slows a matmul beside it 1.5x."""


def choose_path(piece_bytes: int, num_pages: int, *, is_idle: bool, is_load: bool) -> TransferPath:
    """Whether a kernel reaches into host memory itself ("direct") or the copy engine brings pages ("staged").

    Direct is for what is over before it can disturb anybody: small transfers, where one launch is sooner done than
    copies, events and a launch; somewhat larger loads, which somebody waits for, while nothing computes; and pages
    in tiny pieces, which the copy engine is slow with, up to a millisecond of the link while nothing computes: the
    model's next kernels may come right behind, and would wait for its end.

    Args:
        piece_bytes: contiguous bytes of one page that this rank moves.
        is_idle: whether the caller's stream has nothing queued.
    """
    total_bytes = piece_bytes * num_pages
    if total_bytes <= DIRECT_BYTES:
        return "direct"
    if piece_bytes < DIRECT_PIECE_BYTES:
        most = DIRECT_TINY_PIECES_IDLE_BYTES if is_idle else DIRECT_TINY_PIECES_BYTES
        return "direct" if total_bytes <= most else "staged"
    # Not offloads: through staging they give their slots back long before they are over.
    return "direct" if is_load and total_bytes <= DIRECT_IDLE_BYTES and is_idle else "staged"


class StagedTransferEngine(TransferEngine, Generic[S]):
    """See `TransferEngine`.

    Args:
        device: where the pool is.
        transfer: as in `TransferEngine.create`.
        segment_bytes: wanted size of a segment of staging.
        chunks_ahead: chunks queued at once, in each direction.
        num_copy_streams: chunks take turns on this many copy streams of a direction.
        exchange, exchange_deadline_s: as in `TransferEngine.create`.
    """

    def __init__(
        self,
        pool: KVPool,
        host: HostPages,
        device: Device[S],
        *,
        staging_bytes: int,
        max_tasks: int,
        transfer: TransferPath = "auto",
        segment_bytes: int = SEGMENT_BYTES,
        chunks_ahead: int = CHUNKS_AHEAD,
        num_copy_streams: int = 1,
        exchange: Exchange[S] | None = None,
        exchange_deadline_s: float = EXCHANGE_DEADLINE_S,
    ) -> None:
        super().__init__(pool, host, max_tasks)
        self._device = device
        self._transfer: TransferPath = transfer
        if not (device.kernels.reaches_host and device.host_is_pinned):
            self._transfer = "staged"
        sizes = {
            "staging_bytes": staging_bytes,
            "segment_bytes": segment_bytes,
            "num_copy_streams": num_copy_streams,
            "max_chunks_ahead": chunks_ahead,
            "max_tasks": max_tasks,
        }
        self._loads: Direction[S] = Direction("mlkv-load", pool, host, device, run_bytes=host.read_bytes, **sizes)
        self._offloads: Direction[S] = Direction(
            "mlkv-offload", pool, host, device, run_bytes=host.written_bytes, **sizes
        )
        if exchange is not None and host.read_bytes:
            self.cooperation = Cooperation(self._loads, exchange, deadline_s=exchange_deadline_s)
        self._closed = False

    @property
    def kernel_streams(self) -> tuple[S, S]:
        """On which loads and offloads launch their kernels."""
        return self._loads.kernel_stream, self._offloads.kernel_stream

    def load(self, pages: PageBatch, slots: torch.Tensor) -> LoadTransfer:
        if self.cooperation is not None and self.cooperation.takes(len(pages)):
            return self._load_together(self.cooperation, pages, slots)
        self._refuse_when_closed()
        self._check(pages, slots, lowest=-1)
        task = StagedLoad(self._loads, pages, slots)
        self._submit(task, self._loads)
        return task

    def offload(self, pages: PageBatch, slots: torch.Tensor) -> OffloadTransfer:
        self._refuse_when_closed()
        self._check(pages, slots, lowest=0)
        task = StagedOffload(self._offloads, pages, slots)
        self._submit(task, self._offloads)
        return task

    def close(self, deadline_s: float) -> None:
        if self._closed:
            return
        end = time.monotonic() + deadline_s
        for direction in (self._loads, self._offloads):
            direction.close(max(0.0, end - time.monotonic()))
        if self.cooperation is not None:
            self.cooperation.close()
        self._device.close()
        self._closed = True

    def _load_together(self, cooperation: Cooperation[S], pages: PageBatch, slots: torch.Tensor) -> LoadTransfer:
        """One that other ranks wait for: refused only for what is equal on all of them, not for want of room."""
        self._refuse_when_closed()
        self._check_pages(pages)
        task = CooperativeLoad(self._loads, pages, slots, cooperation)

        def begin() -> None:
            self._check(pages, slots, lowest=-1)
            task.keep_slots()
            caller = self._device.current_stream()
            task.after = None if self._device.is_idle(caller) else self._device.record(caller)

        with self._device.current():
            task.attempt(begin)
            self._loads.submit(task)
        return task

    def _refuse_when_closed(self) -> None:
        if self._closed:
            raise CacheUsageError("the transfer engine is closed")

    def _submit(self, task: StagedTask[S], direction: Direction[S]) -> None:
        if not len(task.pages) or not direction.run_bytes:
            task.finish_empty()
            return
        if not direction.has_room():
            task.refuse(f"refused: {self._max_tasks} transfers of this direction are in flight")
            return
        with self._device.current():
            caller = self._device.current_stream()
            is_idle = self._device.is_idle(caller)
            task.path = self._transfer
            if task.path == "auto":
                task.path = choose_path(
                    direction.run_bytes, len(task.pages), is_idle=is_idle, is_load=direction is self._loads
                )
            # What the caller queued from now on is not waited for; if all of it before is over, nothing is.
            task.after = None if is_idle else self._device.record(caller)
            if direction.has_worker:
                task.keep_slots()
            direction.submit(task)
            if task.error is None:  # it may stand behind others, and not have begun
                task.keep_slots()
