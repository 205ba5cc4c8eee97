"""Counters of the cache in vLLM's own metrics: its log line and its Prometheus endpoint."""

from __future__ import annotations

import operator
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from mlkv import CacheStats

_COUNTERS = {
    "lookups": "Prefix lookups asked.",
    "hits": "Lookups that found something worth loading.",
    "hit_tokens": "Tokens that hits offered beyond those on the device.",
    "loaded_pages": "Pages loaded into the device's KV cache.",
    "loaded_bytes": "Bytes loaded into the device's KV cache.",
    "offloaded_pages": "Pages stored.",
    "offloaded_bytes": "Bytes stored.",
    "failed_loads": "Loads that failed on some rank; their requests were recomputed.",
    "failed_offloads": "Stores that failed on some rank.",
}

_BY_TIER = {
    "loaded_pages_from_disk": "Of the pages loaded, those that the disk had brought for their lookup.",
    "loaded_pages_from_remote": "Of the pages loaded, those that the remote store had brought for their lookup.",
}


class MLKVStats(KVConnectorStats):  # type: ignore[misc]
    """What was counted in an interval; `data` maps the name of a counter to its increase."""

    data: dict[str, int]

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        for name, value in other.data.items():
            self.data[name] = self.data.get(name, 0) + value
        return self

    def reduce(self) -> dict[str, int | float]:
        return {f"mlkv {name}": value for name, value in self.data.items() if value}

    def is_empty(self) -> bool:
        return not any(self.data.values())


_values_of = operator.attrgetter(*_COUNTERS)


class StatsSource:
    """Turns the cache's growing counters into increases."""

    def __init__(self) -> None:
        self._last: tuple[int, ...] = (0,) * len(_COUNTERS)
        self._last_by_tier = dict.fromkeys(_BY_TIER, 0)

    def take(self, counters: CacheStats) -> MLKVStats | None:
        """What was counted since the last call, if anything."""
        values = _values_of(counters)
        if values == self._last:
            return None
        increases = {name: now - then for name, now, then in zip(_COUNTERS, values, self._last, strict=True)}
        self._last = values
        by_tier = _loaded_by_tier(counters)
        increases |= {name: count - self._last_by_tier[name] for name, count in by_tier.items()}
        self._last_by_tier = by_tier
        return MLKVStats(data=increases)


def _loaded_by_tier(counters: CacheStats) -> dict[str, int]:
    """A remote store goes by what it is (redis, s3, mooncake); there is one at most."""
    pages = counters.loaded_pages_by_tier
    disk = pages.get("disk", 0)
    return dict(zip(_BY_TIER, (disk, sum(pages.values()) - disk), strict=True))


class MLKVPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """`vllm:mlkv_<counter>` for each counter and engine."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._counters = {}
        for name, text in (_COUNTERS | _BY_TIER).items():
            counter = self._counter_cls(name=f"vllm:mlkv_{name}", documentation=text, labelnames=self._labelnames)
            self._counters[name] = {
                engine: counter.labels(*labels) for engine, labels in self.per_engine_labelvalues.items()
            }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, increase in transfer_stats_data.items():
            if increase and name in self._counters:
                self._counters[name][engine_idx].inc(increase)
