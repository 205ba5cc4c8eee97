"""The kernels of staged transfers in torch operations: where Triton is missing, or cannot take the strides."""

from __future__ import annotations

import torch

from mlkv.kernels.checksum import payload_checksums
from mlkv.kernels.device import Staging, Words
from mlkv.kernels.paged import gather, scatter
from mlkv.layout import KVPool, RankSlice


class TorchKernels:
    """See `device.PageKernels`. On CUDA `scatter` makes its thread wait for the device."""

    num_parts = 1
    reaches_host = False
    takes_stream = False

    def __init__(self, pool: KVPool, rank_slice: RankSlice) -> None:
        self._pool = pool
        self._slice = rank_slice

    def fetch(self, source: Words, target: Words, stream: int) -> None:
        target.tensor.copy_(source.tensor, non_blocking=True)

    def gather(self, num_pages: int, slots: Words, pages: Staging | Words, sums: Words, stream: int) -> None:
        slices = self._slices(pages, num_pages, self._slice.num_written_heads)
        gather(self._pool, self._slots(slots, num_pages), self._slice, slices)
        self._sum(slices, sums)

    def scatter(self, num_pages: int, slots: Words, pages: Staging | Words, sums: Words, stream: int) -> None:
        slices = self._slices(pages, num_pages, self._slice.num_heads)
        self._sum(slices, sums)
        scatter(self._pool, self._slots(slots, num_pages), self._slice, slices)

    def _slots(self, slots: Words, num_pages: int) -> torch.Tensor:
        return slots.part(0, num_pages * self._pool.layout.page_tokens).tensor.to(self._pool.device)

    def _slices(self, pages: Staging | Words, num_pages: int, num_heads: int) -> torch.Tensor:
        if isinstance(pages, Words):
            raise TypeError("these kernels do not reach host memory")
        head_bytes = self._pool.layout.head_bytes
        return pages.memory[: num_pages * num_heads * head_bytes].view(num_pages, num_heads, head_bytes)

    def _sum(self, slices: torch.Tensor, sums: Words) -> None:
        sums.tensor.copy_(payload_checksums(slices).flatten(), non_blocking=True)
