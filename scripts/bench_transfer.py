#!/usr/bin/env python3
"""Transfers between device and host pages on this machine, as ratios to one raw pinned copy of the same run.

    python scripts/bench_transfer.py [--json FILE] [--sections raw,grid,...] [--budget-s SECONDS]

Prints progress while it runs and a short table last. Needs one CUDA device.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from transfer_rig import (
    MAX_TRANSFER_BYTES,
    STAGING_BYTES,
    Case,
    Host,
    RawCopies,
    compute_loads,
    deepseek,
    llama,
    rig,
    slowdown,
)

from mlkv.kernels.staged import CHUNKS_AHEAD, SEGMENT_BYTES

SECTIONS = ("raw", "small", "grid", "beside", "released", "checksum", "baselines", "tune")


@dataclass
class Report:
    """What was measured, and the lines of the last table."""

    data: dict[str, Any] = field(default_factory=dict)
    lines: list[tuple[str, str, str, str]] = field(default_factory=list)

    def goal(self, what: str, value: float, bound: float, *, at_most: bool, unit: str = "") -> None:
        met = value <= bound if at_most else value >= bound
        sign = "<=" if at_most else ">="
        self.lines.append((what, f"{value:.3f}{unit}", f"{sign} {bound:g}{unit}", "yes" if met else "NO"))
        self.data.setdefault("goals", []).append(
            {"what": what, "value": value, "bound": bound, "at_most": at_most, "met": met}
        )

    def say(self, text: str) -> None:
        print(text, flush=True)


def measure_raw(report: Report, raw: RawCopies) -> None:
    rates = {way: statistics.median(raw.rate(way) / 1e9 for _ in range(5)) for way in ("load", "offload")}
    report.data["raw_gb_per_s"] = rates
    report.say(f"raw pinned copy: load {rates['load']:.1f}, offload {rates['offload']:.1f} GB/s")


def measure_small(report: Report, host: Host) -> None:
    """One page on an idle device, and one synchronous raw copy of the same bytes, in turns."""
    rows = []
    for tp in (1, 8):
        case = llama(tp, 64)
        on_host = torch.empty(case.piece_bytes, dtype=torch.uint8, pin_memory=True).random_()
        on_device = torch.empty_like(on_host, device="cuda")
        for path in ("auto", "staged", "direct"):
            with rig(host, case, 4, transfer=path) as bench:
                turns = [(_copy_seconds(on_device, on_host), bench.once("load", 1)) for _ in range(1000)][200:]
            copy_us, load_us = (statistics.median(times) * 1e6 for times in zip(*turns, strict=True))
            rows.append({"tp": tp, "path": path, "raw_us": copy_us, "load_us": load_us})
            report.say(f"small load, tp={tp}, {path}: {load_us:.0f} us; raw copy {copy_us:.0f} us")
            if path == "auto":
                excess = load_us - 1.3 * copy_us
                report.goal(f"1 page at tp={tp}: us over 1.3x raw copy", excess, 30, at_most=True)
    report.data["small"] = rows


def _copy_seconds(target: torch.Tensor, source: torch.Tensor) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    target.copy_(source, non_blocking=True)
    torch.cuda.synchronize()
    return time.perf_counter() - start


def measure_grid(report: Report, host: Host, raw: RawCopies, budget_s: float) -> None:
    rows: list[dict[str, Any]] = []
    left_out, end = [], time.monotonic() + budget_s
    page_sizes = (64, 32, 128, 256)
    cases = [make(tokens) for tokens in page_sizes for make in (*map(_llama_of, (1, 2, 4, 8)), deepseek)]
    for case in cases:
        most = min(512, MAX_TRANSFER_BYTES // case.layout.page_bytes)
        if time.monotonic() > end:
            left_out.append(f"{case.name} {case.layout.page_tokens} tokens")
            continue
        with rig(host, case, most) as bench:
            for num_pages in (1, 8, 64, 512):
                count = min(num_pages, most)
                row = {"case": case.name, "page_tokens": case.layout.page_tokens, "num_pages": count}
                row["piece_bytes"] = case.piece_bytes
                for direction in ("load", "offload"):
                    row[direction] = bench.share_of_raw(direction, count, raw)
                rows.append(row)
                if count < num_pages:
                    break
        last = rows[-1]
        report.say(
            f"{case.name:15} {case.layout.page_tokens:4} tokens, {last['num_pages']:4} pages of "
            f"{case.piece_bytes >> 10:6} KiB: load {last['load']:.3f}, offload {last['offload']:.3f} of raw"
        )
    if left_out:
        report.say(f"not measured within the budget: {', '.join(left_out)}")
    report.data["grid"], report.data["grid_left_out"] = rows, left_out
    for direction in ("load", "offload"):
        large = [row for row in rows if row["piece_bytes"] >= 2 << 20 and _is_long(row)]
        whole = [row[direction] for row in large if row["num_pages"] == 512]
        if whole:
            report.goal(f"{direction} of 512 pages, pieces >= 2 MiB: worst", min(whole), 0.95, at_most=False)
        if large:
            worst = min(row[direction] for row in large)
            report.goal(f"{direction} of 0.5 GB and more, pieces >= 2 MiB: worst", worst, 0.95, at_most=False)
        slices = [row for row in rows if row["case"] == "llama-8b tp=8" and row["page_tokens"] == 64]
        if slices and _is_long(slices[-1]):
            report.goal(f"{direction} of 0.5 GB, tp=8 slices of 1 MiB", slices[-1][direction], 0.91, at_most=False)


def _llama_of(tp: int) -> Callable[[int], Case]:
    return lambda page_tokens: llama(tp, page_tokens)


def _is_long(row: dict[str, Any]) -> bool:
    """Long enough that the rate counts and not the latency, some 200 us: 500 MB take 9 ms."""
    return bool(row["piece_bytes"] * row["num_pages"] >= 500_000_000)


def measure_beside(report: Report, host: Host) -> None:
    rows = []
    works = compute_loads()
    for path in ("staged", "direct"):
        with rig(host, llama(1, 64), 192, transfer=path) as bench:
            for name, work in works.items():
                for direction in ("load", "offload"):
                    # A direct transfer of this size leaves the work little, whatever it is.
                    ratio, own = slowdown(work, bench, direction, share=0.4 if path == "staged" else 0.1)
                    rows.append(
                        {
                            "path": path,
                            "work": name,
                            "direction": direction,
                            "slowdown": None if math.isnan(ratio) else ratio,
                            "own": own,
                        }
                    )
                    told = "over only after the transfer" if math.isnan(ratio) else f"{ratio:.3f}"
                    report.say(f"{name} beside a {direction}, {path}: {told}; the transfer itself {own:.2f}")
                    if path == "staged" and name == "matmul":
                        report.goal(f"{name} beside a {direction}", ratio, 1.04, at_most=True)
    report.data["beside"] = rows


def measure_released(report: Report, host: Host) -> None:
    rows = []
    with rig(host, llama(1, 64), 192, transfer="staged") as bench:
        for num_pages in (8, 32, 192):
            fractions = []
            for _ in range(7):
                torch.cuda.synchronize()
                start = time.perf_counter()
                transfer = bench.offload(num_pages)
                while not transfer.poll_released():
                    pass
                released_s = time.perf_counter() - start
                while not transfer.poll():
                    pass
                fractions.append(released_s / (time.perf_counter() - start))
            num_bytes, fraction = num_pages * bench.case.piece_bytes, statistics.median(fractions)
            rows.append({"bytes": num_bytes, "fraction": fraction})
            report.say(f"released after {fraction:.3f} of an offload of {num_bytes >> 20} MiB")
            if num_pages == 32:
                report.goal("released, offload of 256 MiB: part of it", fraction, 0.1, at_most=True)
    report.data["released"] = rows


def measure_checksum(report: Report) -> None:
    """Two engines side by side, one of which sums nothing and so verifies nothing; they take turns."""
    rows = []
    num_pages, num_pairs = 128, 41
    hosts = [Host(num_pages * llama(1, 64).layout.page_bytes) for _ in range(2)]
    for tp in (1, 8):
        case = llama(tp, 64)
        with ExitStack() as stack:
            engines = [
                stack.enter_context(rig(host, case, num_pages, transfer="staged", checksum=checksum))
                for host, checksum in zip(hosts, (True, False), strict=True)
            ]
            for direction in ("load", "offload"):
                costs = []
                for pair in range(num_pairs + 1):
                    order = engines if pair % 2 else engines[::-1]
                    seconds = {id(bench): bench.once(direction, num_pages) for bench in order}
                    costs.append(seconds[id(engines[0])] / seconds[id(engines[1])] - 1)
                low, cost, high = statistics.quantiles(costs[1:], n=4)
                rows.append({"tp": tp, "direction": direction, "cost": cost, "quartiles": (low, high)})
                report.say(
                    f"checksum of a {direction} at tp={tp}: {cost:+.4f} of its time, "
                    f"half of {num_pairs} pairs within {low:+.4f} to {high:+.4f}"
                )
                report.goal(f"checksum, {direction} at tp={tp}", cost, 0.02, at_most=True)
    report.data["checksum"] = rows


def measure_baselines(report: Report, host: Host, raw: RawCopies) -> None:
    rows = []
    ways: dict[str, dict[str, Any]] = {
        "this library": {},
        "torch indexing": {"kernels": "torch", "transfer": "staged"},
        "a copy a piece": {"batched": False, "transfer": "staged"},
        "direct kernel": {"transfer": "direct"},
    }
    for tp in (1, 8):
        case, num_pages = llama(tp, 64), 64 * tp
        num_pages = min(num_pages, 256)
        for name, options in ways.items():
            with rig(host, case, num_pages, **options) as bench:
                row: dict[str, Any] = {"tp": tp, "way": name}
                for direction in ("load", "offload"):
                    row[direction] = bench.share_of_raw(direction, num_pages, raw)
                rows.append(row)
                report.say(f"{name:15} tp={tp}: load {row['load']:.3f}, offload {row['offload']:.3f} of raw")
    report.data["baselines"] = rows


def measure_tune(report: Report, host: Host, raw: RawCopies) -> None:
    """The constants of the package, one at a time, where they matter."""
    rows = []
    variants: list[dict[str, Any]] = [{}]
    variants += [{"segment_bytes": mib << 20} for mib in (4, 8, 32, 64)]
    variants += [{"num_copy_streams": n} for n in (2, 3)]
    variants += [{"kernel_options": {"max_programs": n}} for n in (16, 64, 256)]
    variants += [{"kernel_options": {"item_bytes": kib << 10}} for kib in (16, 64)]
    variants += [{"priority": 0}, {"staging_bytes": 64 << 20}]
    matmul = compute_loads()["matmul"]
    for options in variants:
        row: dict[str, Any] = {"options": options}
        for tp, num_pages in ((1, 96), (8, 256)):
            case = llama(tp, 64)
            settings: dict[str, Any] = {"transfer": "staged", **options}
            with rig(host, case, num_pages, **settings) as bench:
                for direction in ("load", "offload"):
                    row[f"{direction} tp={tp}"] = bench.share_of_raw(direction, num_pages, raw)
                    if tp == 1:
                        row[f"matmul {direction}"] = slowdown(matmul, bench, direction, repeats=5)[0]
        rows.append(row)
        numbers = ", ".join(f"{key} {value:.3f}" for key, value in row.items() if key != "options")
        report.say(f"{options or 'as shipped'}: {numbers}")
    report.data["tune"] = rows


def machine() -> dict[str, Any]:
    found: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    found["cuda"] = torch.version.cuda
    try:
        import triton

        found["triton"] = triton.__version__
    except ImportError:
        found["triton"] = None
    found["constants"] = {"segment_bytes": SEGMENT_BYTES, "chunks_ahead": CHUNKS_AHEAD, "staging": STAGING_BYTES}
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write everything measured to this file")
    usual = ",".join(section for section in SECTIONS if section != "tune")
    parser.add_argument("--sections", default=usual, help=f"some of {', '.join(SECTIONS)}; default {usual}")
    parser.add_argument("--budget-s", type=float, default=120.0, help="begin no geometry of the grid after this")
    arguments = parser.parse_args()
    sections = arguments.sections.split(",")
    unknown = set(sections) - set(SECTIONS)
    if unknown:
        parser.error(f"unknown sections {', '.join(sorted(unknown))}; there are {', '.join(SECTIONS)}")
    if not torch.cuda.is_available():
        print("bench_transfer needs a CUDA device; this machine shows none to torch", file=sys.stderr)
        return 2
    report = Report()
    report.data["machine"] = machine()
    report.say(" ".join(f"{key}={value}" for key, value in machine().items()))
    raw = RawCopies()
    measure_raw(report, raw)
    host = Host(MAX_TRANSFER_BYTES + (256 << 20))
    steps: dict[str, Callable[[], None]] = {
        "small": lambda: measure_small(report, host),
        "grid": lambda: measure_grid(report, host, raw, arguments.budget_s),
        "beside": lambda: measure_beside(report, host),
        "released": lambda: measure_released(report, host),
        "checksum": lambda: measure_checksum(report),
        "baselines": lambda: measure_baselines(report, host, raw),
        "tune": lambda: measure_tune(report, host, raw),
    }
    for name, step in steps.items():
        if name in sections:
            start = time.monotonic()
            step()
            report.say(f"[{name}: {time.monotonic() - start:.0f} s]")
            # Written after each section, so that a run that is cut short leaves what it has.
            if arguments.json is not None:
                arguments.json.write_text(json.dumps(report.data, indent=1))
    print()
    print(f"{'what':48} {'here':>10} {'to reach':>12}  met")
    for what, value, bound, met in report.lines:
        print(f"{what:48} {value:>10} {bound:>12}  {met}")
    return 0 if all(line[3] == "yes" for line in report.lines) else 1


if __name__ == "__main__":
    sys.exit(main())
