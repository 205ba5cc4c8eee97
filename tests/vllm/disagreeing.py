"""The connector with the agreement taken out: each rank goes by its own store and its own events.

What every other asynchronous connector does under torchrun. It shows that the tests beside it can fail.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from vllm.distributed.parallel_state import get_tp_group

from mlkv import RankSlice, Replica
from mlkv.integrations.vllm import MLKVConnector
from mlkv.integrations.vllm.ranks import LocalRank
from mlkv.integrations.vllm.settings import Settings


class _LoneRank(LocalRank):
    def __init__(self, settings: Settings, kv_caches: dict[str, torch.Tensor]) -> None:
        rank = get_tp_group().rank_in_group
        store = settings.config.store.model_copy(update={"name": f"lone{rank}"})
        # Every rank numbers its loads alike; faults that are to differ between ranks need another seed.
        faults = f"{settings.config.faults},seed={rank}"
        config = settings.config.model_copy(update={"store": store, "faults": faults})
        super().__init__(replace(settings, config=config), kv_caches)

    def _place(self, settings: Settings) -> tuple[Replica, RankSlice | None]:
        heads = RankSlice.of_rank(settings.layout.num_kv_heads, settings.tp, get_tp_group().rank_in_group)
        return Replica.single(), heads


class DisagreeingConnector(MLKVConnector):
    @staticmethod
    def make_worker_half(settings: Settings, kv_caches: dict[str, torch.Tensor]) -> LocalRank:
        return _LoneRank(settings, kv_caches)
