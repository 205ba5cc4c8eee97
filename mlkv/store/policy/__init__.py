"""Eviction policies: pure, small, exchangeable."""

from __future__ import annotations

from mlkv.store.policy.base import Policy
from mlkv.store.policy.lru import LRU

__all__ = ["LRU", "Policy"]
