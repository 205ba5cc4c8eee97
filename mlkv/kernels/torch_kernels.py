"""The kernels of staged transfers in torch operations: where Triton is missing, or cannot take the strides."""

from __future__ import annotations

import torch

from mlkv.kernels.checksum import payload_checksums
from mlkv.kernels.paged import gather, scatter
from mlkv.layout import KVPool, RankSlice


class TorchKernels:
    """See `device.PageKernels`. On CUDA `scatter` makes its thread wait for the device."""

    num_parts = 1
    reaches_host = False

    def __init__(self, pool: KVPool, rank_slice: RankSlice) -> None:
        self._pool = pool
        self._slice = rank_slice

    def gather(self, slots: torch.Tensor, pages: torch.Tensor, sums: torch.Tensor) -> None:
        gather(self._pool, slots.to(self._pool.device), self._slice, pages)
        sums[:, :, 0].copy_(payload_checksums(pages), non_blocking=True)

    def scatter(self, slots: torch.Tensor, pages: torch.Tensor, sums: torch.Tensor) -> None:
        sums[:, :, 0].copy_(payload_checksums(pages), non_blocking=True)
        scatter(self._pool, slots.to(self._pool.device), self._slice, pages)
