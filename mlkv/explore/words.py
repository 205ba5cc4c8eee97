"""Prompts as people read them: words for tokens, two of them to a page."""

from __future__ import annotations

import zlib
from functools import lru_cache

import torch

from mlkv.keys import KEY_BYTES, page_keys
from mlkv.layout import KVLayout

PAGE_TOKENS = 2

_ROOT = b"mlkv.explore/v1/"  # the parent of all first pages: one namespace for everybody

_text_of_key: dict[bytes, str] = {}


def layout_for(num_ranks: int) -> KVLayout:
    """One KV head for each rank, so that every rank writes and reads a slice of its own."""
    return KVLayout.gqa(
        num_layers=1, num_kv_heads=num_ranks, head_dim=8, dtype=torch.float16, page_tokens=PAGE_TOKENS
    )


@lru_cache(maxsize=4096)
def keys_of(text: str, num_tokens: int | None = None) -> bytes:
    """Chained keys of the whole pages among the first `num_tokens` words: 16 bytes each."""
    words = text.split()[:num_tokens]
    keys = page_keys([zlib.crc32(word.encode()) for word in words], PAGE_TOKENS, _ROOT)
    for page, key in enumerate(split(keys)):
        _text_of_key[key] = " ".join(words[: (page + 1) * PAGE_TOKENS])
    return keys


def root() -> bytes:
    return _ROOT


def split(keys: bytes) -> tuple[bytes, ...]:
    return tuple(keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES))


def text_of(key: bytes | None) -> str:
    """The prefix that a key stands for, in quotes."""
    return "nothing" if key is None else f'"{_text_of_key.get(key, key.hex()[:8])}"'
