"""From vLLM's configuration to ours: settings, the geometry of its KV cache, and what cannot be served."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from mlkv import ConfigError, KVLayout, KVPool, MLKVConfig, Plane

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

_DEFAULT_PAGE_TOKENS = 64
_ON_LOAD_FAILURE = ("recompute", "fail")


@dataclass(frozen=True)
class Settings:
    """What one vLLM engine's connector needs to know.

    Attributes:
        block_tokens: tokens in one of vLLM's blocks; a page is a whole number of blocks.
        num_blocks: blocks in each worker's KV cache.
        layers: the names of the layers that have KV of their own, in the order of the page.
        tp: ranks that share the model's heads.
        engine: a name that the processes of this engine share.
        one_process: whether the scheduler and this worker live in one process.
        loads, stores: what `kv_role` asks for.
    """

    config: MLKVConfig
    layout: KVLayout
    block_tokens: int
    num_blocks: int
    layers: tuple[str, ...]
    tp: int
    engine: str
    one_process: bool
    loads: bool
    stores: bool

    def pool(self, kv_caches: dict[str, torch.Tensor]) -> KVPool:
        """vLLM's KV tensors, `[blocks, heads, tokens, content]` each, as a pool of `layout`."""
        views = []
        for name in self.layers:
            if name not in kv_caches:
                raise ConfigError(f"vLLM registered no KV cache for layer {name}")
            tensor = kv_caches[name]
            if tensor.dim() != 4:
                raise ConfigError(
                    f"layer {name}: KV tensor {list(tensor.shape)} is not [blocks, heads, tokens, content]"
                )
            dtype = self.layout.planes[0].dtype
            if tensor.dtype != dtype and tensor.dtype.itemsize == dtype.itemsize:
                tensor = tensor.view(dtype)  # vLLM keeps fp8 as bytes
            views.append([tensor.permute(0, 2, 1, 3)])
        return KVPool(self.layout, views)


def read_settings(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> Settings:
    """Everything the connector must know, checked.

    Raises ConfigError that says what of this configuration mlkv cannot serve, or which setting is wrong.
    """
    transfer, parallel = vllm_config.kv_transfer_config, vllm_config.parallel_config
    for field in ("pipeline_parallel_size", "prefill_context_parallel_size", "decode_context_parallel_size"):
        if getattr(parallel, field, 1) != 1:
            raise ConfigError(f"mlkv serves tensor and data parallelism; {field} must be 1")
    spec, layers = _one_group(kv_cache_config)
    extra = dict(transfer.kv_connector_extra_config)
    on_load_failure = extra.pop("on_load_failure", "recompute")
    if on_load_failure not in _ON_LOAD_FAILURE:
        raise ConfigError(f"on_load_failure must be one of {_ON_LOAD_FAILURE}, got {on_load_failure!r}")
    # vLLM's own default lets a request fail when its cached KV cannot be read; a cache should cost time only.
    transfer.kv_load_failure_policy = on_load_failure
    block_tokens = int(spec.block_size)
    extra.setdefault("page_tokens", -(-_DEFAULT_PAGE_TOKENS // block_tokens) * block_tokens)
    extra.setdefault("model", _identity(vllm_config))
    config = MLKVConfig(**extra)
    if config.page_tokens % block_tokens:
        raise ConfigError(
            f"page_tokens={config.page_tokens} must be a multiple of vLLM's block_size={block_tokens}"
        )
    backend = parallel.distributed_executor_backend
    return Settings(
        config=config,
        layout=_layout(vllm_config, spec, len(layers), config.page_tokens),
        block_tokens=block_tokens,
        num_blocks=int(kv_cache_config.num_blocks),
        layers=layers,
        tp=int(parallel.tensor_parallel_size),
        engine=f"{transfer.engine_id}/{parallel.data_parallel_index}",
        one_process=backend in ("uni", "external_launcher"),
        loads=transfer.is_kv_consumer,
        stores=transfer.is_kv_producer,
    )


def _one_group(kv_cache_config: KVCacheConfig) -> tuple[Any, tuple[str, ...]]:
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        raise ConfigError(
            f"this model has {len(groups)} groups of KV caches; mlkv serves models with one, so try "
            "--disable-hybrid-kv-cache-manager"
        )
    spec = groups[0].kv_cache_spec
    if not isinstance(spec, FullAttentionSpec):
        raise ConfigError(f"mlkv serves full attention and MLA in vLLM, not {type(spec).__name__}")
    own = {name for tensor in kv_cache_config.kv_cache_tensors for name in tensor.layers}
    return spec, tuple(name for name in groups[0].layer_names if name in own)


def _layout(vllm_config: VllmConfig, spec: Any, num_layers: int, page_tokens: int) -> KVLayout:
    from vllm.platforms import current_platform
    from vllm.v1.kv_cache_interface import MLAAttentionSpec

    total = 1 if isinstance(spec, MLAAttentionSpec) else vllm_config.model_config.get_total_num_kv_heads()
    content_bytes = int(spec.state_content_size_bytes)
    if content_bytes % spec.dtype.itemsize:
        raise ConfigError(f"KV cells of {content_bytes} bytes are not whole elements of {spec.dtype}")
    # How K and V lie within a block of one head is the attention backend's own business (on CPU it packs them for
    # the instruction set), so whole blocks are copied as they are, and only engines of the same kind share them.
    name = f"vllm-{current_platform.device_type}-{vllm_config.cache_config.cache_dtype}-{spec.block_size}"
    plane = Plane(name, spec.dtype, content_bytes // spec.dtype.itemsize)
    return KVLayout(num_layers, int(total), page_tokens, (plane,))


def _identity(vllm_config: VllmConfig) -> str:
    """Which weights these are, as far as vLLM's configuration tells."""
    model = vllm_config.model_config
    parts = [model.model, model.revision, str(model.dtype), model.quantization, repr(model.hf_overrides)]
    return json.dumps(parts)
