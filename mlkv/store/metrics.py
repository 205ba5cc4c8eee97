"""Metrics of the owner of a store."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Final

from mlkv.metrics import counter, gauge, histogram, serve
from mlkv.metrics_config import MetricsConfig
from mlkv.store.wire import Report, TierReport

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

PERIOD_S: Final = 0.5
"""A scrape sees the state of at most this long ago."""

_BREAKERS: Final = ("closed", "half-open", "open")


class MetricsFeed:
    """Leaves a copy of the owner's counters for the thread that serves them.

    The owner's loop calls `poll` at each turn and at `due_at`; with nothing to do the loop sleeps, and the last
    copy stays right.
    """

    def __init__(self, config: MetricsConfig, report: Callable[[], Report]) -> None:
        self._report = report
        self._latest = report()
        self._made_at = time.monotonic()
        self.due_at: float | None = None
        self._server = serve(config, 0, "the owner of the store", self._collect)

    @property
    def port(self) -> int | None:
        """Where it is served; None where it is not."""
        return None if self._server is None else self._server.port

    def poll(self) -> None:
        """Something may have changed."""
        now = time.monotonic()
        if now < self._made_at + PERIOD_S:
            self.due_at = self._made_at + PERIOD_S
            return
        self._latest, self._made_at, self.due_at = self._report(), now, None

    def close(self) -> None:
        if self._server is not None:
            self._server.close()

    def _collect(self) -> Iterable[Metric]:
        return families(self._latest)


def families(report: Report) -> Iterable[Metric]:
    """All of a report as Prometheus has it."""
    states = ("free", "reserved", "ready", "quarantined")
    yield gauge(
        "mlkv_store_pages",
        "Pages of the host pool by state.",
        [((state,), getattr(report, state)) for state in states],
        ("state",),
    )
    holders = ("clients", "leases", "reservations")
    yield gauge(
        "mlkv_store_holders", "Who holds pages.", [((name,), getattr(report, name)) for name in holders], ("kind",)
    )
    hits = [(("host",), report.pages_hit - sum(tier.pages_hit for tier in report.tiers))]
    hits += [((tier.name,), tier.pages_hit) for tier in report.tiers]
    yield counter("mlkv_store_pages_hit", "Pages of answered lookups by where they were.", hits, ("tier",))
    for name, text in (
        ("asked", "Pages that lookups asked for."),
        ("evicted", "Pages evicted from the host pool."),
        ("written", "Pages that engines stored."),
        ("bad", "Pages that readers found damaged, stale or foreign."),
    ):
        yield counter(f"mlkv_store_pages_{name}", text, [((), getattr(report, f"pages_{name}"))])
    lookups = report.lookup_latency
    yield histogram(
        "mlkv_store_lookup_seconds", "From a lookup to its answer.", {(): (lookups.counts, lookups.total_s)}
    )
    yield from _tier_families(report.tiers)


def _tier_families(tiers: list[TierReport]) -> Iterable[Metric]:
    for name, text in (
        ("hits", "Pages that a tier read."),
        ("misses", "Pages that a tier was asked for and did not have."),
        ("bytes_read", "Bytes of pages read from a tier."),
        ("bytes_written", "Bytes of pages written to a tier."),
        ("pages_promoted", "Pages that a tier brought into the host pool."),
        ("pages_bad", "Pages that a tier had and that were not what their key names, or could not be read."),
        ("pages_refused", "Pages that a tier did not take."),
        ("pages_evicted", "Pages that a tier evicted to stay within its limit."),
        ("dropped_writes", "Pages that a tier was not given, because it was behind or out of order."),
        ("openings", "Times that a tier's breaker opened."),
    ):
        yield counter(
            f"mlkv_tier_{name}", text, [((tier.name,), getattr(tier, name)) for tier in tiers], ("tier",)
        )
    yield counter(
        "mlkv_tier_failures",
        "Failed calls of a tier by cause.",
        [((tier.name, cause), count) for tier in tiers for cause, count in tier.failures.items()],
        ("tier", "cause"),
    )
    yield histogram(
        "mlkv_tier_call_seconds",
        "Calls of a tier that returned, by kind.",
        {
            (tier.name, kind): (found.counts, found.total_s)
            for tier in tiers
            for kind, found in tier.latency.items()
        },
        ("tier", "kind"),
    )
    for name, text in (
        ("queued_loads", "Lookups and reads that wait for a tier."),
        ("queued_pages", "Pages that wait to be written to a tier."),
        ("running", "Calls of a tier under way."),
        ("hung", "Calls of a tier that were given up on and have not returned."),
        ("erasures", "Deletions that have not reached a tier."),
        ("num_pages", "Pages in a tier, by its own account; -1 where it cannot tell."),
        ("used_bytes", "Bytes that a tier occupies, by its own account; -1 where it cannot tell."),
        ("connected", "Whether a tier is connected."),
    ):
        values = [((tier.name,), float(getattr(tier, name))) for tier in tiers]
        yield gauge(f"mlkv_tier_{name.removeprefix('num_')}", text, values, ("tier",))
    yield gauge(
        "mlkv_tier_breaker",
        "1 for the state in which a tier's breaker is.",
        [((tier.name, state), float(tier.breaker == state)) for tier in tiers for state in _BREAKERS],
        ("tier", "state"),
    )
