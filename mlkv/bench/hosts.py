"""What agreeing across hosts adds to an engine step: waiting for the network, and one step late.

Run one rank on each of two hosts (or network namespaces, see scripts/bench_hosts.sh):

    python -m mlkv.bench.hosts --rank 0 --address 10.77.0.1:29555 &
    python -m mlkv.bench.hosts --rank 1 --address 10.77.0.1:29555

The engine step is a wait of 5 ms, as for a device that computes. "added" is how much longer the step takes with
agreeing than without, medians of one run in which the four take turns. "nobody to agree with" is a replica of one
rank: what the protocol itself costs a processor that has just slept, without any exchange.
"""

from __future__ import annotations

import argparse
import json
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from mlkv.dist import Agreement, Place, Replica

_ROUNDS = 10
_STEPS = 100  # of each kind in each round


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m mlkv.bench.hosts", description=__doc__.split("\n")[0])
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--hosts", type=int, default=2, help="number of ranks, one on each host (2)")
    parser.add_argument("--address", required=True, help="HOST:PORT of rank 0, where all ranks meet")
    parser.add_argument("--step-ms", type=float, default=5.0, help="length of an engine step (5)")
    parser.add_argument("--json", type=Path, help="rank 0 writes the numbers here as well")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"tcp://{options.address}", rank=options.rank, world_size=options.hosts
    )
    # Namespaces of one kernel are told apart by their rank.
    here = Place.here()
    place = Place(here.host ^ options.rank, here.pid)
    result = measure(Replica.from_world(tp=options.hosts, place=place), options.step_ms / 1e3)
    if options.rank == 0:
        print(report(result))
        if options.json is not None:
            options.json.write_text(json.dumps(result, indent=2) + "\n")
    return 0


def measure(replica: Replica, step_s: float) -> dict[str, Any]:
    """Collective over the replica. Times in us, of this rank."""
    agreements = {
        "nobody to agree with": Agreement(Replica.single()),
        "tensor": Agreement(replica, "tensor", late="off"),
        "tensor, one step late": Agreement(replica, "tensor", late="on"),
    }
    plain: list[float] = []
    whole: dict[str, list[float]] = {name: [] for name in agreements}
    inside: dict[str, list[float]] = {name: [] for name in agreements}
    cpu: dict[str, list[float]] = {name: [] for name in agreements}
    for _ in range(_ROUNDS):
        replica.min_int(0)
        for _ in range(_STEPS):
            start = time.perf_counter()
            time.sleep(step_s)
            plain.append(time.perf_counter() - start)
        for name, agreement in agreements.items():
            replica.min_int(0)
            for _ in range(_STEPS):
                start = time.perf_counter()
                time.sleep(step_s)
                middle, cpu_before = time.perf_counter(), time.thread_time()
                agreement.step(list)
                end, cpu_after = time.perf_counter(), time.thread_time()
                inside[name].append(end - middle)
                whole[name].append(end - start)
                cpu[name].append(cpu_after - cpu_before)
    replica.min_int(0)
    for agreement in agreements.values():
        agreement.close()
    base = float(np.median(plain))
    return {
        "benchmark": "hosts",
        "host": socket.gethostname(),
        "hosts": replica.size,
        "step_us": round(base * 1e6, 1),
        "rows": [
            {
                "channel": name,
                "added_us": round((float(np.median(whole[name])) - base) * 1e6, 1),
                "cpu_p50_us": round(float(np.median(cpu[name])) * 1e6, 1),
                "inside_p50_us": round(float(np.median(inside[name])) * 1e6, 1),
                "inside_p99_us": round(float(np.percentile(inside[name], 99)) * 1e6, 1),
            }
            for name in agreements
        ],
    }


def report(result: dict[str, Any]) -> str:
    lines = [f"{result['hosts']} hosts, a step of {result['step_us']:.0f} us without agreeing"]
    lines += [
        f"{row['channel']:24} adds {row['added_us']:8.1f} us   "
        f"(inside step(): p50 {row['inside_p50_us']:.1f} us, p99 {row['inside_p99_us']:.0f} us, "
        f"CPU of its thread {row['cpu_p50_us']:.1f} us)"
        for row in result["rows"]
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
