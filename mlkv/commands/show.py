"""Output of the commands: tables for people, JSON for programs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from mlkv.store import Report

_WIDEST_COLUMNS: Final = 1000


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=2))


def print_table(*tables: Table) -> None:
    """Each as wide as it is: a key that was broken over two lines could not be copied."""
    console = Console(width=_WIDEST_COLUMNS)
    for made in tables:
        Console(width=Measurement.get(console, console.options, made).maximum).print(made)


def table(title: str, columns: Sequence[str], *, right: Sequence[str] = ()) -> Table:
    """An empty table; columns in `right` hold numbers."""
    made = Table(title=title, title_justify="left", title_style="bold", header_style="dim", box=None)
    for column in columns:
        made.add_column(column, justify="right" if column in right else "left", no_wrap=True)
    return made


def size(num_bytes: float) -> str:
    """Bytes for people."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(num_bytes) < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"


def known(number: int) -> str:
    """A number of a tier's own account, which may not be able to tell."""
    return "?" if number < 0 else f"{number:,}"


def pool_table(report: Report, page_bytes: int) -> Table:
    """Pages of the host pool by state, and what became of them since the start."""
    made = table("host memory", ["", "pages", "bytes"], right=["pages", "bytes"])
    for name in ("ready", "free", "reserved", "quarantined", "num_pages"):
        pages = getattr(report, name)
        made.add_row("total" if name == "num_pages" else name, f"{pages:,}", size(pages * page_bytes))
    for name in ("asked", "hit", "written", "evicted", "bad"):
        made.add_row(f"{name}, since the start", f"{getattr(report, f'pages_{name}'):,}", "")
    return made


def holders_table(report: Report) -> Table:
    """Who holds pages."""
    made = table("holders", ["", "number"], right=["number"])
    for name in ("clients", "leases", "reservations"):
        made.add_row(name, f"{getattr(report, name):,}")
    return made


def tiers_table(report: Report) -> Table:
    """The lower tiers."""
    columns = [
        "tier",
        "state",
        "pages",
        "used",
        "limit",
        "hits",
        "misses",
        "read",
        "written",
        "queued",
        "failures",
    ]
    made = table("lower tiers", columns, right=columns[2:-1])
    for tier in report.tiers:
        state = "ok" if tier.connected and tier.breaker == "closed" else "not connected"
        if tier.breaker != "closed":
            state = f"breaker {tier.breaker}"
        failures = ", ".join(f"{cause} {count}" for cause, count in sorted(tier.failures.items())) or "none"
        made.add_row(
            tier.name,
            state + (f", {tier.hung} calls hang" if tier.hung else ""),
            known(tier.num_pages),
            "?" if tier.used_bytes < 0 else size(tier.used_bytes),
            "?" if tier.limit_bytes < 0 else size(tier.limit_bytes),
            f"{tier.hits:,}",
            f"{tier.misses:,}",
            size(tier.bytes_read),
            size(tier.bytes_written),
            f"{tier.queued_loads + tier.queued_pages:,}",
            failures,
        )
    return made
