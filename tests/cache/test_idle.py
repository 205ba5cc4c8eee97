"""What a step with nothing to do costs: engines pay it in every step of theirs, with cold caches."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType

import pytest
import torch

from mlkv import NOTHING_TOLD, KVLayout, KVPool, MLKVConfig, MultiLevelCache, Plane, Replica

MAX_CALLS = 11
"""Calls of Python functions in an idle step. After a model's step each costs about a microsecond."""

LAYOUT = KVLayout(1, 1, 8, (Plane("kv", torch.float32, 4),))


@pytest.fixture
def cache() -> Iterator[MultiLevelCache]:
    config = MLKVConfig(model="test", page_tokens=8, store={"host_bytes": 8 * LAYOUT.page_bytes})
    pool = KVPool(LAYOUT, [[torch.zeros(8, 8, 1, 4)]])
    made = MultiLevelCache(config, LAYOUT, pool, Replica.single())
    yield made
    made.close()


def test_idle_steps_share_a_result(cache: MultiLevelCache) -> None:
    assert all(cache.step() is NOTHING_TOLD for _ in range(3))
    assert cache.counters.steps == 3


def test_an_idle_step_makes_few_calls(cache: MultiLevelCache) -> None:
    cache.step()
    called: list[str] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            called.append(frame.f_code.co_name)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        cache.step()
    finally:
        sys.setprofile(before)
    assert called[0] == "step"
    assert len(called) <= MAX_CALLS, called
