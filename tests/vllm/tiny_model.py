"""A seeded random Llama as a model folder, small enough that real vLLM runs it on CPU within seconds.

Its weights are larger than a fresh model's, so that attention is sharp and a wrong KV row changes the next token.
Six KV heads are shared evenly by 1, 2, 3 and 6 ranks.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

LAYERS = 3
HEADS = 6
HEAD_DIM = 32
HIDDEN = HEADS * HEAD_DIM
FEED_FORWARD = 384
VOCABULARY = 384
CONTEXT = 4096


def make_model(folder: Path, seed: int = 0) -> Path:
    """Write config, weights and a byte tokenizer into `folder`, unless it is complete already."""
    done = folder / "complete"
    if done.exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": FEED_FORWARD,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": CONTEXT,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": 256,
        "eos_token_id": 257,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    save_file(_weights(seed), str(folder / "model.safetensors"), metadata={"format": "pt"})
    _tokenizer().save(str(folder / "tokenizer.json"))
    names = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "model_max_length": CONTEXT,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    done.touch()
    return folder


def _weights(seed: int) -> dict[str, torch.Tensor]:
    chance = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
        return torch.randn(rows, columns, generator=chance) * (gain / columns**0.5)

    weights = {
        "model.embed_tokens.weight": matrix(VOCABULARY, HIDDEN, HIDDEN**0.5),
        "model.norm.weight": torch.ones(HIDDEN),
        "lm_head.weight": matrix(VOCABULARY, HIDDEN, 3.0),
    }
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        weights[at + "input_layernorm.weight"] = torch.ones(HIDDEN)
        weights[at + "post_attention_layernorm.weight"] = torch.ones(HIDDEN)
        weights[at + "self_attn.q_proj.weight"] = matrix(HIDDEN, HIDDEN, 2.0)
        weights[at + "self_attn.k_proj.weight"] = matrix(HIDDEN, HIDDEN, 2.0)
        weights[at + "self_attn.v_proj.weight"] = matrix(HIDDEN, HIDDEN, 2.0)
        weights[at + "self_attn.o_proj.weight"] = matrix(HIDDEN, HIDDEN, 2.0)
        weights[at + "mlp.gate_proj.weight"] = matrix(FEED_FORWARD, HIDDEN)
        weights[at + "mlp.up_proj.weight"] = matrix(FEED_FORWARD, HIDDEN)
        weights[at + "mlp.down_proj.weight"] = matrix(HIDDEN, FEED_FORWARD)
    return weights


def _tokenizer() -> Tokenizer:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate(letters)}
    vocabulary |= {"<s>": 256, "</s>": 257}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


if __name__ == "__main__":
    print(make_model(Path(sys.argv[1])))
