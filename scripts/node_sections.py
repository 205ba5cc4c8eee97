#!/usr/bin/env python3
"""The sections of bench_node.py that need ranks of their own. One rank of one section:

    RANK=.. WORLD_SIZE=.. NODE_DEVICE=cuda|cpu python scripts/node_sections.py SECTION FOLDER

Rank 0 leaves the result in FOLDER/result.json; in the section `kill` every survivor leaves one.
"""

from __future__ import annotations

import json
import logging
import os
import random
import signal
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from node_rig import DEADLINE_S, Moving, Node, SharedHost, deepseek, llama, moving, raw_copy
from steps_rig import Traffic

from mlkv.errors import AgreementError, RankLost

REPEATS = 5
KILL_STEPS = 300  # of traffic before the victim dies
KILL_DEADLINE_S = 20.0  # for a step; a death is seen long before
REDUCED_BYTES = 16 << 20  # activations of a prefill of 2048 tokens in a layer of an 8B model


def rank_bytes(node: Node) -> int:
    """What each rank moves at once: long enough that rates count and not latency."""
    return 1 << 30 if node.on_cuda else 8 << 20


def links(node: Node) -> dict[str, Any]:
    """All ranks at once: raw copies, loads and offloads of their slices of the same pages, and pinning."""
    geometry, num_bytes = llama(small=not node.on_cuda), rank_bytes(node)
    found: dict[str, Any] = {"bytes_per_rank": num_bytes, "raw_gb_per_s": {}, "one_link_gb_per_s": {}}
    for direction in ("load", "offload"):
        copy = raw_copy(node, num_bytes, direction)
        found["one_link_gb_per_s"][direction] = num_bytes / one_alone(node, copy) / 1e9
        found["raw_gb_per_s"][direction] = node.size * num_bytes / node.median_together(copy, REPEATS) / 1e9
    piece_bytes = geometry.part(node).num_heads * geometry.layout.head_bytes
    num_pages = num_bytes // max(1, *node.replica.all_ints(piece_bytes))
    host = SharedHost(node, num_pages * geometry.layout.page_bytes)
    with moving(node, host, geometry, num_pages) as bench:
        total = sum(node.replica.all_ints(bench.rank_bytes))
        found["pool_bytes"], found["pinned_s"] = len(host.bytes), bench.created_s
        for direction, move in (("load", bench.load), ("offload", bench.offload)):
            rate = total / node.median_together(move, REPEATS) / 1e9
            found[direction] = {"gb_per_s": rate, "of_raw": rate / found["raw_gb_per_s"][direction]}
    return found


def one_alone(node: Node, work: Callable[[], None]) -> float:
    """Median seconds of `work` on rank 0, while the others do nothing. Collective."""
    return node.median_together(work if node.rank == 0 else _nothing, REPEATS)


def _nothing() -> None:
    return


def cooperative(node: Node) -> dict[str, Any]:
    """A set of latent pages that every rank needs: each alone, and in parts over all links."""
    geometry, num_bytes = deepseek(small=not node.on_cuda), rank_bytes(node)
    link = num_bytes / one_alone(node, raw_copy(node, num_bytes, "load"))
    # As much for each link as at two ranks, so that the last gather counts as little with more of them.
    num_pages = node.size * num_bytes // 2 // geometry.layout.payload_bytes
    host = SharedHost(node, num_pages * geometry.layout.page_bytes)
    found: dict[str, Any] = {"one_link_gb_per_s": link / 1e9, "num_pages": num_pages}
    for name, is_cooperative in (("alone", False), ("cooperative", True)):
        with moving(node, host, geometry, num_pages, cooperative=is_cooperative) as bench:
            bench.poison()
            bench.load()
            prints = node.replica.all_ints(bench.fingerprint())
            rate = bench.rank_bytes / node.median_together(bench.load, REPEATS)
            found[name] = {"gb_per_s": rate / 1e9, "links": rate / link, "equal": len(set(prints)) == 1}
            if bench.engine.cooperation is not None:
                alone_s, together_s = bench.engine.cooperation.measure(DEADLINE_S)
                found["measured_at_start_s"] = {"alone": alone_s, "together": together_s}
    return found


def beside(node: Node) -> dict[str, Any]:
    """A loop of all-reduces, as tensor-parallel layers make, beside loads of each kind."""
    found = {}
    num_bytes = rank_bytes(node)
    for geometry in (llama(small=not node.on_cuda), deepseek(small=not node.on_cuda)):
        piece_bytes = max(node.replica.all_ints(geometry.part(node).num_heads * geometry.layout.head_bytes))
        num_pages = num_bytes // piece_bytes
        host = SharedHost(node, num_pages * geometry.layout.page_bytes)
        with moving(node, host, geometry, num_pages, cooperative=geometry.replicated) as bench:
            name = "cooperative load" if geometry.replicated else "load"
            found[name] = dict(zip(("slowdown", "own"), slowdown(node, bench), strict=True))
    return found


def slowdown(node: Node, bench: Moving, repeats: int = 7) -> tuple[float | None, float]:
    """Time of the loop beside a load over its time alone, and the same of the load; of the slowest rank.

    The first is None where the load never lasted as long as the loop. Collective.
    """
    values = torch.zeros(
        (REDUCED_BYTES if node.on_cuda else 64 << 10) // 2, dtype=torch.bfloat16, device=node.device
    )

    def reduce(count: int) -> float:
        start = time.perf_counter()
        for _ in range(count):
            dist.all_reduce(values)
        if node.on_cuda:
            torch.cuda.current_stream().synchronize()  # not the device, on which a load runs
        return time.perf_counter() - start

    alone_s = node.median_together(bench.load, 3)
    reduce(20)
    one_s = max(node.replica.all_ints(int(1e9 * reduce(50) / 50))) / 1e9
    # Over well before the load is, also where it is slowed down to a half. Equal on all ranks.
    count = max(2, int(0.4 * alone_s / one_s))
    ratios, loads = [], []
    for _ in range(repeats):
        node.replica.min_int(0)
        without = reduce(count)
        node.replica.min_int(0)
        start = time.perf_counter()
        transfer = bench.engine.load(bench.pages, bench.slots)
        with_load = reduce(count)
        was_running = node.replica.min_int(int(not transfer.poll()))
        bench.finish(transfer)
        loads.append((time.perf_counter() - start) / alone_s)
        if was_running:
            ratios.append(with_load / without)
    if not ratios:  # the same on all ranks; the load was always over first
        return None, max(node.replica.all_ints(int(1e6 * statistics.median(loads)))) / 1e6
    ratio = statistics.median(ratios)
    worst = max(node.replica.all_ints(int(1e6 * ratio))) / 1e6
    return worst, max(node.replica.all_ints(int(1e6 * statistics.median(loads)))) / 1e6


def kill(node: Node, folder: Path, victim: int) -> dict[str, Any]:
    """Random traffic, in the midst of which one rank kills itself; when and how the others learn of it."""
    logging.getLogger("mlkv").setLevel(logging.ERROR)  # a warning for every failure that the fault plan makes
    traffic = Traffic(node.replica, node.device, seed=victim, agree={"deadline_s": KILL_DEADLINE_S})
    moment = folder / "killed_at"
    chance = random.Random(victim)
    last_step = (KILL_STEPS if node.on_cuda else 50) + chance.randrange(50)
    try:
        for step in range(1 << 30):
            traffic.step()
            if node.rank == victim and step == last_step:
                moment.write_text(str(time.monotonic_ns()))
                os.kill(os.getpid(), signal.SIGKILL)
    except AgreementError as error:
        seconds = (time.monotonic_ns() - int(moment.read_text())) / 1e9
        traffic.cache.close()
        named = error.rank if isinstance(error, RankLost) else None
        return {"rank": node.rank, "named": named, "seconds": seconds, "why": str(error)}
    raise AssertionError("the victim did not die")


def main() -> int:
    section, folder = sys.argv[1], Path(sys.argv[2])
    name, _, argument = section.partition(":")
    node = Node.join(folder)
    if name == "kill":
        result = kill(node, folder, int(argument))
        (folder / f"result{node.rank}.json").write_text(json.dumps(result))
        os._exit(0)  # groups with a dead member are not taken down in order
    run = {"links": links, "cooperative": cooperative, "beside": beside}[name]
    result = run(node)
    if node.rank == 0:
        (folder / "result.json").write_text(json.dumps(result))
    node.replica.min_int(0)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
