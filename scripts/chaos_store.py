#!/usr/bin/env python3
"""Kills the store's owner, its ranks, or all of them at random moments, restarts, and checks every byte.

    python scripts/chaos_store.py [--runs 300] [--seed 0] [--json FILE] [--folder DIR]

In each run engines store and load through host memory, a disk and a remote store (Redis, SeaweedFS for S3, or
Mooncake, where they are installed), nearly all of them too small, so that pages are evicted and promoted all the
time. At a moment
drawn from their start, their traffic or their end comes `kill -9`. Then the survivors must end as they should; a
restarted owner must pass `mlkv verify`; a new engine loads everything there is. The KV of a page is a hash of its
key, so that every loaded byte, and every byte in every tier, is compared with what it must be. No page may be
held, no process, socket, shared memory or file may be left. In one of seven runs files of the disk are damaged
before the restart.

Every run is a line of JSON in FILE; runs that FILE has already are not repeated. Exit status 1 when a run was not
as it should be. A run takes two to five seconds.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

sys.path.insert(0, str(Path(__file__).resolve().parent))

from chaos_rig import Run, prepare
from chaos_site import Case, Moment, Remote, Site, Victim

from mlkv.store_config import Admission
from tests.store.remote_servers import MooncakeMaster, RedisServer, S3Server, ServerProcess

VICTIMS: dict[Victim, int] = {"owner": 35, "rank": 20, "ranks": 15, "both": 30}
MOMENTS: dict[Moment, int] = {"start": 15, "traffic": 70, "end": 15}
ADMISSIONS: dict[Admission, int] = {"write": 60, "second_use": 20, "evict": 20}
REMOTES: dict[Remote, int] = {"redis": 60, "s3": 10, "mooncake": 20, "none": 10}
SERVERS: dict[Remote, type[ServerProcess]] = {"redis": RedisServer, "s3": S3Server, "mooncake": MooncakeMaster}
TWO_RANKS_SHARE, EMBEDDED_SHARE, DAMAGE_SHARE = 0.25, 0.15, 0.15
TRIES = 8
"""For a moment at which the victims still live."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="chaos_store.py", description=__doc__.split("\n")[0])
    parser.add_argument("--runs", type=int, default=300, metavar="N", help="kills (300)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments and of all other choices (0)")
    parser.add_argument(
        "--remotes", nargs="+", choices=get_args(Remote), default=list(REMOTES), help="remote stores (all of them)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="append each run to this file")
    parser.add_argument("--folder", type=Path, metavar="DIR", help="where the disk tier lies (a temporary one)")
    chosen = parser.parse_args()
    found = read(chosen.json)
    missing = [case for case in cases(chosen.runs, chosen.seed, chosen.remotes) if case.number not in found]
    if missing:
        prepare()
        with tempfile.TemporaryDirectory(prefix="mlkv-chaos-", dir=chosen.folder) as folder:
            site = Site(Path(folder).absolute())
            try:
                for case in missing:
                    found[case.number] = row = run(case, site)
                    if chosen.json is not None:
                        with open(chosen.json, "a") as file:
                            file.write(json.dumps(row) + "\n")
                    print(describe(row), flush=True)
            finally:
                site.close()
    print(summary(list(found.values())))
    return 1 if any(row["problems"] for row in found.values()) else 0


def cases(runs: int, seed: int, wanted: Sequence[Remote]) -> Iterator[Case]:
    remotes = {kind: share for kind, share in REMOTES.items() if kind in wanted}
    for kind, server in SERVERS.items():
        if kind in remotes and server.missing():
            remotes["none"] = remotes.get("none", 0) + remotes.pop(kind)
    for at in range(runs):
        chance = random.Random(f"{seed}/{at}")

        def draw(shares: dict[Any, int], chance: random.Random = chance) -> Any:
            return chance.choices(list(shares), list(shares.values()))[0]

        yield Case(
            number=f"{seed}/{at}",
            victim=draw(VICTIMS),
            moment=draw(MOMENTS),
            tp=2 if chance.random() < TWO_RANKS_SHARE else 1,
            engines=chance.choice((1, 2, 2, 3)),
            embedded=chance.random() < EMBEDDED_SHARE,
            remote=draw(remotes),
            admission=draw(ADMISSIONS),
            damage=chance.random() < DAMAGE_SHARE,
        )


def run(case: Case, site: Site) -> dict[str, Any]:
    """The run's line of the file."""
    for _ in range(TRIES):
        folder = Path(tempfile.mkdtemp(prefix="run-", dir=site.folder))
        ending = Run(case, site, folder).do()
        log = "".join(path.read_text()[-2000:] for path in sorted(folder.glob("*.log")))
        shutil.rmtree(folder)
        if ending.struck or ending.problems:
            break
    row = asdict(case) | asdict(ending)
    return row | ({"log": log} if ending.problems else {})


def read(path: Path | None) -> dict[str, dict[str, Any]]:
    if path is None or not path.exists():
        return {}
    return {row["number"]: row for row in map(json.loads, path.read_text().splitlines())}


def outcome(row: dict[str, Any]) -> str:
    if row["problems"]:
        return "WRONG"
    return "as it should" if row["struck"] else "ended before"


def describe(row: dict[str, Any]) -> str:
    engines = "TP=2" if row["tp"] > 1 else f"{row['engines']} engines"
    how = f"{engines}{', embedded' * row['embedded']}, {row['remote']}, {row['admission']}"
    after = ", ".join(f"{tier} {pages}" for tier, pages in row["pages_after_restart"].items()) or "nothing"
    text = f"{row['number']:7} {row['victim']} in {row['moment']} ({how}): {outcome(row)}; found after: {after}"
    text += f"; {row['damaged']}: {row['bad_found']} bad" if row["damaged"] else ""
    return "\n  ".join([f"{text}; {row['seconds']:.1f} s", *row["problems"]])


def summary(rows: list[dict[str, Any]]) -> str:
    """Runs by victim, moment and outcome, and what was compared."""
    counts = Counter((row["victim"], row["moment"], outcome(row)) for row in rows)
    lines = [f"{'victim':10}{'moment':10}{'outcome':16}{'runs':>5}"]
    for victim in get_args(Victim):
        for moment in get_args(Moment):
            for (_, _, what), count in sorted(i for i in counts.items() if i[0][:2] == (victim, moment)):
                lines.append(f"{victim:10}{moment:10}{what:16}{count:5}")
    loaded: Counter[str] = Counter()
    for row in rows:
        loaded.update({f"{tier} before": pages for tier, pages in row["pages_by_tier"].items()})
        loaded.update({f"{tier} after": pages for tier, pages in row["pages_after_restart"].items()})
        loaded.update({f"{tier} compared": pages for tier, pages in row["pages_compared"].items()})
    lines.append(f"requests before the kill: {sum(row['requests'] for row in rows):,}")
    lines.append(f"pages loaded and compared before the kill: {sum(row['pages_loaded'] for row in rows):,}")
    lines += [f"pages, {name}: {count:,}" for name, count in sorted(loaded.items())]
    damaged = [row for row in rows if row["damaged"]]
    lines.append(
        f"runs with damaged files: {len(damaged)}; bad pages found: {sum(r['bad_found'] for r in damaged)}"
    )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
