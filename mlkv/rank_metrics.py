"""Metrics of a rank, and how a rank is watched by what its settings and environment ask for."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from mlkv.histogram import Histogram
from mlkv.metrics import counter, histogram, serve
from mlkv.metrics_config import MetricsConfig
from mlkv.observe import Observer, Observers, TaskKind
from mlkv.tasks import CacheStats
from mlkv.trace import TRACE_VARIABLE, Trace, trace_path

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

log = logging.getLogger(__name__)

_TOTALS = {
    "lookups": "Lookups.",
    "hits": "Lookups that found something worth loading.",
    "hit_tokens": "Tokens that hits offered beyond those on the device.",
    "loaded_pages": "Pages loaded.",
    "loaded_bytes": "Bytes loaded to this rank's device.",
    "offloaded_pages": "Pages stored.",
    "offloaded_bytes": "Bytes stored from this rank's device.",
    "failed_loads": "Loads that failed on some rank.",
    "failed_offloads": "Offloads that failed on some rank.",
    "steps": "Steps.",
}


class RankMetrics:
    """Durations of tasks and steps; an `Observer`. Served together with the rank's counters."""

    def __init__(self, config: MetricsConfig, rank: int, counters: CacheStats) -> None:
        self._counters = counters
        self._began: dict[tuple[TaskKind, int], float] = {}
        self._tasks: dict[TaskKind, Histogram] = {kind: Histogram() for kind in ("lookup", "load", "offload")}
        self._steps, self._agreements = Histogram(), Histogram()
        self._server = serve(config, 1 + rank, f"rank {rank}", self._collect)

    def began(self, kind: TaskKind, call: int, request_id: str) -> None:
        self._began[kind, call] = time.monotonic()

    def released(self, call: int, request_id: str) -> None:
        """Of no interest here."""

    def ended(self, kind: TaskKind, call: int, request_id: str, num_tokens: int, why: str) -> None:
        began_s = self._began.pop((kind, call), None)
        if began_s is not None:
            self._tasks[kind].observe(time.monotonic() - began_s)

    def stepped(self, step: int, began_s: float, agreed_s: float, ended_s: float) -> None:
        self._steps.observe(ended_s - began_s)
        self._agreements.observe(agreed_s - began_s)

    def close(self) -> None:
        if self._server is not None:
            self._server.close()

    def _collect(self) -> Iterable[Metric]:
        counters = self._counters
        for name, text in _TOTALS.items():
            yield counter(f"mlkv_rank_{name}", text, [((), getattr(counters, name))])
        yield counter(
            "mlkv_rank_loaded_pages_by_tier",
            "Of the pages loaded, those that a lower tier brought for their lookup; on the master of a replica.",
            [((tier,), pages) for tier, pages in dict(counters.loaded_pages_by_tier).items()],
            ("tier",),
        )
        yield histogram(
            "mlkv_rank_task_seconds",
            "From the call that begins a lookup, load or offload to its end.",
            {(kind,): (found.counts, found.total_s) for kind, found in self._tasks.items()},
            ("kind",),
        )
        for name, text, found in (
            ("step", "Steps of the cache, the agreement within.", self._steps),
            ("agree", "Of steps, the exchange with the other ranks and the wait for them.", self._agreements),
        ):
            yield histogram(f"mlkv_rank_{name}_seconds", text, {(): (found.counts, found.total_s)})


class Watch:
    """Everybody who watches one rank. `observer` is None when nobody does, which costs nothing then."""

    def __init__(self, config: MetricsConfig, rank: int, counters: CacheStats) -> None:
        """`rank`: counted over all replicas. The environment says whether there is a trace, see `mlkv.trace`."""
        self._watching: list[RankMetrics | Trace] = []
        if config.port:
            self._watching.append(RankMetrics(config, rank, counters))
        file = os.environ.get(TRACE_VARIABLE)
        if file:
            try:
                self._watching.append(Trace(trace_path(file, rank), rank))
            except OSError as error:
                log.warning("%s=%s: no trace: %s", TRACE_VARIABLE, file, error.strerror)
        self.observer: Observer | None = None
        if self._watching:
            self.observer = self._watching[0] if len(self._watching) == 1 else Observers(self._watching)

    def close(self) -> None:
        for part in self._watching:
            part.close()
