"""One rank's part of a Hugging Face decoder, computing over the paged pool."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoModelForCausalLM, PretrainedConfig

from mlkv.engine.attention import ATTENTION_NAME, AttentionBatch, PagedKV
from mlkv.engine.sharding import Cut, HeadSplit, TensorParallel, attention_modules, shard
from mlkv.engine.source import PreparedModel
from mlkv.engine.weights import WeightSource
from mlkv.errors import ConfigError
from mlkv.layout import KVLayout

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Geometry:
    """What of a model's configuration the engine needs. `num_kv_heads` and `num_q_heads` are over all ranks."""

    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    context_tokens: int

    @classmethod
    def of(cls, config: PretrainedConfig) -> Geometry:
        """Raises ConfigError for a decoder whose KV is not one K and one V row a token, kept for all tokens."""
        name = config.model_type
        text = config.get_text_config()
        q_heads = getattr(text, "num_attention_heads", None)
        kv_heads = getattr(text, "num_key_value_heads", None)
        context = getattr(text, "max_position_embeddings", None)
        if not isinstance(q_heads, int) or not isinstance(kv_heads, int) or not isinstance(context, int):
            raise ConfigError(
                f"model: {name} is not a decoder with grouped-query attention: its config lacks "
                "num_attention_heads, num_key_value_heads or max_position_embeddings"
            )
        if getattr(text, "kv_lora_rank", None):
            raise ConfigError(f"model: {name} uses multi-head latent attention, this engine grouped-query only")
        if kv_heads < 1 or q_heads % kv_heads:
            raise ConfigError(f"model: {q_heads} query heads of {name} do not divide into {kv_heads} KV groups")
        window = getattr(text, "sliding_window", None) if getattr(text, "use_sliding_window", True) else None
        kinds = set(getattr(text, "layer_types", None) or ()) - {"full_attention"}
        if kinds or (window is not None and window < context):
            raise ConfigError(
                f"model: {name} has layers without full attention "
                f"({', '.join(sorted(kinds)) or 'sliding window'}); this engine supports full attention only"
            )
        rope = getattr(text, "rope_parameters", None) or {}
        if rope.get("rope_type") in ("dynamic", "longrope"):
            raise ConfigError(
                f"model: {name} uses {rope['rope_type']} rotary scaling, under which K depends on the length of "
                "the request and cannot be reused"
            )
        head_dim = getattr(text, "head_dim", None) or text.hidden_size // q_heads
        return cls(text.num_hidden_layers, q_heads, kv_heads, head_dim, text.vocab_size, context)

    def kv_layout(self, dtype: torch.dtype, page_tokens: int) -> KVLayout:
        return KVLayout.gqa(
            num_layers=self.num_layers,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            dtype=dtype,
            page_tokens=page_tokens,
        )


class LoadedModel:
    """This rank's shard of a model. Call `make_pool` once, then `forward` for each step."""

    def __init__(
        self, module: nn.Module, geometry: Geometry, heads: HeadSplit, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.module, self.geometry, self.heads = module, geometry, heads
        self.dtype, self.device = dtype, device
        self.paged_kv: PagedKV | None = None

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of this rank's pool for one token, padding heads included."""
        return 2 * self.geometry.num_layers * self.heads.local_kv * self.geometry.head_dim * self.dtype.itemsize

    def make_pool(self, num_slots: int) -> PagedKV:
        """Allocate the pool and bind the model's attention to it."""
        pool = PagedKV(
            num_layers=self.geometry.num_layers,
            num_slots=num_slots,
            local_kv_heads=self.heads.local_kv,
            head_dim=self.geometry.head_dim,
            dtype=self.dtype,
            device=self.device,
        )
        for module in attention_modules(self.module).values():
            module.paged_kv = pool  # type: ignore[assignment]
        self.paged_kv = pool
        return pool

    @torch.inference_mode()
    def forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, batch: AttentionBatch, rows: torch.Tensor
    ) -> torch.Tensor:
        """Compute one step.

        Args:
            tokens, positions: int64 `[num_tokens]`, the new tokens of all requests and their places in them.
            batch: where their KV goes and what they attend to.
            rows: int64 `[num_rows]`, indices of the tokens whose next-token logits are wanted.

        Returns: float32 logits `[num_rows, vocab_size]`, identical on all ranks of the replica.
        """
        if self.paged_kv is None:
            raise RuntimeError("make_pool must be called before forward")
        self.paged_kv.batch = batch
        try:
            output = self.module(
                input_ids=tokens[None], position_ids=positions[None], use_cache=False, logits_to_keep=rows
            )
        finally:
            self.paged_kv.batch = None
        logits: torch.Tensor = output.logits[0]
        return logits.float()


def check_model(config: PretrainedConfig, tp: int) -> Geometry:
    """Raise the ConfigError that `load_model` would for this model on `tp` ranks, without ranks or weights."""
    geometry = Geometry.of(config)
    _check_heads(geometry, tp)
    first = TensorParallel(0, tp)
    heads = HeadSplit.of_rank(geometry.num_q_heads, geometry.num_kv_heads, first)
    shard(_build(config, torch.device("cpu")), heads, geometry.head_dim, first)
    return geometry


def _check_heads(geometry: Geometry, tp: int) -> None:
    if tp > geometry.num_q_heads:
        raise ConfigError(
            f"tp: {tp} ranks are more than the {geometry.num_q_heads} query heads of the model; tp values "
            f"that work: 1 to {geometry.num_q_heads}"
        )


def load_model(
    prepared: PreparedModel,
    *,
    device: torch.device,
    mesh: DeviceMesh | None = None,
    dtype: str | torch.dtype = "auto",
) -> LoadedModel:
    """Load this rank's shard.

    Args:
        prepared: from `prepare_model`, run before the ranks start.
        mesh: one-dimensional mesh of this replica's ranks; None for a replica of one rank.
        dtype: "float32", "bfloat16", "float16"; "auto" takes what the checkpoint declares.

    Raises:
        ConfigError: the model is of an unsupported kind, its weights do not fit its config, or no padding serves
            this number of ranks; the message lists those that work.
    """
    tp = TensorParallel()
    if mesh is not None and mesh.size() > 1:
        tp = TensorParallel(mesh.get_local_rank(), mesh.size(), mesh.get_group())
    config = prepared.config()
    geometry = Geometry.of(config)
    _check_heads(geometry, tp.size)
    resolved = _dtype(config, dtype)
    module = _build(config, device)
    heads = HeadSplit.of_rank(geometry.num_q_heads, geometry.num_kv_heads, tp)
    tied = _tied(module)
    cuts = shard(module, heads, geometry.head_dim, tp)
    _fill(module, prepared.weights(), cuts, tied, resolved, device)
    return LoadedModel(module.eval(), geometry, heads, resolved, device)


def _dtype(config: PretrainedConfig, dtype: str | torch.dtype) -> torch.dtype:
    if dtype == "auto":
        dtype = getattr(config.get_text_config(), "dtype", None) or torch.float32
    if isinstance(dtype, str):
        dtype = DTYPES.get(dtype, dtype)
    if dtype not in DTYPES.values() or isinstance(dtype, str):
        raise ConfigError(f"dtype: must be one of auto, {', '.join(DTYPES)}; got {dtype}")
    return dtype


def _build(config: PretrainedConfig, device: torch.device) -> Any:
    """The model's modules with real buffers and weights still to come (on device "meta")."""
    name = config.model_type
    try:
        with torch.device("meta"):
            module = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION_NAME)
    except ValueError as error:
        raise ConfigError(f"model: transformers cannot build a causal LM of type {name}: {error}") from None
    if not getattr(module, "_supports_attention_backend", True):
        raise ConfigError(f"model: the attention of {type(module).__name__} cannot be replaced")
    text = config.get_text_config()
    found = [m.layer_idx for m in attention_modules(module).values()]
    if found != list(range(text.num_hidden_layers)):
        raise ConfigError(
            f"model: {type(module).__name__} has self-attention in layers {found}, expected one in each of "
            f"{text.num_hidden_layers}"
        )
    persistent = set(module.state_dict())
    for path, part in list(module.named_modules()):
        derived = [n for n, _ in part.named_buffers(recurse=False) if f"{path}.{n}" not in persistent]
        if derived:  # not in any checkpoint: computed from the config, as the rotary frequencies are
            owner, _, leaf = path.rpartition(".")
            with device:
                setattr(module.get_submodule(owner), leaf, type(part)(text))
    return module


def _tied(module: nn.Module) -> dict[str, str]:
    """Parameters that are another one under a second name: second name -> first."""
    first: dict[int, str] = {}
    tied = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if id(parameter) in first:
            tied[name] = first[id(parameter)]
        else:
            first[id(parameter)] = name
    return tied


def _fill(
    module: Any,
    source: WeightSource,
    cuts: dict[str, Cut],
    tied: dict[str, str],
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Replace all weights on device "meta" by this rank's parts."""
    kept = {*(getattr(module, "_keep_in_fp32_modules", None) or ())}
    kept |= {*(getattr(module, "_keep_in_fp32_modules_strict", None) or ())}

    def load(name: str, meta: torch.Tensor) -> torch.Tensor:
        wanted = torch.float32 if kept.intersection(name.split(".")) else dtype
        return source.read(name, meta.shape, cuts.get(name), device).to(wanted)

    loaded: dict[str, nn.Parameter] = {}
    for name, parameter in module.named_parameters():
        if name not in tied:
            loaded[name] = nn.Parameter(load(name, parameter), requires_grad=False)
    for name, first in tied.items():
        cut = cuts.get(name)
        if cut is None or cut.count == cut.size:  # a view: the weight is in memory once
            weight = loaded[first].data
            loaded[name] = nn.Parameter(
                weight if cut is None else weight.narrow(cut.dim, cut.start, cut.count), requires_grad=False
            )
        else:
            loaded[name] = nn.Parameter(cut.of(loaded[first].data), requires_grad=False)
    for name, parameter in loaded.items():
        owner, _, leaf = name.rpartition(".")
        module.get_submodule(owner).register_parameter(leaf, parameter)
    for name, buffer in list(module.named_buffers()):
        if buffer.is_meta:
            owner, _, leaf = name.rpartition(".")
            module.get_submodule(owner).register_buffer(leaf, load(name, buffer))
