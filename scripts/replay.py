#!/usr/bin/env python3
"""Replay request traces against the eviction policies of the store, and compare their hit rates.

    python scripts/replay.py TRACE.jsonl ... --capacities 1000,10000,50000 --plot hits.png

A trace is a file of JSON lines with `hash_ids` and `timestamp`, the format of Mooncake's. Without one, a generated
workload of sessions is replayed. Capacities are in blocks of the trace. See docs/policies.md.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, cast, get_args

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mlkv.bench.replay import Comparison, compare
from mlkv.bench.traces import Trace, generate_sessions, load_trace
from mlkv.errors import MLKVError
from mlkv.store.policy import DEFAULT_POLICY, PolicyName

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_GENERATED_REQUESTS = 4000
_LINE_STYLES = {"hit-density": ("tab:blue", "o"), "lru": ("tab:orange", "s"), "sieve": ("tab:green", "^")}

_T = TypeVar("_T")


def main(argv: Sequence[str] | None = None) -> int:
    options = _parse(argv)
    try:
        if options.plot:
            _check_can_plot()
        traces = [load_trace(path) for path in options.traces] or [generate_sessions(_GENERATED_REQUESTS)]
        comparisons = [_compare(trace, options.capacities, options.policies) for trace in traces]
        for comparison in comparisons:
            print(comparison.table(), end="\n\n")
        if options.json:
            _write(options.json, json.dumps([one.as_dict() for one in comparisons], indent=2) + "\n")
        if options.plot:
            _plot(comparisons, options.plot)
    except MLKVError as error:
        print(f"replay: {error}", file=sys.stderr)
        return 1
    return 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    names = get_args(PolicyName)
    parser = argparse.ArgumentParser(description="Compare the store's eviction policies on traces of requests.")
    parser.add_argument("traces", nargs="*", type=Path, metavar="TRACE", help="JSON lines in Mooncake's format")
    parser.add_argument(
        "--capacities", type=_listed(_capacity), default=[1000, 10000, 50000], help="of the pool, in blocks"
    )
    parser.add_argument(
        "--policies", type=_listed(_policy), default=list(names), help=f"of {', '.join(names)}; all by default"
    )
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw hit rates by capacity (extra: plot)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers to this file as well")
    return parser.parse_args(argv)


def _listed(one: Callable[[str], _T]) -> Callable[[str], list[_T]]:
    return lambda text: [one(part.strip()) for part in text.split(",")]


def _capacity(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of blocks")
    return int(text)


def _policy(text: str) -> PolicyName:
    if text not in get_args(PolicyName):
        raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(get_args(PolicyName))}")
    return cast(PolicyName, text)


def _compare(trace: Trace, capacities: list[int], policies: list[PolicyName]) -> Comparison:
    print(f"replaying {trace.name}: {len(trace.requests)} requests, {trace.num_blocks} blocks", file=sys.stderr)
    return compare(trace, capacities, policies)


def _check_can_plot() -> None:
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise MLKVError("--plot needs matplotlib: pip install 'mlkv[plot]'") from None


def _plot(comparisons: list[Comparison], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        1, len(comparisons), figsize=(5.5 * len(comparisons), 4.5), squeeze=False, layout="constrained"
    )
    for axis, comparison in zip(axes[0], comparisons, strict=True):
        _draw(axis, comparison)
    axes[0][0].set_ylabel("share of blocks in a leading cached run")
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise MLKVError(f"cannot write the plot {path}: {error}") from None


def _draw(axis: Axes, comparison: Comparison) -> None:
    capacities = comparison.capacities
    axis.axhline(comparison.infinite, color="0.6", linestyle=":", label="infinite cache")
    axis.plot(capacities, comparison.clairvoyant, color="0.3", linestyle="--", label="clairvoyant bound")
    for policy, rates in comparison.rates.items():
        color, marker = _LINE_STYLES[policy]
        label = f"{policy} (default)" if policy == DEFAULT_POLICY else policy
        axis.plot(capacities, rates, color=color, marker=marker, markersize=5, label=label)
    axis.set_xscale("log")
    axis.set_xticks(capacities, [f"{capacity:,}" for capacity in capacities])
    axis.minorticks_off()
    axis.set_ylim(bottom=0)
    axis.set_title(comparison.trace)
    axis.set_xlabel("capacity, blocks")
    axis.grid(alpha=0.3)
    axis.legend(loc="lower right")


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as error:
        raise MLKVError(f"cannot write {path}: {error.strerror}") from None


if __name__ == "__main__":
    sys.exit(main())
