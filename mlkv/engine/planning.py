"""From what a person asked for to what the ranks will do: the model, the requests, the sizes of both pools."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from mlkv import MLKVConfig
from mlkv.engine import on_vllm
from mlkv.engine.model import DTYPES, Geometry, check_model
from mlkv.engine.options import Options
from mlkv.engine.plan import JobPlan, Model
from mlkv.engine.prompts import read_prompts
from mlkv.engine.source import PreparedModel, prepare_model
from mlkv.engine.tokenizer import Tokenizer
from mlkv.engine.workload import Ask, Demand, default_workload
from mlkv.errors import ConfigError
from mlkv.layout import RankSlice

MAX_BATCH_TOKENS = {"cpu": 512, "cuda": 4096}
"""Tokens computed in a step: on a CPU half a second of work, on a GPU enough to keep it busy."""

CONCURRENCY = 2
"""Requests of a replica in flight at once."""

MIN_HOST_BYTES = 64 << 20
"""Of the default host cache: below it nothing is saved."""


def make_plan(options: Options, run_folder: Path, home: Path, progress: Callable[[str], None]) -> JobPlan:
    """Find the model (fetch and convert it once, into `home`), read or make the requests, size the pools.

    Raises ConfigError for whatever cannot work.
    """
    asks = None if options.prompts is None else read_prompts(options.prompts)
    device = _device(options)
    dtype = options.dtype
    if dtype == "auto":
        dtype = "bfloat16" if device == "cuda" and options.engine == "builtin" else "float32"
    # What the ranks will set; wrong MLKV_* variables and fault plans are found here.
    tiers = _tiers(options)
    config = MLKVConfig(model="checked", page_tokens=options.page_tokens, faults=options.faults, store=tiers)
    prepared = prepare_model(options.model, home, device_type=device, progress=progress)
    geometry = _check_model(options, prepared)
    tokenizer = prepared.tokenizer()
    page_bytes = geometry.kv_layout(DTYPES[dtype], options.page_tokens).page_bytes
    if options.host_bytes is not None and options.host_bytes < page_bytes:
        raise ConfigError(
            f"host-cache: {options.host_bytes} bytes are less than one page of {page_bytes} bytes "
            f"({options.page_tokens} tokens)"
        )
    by_replica = _requests(options, asks, tokenizer, geometry, device)
    new, page_tokens = options.max_new_tokens, options.page_tokens
    demands = [Demand.of(requests, tokenizer, new, page_tokens) for requests in by_replica]
    _check_lengths(by_replica, demands, geometry.context_tokens)
    host_bytes = options.host_bytes
    if host_bytes is None:
        host_bytes = max(MIN_HOST_BYTES, sum(d.host_pages(new, page_tokens) for d in demands) * page_bytes)
    return JobPlan(
        run_folder=str(run_folder),
        model=Model.of(prepared),
        tp=options.tp,
        dp=options.dp,
        device=device,
        dtype=dtype,
        page_tokens=page_tokens,
        block_tokens=options.block_tokens,
        pool_pages=_pool_pages(options, demands, geometry, DTYPES[dtype].itemsize),
        host_bytes=host_bytes,
        asks=by_replica,
        concurrency=CONCURRENCY,
        max_new_tokens=new,
        max_batch_tokens=MAX_BATCH_TOKENS[device],
        noise_batch_tokens=_noise_batch_tokens(demands, device),
        faults=options.faults,
        engine=options.engine,
        deadline_s=config.agree.deadline_s,
        tiers=tiers,
    )


def _tiers(options: Options) -> dict[str, Any]:
    """Settings of `StoreConfig` that name the lower tiers."""
    tiers: dict[str, Any] = {}
    if options.disk is not None:
        # Ranks and owner may have other working directories.
        tiers["disk"] = {"directory": str(options.disk.expanduser().absolute())}
        if options.disk_bytes is not None:
            tiers["disk"]["limit_bytes"] = options.disk_bytes
    if options.remote is not None:
        tiers["remote"] = {"url": options.remote}
    return tiers


def _check_model(options: Options, prepared: PreparedModel) -> Geometry:
    if options.engine == "builtin":
        return check_model(prepared.config(), options.tp)
    geometry = Geometry.of(prepared.config())
    on_vllm.check_split(geometry, options.tp)
    return geometry


def _device(options: Options) -> str:
    num_ranks = options.tp * options.dp
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    wanted = options.device
    if options.engine == "vllm":
        wanted = on_vllm.device()
        if options.device not in ("auto", wanted):
            raise ConfigError(f"device: the vLLM of {sys.executable} is built for {wanted}, not {options.device}")
    if wanted == "cpu" or (wanted == "auto" and not num_gpus):
        return "cpu"
    if num_gpus < num_ranks:
        raise ConfigError(
            f"device: {num_ranks} ranks (tp={options.tp} times dp={options.dp}) need as many GPUs, there are "
            f"{num_gpus}; choose smaller numbers, or --device cpu"
        )
    return "cuda"


def _requests(
    options: Options, asks: list[Ask] | None, tokenizer: Tokenizer, geometry: Geometry, device: str
) -> list[list[Ask]]:
    """The requests of each replica."""
    if asks is None:
        return default_workload(tokenizer, options.dp, geometry.context_tokens, device)
    if len(asks) < options.dp:
        raise ConfigError(f"prompts: {options.prompts} holds {len(asks)} prompts for dp={options.dp} replicas")
    return [asks[replica :: options.dp] for replica in range(options.dp)]


def _check_lengths(by_replica: list[list[Ask]], demands: list[Demand], context_tokens: int) -> None:
    for asks, demand in zip(by_replica, demands, strict=True):
        for ask in asks:
            length = demand.longest_tokens[ask.request_id]
            if length >= context_tokens:
                raise ConfigError(
                    f"prompts: {ask.place or ask.request_id}: the prompt has {length} tokens; the model's context "
                    f"of {context_tokens} leaves room for {context_tokens - 1}"
                )


def _pool_pages(options: Options, demands: list[Demand], geometry: Geometry, itemsize: int) -> int:
    """Pages of each rank's device pool. Raises ConfigError when the longest request does not fit."""
    new, page_tokens, context = options.max_new_tokens, options.page_tokens, geometry.context_tokens
    if options.device_bytes is None:
        return max(demand.pool_pages(new, page_tokens, CONCURRENCY, context) for demand in demands)
    heads = RankSlice.local_kv_heads(geometry.num_kv_heads, options.tp)
    page_bytes = 2 * geometry.num_layers * heads * geometry.head_dim * itemsize * page_tokens
    given = options.device_bytes // page_bytes
    longest = min(context, max(max(demand.longest_tokens.values()) for demand in demands) + new)
    needed = -(-longest // page_tokens)
    if given < needed:
        raise ConfigError(
            f"device-cache: {options.device_bytes} bytes hold {given * page_tokens} tokens, the longest request "
            f"has {longest}; give at least {needed * page_bytes} bytes"
        )
    return given


def _noise_batch_tokens(demands: list[Demand], device: str) -> int:
    """A step of the run that measures noise: it cuts most prompts elsewhere than the other runs do.

    Prompts that fit into one step are cut in two, where a hit in the cache would cut them as well.
    """
    shortest = min(demand.median_tokens for demand in demands)
    return max(1, min(MAX_BATCH_TOKENS[device] // 3, shortest // 2))
