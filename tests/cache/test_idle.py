"""What a step with nothing to do costs: engines pay it in every step of theirs, with cold caches."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from types import FrameType

import pytest
import torch

from mlkv import NOTHING_TOLD, KVLayout, KVPool, MLKVConfig, MultiLevelCache, Plane, Replica
from mlkv.dist.ledger import Kind
from tests.ranks import run_ranks

MAX_CALLS = 5
"""Calls of Python functions in an idle step. After a model's step each costs one or two microseconds."""

LAYOUT = KVLayout(1, 1, 8, (Plane("kv", torch.float32, 4),))


def calls_of(function: Callable[[], object]) -> list[str]:
    """The names of the Python functions that run in one call, itself the first."""
    called: list[str] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            called.append(frame.f_code.co_name)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(before)
    return called


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
    called = calls_of(cache.step)
    assert called[0] == "step"
    assert len(called) <= MAX_CALLS, called


def idle_master(rank: int) -> list[str]:
    """The calls of an idle step of the master, before which the other rank has reported."""
    config = MLKVConfig(
        model="test",
        page_tokens=8,
        store={"host_bytes": 8 * LAYOUT.page_bytes},
        agree={"channel": "ledger", "deadline_s": 20.0},
    )
    pool = KVPool(LAYOUT, [[torch.zeros(8, 8, 1, 4)]])
    replica = Replica.from_world(tp=2)
    cache = MultiLevelCache(config, LAYOUT, pool, replica)
    cache.step()
    called = []
    if rank:
        cache.step()
    else:
        ledger = cache._agreement._channel._ledger  # type: ignore[attr-defined]
        give_up_at = time.monotonic() + 20
        while ledger.words[ledger.token_at[1]] != ledger.token(2, Kind.SAME):
            assert time.monotonic() < give_up_at
        called = calls_of(cache.step)
    replica.min_int(0)
    cache.close()
    return called


def test_an_idle_step_over_the_ledger_makes_as_few() -> None:
    called, _ = run_ranks(idle_master, 2)
    assert called[0] == "step"
    assert len(called) <= MAX_CALLS, called
