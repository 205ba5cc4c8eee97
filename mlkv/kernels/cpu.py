"""Transfers for KV pools in host memory: one thread for each direction, torch operations, memory copies.

The caller's thread goes on meanwhile. Nothing orders its writes to the pool with these threads but the contract of
`transfer`: slots in flight are left alone.
"""

from __future__ import annotations

import numpy as np
import torch

from mlkv.errors import CacheUsageError
from mlkv.kernels.checksum import payload_checksums
from mlkv.kernels.host_pages import HostPages, PageBatch, num_verified
from mlkv.kernels.paged import gather, scatter
from mlkv.kernels.transfer import LoadTransfer, OffloadTransfer, TransferEngine
from mlkv.kernels.worker import Worker
from mlkv.layout import KVPool

_CHUNK_BYTES = 4 << 20
"""Pages are copied, summed and scattered in pieces of about this size, so that each stays in cache from one stage
to the next. On two cores of a server CPU, pieces of 1 to 8 MiB were equally fast."""


class CpuTransferEngine(TransferEngine):
    """See `TransferEngine`."""

    def __init__(self, pool: KVPool, host: HostPages, *, staging_bytes: int, max_tasks: int) -> None:
        super().__init__(pool, host, max_tasks)
        run_bytes = max(1, host.read_bytes)
        self._chunk_pages = max(1, min(staging_bytes, _CHUNK_BYTES) // run_bytes)
        self._load_worker = Worker("mlkv-load", max_tasks)
        self._offload_worker = Worker("mlkv-offload", max_tasks)
        self._closed = False

    def load(self, pages: PageBatch, slots: torch.Tensor) -> LoadTransfer:
        self._refuse_when_closed()
        self._check(pages, slots, lowest=-1)
        job = _CpuLoad(self._pool, self._host, pages, slots.clone(), self._chunk_pages)
        self._start(self._load_worker, job, len(pages) * self._host.read_bytes)
        return job

    def offload(self, pages: PageBatch, slots: torch.Tensor) -> OffloadTransfer:
        self._refuse_when_closed()
        self._check(pages, slots, lowest=0)
        job = _CpuOffload(self._pool, self._host, pages, slots.clone(), self._chunk_pages)
        self._start(self._offload_worker, job, len(pages) * self._host.written_bytes)
        return job

    def close(self, deadline_s: float) -> None:
        if self._closed:
            return
        self._load_worker.close(deadline_s)
        self._offload_worker.close(deadline_s)
        self._closed = True

    def _start(self, worker: Worker, job: _CpuLoad | _CpuOffload, num_bytes: int) -> None:
        if not num_bytes:
            job.run()  # headers at most: a rank with nothing to move is done at once
        elif not worker.submit(job):
            job.fail(f"refused: {self._max_tasks} transfers of this direction are in flight")

    def _refuse_when_closed(self) -> None:
        if self._closed:
            raise CacheUsageError("the transfer engine is closed")


class _CpuLoad(LoadTransfer):
    def __init__(
        self, pool: KVPool, host: HostPages, pages: PageBatch, slots: torch.Tensor, chunk_pages: int
    ) -> None:
        self._pool, self._host, self._pages, self._slots = pool, host, pages, slots
        self._chunk_pages = chunk_pages
        self._done = False
        self.num_good = 0
        self.error: str | None = None

    def poll(self) -> bool:
        return self._done

    def fail(self, reason: str) -> None:
        self.error = reason
        self._done = True

    @torch.inference_mode()
    def run(self) -> None:
        page_tokens = self._pool.layout.page_tokens
        heads = self._host.rank_slice.num_heads
        num_identified = self._host.num_identified(self._pages)
        staging = np.empty((min(num_identified, self._chunk_pages), self._host.read_bytes), np.uint8)
        for start in range(0, num_identified, self._chunk_pages):
            part = self._pages[start : min(start + self._chunk_pages, num_identified)]
            # What is verified is the private copy that is scattered, not memory others could still write.
            runs = staging[: len(part)]
            self._host.read_runs(part, runs)
            slices = torch.from_numpy(runs).view(len(part), heads, self._pool.layout.head_bytes)
            found = payload_checksums(slices).numpy().view(np.uint64)
            good = num_verified(self._host.expected_sums(part), found)
            slots = self._slots[start * page_tokens : (start + good) * page_tokens]
            scatter(self._pool, slots, self._host.rank_slice, slices[:good])
            self.num_good += good
            if good < len(part):
                break
        self._done = True


class _CpuOffload(OffloadTransfer):
    def __init__(
        self, pool: KVPool, host: HostPages, pages: PageBatch, slots: torch.Tensor, chunk_pages: int
    ) -> None:
        self._pool, self._host, self._pages, self._slots = pool, host, pages, slots
        self._chunk_pages = chunk_pages
        self._released = False
        self._done = False
        self.error: str | None = None

    def poll_released(self) -> bool:
        return self._released

    def poll(self) -> bool:
        return self._done

    def fail(self, reason: str) -> None:
        self.error = reason
        self._released = True
        self._done = True

    @torch.inference_mode()
    def run(self) -> None:
        page_tokens = self._pool.layout.page_tokens
        heads = self._host.rank_slice.num_written_heads
        num_pages = len(self._pages)
        staging = np.empty((min(num_pages, self._chunk_pages), self._host.written_bytes), np.uint8)
        for start in range(0, num_pages, self._chunk_pages):
            part = self._pages[start : start + self._chunk_pages]
            runs = staging[: len(part)]
            slices = torch.from_numpy(runs).view(len(part), heads, self._pool.layout.head_bytes)
            slots = self._slots[start * page_tokens : (start + len(part)) * page_tokens]
            gather(self._pool, slots, self._host.rank_slice, slices)
            if start + len(part) == num_pages:
                self._released = True  # the rest is read from staging
            sums = payload_checksums(slices).numpy().view(np.uint64)
            self._host.write_runs(part, runs)
            self._host.write_identities(part)
            if heads:
                self._host.write_sums(part.indices, sums, self._host.sum_bindings(part))
        self._released = True
        self._done = True
