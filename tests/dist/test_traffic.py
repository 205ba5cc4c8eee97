"""The random traffic of scripts/agree_gpus.py, on the CPU: equal on all ranks, and able to see a wrong element."""

from __future__ import annotations

import sys

import torch

from mlkv import Replica
from tests.job.jobs import ROOT
from tests.ranks import run_ranks


def traffic(rank: int, num_steps: int, spoil: bool) -> tuple[bytes, int, int]:
    sys.path.insert(0, str(ROOT / "scripts"))
    from steps_rig import Traffic

    replica = Replica.from_world(tp=2)
    traffic = Traffic(replica, torch.device("cpu"), seed=11, agree={"deadline_s": 20.0})
    for _ in range(num_steps):
        traffic.step()
    if spoil and rank == 1:
        traffic.kv.poison(slice(0, 1))
        traffic.kv.check(0, slice(0, 1), 0, 1)
    while not traffic.drained:
        traffic.step(asking=False)
    result = traffic.cache.results_digest, traffic.kv.num_wrong, traffic.seen["loaded tokens"]
    replica.min_int(0)
    traffic.cache.close()
    return result


def test_random_traffic_gives_equal_results_and_right_elements_on_all_ranks() -> None:
    first, second = run_ranks(traffic, 2, 150, False)
    assert first == second
    _, wrong, loaded = first
    assert wrong == 0
    assert loaded > 0


def test_a_wrong_element_on_one_rank_is_counted_there() -> None:
    first, second = run_ranks(traffic, 2, 20, True)
    assert (first[1], second[1]) == (0, 1)
