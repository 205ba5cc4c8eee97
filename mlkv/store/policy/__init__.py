"""Eviction policies: pure, small, exchangeable."""

from __future__ import annotations

from typing import Final, Literal, TypeAlias

from mlkv.store.policy.base import MAX_CHILDREN, Chooser, Policy, Share
from mlkv.store.policy.hit_density import HitDensity
from mlkv.store.policy.lru import LRU
from mlkv.store.policy.sieve import Sieve

PolicyName: TypeAlias = Literal["hit-density", "lru", "sieve"]

POLICIES: Final[dict[PolicyName, type[HitDensity] | type[LRU] | type[Sieve]]] = {
    "hit-density": HitDensity,
    "lru": LRU,
    "sieve": Sieve,
}
"""By the names of the setting `store.policy`. Each is made with the number of pages of its pool."""

DEFAULT_POLICY: Final[PolicyName] = "hit-density"

__all__ = [
    "DEFAULT_POLICY",
    "LRU",
    "MAX_CHILDREN",
    "POLICIES",
    "Chooser",
    "HitDensity",
    "Policy",
    "PolicyName",
    "Share",
    "Sieve",
]
