"""Attention over the paged pool, as an attention function that transformers calls in every layer.

A step computes one flat row of tokens `[1, num_tokens]` of many requests: first those that add a single token
(decode), then chunks of prompts. Each token's K and V are written to its slot, then every request attends to the
slots of its whole context, which the pool holds whoever wrote them: this step, an earlier one, or a load.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right
from transformers import AttentionInterface

from mlkv.errors import ConfigError

ATTENTION_NAME = "mlkv_paged"

MAX_GATHERED_SLOTS = 1 << 18
"""Slots gathered at once for decoding: bounds the temporary copy of K (and of V) in a layer, here to 512 MiB for
8 local heads of 128 in bf16. More requests, or longer ones, are computed in several groups."""

SlotArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class _Decode:
    """Tokens [start, stop) are one request each; `slots` [requests, longest context], `mask` True where real."""

    start: int
    stop: int
    slots: torch.Tensor
    mask: torch.Tensor


@dataclass(frozen=True)
class _Chunk:
    """Tokens [start, stop) are the last ones of a context that lies in `slots`.

    `mask` says what each of them sees; None when they are the whole context, so that the plain causal mask is it.
    """

    start: int
    stop: int
    slots: torch.Tensor
    mask: Any

    @classmethod
    def of(cls, start: int, stop: int, context: SlotArray, device: torch.device) -> _Chunk:
        new, total = stop - start, len(context)
        mask: Any = None
        if new < total and device.type == "cuda":
            mask = causal_lower_right(new, total)  # only a mark: the fused kernels mask by themselves
        elif new < total:
            mask = torch.ones(new, total, dtype=torch.bool).tril(total - new)
        return cls(start, stop, torch.from_numpy(context).to(device), mask)


@dataclass(frozen=True)
class AttentionBatch:
    """Where the tokens of one step are written and what they attend to."""

    slots: torch.Tensor
    decodes: tuple[_Decode, ...]
    chunks: tuple[_Chunk, ...]

    @classmethod
    def build(cls, contexts: Sequence[SlotArray], num_new: Sequence[int], device: torch.device) -> AttentionBatch:
        """Args:
        contexts: for each request the slots of its context, the new tokens' included.
        num_new: how many of them, at the end, are computed now; requests with one come first.
        """
        ones = sum(1 for n in num_new if n == 1)
        if any(n == 1 for n in num_new[ones:]):
            raise ValueError("requests that compute one token must come before those that compute more")
        slots = np.concatenate([context[-n:] for context, n in zip(contexts, num_new, strict=True)])
        decodes, at = [], 0
        while at < ones:
            stop, longest = at + 1, len(contexts[at])
            while stop < ones:
                widest = max(longest, len(contexts[stop]))
                if widest * (stop + 1 - at) > MAX_GATHERED_SLOTS:
                    break
                stop, longest = stop + 1, widest
            decodes.append(_decode_group(at, stop, contexts[at:stop], longest, device))
            at = stop
        chunks, at = [], ones
        for context, n in zip(contexts[ones:], num_new[ones:], strict=True):
            chunks.append(_Chunk.of(at, at + n, context, device))
            at += n
        return cls(torch.from_numpy(slots).to(device), tuple(decodes), tuple(chunks))


def _decode_group(
    start: int, stop: int, contexts: Sequence[SlotArray], longest: int, device: torch.device
) -> _Decode:
    # Padding repeats a slot of the same request: what lies in an unused slot may not be a number, and zero
    # weight times that is not zero.
    slots = np.stack([np.pad(c, (0, longest - len(c)), constant_values=c[0]) for c in contexts])
    mask = np.arange(longest)[None, :] < np.array([len(c) for c in contexts])[:, None]
    return _Decode(
        start, stop, torch.from_numpy(slots).to(device), torch.from_numpy(mask).to(device)[:, None, None, :]
    )


class PagedKV:
    """One rank's pool: for each layer K and V of shape `[num_slots, local_kv_heads, head_dim]`."""

    def __init__(
        self,
        *,
        num_layers: int,
        num_slots: int,
        local_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (num_slots, local_kv_heads, head_dim)
        self.k = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(num_layers)]
        self.v = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(num_layers)]
        self.num_slots = num_slots
        self.batch: AttentionBatch | None = None

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None
    ) -> torch.Tensor:
        """Write the step's K and V, and attend.

        Args:
            query: `[1, local_q_heads, num_tokens, head_dim]`; key, value: `[1, local_kv_heads, ...]`.

        Returns: `[1, num_tokens, local_q_heads, head_dim]`.
        """
        batch = self.batch
        if batch is None:
            raise RuntimeError("attention was called outside of an engine step")
        k, v = self.k[layer], self.v[layer]
        k.index_copy_(0, batch.slots, key[0].transpose(0, 1))
        v.index_copy_(0, batch.slots, value[0].transpose(0, 1))
        output = torch.empty_like(query[0].transpose(0, 1), memory_format=torch.contiguous_format)
        for decode in batch.decodes:
            output[decode.start : decode.stop] = _decode(
                query[0, :, decode.start : decode.stop].transpose(0, 1),
                _gather(k, decode.slots),
                _gather(v, decode.slots),
                decode.mask,
                scaling,
            )
        for chunk in batch.chunks:
            output[chunk.start : chunk.stop] = _prefill(
                query[0, :, chunk.start : chunk.stop],
                k.index_select(0, chunk.slots),
                v.index_select(0, chunk.slots),
                chunk.mask,
                scaling,
            )
        return output[None]


def _decode(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, scaling: float | None
) -> torch.Tensor:
    """q `[requests, q_heads, dim]`, k and v `[requests, context, kv_heads, dim]` -> like q.

    A KV head's whole group of query heads is attended as that many rows of one head: with a single token there
    is no causal order among them, and K and V need no repetition.
    """
    grouped = q.reshape(q.shape[0], k.shape[2], -1, q.shape[-1])
    out = F.scaled_dot_product_attention(
        grouped, k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask, scale=scaling
    )
    return out.reshape(q.shape)


def _gather(pool: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """`[requests, context, kv_heads, dim]` of a pool. `index_select` copies rows; plain indexing is slower."""
    return pool.index_select(0, slots.reshape(-1)).view(*slots.shape, *pool.shape[1:])


def _prefill(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any, scaling: float | None) -> torch.Tensor:
    """q `[q_heads, new, dim]`, k and v `[context, kv_heads, dim]` -> `[new, q_heads, dim]`.

    The new tokens are the last of the context: token i sees the first `context - new + i + 1`.
    """
    q, k, v = q[None], k.transpose(0, 1)[None], v.transpose(0, 1)[None]
    grouped = q.shape[1] != k.shape[1]
    if grouped and q.is_cuda and q.dtype == torch.float32:
        # The memory-efficient kernel, the only one for fp32 that does not store all scores, takes equal heads.
        groups = q.shape[1] // k.shape[1]
        k, v, grouped = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1), False
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=grouped
    )
    return out[0].transpose(0, 1)


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers calls in each layer; `module.paged_kv` is the pool that `LoadedModel.bind` put there."""
    for name in ("softcap", "s_aux", "sliding_window", "position_bias"):
        if options.get(name) is not None:
            raise ConfigError(f"model: its attention uses {name}, which the paged attention does not support")
    paged_kv: PagedKV = module.paged_kv  # type: ignore[assignment]
    layer: int = module.layer_idx  # type: ignore[assignment]
    return paged_kv.attend(layer, query, key, value, scaling), None


AttentionInterface.register(ATTENTION_NAME, paged_attention)
