"""`generate()` of a Hugging Face decoder, with its prefix served from mlkv and its KV put back.

Three lines::

    from mlkv.integrations.transformers import CachedModel
    cached = CachedModel(model)
    output = cached.generate(input_ids, max_new_tokens=64)

The same in one process and on every rank of a model loaded with `tp_plan="auto"` under torchrun.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.generation.utils import ALL_CACHE_NAMES

from mlkv import (
    CacheStats,
    CacheUsageError,
    ConfigError,
    DeadlineExceeded,
    KVPool,
    MLKVConfig,
    MultiLevelCache,
    RankSlice,
    Replica,
    StepResult,
)
from mlkv.engine import Geometry

_COPY_DEADLINE_S = 120.0
_POLL_S = 0.0002
# Its name in generate has changed; releases that call it "cache" warn of the old name.
_CACHE_ARGUMENT = "cache" if "cache" in ALL_CACHE_NAMES else "past_key_values"
_ONE_PATH = {"num_beams": 1, "num_return_sequences": 1}  # arguments of generate that multiply the rows


class CachedModel:
    """A model whose `generate` begins with the longest prefix that was computed before, by whomever.

    Args:
        max_tokens: tokens, over all rows, of which one call can load or store the KV; what exceeds it is computed,
            and not stored. Their KV takes memory beside the model's.
        replica: the ranks that share the model; default: all of the process group if the model is
            tensor-parallel, else this process alone.
        settings: of `MLKVConfig`. `model`, the identity of the weights, must be given for a model without a name.

    Raises:
        ConfigError: for a model without plain grouped-query full attention, and for wrong settings.
        StoreError: the store cannot be found or started.
    """

    def __init__(
        self, model: PreTrainedModel, /, *, max_tokens: int = 8192, replica: Replica | None = None, **settings: Any
    ) -> None:
        self.model = model
        geometry = Geometry.of(model.config)
        if "model" not in settings:
            settings["model"] = _identity(model)
        self._config = MLKVConfig(**settings)
        if replica is None:
            tp = getattr(model, "tp_size", None) or 1
            replica = Replica.from_world(tp=tp) if tp > 1 else Replica.single()
        self._replica = replica
        page_tokens = self._config.page_tokens
        if max_tokens < page_tokens:
            raise ConfigError(f"max_tokens={max_tokens} holds no page of {page_tokens} tokens")
        self._num_slots = max_tokens
        layout = geometry.kv_layout(model.dtype, page_tokens)
        local_heads = RankSlice.local_kv_heads(geometry.num_kv_heads, replica.size)
        shape = (max_tokens, local_heads, geometry.head_dim)
        layers = range(geometry.num_layers)
        self._k = [torch.zeros(shape, dtype=model.dtype, device=model.device) for _ in layers]
        self._v = [torch.zeros(shape, dtype=model.dtype, device=model.device) for _ in layers]
        pool = KVPool.from_layers(layout, k=self._k, v=self._v)
        self._cache = MultiLevelCache(self._config, layout, pool, replica)
        self._num_calls = 0
        self.loaded_tokens = 0
        """Tokens a row that the last call of `generate` did not have to compute."""

    @torch.no_grad()
    def generate(self, input_ids: torch.Tensor, **options: Any) -> Any:
        """As `model.generate(input_ids, **options)`, with equal results. Collective over the replica.

        Args:
            input_ids: int64 `[rows, tokens]` without padding. Rows share the length of the prefix that is loaded.

        Raises:
            CacheUsageError: for options that the cache cannot serve: padding, beams, a cache of the caller's.
            DeadlineExceeded: the store or a copy took too long.
        """
        self._check(input_ids, options)
        self._num_calls += 1
        num_loaded, past = self._load(input_ids)
        self.loaded_tokens = num_loaded
        wants_dict = options.pop("return_dict_in_generate", False)
        options[_CACHE_ARGUMENT] = past
        output = self.model.generate(input_ids, return_dict_in_generate=True, **options)
        self._store(output.sequences, past, input_ids.shape[1], num_loaded)
        return output if wants_dict else output.sequences

    def clear(self) -> None:
        """Forget all KV, after the weights have changed. Collective over the replica."""
        self._cache.invalidate()

    def stats(self) -> CacheStats:
        return self._cache.stats()

    def close(self) -> None:
        """Leave the store."""
        self._cache.close()

    def __enter__(self) -> CachedModel:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check(self, input_ids: torch.Tensor, options: dict[str, Any]) -> None:
        if input_ids.dim() != 2 or not input_ids.numel():
            raise CacheUsageError(f"input_ids must be [rows, tokens], got {list(input_ids.shape)}")
        for option in ("cache", "past_key_values", "cache_implementation"):
            if options.get(option) is not None:
                raise CacheUsageError(f"{option} is chosen here; to choose it call the model's own generate")
        mask = options.get("attention_mask")
        if mask is not None and not bool(torch.as_tensor(mask).all()):
            raise CacheUsageError("rows must not be padded: pages hold consecutive tokens; generate row by row")
        for option, one in _ONE_PATH.items():
            chosen = options.get(option)
            if chosen is None:
                chosen = getattr(options.get("generation_config") or self.model.generation_config, option, one)
            if (chosen or one) != one:
                raise CacheUsageError(f"{option}={chosen} multiplies the rows, which the cache does not follow")

    def _load(self, input_ids: torch.Tensor) -> tuple[int, DynamicCache]:
        """The KV of the longest prefix that every row has in the cache."""
        past = DynamicCache(config=self.model.config)
        rows = input_ids.tolist()
        names = [f"{self._num_calls}/{row}" for row in range(len(rows))]
        for name, tokens in zip(names, rows, strict=True):
            self._cache.lookup(name, tokens)
        found = self._step_until(names, lambda step: step.hits)
        fitting = self._num_slots // len(rows) // self._config.page_tokens * self._config.page_tokens
        length = min(fitting, *(hit.num_tokens for hit in found.values()))
        slots = [self._row_slots(row, len(rows), length) for row in range(len(rows))]
        for name, row_slots in zip(names, slots, strict=True):
            if length:
                # A row whose own prefix is longer leaves the rest of it where it is.
                beyond = torch.full((found[name].num_tokens - length,), -1, dtype=torch.int64)
                self._cache.load(name, torch.cat([row_slots, beyond]))
            elif found[name].num_tokens:
                self._cache.decline(name)
        if not length:
            return 0, past
        ended = self._step_until(
            names, lambda step: step.loaded | {name: lost.num_tokens for name, lost in step.failed.items()}
        )
        length = min(length, *ended.values())
        if length:
            at = torch.stack([row_slots[:length] for row_slots in slots]).to(self.model.device)
            for layer, (k, v) in enumerate(zip(self._k, self._v, strict=True)):
                past.update(k[at].transpose(1, 2), v[at].transpose(1, 2), layer)
        return length, past

    def _store(self, sequences: torch.Tensor, past: DynamicCache, num_prompt: int, num_loaded: int) -> None:
        """Put back the whole pages of every row, prompt and answer."""
        page_tokens = self._config.page_tokens
        fitting = self._num_slots // len(sequences)
        names = []
        for row, tokens in enumerate(sequences.tolist()):
            # The newest token has no KV; what follows the end of a row's answer is padding.
            length = min(past.get_seq_length(), self._end_of(tokens, num_prompt), fitting)
            length -= length % page_tokens
            if length <= num_loaded:
                continue
            slots = self._row_slots(row, len(sequences), length)
            at = slots.to(self.model.device)
            for layer, cached in enumerate(past.layers):
                self._k[layer][at] = cached.keys[row, :, :length].transpose(0, 1)
                self._v[layer][at] = cached.values[row, :, :length].transpose(0, 1)
            names.append(f"{self._num_calls}/{row}")
            self._cache.offload(names[-1], tokens[:length], slots)
        self._step_until(names, lambda step: [*step.offloaded, *step.unstored])

    def _end_of(self, tokens: list[int], num_prompt: int) -> int:
        stops = self.model.generation_config.eos_token_id
        ends = {stops} if isinstance(stops, int) else set(stops or ())
        for position in range(num_prompt, len(tokens)):
            if tokens[position] in ends:
                return position + 1
        return len(tokens)

    def _row_slots(self, row: int, num_rows: int, length: int) -> torch.Tensor:
        return torch.arange(length, dtype=torch.int64) + row * (self._num_slots // num_rows)

    def _step_until(self, names: list[str], told: Callable[[StepResult], Iterable[str]]) -> dict[str, Any]:
        """Step until every name was told. Steps are agreed, so all ranks make the same number of them."""
        missing, found = set(names), {}
        give_up_at = time.monotonic() + _COPY_DEADLINE_S
        while missing:
            if time.monotonic() > give_up_at:
                raise DeadlineExceeded(f"the cache did not answer for {sorted(missing)} in {_COPY_DEADLINE_S:g} s")
            news = told(self._cache.step())
            for name in missing.intersection(news):
                found[name] = news[name] if isinstance(news, dict) else None
                missing.remove(name)
            if missing:
                time.sleep(_POLL_S)
        return found


def _identity(model: PreTrainedModel) -> str:
    name = getattr(model.config, "name_or_path", "")
    if not name:
        raise ConfigError("this model has no name: give the identity of its weights, CachedModel(..., model=)")
    return f"{name}@{getattr(model.config, '_commit_hash', None)}"
