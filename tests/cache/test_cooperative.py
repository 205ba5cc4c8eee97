"""Loads that Gloo ranks bring together, through the facade: all ranks have the right bytes, or none is told so."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
import torch

from mlkv import ConfigError, KVLayout, KVPool, MLKVConfig, MultiLevelCache, Replica
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


def mla(rank_index: int) -> tuple[Any, ...]:
    replica = Replica.from_world(tp=3, deadline_s=20.0)
    layout = KVLayout.mla(num_layers=2, latent_dim=6, dtype=torch.bfloat16, page_tokens=PAGE_TOKENS)
    kv = [torch.full((64, 1, 1, 6), -1.0, dtype=torch.bfloat16) for _ in range(2)]
    config = MLKVConfig(
        model="m",
        page_tokens=PAGE_TOKENS,
        store={"host_bytes": 16 * layout.page_bytes},
        move={"cooperative": "on"},
        agree={"deadline_s": 20.0},
    )
    cache = MultiLevelCache(config, layout, KVPool(layout, [[layer] for layer in kv]), replica)
    tokens = tokens_of(21)
    right = torch.arange(2 * 20 * 6).view(2, 20, 1, 1, 6) % 251
    for layer, values in zip(kv, right, strict=True):
        layer[:20] = values
    cache.offload("a", tokens, slots_of(0, 21))
    seen: dict[str, int] = {}

    def step_until(kind: str, request_id: str) -> None:
        end = time.monotonic() + 15
        while request_id not in seen:
            assert time.monotonic() < end, f"{kind} of {request_id}"
            step = cache.step()
            seen.update(getattr(step, kind))
            time.sleep(0.0002)

    step_until("offloaded", "a")
    for layer in kv:
        layer.fill_(-1.0)
    cache.lookup("b", tokens)
    step_until("hits", "b")
    del seen["b"]
    slots = torch.randperm(40, generator=torch.Generator().manual_seed(rank_index))[:20] + 20
    cache.load("b", slots)
    step_until("loaded", "b")
    loaded = torch.stack([layer[slots] for layer in kv])
    is_right = bool((loaded == right).all()) and all(bool((layer[:20] == -1.0).all()) for layer in kv)
    result = (cache.stats().cooperative, seen["b"], is_right)
    cache.close()
    return result


def test_a_latent_is_right_on_every_rank() -> None:
    assert run_ranks(mla, 3) == [(True, 20, True)] * 3


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


def one_dies(rank_index: int) -> tuple[str, float]:
    """Rank 1 ends without a word between two loads."""
    rank = make(2, 1, agree={"deadline_s": 5.0})
    tokens, slots = tokens_of(41), slots_of(0, 41)
    rank.compute(tokens, slots)
    rank.store("a", tokens, slots)
    rank.ask("b", tokens)
    if rank_index == 1:
        os._exit(9)
    rank.cache.load("b", slots[:40])
    start = time.monotonic()
    try:
        rank.drain()
    except Exception as error:
        rank.cache.close()
        return type(error).__name__, time.monotonic() - start
    return "went on", 0.0


def test_a_load_that_waits_for_a_dead_rank_ends_with_its_loss() -> None:
    outcomes = watch_ranks(one_dies, 2)
    assert outcomes[0].value is not None, outcomes[0].trace
    how, seconds = outcomes[0].value
    assert how == "RankLost"
    assert seconds < 10
