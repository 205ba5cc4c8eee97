"""A small real deployment: any Hugging Face decoder with grouped-query attention under torchrun, TP x DP.

One token's way: `launch` starts the ranks, each runs `job`, which feeds `workload` to an `Engine`; its `scheduler`
asks the cache, and `attention` reads and writes the pool that the cache loads into and offloads from.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mlkv.engine.attention import PagedKV
    from mlkv.engine.engine import Engine, Output, pool_pages
    from mlkv.engine.model import Geometry, LoadedModel, check_model, load_model
    from mlkv.engine.pages import DevicePages
    from mlkv.engine.request import Finished, RequestError, SamplingParams
    from mlkv.engine.source import DEFAULT_MODEL, PreparedModel, prepare_model, silence_transformers
    from mlkv.engine.tokenizer import Tokenizer

_MODULE_OF = {
    "DEFAULT_MODEL": "source",
    "DevicePages": "pages",
    "Engine": "engine",
    "Finished": "request",
    "Geometry": "model",
    "LoadedModel": "model",
    "Output": "engine",
    "PagedKV": "attention",
    "PreparedModel": "source",
    "RequestError": "request",
    "SamplingParams": "request",
    "Tokenizer": "tokenizer",
    "check_model": "model",
    "load_model": "model",
    "pool_pages": "engine",
    "prepare_model": "source",
    "silence_transformers": "source",
}


def __getattr__(name: str) -> object:
    # Imported when first used: the launcher answers --help and wrong options without loading transformers.
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module 'mlkv.engine' has no attribute {name!r}")
    value: object = getattr(importlib.import_module(f"mlkv.engine.{module}"), name)
    globals()[name] = value
    return value


__all__ = [
    "DEFAULT_MODEL",
    "DevicePages",
    "Engine",
    "Finished",
    "Geometry",
    "LoadedModel",
    "Output",
    "PagedKV",
    "PreparedModel",
    "RequestError",
    "SamplingParams",
    "Tokenizer",
    "check_model",
    "load_model",
    "pool_pages",
    "prepare_model",
    "silence_transformers",
]
