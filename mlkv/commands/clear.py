"""`mlkv clear`: forgets pages, of everybody or of one namespace."""

from __future__ import annotations

import argparse
from pathlib import Path

from mlkv.commands.find import DEADLINE_S, add_json, add_options, connect
from mlkv.commands.pages import choose_namespace
from mlkv.commands.show import print_json
from mlkv.commands.verify import open_folder
from mlkv.store import Clear, Invalidate


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Make it known to the parser."""
    parser = commands.add_parser(
        "clear",
        help="forget all pages, or those of one namespace, in every tier",
        description="Forgets pages in every tier. Engines go on; what they load now they still get, what they are "
        "writing is not kept. A namespace is invalidated: its pages are never found again, and lower tiers reuse "
        "their room as they need it.",
    )
    parser.add_argument("--namespace", metavar="NAME", help="only this one: its model, or fingerprint (mlkv ls)")
    parser.add_argument("--disk", type=Path, metavar="DIR", help="a folder of a disk tier that no store uses now")
    add_options(parser)
    add_json(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Forget what the options name."""
    if options.disk is not None:
        for tier, _ in open_folder(options.disk):
            tier.clear()
        told: dict[str, object] = {"cleared": str(options.disk)}
    else:
        with connect(options) as client:
            if options.namespace is None:
                client.call(Clear(), DEADLINE_S)
                told = {"cleared": "all namespaces"}
            else:
                entry = choose_namespace(client, options.namespace)
                opened = client.call(Invalidate(entry.fingerprint), DEADLINE_S)
                told = {"cleared": entry.fingerprint.hex(), "epoch": opened.epoch, "is_saved": opened.is_saved}
    if options.json:
        print_json(told)
    else:
        print(f"cleared: {told['cleared']}")
        if told.get("is_saved") is False:
            print("a lower tier does not know it yet; the store keeps trying for as long as it runs")
    return 0
