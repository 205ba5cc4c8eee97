"""`mlkv top`: a live view of a store."""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from mlkv.commands.find import DEADLINE_S, add_options, connect
from mlkv.commands.pages import namespaces
from mlkv.commands.show import known, size
from mlkv.errors import StoreLost
from mlkv.store import Report, Stats, StoreClient
from mlkv.store.wire import TierReport
from mlkv.store.wire_tools import NamespaceEntry


@dataclass(frozen=True)
class Sample:
    """What a store said at one moment. `at_s`: on a clock that only grows."""

    at_s: float
    report: Report
    namespaces: list[NamespaceEntry]


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Make it known to the parser."""
    parser = commands.add_parser("top", help="watch a store live")
    parser.add_argument("--interval", type=float, default=1.0, metavar="S", help="seconds between two looks (1.0)")
    parser.add_argument("--once", action="store_true", help="one frame, rates over one interval, then end")
    add_options(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Show frames until Ctrl-C, or until the store ends."""
    interval_s = max(0.1, options.interval)
    console = Console()
    with connect(options) as client:
        before = look(client)
        try:
            if options.once:
                time.sleep(interval_s)
                console.print(frame(client, before, look(client)))
                return 0
            with Live(console=console, screen=True, auto_refresh=False) as live:
                while True:
                    time.sleep(interval_s)
                    now = look(client)
                    live.update(frame(client, before, now), refresh=True)
                    before = now
        except KeyboardInterrupt:
            return 0
        except StoreLost as error:
            console.print(f"mlkv: {error}")
            return 1


def look(client: StoreClient) -> Sample:
    """Ask once. Raises StoreError, DeadlineExceeded."""
    return Sample(time.monotonic(), client.call(Stats(), DEADLINE_S), namespaces(client))


def frame(client: StoreClient, before: Sample, now: Sample) -> RenderableType:
    """One picture; rates are between the two samples."""
    parts: list[RenderableType] = [_pool(client.page_bytes, before, now)]
    if now.report.tiers:
        parts.append(Panel(_tiers(before, now), title="lower tiers", title_align="left", border_style="dim"))
    if now.namespaces:
        parts.append(Panel(_namespaces(now), title="namespaces", title_align="left", border_style="dim"))
    return Group(*parts)


def _pool(page_bytes: int, before: Sample, now: Sample) -> Panel:
    report = now.report
    used = report.num_pages - report.free
    head = Table.grid(padding=(0, 2), expand=True)
    head.add_column(no_wrap=True)
    head.add_column(ratio=1)
    head.add_column(justify="right", no_wrap=True)
    head.add_row(
        "host memory",
        ProgressBar(total=report.num_pages, completed=used, complete_style="cyan", finished_style="cyan"),
        f"{size(used * page_bytes)} of {size(report.num_pages * page_bytes)}",
    )
    asked, hit = (_rate(before, now, name) for name in ("pages_asked", "pages_hit"))
    share = f"{hit / asked:.0%}" if asked else "-"
    states = Text.assemble(
        *(_labelled(name, f"{getattr(report, name):,}") for name in ("ready", "free", "reserved", "quarantined"))
    )
    holders = Text.assemble(
        *(_labelled(name, f"{getattr(report, name):,}") for name in ("clients", "leases", "reservations"))
    )
    rates = Text.assemble(
        _labelled("asked", f"{asked:,.0f}/s"),
        _labelled("hit", f"{hit:,.0f}/s ({share})"),
        _labelled("written", f"{_rate(before, now, 'pages_written'):,.0f}/s"),
        _labelled("evicted", f"{_rate(before, now, 'pages_evicted'):,.0f}/s"),
        _labelled("bad", f"{report.pages_bad:,}"),
    )
    body = Group(head, Text(), states, holders, rates)
    return Panel(body, title="mlkv", title_align="left", subtitle="pages", subtitle_align="right")


def _labelled(name: str, value: str) -> Text:
    return Text.assemble((f"{name} ", "dim"), (value, "bold"), "   ")


def _tiers(before: Sample, now: Sample) -> Table:
    made = Table(box=None, header_style="dim", expand=True)
    made.add_column("tier")
    made.add_column("state")
    for column in ("pages", "used", "hits/s", "misses/s", "read/s", "written/s", "queued", "failures"):
        made.add_column(column, justify="right")
    earlier = {tier.name: tier for tier in before.report.tiers}
    seconds = max(now.at_s - before.at_s, 1e-3)
    for tier in now.report.tiers:
        old = earlier.get(tier.name, tier)
        made.add_row(
            tier.name,
            _state(tier),
            known(tier.num_pages),
            "?" if tier.used_bytes < 0 else size(tier.used_bytes),
            f"{(tier.hits - old.hits) / seconds:,.0f}",
            f"{(tier.misses - old.misses) / seconds:,.0f}",
            size((tier.bytes_read - old.bytes_read) / seconds),
            size((tier.bytes_written - old.bytes_written) / seconds),
            f"{tier.queued_loads + tier.queued_pages:,}",
            f"{sum(tier.failures.values()):,}",
        )
    return made


def _state(tier: TierReport) -> Text:
    if tier.connected and tier.breaker == "closed" and not tier.hung:
        return Text("ok", "green")
    words = f"breaker {tier.breaker}" if tier.breaker != "closed" else "ok" if tier.connected else "not connected"
    return Text(words + (f", {tier.hung} hang" if tier.hung else ""), "yellow" if tier.connected else "red")


def _namespaces(now: Sample) -> Table:
    made = Table(box=None, header_style="dim", expand=True)
    for column in ("namespace", "model"):
        made.add_column(column)
    for column in ("page tokens", "epoch", "pages", "quota"):
        made.add_column(column, justify="right")
    for entry in now.namespaces:
        pages, limit = ("" if number < 0 else f"{number:,}" for number in (entry.num_pages, entry.limit_pages))
        made.add_row(
            entry.fingerprint.hex()[:16], entry.model, str(entry.page_tokens), str(entry.epoch), pages, limit
        )
    return made


def _rate(before: Sample, now: Sample, name: str) -> float:
    """Of a total, per second."""
    grown: int = getattr(now.report, name) - getattr(before.report, name)
    return grown / max(now.at_s - before.at_s, 1e-3)
