"""What agreeing costs per step: every channel in one run, as ratios to the portable `object` channel.

Starts its own ranks on this host, so that it needs no launcher. Three loads:

- idle: nothing happens, as in most steps of a decoding engine;
- busy: each step submits and finishes a load, and the master tells a fact of 300 bytes;
- compute: each rank multiplies matrices for about a millisecond before each step, so that caches are cold, cores
  are taken and ranks do not come at once. Here the time of the rank that comes last counts: it waits for nobody,
  and what it spends is what agreeing adds to the step.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import platform
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from mlkv.dist import Agreement, Mark, Place, Replica, Stream
from mlkv.errors import MLKVError

_DEADLINE_S = 300.0  # for the whole run
_WARM_STEPS = 100
_COMPUTE_S = 0.001
_FACT = bytes(300)

Seconds = npt.NDArray[np.float64]

Work = Callable[[], list[bytes]]
"""What a rank does between two steps; returns the facts that the master tells in the next."""


@dataclass(frozen=True)
class Variant:
    """One row of the table. `hosts`: into how many pretended hosts the ranks are split."""

    label: str
    channel: str
    late: str = "off"
    hosts: int = 1


def variants(num_ranks: int) -> list[Variant]:
    rows = [
        Variant("object", "object"),
        Variant("ledger", "ledger"),
        Variant("tensor", "tensor"),
        Variant("tensor, late", "tensor", "on"),
    ]
    if num_ranks >= 4:
        rows.append(Variant("hierarchical", "hierarchical", hosts=2))
        rows.append(Variant("hierarchical, late", "hierarchical", "on", 2))
    return rows


def run(num_ranks: int, *, max_steps: int = 5000, budget_s: float = 1.5) -> dict[str, Any]:
    """Run the benchmark. Returns what `--json` writes.

    Args:
        max_steps, budget_s: bounds of each measurement (three for each row).

    Raises MLKVError when a rank fails or the run takes too long.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    rows = variants(num_ranks)
    with tempfile.TemporaryDirectory() as folder:
        processes, pipes = [], []
        for rank in range(num_ranks):
            here, there = context.Pipe(duplex=False)
            process = context.Process(
                target=_rank_main, args=(rank, num_ranks, folder, rows, max_steps, budget_s, there), daemon=True
            )
            process.start()
            there.close()
            processes.append(process)
            pipes.append(here)
        try:
            found = _receive(pipes)
        finally:
            for process in processes:
                process.kill()
                process.join()
    return {
        "benchmark": "agree",
        "ranks": num_ranks,
        "cores": len(os.sched_getaffinity(0)),
        "machine": platform.machine(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "rows": summarize(rows, found),
    }


def measure(
    num_ranks: int, rows: list[Variant], compute: Work, *, max_steps: int, budget_s: float
) -> dict[str, Seconds]:
    """This rank's seconds of every step, by "label/load". Collective over the default process group.

    Args:
        num_ranks: all ranks of the default group, which are on one host; they make one replica.
        compute: the load "compute": about a millisecond of what keeps an engine busy.
        max_steps, budget_s: as for `run`.
    """
    found: dict[str, Seconds] = {}
    for variant in rows:
        here = Place.here()
        host = dist.get_rank() * variant.hosts // num_ranks
        replica = Replica.from_world(tp=num_ranks, place=Place(here.host ^ host, here.pid))
        agreement = Agreement(replica, variant.channel, late=variant.late)
        for mode, work in (("idle", _idle), ("busy", _Busy(agreement)), ("compute", compute)):
            found[f"{variant.label}/{mode}"] = _measure(replica, agreement, work, max_steps, budget_s)
        replica.min_int(0)  # nobody leaves while another still steps
        agreement.close()
    return found


def report(result: dict[str, Any]) -> str:
    """The result as a table for people."""
    where = f"{result['ranks']} ranks on {result['cores']} cores"
    head = f"{where}: time per step in us, p50 / p99, and how many times cheaper than object"
    lines = [head, f"{'':20}{'idle':>28}{'busy':>28}{'beside compute':>28}"]
    for row in result["rows"]:
        cells = []
        for mode in ("idle", "busy", "compute"):
            cell = row[mode]
            cells.append(f"{cell['p50_us']:>9.1f} / {cell['p99_us']:>7.0f} {cell['object_over_this']:>7.1f}x")
        lines.append(f"{row['channel']:20}" + "".join(f"{cell:>28}" for cell in cells))
    return "\n".join(lines)


def write(result: dict[str, Any], path: Path) -> None:
    path.write_text(json.dumps(result, indent=2) + "\n")


def _receive(pipes: list[Connection]) -> list[dict[str, Seconds]]:
    end = time.monotonic() + _DEADLINE_S
    found: list[dict[str, Seconds]] = [{} for _ in pipes]
    waiting = dict(zip(pipes, range(len(pipes)), strict=True))
    while waiting:
        ready = wait(list(waiting), timeout=max(0.0, end - time.monotonic()))
        if not ready:
            raise MLKVError(f"ranks {sorted(waiting.values())} did not finish within {_DEADLINE_S:g} s")
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = waiting.pop(pipe)
            try:
                answer = pipe.recv()
            except EOFError:
                raise MLKVError(f"rank {rank} of the benchmark died") from None
            if isinstance(answer, str):
                raise MLKVError(f"rank {rank} of the benchmark failed: {answer}")
            found[rank] = answer
    return found


def summarize(rows: list[Variant], found: list[dict[str, Seconds]]) -> list[dict[str, Any]]:
    """Percentiles of what `measure` found on each rank, and the ratios to the first row."""
    table: list[dict[str, Any]] = []
    for variant in rows:
        row: dict[str, Any] = {"channel": variant.label}
        for mode in ("idle", "busy", "compute"):
            costs = np.stack([ranks[f"{variant.label}/{mode}"] for ranks in found])  # [ranks, steps]
            if mode == "compute":
                p50, p99 = np.percentile(costs.min(axis=0), [50, 99])
            else:
                p50, p99 = np.percentile(costs, [50, 99], axis=1).max(axis=1)  # of the rank that fares worst
            first = table[0][mode]["p50_us"] if table else p50 * 1e6
            row[mode] = {
                "p50_us": round(float(p50) * 1e6, 2),
                "p99_us": round(float(p99) * 1e6, 2),
                "object_over_this": round(first / (float(p50) * 1e6), 2),
                "steps": int(costs.shape[1]),
            }
        table.append(row)
    return table


def _rank_main(
    rank: int,
    num_ranks: int,
    folder: str,
    rows: list[Variant],
    max_steps: int,
    budget_s: float,
    pipe: Connection,
) -> None:
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=num_ranks)
        found = measure(num_ranks, rows, Compute(), max_steps=max_steps, budget_s=budget_s)
        pipe.send(found)
    except Exception as error:  # told to the parent, which ends the run
        pipe.send(f"{type(error).__name__}: {error}")
    # Other ranks may still need this one's connections; the parent ends all of them together.
    time.sleep(_DEADLINE_S)


def _measure(replica: Replica, agreement: Agreement, work: Work, max_steps: int, budget_s: float) -> Seconds:
    start = time.perf_counter()
    for _ in range(_WARM_STEPS):
        facts = work()
        agreement.step(lambda facts=facts: facts)  # type: ignore[misc]
    warm_s = (time.perf_counter() - start) / _WARM_STEPS
    num_steps = replica.min_int(max(_WARM_STEPS, min(max_steps, int(budget_s / warm_s))))
    costs = np.empty(num_steps)
    for at in range(num_steps):
        facts = work()

        def tell(facts: list[bytes] = facts) -> list[bytes]:
            return facts

        start = time.perf_counter()
        agreement.step(tell)
        costs[at] = time.perf_counter() - start
    return costs


def _idle() -> list[bytes]:
    return []


class _Busy:
    """Submits a load in every step and finishes the one before."""

    def __init__(self, agreement: Agreement) -> None:
        self._member = agreement.member
        self._unfinished = 0

    def __call__(self) -> list[bytes]:
        number = self._member.record(Stream.LOADS, b"benchmark", "load")
        if self._unfinished:
            self._member.finish(Mark.LOADED, self._unfinished)
        self._unfinished = number
        return [_FACT]


class Compute:
    """Multiplies matrices for about a millisecond on one core."""

    def __init__(self) -> None:
        self._matrix = torch.rand(192, 192)

    def __call__(self) -> list[bytes]:
        end = time.perf_counter() + _COMPUTE_S
        while time.perf_counter() < end:
            torch.mm(self._matrix, self._matrix)
        return []
