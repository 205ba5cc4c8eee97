#!/usr/bin/env python3
"""Agreement on this machine's devices: what a step costs on each channel, and whether all ranks see the same.

    python scripts/agree_gpus.py DIR [--ranks N] [--steps 10000] [--device cuda|cpu]

Starts N ranks under torchrun (default: one on each GPU, or two on the CPU). First the cost of agreeing, idle and
beside compute, then the real cache under random traffic with random delays, failures and damaged pages, once for
each way to agree; every step's results must be equal on all ranks, and every loaded element right. Writes
DIR/agree.json and prints a short table last. Exit status 1 when something was unequal or wrong.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from steps_rig import FAULTS, Traffic

from mlkv import Replica, init_process_group
from mlkv.bench import agree

LATENESS = {"ledger": "off", "tensor": "off", "tensor, late": "on"}
"""Ways to agree that serve traffic, and their `agree.late`."""

SAMPLE_STEPS = 1000  # between two comparisons of the ranks, so that the first difference is found near its step
DRAIN_STEPS = 20000  # what is in flight takes a few hundred steps to end; more would be a leak
MATRIX = 4096
MULTIPLICATIONS = 5  # of bf16 matrices, about 1 ms on an H200
ACTIVATIONS = 1 << 20  # bytes that a layer of a tensor-parallel model reduces over the ranks, roughly


def main() -> int:
    parser = argparse.ArgumentParser(prog="agree_gpus.py", description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path, metavar="DIR", help="where agree.json goes")
    parser.add_argument("--ranks", type=int, metavar="N", help="default: the number of GPUs, 2 without any")
    parser.add_argument(
        "--steps", type=int, default=10000, metavar="N", help="cache steps on each channel (10000)"
    )
    parser.add_argument("--bench-steps", type=int, default=5000, help="steps of each cost (5000)")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    options = parser.parse_args()
    if options.device == "auto":
        options.device = "cuda" if torch.cuda.is_available() else "cpu"
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        num_ranks = options.ranks or (torch.cuda.device_count() if options.device == "cuda" else 2)
        if num_ranks < 2:
            parser.error(f"agreeing takes two ranks; there is {num_ranks} GPU here (--device cpu needs none)")
        options.folder.mkdir(parents=True, exist_ok=True)
        become_torchrun(num_ranks, [*sys.argv[1:], f"--device={options.device}"])
    return run_rank(options)


def become_torchrun(num_ranks: int, arguments: list[str]) -> NoReturn:
    command = ["-m", "torch.distributed.run", f"--nproc-per-node={num_ranks}", "--local-addr=127.0.0.1"]
    command += ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", f"--rdzv-id={os.getpid()}"]
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.execv(sys.executable, [sys.executable, *command, __file__, *arguments])


def run_rank(options: argparse.Namespace) -> int:
    logging.getLogger("mlkv").setLevel(logging.ERROR)  # a warning for every failure that the fault plan makes
    device = torch.device("cpu")
    if options.device == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        init_process_group("nccl", device_id=device)
    else:
        torch.set_num_threads(1)
        init_process_group("gloo")
    num_ranks = dist.get_world_size()
    objects = dist.new_group(backend="gloo")
    result: dict[str, Any] = {
        "ranks": num_ranks,
        "cores": len(os.sched_getaffinity(0)),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
    }
    rows = agree.variants(num_ranks)
    compute = DeviceCompute(device) if device.type == "cuda" else agree.Compute()
    found = agree.measure(num_ranks, rows, compute, max_steps=options.bench_steps, budget_s=2.0)
    gathered: list[Any] = [None] * num_ranks
    dist.all_gather_object(gathered, found, group=objects)
    result["rows"] = agree.summarize(rows, gathered)
    result["traffic"] = [serve(label, device, options.steps) for label in LATENESS]
    if dist.get_rank() == 0:
        (options.folder / "agree.json").write_text(json.dumps(result, indent=2) + "\n")
        print(report(result), flush=True)
    dist.destroy_process_group()
    fine = all(
        row["equal"] and row["drained"] and not row["wrong_tokens"] and not row["held_pages_and_leases"]
        for row in result["traffic"]
    )
    return 0 if fine else 1


class DeviceCompute:
    """Keeps the GPU busy for about a millisecond, as a tensor-parallel model does, without waiting for it."""

    def __init__(self, device: torch.device) -> None:
        self._matrix = torch.rand(MATRIX, MATRIX, dtype=torch.bfloat16, device=device)
        self._product = torch.empty_like(self._matrix)
        self._activations = torch.zeros(ACTIVATIONS // 2, dtype=torch.bfloat16, device=device)

    def __call__(self) -> list[bytes]:
        torch.cuda.current_stream().synchronize()  # an engine needs the last step's tokens before it goes on
        for _ in range(MULTIPLICATIONS):
            torch.mm(self._matrix, self._matrix, out=self._product)
        dist.all_reduce(self._activations)
        return []


def serve(label: str, device: torch.device, num_steps: int) -> dict[str, Any]:
    """Random traffic on the cache; what was moved, and whether all ranks saw the same. Collective."""
    replica = Replica.from_world(tp=dist.get_world_size())
    channel = label.partition(",")[0]
    traffic = Traffic(replica, device, seed=num_steps, agree={"channel": channel, "late": LATENESS[label]})
    first_unequal = 0
    costs_s = np.empty(num_steps)
    start = time.perf_counter()
    for at in range(num_steps):
        before = time.perf_counter()
        traffic.step()
        costs_s[at] = time.perf_counter() - before
        if (at + 1) % SAMPLE_STEPS == 0 and not first_unequal and not same(replica, traffic):
            first_unequal = at + 1
    seconds = time.perf_counter() - start
    num_drained = 0
    while not traffic.drained and num_drained < DRAIN_STEPS:
        traffic.step(asking=False)
        num_drained += 1
    equal = same(replica, traffic) and not first_unequal
    # One word for "all books are right" on every rank: only the master's connection can ask.
    books = traffic.cache.audit() if replica.is_master and traffic.drained else None
    held = 0 if books is None else books.leases + books.reservations + books.reserved + books.quarantined
    stats = traffic.cache.stats()
    row = {
        "channel": label,
        "steps": stats.steps,
        "seconds": round(seconds, 1),
        "equal": equal,
        "first_unequal_by_step": first_unequal,
        "drained": traffic.drained,
        "held_pages_and_leases": held,
        "wrong_tokens": sum(replica.all_ints(traffic.kv.num_wrong)),
        "seen": dict(traffic.seen),
        "agree_us": stats.agree_us,
        "step_p50_us": round(float(np.median(costs_s)) * 1e6, 1),
        "faults": FAULTS,
    }
    replica.min_int(0)  # nobody leaves while another still steps
    traffic.cache.close()
    return row


def same(replica: Replica, traffic: Traffic) -> bool:
    """Whether the digest over all step results so far is equal on all ranks. Collective."""
    word = int.from_bytes(traffic.cache.results_digest[:8], "little", signed=True)
    return len(set(replica.all_ints(word))) == 1


def report(result: dict[str, Any]) -> str:
    lines = [f"{result['device']}, torch {result['torch']}", agree.report(result), ""]
    lines.append(f"cache under random traffic ({FAULTS}, ranks late by up to 1 ms)")
    head = ("steps", "hits", "loads", "failed", "offloads", "aborted", "tokens", "wrong", "agree p50/p99 us")
    lines.append(f"{'':14}" + "".join(f"{name:>9}" for name in head[:-1]) + f"{head[-1]:>18}  results")
    for row in result["traffic"]:
        seen, cost = row["seen"], row["agree_us"]
        failed = seen.get("failed loads", 0) + seen.get("failed offloads", 0)
        moved = [seen.get(name, 0) for name in ("hits", "loads", "offloads", "aborted", "loaded tokens")]
        counts = (row["steps"], *moved[:2], failed, *moved[2:], row["wrong_tokens"])
        verdict = f"equal on {result['ranks']} ranks" if row["equal"] else "NOT EQUAL"
        if not row["drained"] or row["held_pages_and_leases"]:
            verdict += ", LEAK"
        cells = "".join(f"{count:>9}" for count in counts) + f"{cost['p50']:.1f} / {cost['p99']:.0f}".rjust(18)
        lines.append(f"{row['channel']:14}{cells}  {verdict}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
