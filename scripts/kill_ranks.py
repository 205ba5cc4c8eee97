#!/usr/bin/env python3
"""Ends ranks of the main job at random moments, and checks what the others make of it.

    python scripts/kill_ranks.py [--runs 200] [--others 10] [--seed 0] [--json FILE]

Each of `--runs` jobs loses one rank by SIGKILL at a moment drawn evenly from the life of such a job. In most of
them every other rank must end with an error that names it, within the deadline, and nothing may be left: no
process, no socket, no shared memory, no lease in the store's owner (kept alive in some runs, so that it can be
asked). One in five runs under torchrun with `--max-restarts 1` and must complete with the answers of an
undisturbed job. `--others` more jobs lose a rank in each other way: os._exit, an exception in the engine's code,
a process that stops.

Every run is a line of JSON in FILE; runs that FILE has already are not repeated. Exit status 1 when a run was not
as it should be. A run takes two to five seconds on two cores.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from kill_rig import Job, Kind, Strike, Surroundings, prepare, run_restarted, run_struck, run_undisturbed

RESTART_SHARE = 0.2
TWO_REPLICAS_SHARE = 0.3
KEEP_SHARE = 0.25
TRIES = 4  # for a moment at which the rank still lives


@dataclass(frozen=True)
class Case:
    """One run; `number` seeds all that is drawn in it."""

    number: str
    kind: Kind
    restart: bool
    dp: int
    keep: bool


@dataclass(frozen=True)
class Usual:
    """An undisturbed job: how long it lives, what it answers."""

    life_s: float
    answers: dict[str, list[int]]


def main() -> int:
    parser = argparse.ArgumentParser(prog="kill_ranks.py", description=__doc__.split("\n")[0])
    parser.add_argument(
        "--runs", type=int, default=200, metavar="N", help="jobs that lose a rank by SIGKILL (200)"
    )
    parser.add_argument("--others", type=int, default=10, metavar="N", help="for each other way to fail (10)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments and of all other choices (0)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append each run to this file")
    chosen = parser.parse_args()
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # it reports each failure at length
    found = read(chosen.json)
    missing = [case for case in cases(chosen.runs, chosen.others, chosen.seed) if case.number not in found]
    if missing:
        prepare()
    usual = {dp: live_undisturbed(dp) for dp in {case.dp for case in missing}}
    for case in missing:
        found[case.number] = row = run(case, usual[case.dp])
        if chosen.json is not None:
            with open(chosen.json, "a") as file:
                file.write(json.dumps(row) + "\n")
        print(describe(row), flush=True)
    print(summary(list(found.values())))
    return 1 if any(row["problems"] for row in found.values()) else 0


def cases(runs: int, others: int, seed: int) -> Iterator[Case]:
    ways: list[tuple[Kind, int]] = [("kill", runs), ("exit", others), ("raise", others), ("stall", others)]
    for kind, count in ways:
        for at in range(count):
            chance = random.Random(f"{seed}/{kind}/{at}")
            restart = kind == "kill" and chance.random() < RESTART_SHARE
            dp = 1 + (chance.random() < TWO_REPLICAS_SHARE)
            yield Case(f"{seed}/{kind}/{at}", kind, restart, dp, not restart and chance.random() < KEEP_SHARE)


def live_undisturbed(dp: int) -> Usual:
    with tempfile.TemporaryDirectory(prefix="mlkv-kill-") as folder:
        job = Job(Path(folder), dp)
        life_s = run_undisturbed(job)
        return Usual(life_s, job.answers())


def run(case: Case, usual: Usual) -> dict[str, Any]:
    """The run's line of the file."""
    chance = random.Random(f"{case.number}/moment")
    for _ in range(TRIES):
        with tempfile.TemporaryDirectory(prefix="mlkv-kill-") as folder:
            job = Job(Path(folder), case.dp, case.keep)
            before = Surroundings(job)
            strike = Strike(case.kind, chance.randrange(job.size), chance.uniform(0.0, usual.life_s))
            if case.restart:
                ending = run_restarted(job, strike, usual.answers)
            else:
                ending = run_struck(job, strike)
            ending.problems += before.problems()
            log = "".join(path.read_text()[-3000:] for path in sorted(job.folder.glob("rank*.log")))
        if ending.phase or ending.problems:
            break
    row = asdict(case) | asdict(strike) | asdict(ending)
    return row | ({"log": log} if ending.problems else {})


def read(path: Path | None) -> dict[str, dict[str, Any]]:
    if path is None or not path.exists():
        return {}
    return {row["number"]: row for row in map(json.loads, path.read_text().splitlines())}


def outcome(row: dict[str, Any]) -> str:
    if row["problems"]:
        return "WRONG"
    if not row["phase"]:
        return "ended before"
    return "completed" if row["completed"] else "named"


def describe(row: dict[str, Any]) -> str:
    way = "restart" if row["restart"] else "keep" if row["keep"] else ""
    place = f"rank {row['victim']} of {2 * row['dp']} at {row['moment_s']:.2f} s"
    text = f"{row['number']:12} {way:8}{place} ({row['phase']}): {outcome(row)}, {row['seconds']:.2f} s"
    return "\n  ".join([text, *row["problems"]])


def summary(rows: list[dict[str, Any]]) -> str:
    """Runs by kind, phase and outcome, and the longest time survivors took."""
    counts = Counter((r["kind"] + " + restart" * r["restart"], r["phase"] or "-", outcome(r)) for r in rows)
    lines = [f"{'':16}{'struck in':12}{'outcome':14}{'runs':>5}"]
    lines += [f"{kind:16}{phase:12}{what:14}{count:5}" for (kind, phase, what), count in sorted(counts.items())]
    named = sorted(r["seconds"] for r in rows if r["named"] and r["kind"] != "stall")
    if named:
        lines.append(f"survivors ended after {named[len(named) // 2]:.3f} s (median), {named[-1]:.1f} s at most")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
