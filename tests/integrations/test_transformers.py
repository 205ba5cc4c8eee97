"""generate() through the cache: equal results, less prefill, one process and tensor-parallel ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from mlkv import CacheUsageError, ConfigError
from mlkv.integrations.transformers import CachedModel
from tests.ranks import run_ranks

PAGE_TOKENS = 8


def make_model(folder: Path) -> Path:
    torch.manual_seed(3)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=200,
        max_position_embeddings=512,
        initializer_range=0.4,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("llama"))


@pytest.fixture
def model(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def prompt(length: int, seed: int, rows: int = 1) -> torch.Tensor:
    chance = torch.Generator().manual_seed(seed)
    return torch.randint(3, 200, (rows, length), generator=chance)


def settings(**more: Any) -> dict[str, Any]:
    return {"page_tokens": PAGE_TOKENS, "store": {"host_bytes": "16MiB"}, "max_tokens": 512, **more}


OPTIONS = {"max_new_tokens": 12, "do_sample": False}


def test_second_turn_is_equal_and_computes_only_what_is_new(model: Any) -> None:
    first = prompt(40, 1)
    with CachedModel(model, **settings()) as cached:
        answer = cached.generate(first, **OPTIONS)
        assert cached.loaded_tokens == 0
        assert answer.equal(model.generate(first, **OPTIONS))
        second = torch.cat([answer, prompt(5, 2)], dim=1)
        seen = []
        handle = model.model.embed_tokens.register_forward_hook(
            lambda _m, args, _out: seen.append(args[0].shape[1])
        )
        again = cached.generate(second, **OPTIONS)
        handle.remove()
        # Of prompt and answer (but its newest token, which has no KV) whole pages were stored.
        known = (answer.shape[1] - 1) // PAGE_TOKENS * PAGE_TOKENS
        assert cached.loaded_tokens == known
        assert seen[0] == second.shape[1] - known
        assert again.equal(model.generate(second, **OPTIONS))


def test_rows_of_a_batch_share_the_shortest_known_prefix(model: Any) -> None:
    rows = prompt(33, 4, rows=2)
    with CachedModel(model, **settings()) as cached:
        cached.generate(rows[:1], **OPTIONS)
        cached.generate(rows[1:, :17], max_new_tokens=1, do_sample=False)
        both = cached.generate(rows, **OPTIONS)
        assert cached.loaded_tokens == 16
        assert both.equal(model.generate(rows, **OPTIONS))


def test_a_prompt_longer_than_the_memory_for_copies_is_answered(model: Any) -> None:
    long = prompt(100, 6)
    with CachedModel(model, **settings(max_tokens=32)) as cached:
        for expected in (0, 32):
            assert cached.generate(long, **OPTIONS).equal(model.generate(long, **OPTIONS))
            assert cached.loaded_tokens == expected


def test_a_rotten_page_is_computed_again(model: Any) -> None:
    tokens = prompt(40, 7)
    with CachedModel(model, **settings(faults="corrupt=all/load:1,seed=1")) as cached:
        cached.generate(tokens, **OPTIONS)
        answer = cached.generate(tokens, **OPTIONS)
        assert cached.stats().failed_loads == 1
        assert answer.equal(model.generate(tokens, **OPTIONS))


def test_clear_forgets(model: Any) -> None:
    tokens = prompt(40, 8)
    with CachedModel(model, **settings()) as cached:
        cached.generate(tokens, **OPTIONS)
        cached.clear()
        cached.generate(tokens, **OPTIONS)
        assert cached.loaded_tokens == 0


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"num_beams": 2}, "num_beams"),
        ({"attention_mask": torch.tensor([[0] + [1] * 9])}, "padded"),
        ({"past_key_values": object()}, "past_key_values"),
    ],
)
def test_what_cannot_be_served_is_refused(model: Any, options: dict[str, Any], reason: str) -> None:
    with CachedModel(model, **settings()) as cached, pytest.raises(CacheUsageError, match=reason):
        cached.generate(prompt(10, 9), **options)


def test_a_model_without_a_name_needs_an_identity(model: Any) -> None:
    model.config.name_or_path = ""
    with pytest.raises(ConfigError, match="identity"):
        CachedModel(model, **settings())
    CachedModel(model, **settings(model="mine@1")).close()


def _turns(_: int, folder: str, faults: str) -> tuple[list[list[int]], list[int]]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, tp_plan="auto").eval()
    assert model.tp_size == 2, "these are to be two parts of one model"
    tokens, answers, loaded = prompt(40, 1), [], []
    with CachedModel(model, **settings(faults=faults, model="tp")) as cached:
        for turn in range(3):
            tokens = cached.generate(tokens, **OPTIONS)
            answers.append(tokens[0].tolist())
            loaded.append(cached.loaded_tokens)
            tokens = torch.cat([tokens, prompt(3, 10 + turn)], dim=1)
    return answers, loaded


@pytest.mark.parametrize("faults", ["", "delay=all:0-20ms,fail=rank1/load:1,seed=2"], ids=["well", "rank_1_fails"])
def test_tensor_parallel_ranks_answer_as_one_process(model: Any, folder: Path, faults: str) -> None:
    results = run_ranks(_turns, 2, str(folder), faults, deadline_s=120)
    assert results[0] == results[1]
    tokens = prompt(40, 1)
    for turn, answer in enumerate(results[0][0]):
        tokens = model.generate(tokens, **OPTIONS)
        assert answer == tokens[0].tolist()
        tokens = torch.cat([tokens, prompt(3, 10 + turn)], dim=1)
    if not faults:
        assert results[0][1] == [0, 48, 64]
