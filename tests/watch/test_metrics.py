"""Prometheus metrics of owner and ranks: right, monotone, and of no consequence for anybody."""

from __future__ import annotations

import socket
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from mlkv import Hit, Replica
from mlkv.histogram import BOUNDS_S, Histogram
from mlkv.metrics import serve
from mlkv.metrics_config import MetricsConfig
from tests.cache.bench import Rank, slots_of, tokens_of

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def free_ports(number: int) -> int:
    """The first of `number` neighbouring ports that nobody has."""
    for first in range(21_000, 32_000, number):
        sockets: list[socket.socket] = []
        try:
            sockets = [socket.create_server(("127.0.0.1", first + at)) for at in range(number)]
        except OSError:
            continue
        finally:
            for made in sockets:
                made.close()
        return first
    raise AssertionError("no ports are free")


def scrape(port: int) -> Samples:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10.0) as answer:
        text = answer.read().decode()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(samples: Samples, name: str, **labels: str) -> float:
    return samples[name, tuple(sorted(labels.items()))]


@pytest.fixture
def port() -> int:
    return free_ports(3)


@pytest.fixture
def rank(tmp_path: Path, port: int) -> Iterator[Rank]:
    tmp_path.chmod(0o700)
    store: dict[str, Any] = {
        "directory": tmp_path,
        "disk": {"directory": tmp_path / "disk", "limit_bytes": 8 << 20},
    }
    made = Rank(Replica.single(), metrics={"port": port}, store=store)
    yield made
    made.cache.close()


def traffic(rank: Rank, seed: int) -> None:
    tokens = tokens_of(19, seed)
    rank.compute(tokens, slots_of(0, 19))
    rank.store(f"store{seed}", tokens, slots_of(0, 19))
    assert rank.fetch(f"load{seed}", tokens, slots_of(50, 19)) == 16
    assert rank.ask(f"miss{seed}", tokens_of(9, seed + 1000)) == Hit(0)
    rank.drain()


def settled(port: int, name: str, expected: float) -> Samples:
    """A scrape in which this total has come as far as it must."""
    end = time.monotonic() + 10.0
    while True:
        samples = scrape(port)
        if value(samples, name) == expected:
            return samples
        assert time.monotonic() < end, f"{name} is {value(samples, name)}, not {expected}"
        time.sleep(0.05)


def test_owner_and_rank_tell_what_happened_and_only_count_up(rank: Rank, port: int) -> None:
    traffic(rank, 1)
    owner = settled(port, "mlkv_store_pages_asked_total", 6.0)
    mine = scrape(port + 1)
    assert value(owner, "mlkv_store_pages_hit_total", tier="host") == 4
    assert value(owner, "mlkv_store_pages_hit_total", tier="disk") == 0
    assert value(owner, "mlkv_store_pages_written_total") == 4
    assert value(owner, "mlkv_store_pages", state="ready") == 4
    assert value(owner, "mlkv_store_lookup_seconds_count") == 2
    assert value(owner, "mlkv_tier_breaker", tier="disk", state="closed") == 1
    assert value(owner, "mlkv_tier_connected", tier="disk") == 1
    assert value(mine, "mlkv_rank_lookups_total") == 2
    assert value(mine, "mlkv_rank_hits_total") == 1
    assert value(mine, "mlkv_rank_loaded_pages_total") == 4
    assert value(mine, "mlkv_rank_offloaded_pages_total") == 4
    for kind, count in (("lookup", 2), ("load", 1), ("offload", 1)):
        assert value(mine, "mlkv_rank_task_seconds_count", kind=kind) == count
    assert value(mine, "mlkv_rank_step_seconds_count") == rank.cache.stats().steps
    assert value(mine, "mlkv_rank_agree_seconds_sum") <= value(mine, "mlkv_rank_step_seconds_sum")
    traffic(rank, 2)
    for before, after in ((owner, settled(port, "mlkv_store_pages_asked_total", 12.0)), (mine, scrape(port + 1))):
        for (name, labels), old in before.items():
            if name.endswith(("_total", "_bucket", "_count", "_sum")):
                assert after[name, labels] >= old, name
    rank.check_conserved()


def test_disk_is_timed_by_kind(rank: Rank, port: int) -> None:
    traffic(rank, 1)
    end = time.monotonic() + 10.0
    while ("mlkv_tier_call_seconds_count", (("kind", "write"), ("tier", "disk"))) not in scrape(port):
        rank.cache.audit()  # any turn of the owner's loop
        assert time.monotonic() < end, "no write is counted"
        time.sleep(0.05)


def test_a_scraper_that_hangs_stops_nobody(rank: Rank, port: int) -> None:
    silent = [socket.create_connection(("127.0.0.1", port + at)) for at in (0, 0, 1, 1)]
    try:
        traffic(rank, 1)
        settled(port, "mlkv_store_pages_asked_total", 6.0)
        assert value(scrape(port + 1), "mlkv_rank_lookups_total") == 2
    finally:
        for connection in silent:
            connection.close()


def test_a_port_in_use_stops_nobody(tmp_path: Path, port: int, caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", port)), socket.create_server(("127.0.0.1", port + 1)):
        rank = Rank(Replica.single(), metrics={"port": port})
        try:
            traffic(rank, 1)
        finally:
            rank.cache.close()
    assert f"not served at 127.0.0.1 port {port + 1}" in caplog.text


def test_only_this_host_can_look_unless_asked_otherwise(port: int) -> None:
    server = serve(MetricsConfig(port=port), 0, "test", list)
    assert server is not None
    try:
        assert server._server.server_address[0] == "127.0.0.1"
    finally:
        server.close()
    assert serve(MetricsConfig(), 0, "test", list) is None


def test_histogram_puts_durations_into_their_buckets() -> None:
    made = Histogram()
    for duration_s in (0.0, 1e-4, 1.1e-4, 100.0):
        made.observe(duration_s)
    assert made.counts[0] == 2
    assert made.counts[1] == 1
    assert made.counts[-1] == 1
    assert len(made.counts) == len(BOUNDS_S) + 1
    assert made.total_s == pytest.approx(100.00021)
