"""Lower tiers: where page bytes live beyond host memory. One module each; see base.py for their contract."""

from __future__ import annotations

from mlkv.store.tiers.base import ReadOnlyPages, StoredPage, Tier, TierStats, WritablePages

__all__ = ["ReadOnlyPages", "StoredPage", "Tier", "TierStats", "WritablePages"]
