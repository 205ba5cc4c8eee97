"""One rank on the CPU with two stored pages, for tests of its transfers."""

from __future__ import annotations

import numpy as np
import torch
from kernel_cases import batch, build_pool, finish_offload, gqa, host_pool, make_engine, page_of, random_slots

from mlkv.layout import KVLayout, RankSlice

LAYOUT = gqa("fp32", heads=3, dim=4, page_tokens=4)
WHOLE = RankSlice(0, 3, 3)


class Site:
    """One rank with a pool, a host pool, and two stored pages at host indices 1 and 4."""

    def __init__(self, layout: KVLayout = LAYOUT, **options: object) -> None:
        heads = layout.num_kv_heads
        self.layout = layout
        self.case = build_pool("separate", layout, num_blocks=16, block_tokens=4, local_heads=heads, seed=11)
        self.host = host_pool(layout, 6)
        self.engine = make_engine(self.case.pool, self.host, RankSlice(0, heads, heads), **options)
        self.pages = batch([1, 4])
        self.slots = random_slots(2, layout, 16, 4, seed=12)
        assert finish_offload(self.engine, self.pages, self.slots) is None
        self.before = [storage.clone() for storage in self.case.storages]
        self.free_slots = torch.tensor([s for s in range(64) if s not in set(self.slots.tolist())])[
            : len(self.slots)
        ]

    def page(self, index: int) -> np.ndarray:
        return page_of(self.host, self.layout, index)

    def key(self, at: int) -> bytes:
        return self.pages.keys[16 * at : 16 * at + 16]
