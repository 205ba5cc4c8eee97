"""A loop in the LightLLM style on the facade: right KV, less work, no slot given away too early."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mlkv import Replica
from tests.cache.bench import Rank
from tests.embedding.spmd_loop import Loop
from tests.ranks import run_ranks

NUM_SLOTS = 160


class KVReadingModel:
    """Its next token depends on the KV that lies in the slots on every rank, so wrong KV gives another answer."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank

    def __call__(self, tokens: list[int], slots: torch.Tensor, start: int) -> int:
        self._rank.compute(tokens, slots[: len(tokens)], start)
        seen = len(self._rank.wrong_tokens(tokens, slots[: len(tokens)]))
        if self._rank.replica.size > 1:
            wrong = torch.tensor([seen])
            dist.all_reduce(wrong)
            seen = int(wrong)
        return 1000 + (sum(tokens) + 7 * seen) % 997


def talks(seed: int) -> list[tuple[str, list[int]]]:
    chance = random.Random(seed)
    system = [chance.randrange(900) for _ in range(17)]
    return [
        (f"talk{n}", system + [chance.randrange(900) for _ in range(chance.randrange(3, 40))]) for n in range(8)
    ]


def expected(prompt: list[int], num_new: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(num_new):
        tokens.append(1000 + sum(tokens) % 997)
    return tokens


def run_loop(rank: Rank) -> dict[str, Any]:
    loop = Loop(rank.cache, KVReadingModel(rank), NUM_SLOTS)
    turns = []
    prompts = talks(seed=5)
    for turn in range(3):
        loop.num_computed = 0
        for name, prompt in prompts:
            loop.waiting.append((f"{name}/{turn}", prompt, 5))
        give_up_at = time.monotonic() + 40
        while not loop.done:
            assert time.monotonic() < give_up_at, (loop.waiting, loop.admitted)
            loop.iterate()
            time.sleep(0.0002)
        for name, prompt in prompts:
            assert loop.answers[f"{name}/{turn}"] == expected(prompt, 5), (name, turn)
        turns.append(loop.num_computed)
        prompts = [(name, [*loop.answers[f"{name}/{turn}"], 3, 1, 4]) for name, _ in prompts]
        rank.poison()  # nothing of an earlier turn can be used but through the cache
    rank.step_until(lambda: rank.cache.pending == 0, "everything in flight to end")
    digest = rank.cache.results_digest
    rank.check_conserved()
    rank.cache.close()
    return {"computed": turns, "digest": digest, "prompt_tokens": sum(len(prompt) for _, prompt in talks(seed=5))}


def test_answers_are_right_and_later_turns_compute_little() -> None:
    result = run_loop(Rank(Replica.single(), num_slots=NUM_SLOTS, host_pages=256))
    first, second, third = result["computed"]
    assert second < first / 2
    assert third < first / 2


def _on_rank(_: int, size: int, faults: str) -> dict[str, Any]:
    replica = Replica.from_world(tp=size, deadline_s=30)
    return run_loop(Rank(replica, num_kv_heads=4, num_slots=NUM_SLOTS, host_pages=256, faults=faults))


@pytest.mark.parametrize(
    ("size", "faults"),
    [
        (2, "delay=rank0:0-8ms,delay=rank1:0-8ms,seed=3"),
        (2, "fail=rank1/load:0.4,corrupt=rank0/load:0.2,seed=4"),
    ],
    ids=["ranks_finish_in_different_orders", "loads_fail_on_one_rank"],
)
def test_every_rank_decides_alike(size: int, faults: str) -> None:
    results = run_ranks(_on_rank, size, size, faults, deadline_s=90)
    assert results[0]["digest"] == results[1]["digest"]
    assert results[0]["computed"] == results[1]["computed"]
