"""Moving bytes between the engine's paged KV tensors and host pages."""

from __future__ import annotations

from mlkv.kernels.cooperative import COOPERATIVE_BYTES, Cooperation, Exchange
from mlkv.kernels.host_pages import PageBatch
from mlkv.kernels.transfer import LoadTransfer, OffloadTransfer, TransferEngine, TransferPath

__all__ = [
    "COOPERATIVE_BYTES",
    "Cooperation",
    "Exchange",
    "LoadTransfer",
    "OffloadTransfer",
    "PageBatch",
    "TransferEngine",
    "TransferPath",
]
