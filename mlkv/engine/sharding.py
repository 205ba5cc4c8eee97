"""Tensor parallelism: which part of each weight a rank holds, by the plan that transformers gives for the model.

The plan (`model.tp_plan`) says for each module how it is split: by columns, by rows, and where the output is
gathered. It is applied here instead of by `from_pretrained`, whose mesh spans the whole job and so leaves no
room for data-parallel replicas, and which only splits evenly. Attention is cut by whole heads, so that a rank's
KV heads are exactly those of `mlkv.layout.RankSlice`; what does not divide is padded with zeros at the end.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from mlkv.errors import ConfigError
from mlkv.layout import RankSlice

_KEPT_WHOLE = frozenset({"replicate", "replicated_with_grad_allreduce", "embedding_rowwise", "embedding_colwise"})
"""Styles under which a rank simply keeps the whole weight. A token embedding is a lookup, so nothing is gained
by splitting it, and a tied output projection is then a view of its rows."""

_EXPERT_MULTIPLE = 16
"""Inner features of an expert on a rank are a multiple of this: grouped matrix products want rows of a multiple of
16 bytes."""


@dataclass(frozen=True)
class TensorParallel:
    """One rank's place in its replica. `group` is None when the replica has one rank."""

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks, in place."""
        if self.group is not None:
            dist.all_reduce(tensor, group=self.group)
        return tensor

    def all_gather_last(self, tensor: torch.Tensor) -> torch.Tensor:
        """The ranks' tensors (equal shapes) side by side in the last dimension."""
        if self.group is None:
            return tensor
        tensor = tensor.contiguous()
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather(parts, tensor, group=self.group)
        return torch.cat(parts, dim=-1)


@dataclass(frozen=True)
class Cut:
    """A rank's part of one dimension of a weight: `count` real elements from `start`, padded with zeros to `size`.

    With `parts` above 1 the dimension is that many equal parts one after the other, and each is cut alike.
    """

    dim: int
    start: int
    count: int
    size: int
    parts: int = 1

    @classmethod
    def even(cls, dim: int, total: int, tp: TensorParallel, parts: int = 1, multiple: int = 1) -> Cut:
        """Equal runs of a multiple of elements over the ranks, the last ones shorter or empty before padding."""
        whole = total // parts
        size = -(-whole // (tp.size * multiple)) * multiple
        start = min(whole, tp.rank * size)
        return cls(dim, start, min(whole, start + size) - start, size, parts)

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """This part of the whole `tensor`; shares no memory with it."""
        whole = tensor.shape[self.dim] // self.parts
        pieces = []
        for part in range(self.parts):
            piece = tensor.narrow(self.dim, part * whole + self.start, self.count)
            pieces.append(self.pad(piece))
        return torch.cat(pieces, self.dim).contiguous() if self.parts > 1 else pieces[0].clone()

    def pad(self, piece: torch.Tensor) -> torch.Tensor:
        """Append zeros to a piece of `count` elements up to `size`."""
        missing = self.size - self.count
        if not missing:
            return piece
        shape = list(piece.shape)
        shape[self.dim] = missing
        return torch.cat([piece, piece.new_zeros(shape)], self.dim)


@dataclass(frozen=True)
class HeadSplit:
    """The heads one rank computes; padding heads follow the real ones.

    Attributes:
        q_start, num_q, local_q: first real query head, how many are real, how many there are with padding.
        kv_start, num_kv, local_kv: the same for KV heads.
    """

    q_start: int
    num_q: int
    local_q: int
    kv_start: int
    num_kv: int
    local_kv: int

    @classmethod
    def of_rank(cls, num_q_heads: int, num_kv_heads: int, tp: TensorParallel) -> HeadSplit:
        """Cut by KV heads, each with its whole group of query heads. Where KV heads are replicated, the
        neighbouring ranks that hold the same one share its group of query heads among them."""
        group = num_q_heads // num_kv_heads
        kv = RankSlice.of_rank(num_kv_heads, tp.size, tp.rank)
        local_kv = RankSlice.local_kv_heads(num_kv_heads, tp.size)
        if num_kv_heads < tp.size and tp.size % num_kv_heads == 0:
            copies = tp.size // num_kv_heads
            local_q = -(-group // copies)
            first = min(group, tp.rank % copies * local_q)
            num_q = min(group, first + local_q) - first
            return cls(kv.head_start * group + first, num_q, local_q, kv.head_start, 1, 1)
        return cls(
            kv.head_start * group, kv.num_heads * group, local_kv * group, kv.head_start, kv.num_heads, local_kv
        )

    def q_cut(self, dim: int, head_dim: int) -> Cut:
        return Cut(dim, self.q_start * head_dim, self.num_q * head_dim, self.local_q * head_dim)

    def kv_cut(self, dim: int, head_dim: int) -> Cut:
        return Cut(dim, self.kv_start * head_dim, self.num_kv * head_dim, self.local_kv * head_dim)


class RowParallelLinear(nn.Module):
    """A linear layer of which each rank holds some input features; the ranks' partial outputs are summed."""

    def __init__(self, linear: nn.Linear, tp: TensorParallel, split_input: Cut | None) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self.tp, self.split_input = tp, split_input

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.split_input is not None:
            x = Cut(-1, self.split_input.start, self.split_input.count, self.split_input.size).of(x)
        y = self.tp.all_reduce(F.linear(x, self.weight))
        return y if self.bias is None else y + self.bias


class GatheredLinear(nn.Module):
    """A linear layer of which each rank computes some output features, gathered to all of them."""

    def __init__(self, linear: nn.Linear, tp: TensorParallel) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self.tp, self.out_features = tp, linear.out_features

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.tp.all_gather_last(F.linear(x, self.weight, self.bias))
        return y[..., : self.out_features]


def attention_modules(model: nn.Module) -> dict[str, nn.Module]:
    """The model's self-attention modules by name, in the order of their layers."""
    found = {n: m for n, m in model.named_modules() if hasattr(m, "layer_idx") and hasattr(m, "scaling")}
    return dict(sorted(found.items(), key=lambda item: int(item[1].layer_idx)))


def shard(model: Any, heads: HeadSplit, head_dim: int, tp: TensorParallel) -> dict[str, Cut]:
    """Prepare a model whose weights are not there yet (device "meta") for this rank.

    Modules that communicate are replaced in place.

    Returns:
        parameter name -> the part of the checkpoint's weight to load into it; what is absent is loaded whole.

    Raises:
        ConfigError: the model has no plan, or one that cannot be cut by heads.
    """
    if tp.size == 1:
        return {}
    name = type(model).__name__
    plan: dict[str, str] = dict(model.tp_plan or {})
    if not plan:
        raise ConfigError(f"tp: transformers has no tensor-parallel plan for {name}; tp values that work: 1")
    attention = attention_modules(model)
    cuts: dict[str, Cut] = {}
    modules = dict(model.named_modules())
    styles = {n: s for n in modules if (s := plan.get(_pattern(n))) is not None}
    for prefix in attention:
        for part, wanted in (
            ("q_proj", "colwise"),
            ("k_proj", "colwise"),
            ("v_proj", "colwise"),
            ("o_proj", "rowwise"),
        ):
            if styles.get(f"{prefix}.{part}") != wanted:
                raise ConfigError(
                    f"tp: the attention of {name} cannot be cut by heads ({part} is "
                    f"{styles.get(f'{prefix}.{part}', 'not in its plan')}); tp values that work: 1"
                )
    for path, style in styles.items():
        owner, _, leaf = path.rpartition(".")
        module = modules[path]
        if style in _KEPT_WHOLE:
            continue
        if style == "moe_tp_experts":
            module.register_forward_hook(lambda _module, _inputs, output: tp.all_reduce(output))
            continue
        if not isinstance(module, nn.Linear):
            raise ConfigError(f"tp: style {style!r} of {path} in {name} is not supported; tp values that work: 1")
        if style in ("colwise", "colwise_rep", "colwise_gather_output"):
            cut = Cut.even(0, module.out_features, tp)
            if owner in attention:
                cut = heads.q_cut(0, head_dim) if leaf == "q_proj" else heads.kv_cut(0, head_dim)
            cuts[f"{path}.weight"] = cut
            if module.bias is not None:
                cuts[f"{path}.bias"] = cut
            if style != "colwise":
                _replace(model, path, GatheredLinear(module, tp))
        elif style in ("rowwise", "rowwise_rep", "rowwise_split_input"):
            cut = heads.q_cut(1, head_dim) if owner in attention else Cut.even(1, module.in_features, tp)
            cuts[f"{path}.weight"] = cut
            _replace(model, path, RowParallelLinear(module, tp, None if style == "rowwise" else cut))
        else:
            raise ConfigError(f"tp: style {style!r} of {path} in {name} is not supported; tp values that work: 1")
    for path, parameter in model.named_parameters():
        style = plan.get(_pattern(path), "")
        rows, columns = parameter.dim() - 2, parameter.dim() - 1  # of experts: [experts, out, in]
        if style in ("packed_colwise", "colwise"):
            parts = 2 if style == "packed_colwise" else 1  # gate and up, one after the other
            cuts[path] = Cut.even(rows, parameter.shape[rows], tp, parts, _EXPERT_MULTIPLE)
        elif style == "rowwise":
            cuts[path] = Cut.even(columns, parameter.shape[columns], tp, 1, _EXPERT_MULTIPLE)
        elif style and style not in _KEPT_WHOLE:
            raise ConfigError(f"tp: style {style!r} of {path} in {name} is not supported; tp values that work: 1")
    return cuts


def _pattern(name: str) -> str:
    """The plan's name of a module: layer numbers are written `*`."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def _replace(model: nn.Module, path: str, module: nn.Module) -> None:
    owner, _, leaf = path.rpartition(".")
    setattr(model.get_submodule(owner), leaf, module)
