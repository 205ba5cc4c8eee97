"""The loop: reuse, preemption and the real cache change when tokens are computed, never which come out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from mlkv import KVPool, MLKVConfig, MultiLevelCache, Replica
from mlkv.engine import DevicePages, Engine, RequestError, SamplingParams, load_model, pool_pages
from tests.engine.model_cases import (
    CPU,
    TINY,
    prompts,
    reference_answer,
    serve,
    tiny_engine,
    tiny_reference,
)
from tests.ranks import run_ranks

PAGE = 4


def expected(rows: list[list[int]], new: int) -> list[tuple[int, ...]]:
    return [reference_answer(tiny_reference(), row, new) for row in rows]


def test_device_prefix_reuse_computes_less_and_answers_the_same() -> None:
    rows = prompts(8)
    engine = tiny_engine(num_pages=400, max_running=2)
    first, again = serve(engine, rows, 6), serve(engine, rows, 6)
    for found in (first, again):
        assert [done.tokens for done in found] == expected(rows, 6)
        for done, row in zip(found, rows, strict=True):
            assert done.device_tokens + done.host_tokens + done.computed_tokens == len(row)
    assert sum(done.device_tokens for done in first) > 0  # prompts share prefixes
    assert [done.device_tokens for done in again] == [(len(row) - 1) // PAGE * PAGE for row in rows]


def test_preemption_in_a_small_pool_answers_the_same() -> None:
    rows = prompts(8)
    engine = tiny_engine(num_pages=30, max_batch_tokens=32)
    found = serve(engine, rows, 20)
    assert [done.tokens for done in found] == expected(rows, 20)
    assert sum(done.num_preemptions for done in found) > 0
    assert engine.pages.num_available == 30


def test_the_same_prompt_many_times_at_once_answers_the_same() -> None:
    row = prompts(1)[0]
    found = serve(tiny_engine(num_pages=200), [row] * 6, 10)
    assert {done.tokens for done in found} == set(expected([row], 10))


def test_a_stop_token_ends_the_answer_and_belongs_to_it() -> None:
    row = prompts(1)[0]
    (answer,) = expected([row], 10)
    stop = answer[4]
    engine = tiny_engine()
    engine.add_request("a", row, SamplingParams(max_new_tokens=10, stop_ids=(stop,)))
    outputs = []
    while not engine.idle:
        outputs += engine.step()
    upto = answer.index(stop) + 1
    assert [output.token for output in outputs] == list(answer[:upto])
    done = outputs[-1].finished
    assert done is not None
    assert (done.tokens, done.reason) == (answer[:upto], "stop")
    assert done.first_token_s is not None
    assert done.arrival_s <= done.first_token_s <= done.finish_s


def test_forced_tokens_are_taken_and_the_logits_before_each_are_kept() -> None:
    row, forced = prompts(1)[0], (3, 9, 27, 81)
    engine = tiny_engine(record_logits=True)
    engine.add_request("a", row, SamplingParams(forced=forced, stop_ids=(9,)))
    finished = [output.finished for _ in range(4) for output in engine.step()][-1]
    assert finished is not None
    assert finished.tokens == forced
    with torch.inference_mode():
        logits = tiny_reference()(torch.tensor([[*row, *forced]])).logits[0, len(row) - 1 : -1]
    torch.testing.assert_close(torch.stack(finished.logits), logits, atol=2e-5, rtol=1e-5)


def test_an_answer_ends_with_the_context() -> None:
    engine = tiny_engine(num_pages=1024)
    context = engine.model.geometry.context_tokens
    (done,) = serve(engine, [[1] * (context - 2)], 50)
    assert (len(done.tokens), done.reason) == (2, "length")


def test_an_aborted_request_ends_with_what_it_has_and_gives_its_pages_back() -> None:
    engine = tiny_engine()
    engine.add_request("a", [1, 2, 3], SamplingParams(max_new_tokens=50))
    engine.step()
    engine.step()
    done = engine.abort("a")
    assert done is not None
    assert (len(done.tokens), done.reason) == (2, "aborted")
    assert engine.abort("a") is None
    assert engine.idle
    assert engine.pages.num_available == engine.pages.num_pages
    engine.add_request("a", [1, 2, 3], SamplingParams(max_new_tokens=1))
    assert engine.step()[0].finished is not None


@pytest.mark.parametrize(
    ("tokens", "params", "says"),
    [
        ([], SamplingParams(), "one or more token ids"),
        ([[1, 2]], SamplingParams(), "a row of"),
        ([0.5], SamplingParams(), "token ids"),
        ([512], SamplingParams(), r"in \[0, 512\)"),
        ([-1], SamplingParams(), r"in \[0, 512\)"),
        ([1] * 4096, SamplingParams(), "has 4096 tokens; the model's context of 4096 leaves room for 4095"),
        ([1], SamplingParams(max_new_tokens=0), "max_new_tokens must be at least 1"),
        ([1] * 250, SamplingParams(max_new_tokens=10), "need 260 tokens, the device pool has 256"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused(tokens: Any, params: SamplingParams, says: str) -> None:
    engine = tiny_engine()
    with pytest.raises(RequestError, match=f"request bad: .*{says}"):
        engine.add_request("bad", tokens, params)
    assert engine.idle


def test_two_unfinished_requests_of_one_name_are_refused() -> None:
    engine = tiny_engine()
    engine.add_request("a", [1], SamplingParams())
    with pytest.raises(RequestError, match="unfinished request of this name"):
        engine.add_request("a", [2], SamplingParams())


def test_the_pool_takes_the_given_memory_in_whole_pages() -> None:
    model = load_model(TINY, device=CPU, dtype="float32")
    token_bytes = 2 * 3 * 2 * 16 * 4  # K and V, layers, KV heads, dim, bytes
    assert pool_pages(model, PAGE, memory_bytes=PAGE * token_bytes * 7 + 1) == 7
    with pytest.raises(ValueError, match="less than one page"):
        pool_pages(model, PAGE, memory_bytes=PAGE * token_bytes - 1)


# -- with the real cache ------------------------------------------------------------------------------------------


@contextmanager
def cached_engine(replica: Replica, mesh: Any, *, num_pages: int, **settings: Any) -> Iterator[Engine]:
    model = load_model(TINY, device=CPU, mesh=mesh, dtype="float32")
    pool = model.make_pool(num_pages * PAGE)
    layout = model.geometry.kv_layout(model.dtype, PAGE)
    config = MLKVConfig(model=TINY.digest, page_tokens=PAGE, store={"host_bytes": "16MiB"}, **settings)
    cache = MultiLevelCache(
        config, layout, KVPool.from_layers(layout, k=pool.k, v=pool.v, block_tokens=PAGE), replica
    )
    try:
        yield Engine(model, DevicePages(num_pages, PAGE), cache, max_batch_tokens=48, max_running=4)
    finally:
        cache.close()


def test_prompts_that_left_the_device_come_back_from_the_host() -> None:
    rows = [np.random.default_rng(i).integers(0, 256, 60 + i).tolist() for i in range(4)]
    with cached_engine(Replica.single(), None, num_pages=40) as engine:
        first, again = serve(engine, rows, 6, 20_000), serve(engine, rows, 6, 20_000)
    assert [done.tokens for done in first] == [done.tokens for done in again] == expected(rows, 6)
    assert sum(done.host_tokens for done in first) == 0
    assert sum(done.host_tokens for done in again) > 100
    for done, row in zip(again, rows, strict=True):
        assert done.device_tokens + done.host_tokens == (len(row) - 1) // PAGE * PAGE


def serve_with_cache(rank: int, rows: list[list[int]], faults: str) -> tuple[Any, bytes]:
    replica = Replica.from_world(tp=2)
    mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    with cached_engine(replica, mesh["tp"], num_pages=40, faults=faults) as engine:
        found = [serve(engine, rows, 6, 20_000) for _ in range(3)]
        digest = engine.cache.results_digest
    facts = [[(d.tokens, d.device_tokens, d.host_tokens) for d in part] for part in found]
    return facts, digest


@pytest.mark.parametrize("faults", ["", "delay=rank1:0-4ms,fail=rank1:0.3,seed=7"])
def test_two_ranks_with_a_cache_agree_even_when_loads_of_one_are_late_or_fail(faults: str) -> None:
    rows = prompts(6, longest=60)
    (facts, digest), (others, other) = run_ranks(serve_with_cache, 2, rows, faults, deadline_s=160)
    assert facts == others
    assert digest == other
    for part in facts:
        assert [tokens for tokens, _, _ in part] == expected(rows, 6)
    assert sum(host for part in facts[1:] for _, _, host in part) > 0
