"""The paged model computes what transformers computes, for any chunking, any TP and several architectures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig, Phi3Config, Qwen2Config, Qwen3Config

from mlkv.engine import attention
from mlkv.engine.attention import AttentionBatch
from mlkv.engine.model import Geometry, load_model
from mlkv.engine.sharding import Cut, HeadSplit, TensorParallel
from mlkv.errors import ConfigError
from mlkv.layout import RankSlice
from tests.engine.model_cases import (
    CPU,
    TINY,
    prompts,
    reference_answer,
    save_random,
    serve,
    tiny_engine,
    tiny_reference,
)
from tests.ranks import run_ranks

SMALL: dict[str, Any] = {
    "hidden_size": 48, "intermediate_size": 84, "num_hidden_layers": 2, "num_attention_heads": 6,
    "num_key_value_heads": 3, "vocab_size": 301, "max_position_embeddings": 256,
}  # fmt: skip


def paged_logits(prepared: Any, row: list[int], chunks: list[int], mesh: DeviceMesh | None = None) -> torch.Tensor:
    """Logits of every position, computed in the given chunks over scattered slots."""
    model = load_model(prepared, device=CPU, mesh=mesh, dtype="float32")
    model.make_pool(128)
    slots = np.random.default_rng(5).permutation(128)[: len(row)].astype(np.int64)
    parts, at = [], 0
    for count in chunks:
        stop = at + count
        batch = AttentionBatch.build([slots[:stop]], [count], CPU)
        new = torch.arange(at, stop)
        parts.append(model.forward(torch.tensor(row)[new], new, batch, torch.arange(count)))
        at = stop
    return torch.cat(parts)


@pytest.mark.parametrize("chunks", [[60], [1, 2, 3, 54], [59, 1], [20] * 3])
def test_logits_equal_those_of_transformers_for_any_chunks(chunks: list[int]) -> None:
    row = np.random.default_rng(0).integers(0, 512, 60).tolist()
    with torch.inference_mode():
        expected = tiny_reference()(torch.tensor([row])).logits[0]
    torch.testing.assert_close(paged_logits(TINY, row, chunks), expected, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_as_near_to_fp32_as_that_of_transformers(dtype: torch.dtype) -> None:
    row = np.random.default_rng(0).integers(0, 512, 60).tolist()
    halved = AutoModelForCausalLM.from_config(TINY.config(), dtype=dtype).eval()
    halved.load_state_dict(tiny_reference().state_dict())
    model = load_model(TINY, device=CPU, dtype=dtype)
    model.make_pool(64)
    at = torch.arange(60)
    batch = AttentionBatch.build([np.arange(60)], [60], CPU)
    with torch.inference_mode():
        exact = tiny_reference()(torch.tensor([row])).logits[0]
        noise = (halved(torch.tensor([row])).logits[0].float() - exact).abs().max()
    ours = (model.forward(torch.tensor(row), at, batch, at) - exact).abs().max()
    assert 0 < ours < 2 * noise


@pytest.mark.parametrize("budget", [1, 5, 16, 500])
def test_greedy_tokens_equal_those_of_transformers_for_any_budget(budget: int) -> None:
    rows = prompts(6)
    engine = tiny_engine(num_pages=200, max_batch_tokens=budget, max_running=min(budget, 6), reuse=False)
    answers = [done.tokens for done in serve(engine, rows, 8)]
    assert answers == [reference_answer(tiny_reference(), row, 8) for row in rows]


def test_decoding_in_several_groups_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "MAX_GATHERED_SLOTS", 100)
    rows = prompts(6)
    answers = [done.tokens for done in serve(tiny_engine(num_pages=200), rows, 8)]
    assert answers == [reference_answer(tiny_reference(), row, 8) for row in rows]


def test_padding_of_a_decode_group_reads_no_foreign_slot() -> None:
    model = load_model(TINY, device=CPU, dtype="float32")
    pool = model.make_pool(64)
    for layer in (*pool.k, *pool.v):
        layer.fill_(float("nan"))
    contexts = [np.arange(10, 12), np.arange(20, 29)]
    for context in contexts:
        at = torch.arange(len(context) - 1)
        model.forward(at, at, AttentionBatch.build([context[:-1]], [len(at)], CPU), at[-1:])
    batch = AttentionBatch.build(contexts, [1, 1], CPU)
    logits = model.forward(torch.tensor([1, 8]), torch.tensor([1, 8]), batch, torch.tensor([0, 1]))
    assert torch.isfinite(logits).all()


# -- tensor parallel ----------------------------------------------------------------------------------------------


def serve_on_meshes(rank: int, rows: list[list[int]]) -> dict[str, Any]:
    """The same prompts at TP 2 (two replicas side by side, each its own half), 3 and 4."""
    found: dict[str, Any] = {}
    by_two = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    replica = rank // 2
    found["dp"] = [d.tokens for d in serve(tiny_engine(mesh=by_two["tp"], num_pages=200), rows[replica::2], 8)]
    three, four = DeviceMesh("cpu", [0, 1, 2]), DeviceMesh("cpu", [0, 1, 2, 3])
    if rank < 3:
        found["tp3"] = [d.tokens for d in serve(tiny_engine(mesh=three, num_pages=200), rows, 8)]
    found["tp4"] = [d.tokens for d in serve(tiny_engine(mesh=four, num_pages=200), rows, 8)]
    return found


def test_every_tp_gives_the_tokens_of_the_whole_model_on_every_rank() -> None:
    """TP 2 divides the 2 KV heads, 3 pads one and splits 224 and 512 unevenly, 4 replicates each."""
    rows = prompts(6)
    expected = [reference_answer(tiny_reference(), row, 8) for row in rows]
    for rank, found in enumerate(run_ranks(serve_on_meshes, 4, rows, deadline_s=160)):
        assert found["dp"] == expected[rank // 2 :: 2]
        assert found["tp4"] == expected
        assert found.get("tp3", expected) == expected


def architectures() -> dict[str, Any]:
    return {
        "tied-llama": LlamaConfig(**SMALL, tie_word_embeddings=True, attention_bias=True, mlp_bias=True),
        "qwen2": Qwen2Config(**SMALL),
        "qwen3": Qwen3Config(**SMALL, head_dim=16),
        "mixtral": MixtralConfig(**SMALL, num_local_experts=4, num_experts_per_tok=2, sliding_window=None),
    }


def logits_at_tp(rank: int, prepared: list[Any], row: list[int]) -> list[torch.Tensor]:
    mesh = DeviceMesh("cpu", [0, 1])
    return [paged_logits(model, row, [7, 1, 12], mesh) for model in prepared]


def test_other_architectures_give_the_logits_of_transformers_at_tp_1_and_2(tmp_path: Path) -> None:
    """Biases, tied embeddings, norms of heads, experts; 3 KV heads and 301 tokens on 2 ranks."""
    row = np.random.default_rng(0).integers(0, 301, 20).tolist()
    names, prepared, expected = [], [], []
    for name, config in architectures().items():
        model = save_random(config, tmp_path / name)
        names.append(name)
        prepared.append(model)
        plain = AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=torch.float32).eval()
        with torch.inference_mode():
            expected.append(plain(torch.tensor([row])).logits[0])
    alone = [paged_logits(model, row, [7, 1, 12]) for model in prepared]
    for found in (alone, *run_ranks(logits_at_tp, 2, prepared, row, deadline_s=160)):
        for name, ours, theirs in zip(names, found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, atol=3e-5, rtol=1e-5, msg=lambda m, name=name: f"{name}: {m}")


def test_fused_projections_work_at_tp_1_and_are_refused_above(tmp_path: Path) -> None:
    row = np.random.default_rng(0).integers(0, 301, 20).tolist()
    prepared = save_random(Phi3Config(**SMALL, pad_token_id=0, sliding_window=None), tmp_path / "phi3")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "phi3", dtype=torch.float32).eval()
    with torch.inference_mode():
        torch.testing.assert_close(
            paged_logits(prepared, row, [20]), plain(torch.tensor([row])).logits[0], atol=3e-5, rtol=1e-5
        )
    for message in run_ranks(refusal, 2, prepared, deadline_s=160):
        assert message == (
            "tp: the attention of Phi3ForCausalLM cannot be cut by heads (q_proj is not in its plan); tp values "
            "that work: 1"
        )


def refusal(rank: int, prepared: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        load_model(prepared, device=CPU, mesh=DeviceMesh("cpu", [0, 1]))
    return str(caught.value)


@pytest.mark.parametrize("kv_heads", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("tp", [1, 2, 3, 4, 6, 8])
def test_ranks_share_all_heads_and_agree_with_the_layout(kv_heads: int, tp: int) -> None:
    q_heads = kv_heads * 3
    seen_q: list[int] = []
    for rank in range(tp):
        split = HeadSplit.of_rank(q_heads, kv_heads, TensorParallel(rank, tp))
        layout = RankSlice.of_rank(kv_heads, tp, rank)
        assert (split.kv_start, split.num_kv) == (layout.head_start, layout.num_heads)
        assert split.local_kv == RankSlice.local_kv_heads(kv_heads, tp)
        assert split.local_q % split.local_kv == 0
        own = range(split.q_start, split.q_start + split.num_q)
        # The i-th local query head attends to the local KV head that its global one belongs to.
        for index, head in enumerate(own):
            assert split.kv_start + index // (split.local_q // split.local_kv) == head // 3
        seen_q += own
    assert sorted(seen_q) == list(range(q_heads))


@pytest.mark.parametrize("parts", [1, 2])
def test_cuts_of_all_ranks_make_up_the_weight(parts: int) -> None:
    whole = torch.arange(2 * 14.0).reshape(2, 14)
    pieces = [Cut.even(1, 14, TensorParallel(rank, 3), parts).of(whole) for rank in range(3)]
    assert len({piece.shape for piece in pieces}) == 1
    real = [piece.reshape(2, parts, -1) for piece in pieces]
    joined = torch.cat(real, 2)[:, :, : 14 // parts].reshape(2, 14)
    assert torch.equal(joined, whole)
    assert sum(float(piece.sum()) for piece in pieces) == float(whole.sum())  # what is added is zeros


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"sliding_window": 16, "model": "mistral"}, "sliding window"),
        ({"model": "gpt2"}, "not a decoder with grouped-query attention"),
        ({"model": "deepseek_v3"}, "latent attention"),
        ({"num_key_value_heads": 4}, "do not divide"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "dynamic rotary"),
        ({"model": "gpt_oss"}, "without full attention"),
    ],
)
def test_models_whose_kv_is_of_another_kind_are_refused(change: dict[str, Any], says: str) -> None:
    from transformers import AutoConfig

    kind = change.pop("model", "llama")
    base = {} if kind in ("gpt2", "deepseek_v3", "gpt_oss") else SMALL | {"head_dim": 8}
    with pytest.raises(ConfigError, match=says):
        Geometry.of(AutoConfig.for_model(kind, **(base | change)))
