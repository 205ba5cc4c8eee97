"""`mlkv stats` and `mlkv ls`: what a store has done and what is in it."""

from __future__ import annotations

import argparse
from collections import Counter

import msgspec

from mlkv.commands.find import DEADLINE_S, add_json, add_options, connect
from mlkv.commands.pages import namespace_of, namespaces, page_lists, pages_of
from mlkv.commands.show import holders_table, pool_table, print_json, print_table, table, tiers_table
from mlkv.store import Stats, StoreClient
from mlkv.store.states import READY, STATE_NAMES
from mlkv.store.wire_tools import ListTier, NamespaceEntry, Pins

_TIER_KEYS_AT_ONCE = 4096


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Make them known to the parser."""
    stats = commands.add_parser("stats", help="count pages, hits by tier, failures, states of breakers")
    stats.add_argument(
        "--audit", action="store_true", help="also check the whole index, which keeps engines waiting"
    )
    stats.set_defaults(run=_stats)
    ls = commands.add_parser("ls", help="list namespaces, pages, pins, or the keys of a lower tier")
    what = ls.add_mutually_exclusive_group()
    what.add_argument("--pages", action="store_true", help="pages of host memory, with their keys and states")
    what.add_argument("--pins", action="store_true", help="what is pinned")
    what.add_argument("--tier", metavar="NAME", help="keys of a lower tier")
    ls.add_argument("--limit", type=int, default=100, metavar="N", help="list at most so many (100)")
    ls.set_defaults(run=_ls)
    for parser in (stats, ls):
        add_options(parser)
        add_json(parser)


def _stats(options: argparse.Namespace) -> int:
    with connect(options) as client:
        report = client.call(Stats(audit=options.audit), DEADLINE_S)
        if options.json:
            print_json(
                {"owner_pid": client.owner_pid, "page_bytes": client.page_bytes, **msgspec.to_builtins(report)}
            )
        else:
            tables = [pool_table(report, client.page_bytes), holders_table(report)]
            print_table(*tables, *([tiers_table(report)] if report.tiers else []))
            if report.problem:
                print(f"the index is broken: {report.problem}")
    return 1 if report.problem else 0


def _ls(options: argparse.Namespace) -> int:
    with connect(options) as client:
        if options.pages:
            columns, rows = ["page", "key", "namespace", "generation", "state"], _pages(client, options.limit)
        elif options.pins:
            columns, rows = ["key", "pages"], _pins(client)[: options.limit]
        elif options.tier:
            columns, rows = ["key"], _tier_keys(client, options.tier, options.limit)
        else:
            columns, rows = ["namespace", "model", "page_tokens", "epoch", "pages", "limit"], _namespaces(client)
            rows = rows[: options.limit]
    if options.json:
        print_json([dict(zip(columns, row, strict=True)) for row in rows])
        return 0
    shown = table("", columns, right=["page", "generation", "page_tokens", "epoch", "pages", "limit"])
    for row in rows:
        shown.add_row(*("" if cell is None else str(cell) for cell in row))
    print_table(shown)
    return 0


def _pages(client: StoreClient, limit: int) -> list[list[object]]:
    rows: list[list[object]] = []
    for found in page_lists(client, limit):
        for page in pages_of(found):
            namespace = namespace_of(client, page)
            name = "" if namespace is None else namespace.hex()
            rows.append([page.number, page.key.hex(), name, page.generation, STATE_NAMES[page.state]])
    return rows


def _pins(client: StoreClient) -> list[list[object]]:
    pinned = client.call(Pins(), DEADLINE_S)
    return [[pinned.keys[16 * at : 16 * at + 16].hex(), pages] for at, pages in enumerate(pinned.lengths)]


def _tier_keys(client: StoreClient, tier: str, limit: int) -> list[list[object]]:
    rows: list[list[object]] = []
    after = b""
    while len(rows) < limit:
        asked = min(limit - len(rows), _TIER_KEYS_AT_ONCE)
        keys = client.call(ListTier(tier, after, asked), DEADLINE_S).keys
        rows += [[keys[at : at + 16].hex()] for at in range(0, len(keys), 16)]
        if len(keys) < 16 * asked:
            break
        after = keys[-16:]
    return rows


def _namespaces(client: StoreClient) -> list[list[object]]:
    """Those that were opened, and those of which there are only pages."""
    num_pages: Counter[bytes] = Counter()
    for found in page_lists(client, client.num_pages):
        num_pages.update(
            fingerprint
            for page in pages_of(found)
            if page.state == READY and (fingerprint := namespace_of(client, page)) is not None
        )
    rows: list[list[object]] = []
    for entry in namespaces(client):
        pages = num_pages.pop(entry.fingerprint, 0)
        rows.append([entry.fingerprint.hex(), entry.model, entry.page_tokens, entry.epoch, pages, _limit(entry)])
    return rows + [[fingerprint.hex(), None, None, None, pages, None] for fingerprint, pages in num_pages.items()]


def _limit(entry: NamespaceEntry) -> int | None:
    """Pages that its quota allows."""
    return None if entry.limit_pages < 0 else entry.limit_pages
