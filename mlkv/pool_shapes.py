"""KV pools in the shapes that known engines keep them, as `KVPool`s. Views only: nothing is copied.

Every function takes the tensors as the engine made them, one for each layer, and the layout of the whole model.
Slots are the engine's own numbers: block times block length plus place in the block (vLLM), or the row of the
pool's tensors (SGLang, LightLLM).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

from mlkv.errors import ConfigError
from mlkv.layout import KVLayout, KVPool

VllmOrder = Literal["auto", "kv_first", "block_first", "joined_dim", "latent"]


def vllm_pool(layout: KVLayout, kv_caches: Sequence[torch.Tensor], *, order: VllmOrder = "auto") -> KVPool:
    """vLLM's `kv_caches`: one tensor for each layer, in one of these shapes, whatever its strides (NHD or HND).

    Args:
        order:
            "kv_first": `[2, num_blocks, block_tokens, heads, head_dim]` (FlashAttention);
            "block_first": `[num_blocks, 2, block_tokens, heads, head_dim]` (FlashInfer, Triton);
            "joined_dim": `[num_blocks, heads, block_tokens, 2 * head_dim]`, K before V (CPU);
            "latent": `[num_blocks, block_tokens, latent_dim]` (MLA);
            "auto": told from the shape.

    Raises:
        ConfigError: for a shape that is none of these, or could be two of them.
    """
    views = [_vllm_layer(layout, cache, order) for cache in kv_caches]
    return KVPool(layout, views)


def sglang_pool(
    layout: KVLayout,
    *,
    k: Sequence[torch.Tensor] = (),
    v: Sequence[torch.Tensor] = (),
    latent: Sequence[torch.Tensor] = (),
    block_tokens: int = 1,
) -> KVPool:
    """SGLang's `k_buffer` and `v_buffer`, or for MLA its `kv_buffer` as `latent`.

    Args:
        k, v: for each layer `[num_slots, heads, head_dim]`.
        latent: for each layer `[num_slots, 1, latent_dim]`.
        block_tokens: the engine's page size; its slot 0 to `block_tokens - 1` are spare, and are slots here too.

    Raises:
        ConfigError: when the shapes do not fit the layout, or both or neither kind is given.
    """
    if bool(k) == bool(latent):
        raise ConfigError("sglang pool: give k and v, or latent")
    if not latent:
        return KVPool.from_layers(layout, k=k, v=v, block_tokens=block_tokens)
    return KVPool(layout, [[_blocks(buffer, block_tokens)] for buffer in latent])


def lightllm_pool(
    layout: KVLayout,
    kv_buffer: Sequence[torch.Tensor] | torch.Tensor,
    *,
    scales: Sequence[torch.Tensor] | torch.Tensor | None = None,
) -> KVPool:
    """LightLLM's `kv_buffer`: K heads, then V heads, in one tensor for each layer or one for all.

    Args:
        kv_buffer: for each layer `[num_slots, 2 * heads, head_dim]`; for MLA `[num_slots, 1, latent_dim]`.
        scales: for int8 pools, `[num_slots, 2 * heads, num_groups]` for each layer: the layout then has planes
            for K, V, the scales of K and the scales of V, in this order.

    Raises:
        ConfigError: when the shapes do not fit the layout.
    """
    num_planes = len(layout.planes)
    views = []
    for layer, buffer in enumerate(kv_buffer):
        parts = [buffer] if num_planes == 1 else _halves(buffer)
        if scales is not None:
            parts += _halves(scales[layer])
        views.append([_blocks(part, 1) for part in parts])
    return KVPool(layout, views)


def _vllm_layer(layout: KVLayout, cache: torch.Tensor, order: VllmOrder) -> list[torch.Tensor]:
    if order == "auto":
        order = _vllm_order(layout, cache)
    if order == "kv_first" and cache.dim() == 5 and cache.shape[0] == 2:
        return [cache[0], cache[1]]
    if order == "block_first" and cache.dim() == 5 and cache.shape[1] == 2:
        return [cache[:, 0], cache[:, 1]]
    if order == "joined_dim" and cache.dim() == 4:
        by_token = cache.transpose(1, 2)
        dim = layout.planes[0].dim
        return [by_token[..., :dim], by_token[..., dim:]]
    if order == "latent" and cache.dim() == 3:
        return [cache.unsqueeze(2)]
    raise ConfigError(f"vllm pool: a cache of shape {tuple(cache.shape)} is not of order {order!r}")


def _vllm_order(layout: KVLayout, cache: torch.Tensor) -> VllmOrder:
    shape = tuple(cache.shape)
    found: list[VllmOrder] = []
    if len(shape) == 5:
        if shape[0] == 2:
            found.append("kv_first")
        if shape[1] == 2:
            found.append("block_first")
    elif len(shape) == 4 and shape[3] == 2 * layout.planes[0].dim:
        found.append("joined_dim")
    elif len(shape) == 3:
        found.append("latent")
    if len(found) != 1:
        kind = "could be " + " or ".join(found) if found else "is of no known order"
        raise ConfigError(f"vllm pool: a cache of shape {shape} {kind}; say which with `order`")
    return found[0]


def _halves(buffer: torch.Tensor) -> list[torch.Tensor]:
    if buffer.dim() != 3 or buffer.shape[1] % 2:
        raise ConfigError(
            f"lightllm pool: a buffer of K and V heads is [num_slots, 2 * heads, dim], got {tuple(buffer.shape)}"
        )
    return list(buffer.chunk(2, dim=1))


def _blocks(buffer: torch.Tensor, block_tokens: int) -> torch.Tensor:
    if buffer.dim() != 3 or buffer.shape[0] % block_tokens:
        raise ConfigError(
            f"pool tensors must be [num_slots, heads, dim] with whole blocks of {block_tokens} tokens, "
            f"got {tuple(buffer.shape)}"
        )
    return buffer.view(-1, block_tokens, *buffer.shape[1:])
