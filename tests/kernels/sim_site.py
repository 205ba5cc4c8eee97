"""A simulated device with pools, for tests of the staged pipeline."""

from __future__ import annotations

import functools
import random

import numpy as np
import torch
from kernel_cases import (
    FINGERPRINT,
    batch,
    build_pool,
    gqa,
    host_pool,
    page_of,
)
from sim_device import SimDevice, SimStream, sim_engine

from mlkv.kernels.staged import StagedTransferEngine
from mlkv.layout import KVLayout, RankSlice

LAYOUT = gqa("fp16", layers=1, heads=2, dim=16, page_tokens=4)  # runs of 512 bytes
SMALL = gqa("fp16", layers=1, heads=2, dim=6, page_tokens=4)  # of 192
WHOLE = RankSlice(0, 2, 2)
NUM_BLOCKS = 32


class Site:
    """A simulated device with a pool, and a host pool of 16 poisoned pages."""

    def __init__(self, seed: int = 0, layout: KVLayout = LAYOUT, **options: object) -> None:
        self.layout = layout
        self.build = functools.partial(
            build_pool, "separate", layout, num_blocks=NUM_BLOCKS, block_tokens=4, local_heads=2
        )
        self.case = self.build(seed=seed)
        self.host = host_pool(layout, 16)
        self.engine: StagedTransferEngine[SimStream]
        self.device: SimDevice
        self.engine, self.device = sim_engine(
            self.case.pool,
            self.host,
            WHOLE,
            fingerprint=FINGERPRINT,
            **options,  # type: ignore[arg-type]
        )
        self.order = random.Random(seed)

    def store(self, indices: list[int], slots: torch.Tensor) -> None:
        transfer = self.engine.offload(batch(indices), slots)
        self.device.run_until(transfer.poll, self.order)
        assert transfer.error is None

    def payload(self, index: int) -> np.ndarray:
        start = self.layout.header_bytes
        return page_of(self.host, self.layout, index)[start : start + self.layout.payload_bytes].reshape(2, -1)

    def fill_slots(self, slots: torch.Tensor, value: int) -> None:
        for storage in self.case.storages:
            storage.view(torch.uint8).flatten(0, 1)[slots] = value
