"""The connector's worker half and vLLM's worker, without an engine around them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from mlkv import KVLayout, MLKVConfig, Plane
from mlkv.integrations.vllm.scheduler import NO_OUTCOME, SchedulerSide
from mlkv.integrations.vllm.settings import Settings

pytest.importorskip("vllm", reason="needs vllm: run scripts/test_vllm.sh")

from mlkv.integrations.vllm import MLKVConnector
from mlkv.integrations.vllm.cpu_worker import memory_name
from mlkv.integrations.vllm.ranks import LocalRank

BLOCK, PAGE, NUM_BLOCKS = 4, 8, 8
LAYOUT = KVLayout(1, 1, PAGE, (Plane("kv", torch.float32, 4),))


@pytest.fixture
def naps(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    found: list[float] = []
    monkeypatch.setattr("mlkv.integrations.vllm.scheduler.time.sleep", found.append)
    return found


@pytest.fixture
def side() -> SchedulerSide:
    config = MLKVConfig(
        model="test",
        page_tokens=PAGE,
        faults="delay=all/offload:60000-60000ms",
        store={"host_bytes": 8 * LAYOUT.page_bytes},
    )
    return SchedulerSide(Settings(config, LAYOUT, BLOCK, NUM_BLOCKS, ("layer",), 1, "halves", True, True, True))


@pytest.fixture
def rank(side: SchedulerSide) -> Iterator[LocalRank]:
    made = LocalRank(side._settings, {"layer": torch.zeros(NUM_BLOCKS, 1, BLOCK, 4)})
    made.serve(side)
    yield made
    made.close()


def test_layers_are_not_asked_to_wait_or_to_save() -> None:
    assert MLKVConnector.has_connector_metadata() is False


def test_hooks_that_never_have_anything_say_so() -> None:
    assert MLKVConnector.get_kv_connector_kv_cache_events() is None
    assert MLKVConnector.take_events() == ()


def test_an_idle_rank_has_nothing_to_tell_and_does_not_sleep(
    rank: LocalRank, side: SchedulerSide, naps: list[float]
) -> None:
    for computes in (True, False):
        side.computes = computes
        assert rank.step() is NO_OUTCOME
        assert rank.take_stats() is None
    assert naps == []


def test_a_rank_sleeps_only_when_it_waits_for_copies_and_computes_nothing(
    rank: LocalRank, side: SchedulerSide, naps: list[float]
) -> None:
    rank.cache.offload("held by its delay", list(range(PAGE)), torch.arange(PAGE))
    side.computes = True
    for _ in range(50):
        rank.step()
    assert rank.cache.pending
    assert naps == []
    side.computes = False
    for _ in range(50):
        rank.step()
    assert naps[0] < naps[1] < naps[-1] == max(naps) <= 0.001


def test_ranks_of_one_start_of_one_job_share_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})

    def name(port: int, rank: int, ranks: int = 2, restarts: int = 0) -> str:
        monkeypatch.setenv("MASTER_PORT", str(port))
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(restarts))
        return memory_name()

    assert name(29500, 0) == name(29500, 1)
    assert name(29500, 0) != name(29501, 0)
    assert name(29500, 0) != name(29500, 0, restarts=1)


def test_ranks_that_outnumber_the_cores_share_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setenv("MASTER_PORT", "29500")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    names = set()
    for rank in range(3):
        monkeypatch.setenv("RANK", str(rank))
        names.add(memory_name())
    assert len(names) == 3
