"""The command `mlkv`, also as `python -m mlkv`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from mlkv.commands import add_commands
from mlkv.errors import MLKVError
from mlkv.version import __version__

_Result = TypeVar("_Result")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    parser = argparse.ArgumentParser(prog="mlkv", description="A multi-level KV cache for LLM inference.")
    parser.add_argument("--version", action="version", version=f"mlkv {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    bench = commands.add_parser("bench", help="measure on this machine")
    _add_benchmarks(bench.add_subparsers(dest="benchmark", required=True))
    add_commands(commands)
    options = parser.parse_args(arguments)
    try:
        code: int = options.run(options)
    except MLKVError as error:
        print(f"mlkv: {error}", file=sys.stderr)
        return 1
    return code


def _add_benchmarks(benchmarks: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    agree = benchmarks.add_parser("agree", help="cost per step of agreeing, for each channel")
    agree.add_argument("--ranks", type=_ranks, default=4, metavar="N", help="ranks to start on this host (4)")
    agree.add_argument("--json", type=Path, metavar="FILE", help="write the numbers to this file as well")
    agree.set_defaults(run=_bench_agree)
    store = benchmarks.add_parser("store", help="the index of the store beside a dict: rates, pauses, memory")
    store.add_argument("--pages", type=int, default=1_000_000, metavar="N", help="size of the pool (1000000)")
    store.add_argument("--json", type=Path, metavar="FILE", help="write the numbers to this file as well")
    store.set_defaults(run=_bench_store)
    disk = benchmarks.add_parser("disk", help="the disk tier beside fio: rates, CPU time, restart")
    disk.add_argument("--directory", type=Path, required=True, metavar="DIR", help="on the disk to measure")
    disk.add_argument("--json", type=Path, metavar="FILE", help="write the numbers to this file as well")
    disk.set_defaults(run=_bench_disk)
    remote = benchmarks.add_parser("remote", help="a remote store's tier beside the store's own client")
    remote.add_argument("--url", required=True, help="as store.remote.url; credentials come from the environment")
    remote.add_argument("--page-bytes", type=int, default=1 << 20, metavar="N", help="size of a page (1048576)")
    remote.add_argument("--json", type=Path, metavar="FILE", help="write the numbers to this file as well")
    remote.set_defaults(run=_bench_remote)
    hang = benchmarks.add_parser("hang", help="an engine's step time above a remote store that hangs for ever")
    hang.add_argument("--json", type=Path, metavar="FILE", help="write the numbers to this file as well")
    hang.set_defaults(run=_bench_hang)


def _ranks(text: str) -> int:
    if not text.isdigit() or not 2 <= int(text) <= 256:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of ranks from 2 to 256")
    return int(text)


def _tell(
    report: Callable[[_Result], str], write: Callable[[_Result, Path], None], result: _Result, file: Path | None
) -> int:
    """Print what a benchmark measured, and write it to a file as well if one was named."""
    print(report(result))
    if file is not None:
        write(result, file)
    return 0


def _bench_agree(options: argparse.Namespace) -> int:
    from mlkv.bench import agree  # loads torch, which the other commands need not wait for

    return _tell(agree.report, agree.write, agree.run(options.ranks), options.json)


def _bench_store(options: argparse.Namespace) -> int:
    from mlkv.bench import store

    return _tell(store.report, store.write, store.run(options.pages), options.json)


def _bench_disk(options: argparse.Namespace) -> int:
    from mlkv.bench import disk

    return _tell(disk.report, disk.write, disk.run(options.directory), options.json)


def _bench_remote(options: argparse.Namespace) -> int:
    from mlkv.bench import remote

    return _tell(remote.report, remote.write, remote.run(options.url, page_bytes=options.page_bytes), options.json)


def _bench_hang(options: argparse.Namespace) -> int:
    from mlkv.bench import hang

    return _tell(hang.report, hang.write, hang.run(), options.json)


if __name__ == "__main__":
    sys.exit(main())
