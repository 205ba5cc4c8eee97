"""A small real deployment: any Hugging Face decoder with grouped-query attention under torchrun, TP x DP."""

from __future__ import annotations

from mlkv.engine.attention import PagedKV
from mlkv.engine.engine import Engine, Output, pool_pages
from mlkv.engine.model import Geometry, LoadedModel, load_model
from mlkv.engine.pages import DevicePages
from mlkv.engine.request import Finished, RequestError, SamplingParams
from mlkv.engine.source import DEFAULT_MODEL, PreparedModel, prepare_model, silence_transformers
from mlkv.engine.tokenizer import Tokenizer

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
    "load_model",
    "pool_pages",
    "prepare_model",
    "silence_transformers",
]
