"""Serves counters to Prometheus from a thread of its own.

What is served is read from counters that their owners change as they go, or from a copy that they have left: a
scrape never waits for them, nor they for a scrape.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

from mlkv.histogram import BOUNDS_S
from mlkv.metrics_config import MetricsConfig

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

log = logging.getLogger(__name__)

Labelled: TypeAlias = Iterable[tuple[Sequence[str], float]]


class MetricsServer:
    """An HTTP server with one page. Use `serve`."""

    def __init__(self, address: str, port: int, collect: Callable[[], Iterable[Metric]]) -> None:
        from prometheus_client import CollectorRegistry, start_http_server
        from prometheus_client.registry import Collector

        class _Ours(Collector):
            def collect(self) -> Iterable[Metric]:
                return collect()

            def describe(self) -> Iterable[Metric]:
                return ()  # else it would be collected once just to learn the names

        registry = CollectorRegistry()
        registry.register(_Ours())
        self._server, self._thread = start_http_server(port, address, registry)
        self.port: int = self._server.server_port

    def close(self) -> None:
        """Stop serving. Waits for a scrape under way."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def serve(
    config: MetricsConfig, number: int, who: str, collect: Callable[[], Iterable[Metric]]
) -> MetricsServer | None:
    """Serve at `config.port + number`; None, with a warning, where that is impossible: nobody stops for metrics.

    Args:
        who: for messages.
        collect: called for every scrape, in the server's thread.
    """
    if not config.port:
        return None
    port = config.port + number
    try:
        return MetricsServer(config.address, port, collect)
    except ImportError:
        log.warning("metrics of %s need the extra `metrics`: pip install 'mlkv[metrics]'", who)
    except (OSError, OverflowError) as error:
        log.warning("metrics of %s are not served at %s port %d: %s", who, config.address, port, error)
    return None


def counter(name: str, text: str, values: Labelled, labels: Sequence[str] = ()) -> Metric:
    """A total that only grows; `_total` is added to its name. `values`: label values, and the total."""
    from prometheus_client.metrics_core import CounterMetricFamily

    family = CounterMetricFamily(name, text, labels=labels)
    for label_values, value in values:
        family.add_metric(label_values, value)
    return family


def gauge(name: str, text: str, values: Labelled, labels: Sequence[str] = ()) -> Metric:
    """A value that goes up and down."""
    from prometheus_client.metrics_core import GaugeMetricFamily

    family = GaugeMetricFamily(name, text, labels=labels)
    for label_values, value in values:
        family.add_metric(label_values, value)
    return family


def histogram(
    name: str, text: str, values: Mapping[Sequence[str], tuple[Sequence[int], float]], labels: Sequence[str] = ()
) -> Metric:
    """Durations in seconds. `values`: label values -> counts by bucket of `BOUNDS_S`, and their total."""
    from prometheus_client.metrics_core import HistogramMetricFamily

    family = HistogramMetricFamily(name, text, labels=labels)
    for label_values, (counts, total_s) in values.items():
        buckets: list[tuple[str, float]] = []
        sum_so_far = 0
        for bound, count in zip((*map(str, BOUNDS_S), "+Inf"), counts, strict=True):
            sum_so_far += count
            buckets.append((bound, sum_so_far))
        family.add_metric(label_values, buckets, total_s)
    return family
