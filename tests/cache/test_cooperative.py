"""Loads that Gloo ranks bring together, through the facade: all ranks have the right bytes, or none is told so."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
import torch

from mlkv import ConfigError, KVLayout, KVPool, MLKVConfig, MultiLevelCache, RankLost, Replica
from tests.cache.bench import PAGE_TOKENS, Rank, layout_of, slots_of, tokens_of
from tests.cache.test_many_ranks import ended, random_traffic
from tests.ranks import run_ranks, watch_ranks


def make(tp: int, num_kv_heads: int, mode: str = "on", **settings: Any) -> Rank:
    replica = Replica.from_world(tp=tp, deadline_s=20.0)
    return Rank(replica, num_kv_heads=num_kv_heads, move={"cooperative": mode}, **settings)


def fetch_all_lengths(rank_index: int, tp: int, num_kv_heads: int) -> tuple[Any, ...]:
    """Loads of 1 to 9 pages: fewer than ranks, as many, and numbers that they do not divide."""
    rank = make(tp, num_kv_heads)
    tokens = tokens_of(9 * PAGE_TOKENS + 1)
    rank.compute(tokens, slots_of(0, len(tokens)))
    rank.store("a", tokens, slots_of(0, len(tokens)))
    story = []
    for num_pages in range(1, 10):
        rank.poison()
        part, slots = tokens[: num_pages * PAGE_TOKENS + 1], slots_of(100, num_pages * PAGE_TOKENS + 1)
        num_tokens = rank.fetch(f"b{num_pages}", part, slots)
        story.append((num_tokens, rank.wrong_tokens(part[:num_tokens], slots[:num_tokens])))
    is_on = rank.cache.stats().cooperative
    return ended(rank, (is_on, story))


@pytest.mark.parametrize(("tp", "num_kv_heads"), [(2, 1), (3, 1), (4, 2)])
def test_replicated_heads_are_right_on_every_rank(tp: int, num_kv_heads: int) -> None:
    right = [(num_pages * PAGE_TOKENS, []) for num_pages in range(1, 10)]
    assert run_ranks(fetch_all_lengths, tp, tp, num_kv_heads) == [(True, right)] * tp


def test_ranks_with_heads_of_their_own_load_alone_whatever_the_setting() -> None:
    results = run_ranks(fetch_all_lengths, 2, 2, 2)
    assert [is_on for is_on, _ in results] == [False, False]
    assert results[0] == results[1]


NUM_LATENT_TOKENS = 9 * PAGE_TOKENS
LATENT_DIM = 6


class LatentRank:
    """A rank with a pool of latents on the CPU or on a GPU of its own; nine pages of known content are stored."""

    def __init__(self, rank_index: int, size: int, device: str, deadline_s: float = 20.0) -> None:
        self.device = torch.device(device, rank_index) if device == "cuda" else torch.device(device)
        if device == "cuda":
            torch.cuda.set_device(self.device)
        layout = KVLayout.mla(num_layers=2, latent_dim=LATENT_DIM, dtype=torch.bfloat16, page_tokens=PAGE_TOKENS)
        self.kv = torch.full((2, 128, 1, 1, LATENT_DIM), -1.0, dtype=torch.bfloat16, device=self.device)
        config = MLKVConfig(
            model="m",
            page_tokens=PAGE_TOKENS,
            store={"host_bytes": 16 * layout.page_bytes},
            move={"cooperative": "on"},
            agree={"deadline_s": deadline_s},
        )
        replica = Replica.from_world(tp=size, deadline_s=deadline_s)
        self.cache = MultiLevelCache(config, layout, KVPool(layout, [[layer] for layer in self.kv]), replica)
        self.tokens = tokens_of(NUM_LATENT_TOKENS + 1)
        self.seen: dict[tuple[str, str], Any] = {}
        content = torch.arange(2 * NUM_LATENT_TOKENS * LATENT_DIM) % 251
        self.right = content.view(2, -1, 1, 1, LATENT_DIM).to(self.device, torch.bfloat16)
        self.kv[:, :NUM_LATENT_TOKENS] = self.right
        self.cache.offload("stored", self.tokens, slots_of(0, NUM_LATENT_TOKENS + 1))
        self.step_until("offloaded", "stored")

    def step_until(self, kind: str, request_id: str) -> Any:
        end = time.monotonic() + 30
        while (kind, request_id) not in self.seen:
            assert time.monotonic() < end, f"{kind} of {request_id}"
            step = self.cache.step()
            for name in ("hits", "loaded", "offloaded"):
                self.seen |= {(name, key): value for key, value in getattr(step, name).items()}
            time.sleep(0.0002)
        return self.seen[kind, request_id]

    def loads_right(self, num_pages: int) -> bool:
        """Whether a load of so many pages into poisoned slots, others on each rank, brings exactly these bytes."""
        request_id, num_tokens = f"{num_pages} pages", num_pages * PAGE_TOKENS
        self.kv.fill_(-1.0)
        self.cache.lookup(request_id, self.tokens[: num_tokens + 1])
        self.step_until("hits", request_id)
        generator = torch.Generator().manual_seed(num_pages + 100 * (self.device.index or 0))
        slots = torch.randperm(128, generator=generator)[:num_tokens]
        self.cache.load(request_id, slots)
        self.step_until("loaded", request_id)
        expected = torch.full_like(self.kv, -1.0)
        expected[:, slots] = self.right[:, :num_tokens]
        return torch.equal(self.kv, expected)


def latents(rank_index: int, size: int, device: str) -> tuple[bool, list[bool]]:
    rank = LatentRank(rank_index, size, device)
    result = rank.cache.stats().cooperative, [rank.loads_right(num_pages) for num_pages in range(1, 10)]
    rank.cache.close()
    return result


def test_a_latent_is_right_on_every_rank() -> None:
    assert run_ranks(latents, 3, 3, "cpu") == [(True, [True] * 9)] * 3


needs_two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


@needs_two_gpus
def test_a_latent_is_right_on_every_gpu() -> None:
    size = torch.cuda.device_count()
    assert run_ranks(latents, size, size, "cuda", deadline_s=120.0) == [(True, [True] * 9)] * size


@pytest.mark.parametrize("faults", ["delay=all:0-10ms,seed=3", "delay=all:0-5ms,fail=rank1:0.2,corrupt=rank0:0.1"])
def test_results_are_equal_and_bytes_right_under_random_traffic(
    faults: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLKV_MOVE__COOPERATIVE", "on")
    results = run_ranks(replicated_traffic, 3, faults)
    assert results[0] == results[1] == results[2]
    assert results[0][1] == 0


def replicated_traffic(rank_index: int, faults: str) -> tuple[Any, ...]:
    return random_traffic(rank_index, 3, faults, 5, 200, num_kv_heads=1)


def damaged(rank_index: int, page: int) -> tuple[Any, ...]:
    rank = make(2, 1)
    tokens, slots = tokens_of(41), slots_of(0, 41)
    rank.compute(tokens, slots)
    rank.store("a", tokens, slots)
    rank.poison()
    rank.ask("b", tokens)
    if rank_index == 0:
        index = int(rank.cache._lifecycle.answered("b").indices[page])
        rank.cache._client.pool[index * rank.layout.page_bytes + rank.layout.header_bytes + 5] ^= 1
    rank.replica.min_int(0)
    rank.cache.load("b", slots_of(100, 40))
    rank.drain()
    num_tokens = rank.seen.failed["b"].num_tokens
    wrong = rank.wrong_tokens(tokens[:num_tokens], slots_of(100, num_tokens))
    return ended(rank, (num_tokens, wrong))


@pytest.mark.parametrize("page", [3, 7])  # of ten: in the part of rank 0, and of rank 1
def test_a_damaged_page_ends_the_good_prefix_on_all_ranks_alike(page: int) -> None:
    assert run_ranks(damaged, 2, page) == [(page * PAGE_TOKENS, [])] * 2


def cannot(rank_index: int) -> str:
    replica = Replica.from_world(tp=3, deadline_s=20.0)
    two_pages = 2 * layout_of(1).payload_bytes  # less than a page of each rank
    with pytest.raises(ConfigError) as caught:
        Rank(replica, num_kv_heads=1, move={"cooperative": "on", "staging_bytes": two_pages})
    return str(caught.value)


def test_insisting_where_it_cannot_be_is_an_error_on_all_ranks() -> None:
    for text in run_ranks(cannot, 3):
        assert "move.cooperative is on, but rank 0 cannot" in text


def auto(rank_index: int) -> bool:
    rank = make(2, 1, mode="auto")
    return ended(rank, rank.cache.stats().cooperative)


def test_tensors_on_the_cpu_are_loaded_alone_unless_told() -> None:
    assert run_ranks(auto, 2) == [False, False]


def one_dies(rank_index: int, device: str) -> float:
    """Rank 1 ends without a word when the other has begun a load that needs it."""
    rank = LatentRank(rank_index, 2, device, deadline_s=5.0)
    rank.cache.lookup("b", rank.tokens)
    rank.step_until("hits", "b")
    if rank_index == 1:
        os._exit(9)
    rank.cache.load("b", slots_of(0, NUM_LATENT_TOKENS))
    start = time.monotonic()
    with pytest.raises(RankLost):
        rank.step_until("loaded", "b")
    rank.cache.close()
    return time.monotonic() - start


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_two_gpus)])
def test_a_load_that_waits_for_a_dead_rank_ends_with_its_loss(device: str) -> None:
    outcome = watch_ranks(one_dies, 2, device, deadline_s=120.0)[0]
    assert outcome.error is None, outcome.trace
    assert outcome.value < 20
