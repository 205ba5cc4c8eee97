"""Run a function on several real Gloo ranks, each a process, under a watchdog that dumps stacks."""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

_context = multiprocessing.get_context("forkserver")
# Importing torch once in the fork server, not in every rank, makes a test of four ranks start in a fraction of a
# second.
_context.set_forkserver_preload(["torch", "torch.distributed", "mlkv.cache"])


@dataclass
class Outcome:
    """How one rank ended: `value` returned, `error` raised (type name, text), or only an exit code."""

    value: Any = None
    error: tuple[str, str] | None = None
    trace: str = ""
    exitcode: int | None = None
    seconds: float = 0.0


def run_ranks(function: Callable[..., Any], size: int, *args: Any, deadline_s: float = 60.0) -> list[Any]:
    """`function(rank, *args)` on `size` ranks of one Gloo world; their results. Raises if any rank did."""
    outcomes = watch_ranks(function, size, *args, deadline_s=deadline_s)
    for rank, outcome in enumerate(outcomes):
        if outcome.error is not None or outcome.exitcode != 0:
            raise AssertionError(
                f"rank {rank} ended with {outcome.error or f'exit code {outcome.exitcode}'}\n{outcome.trace}"
            )
    return [outcome.value for outcome in outcomes]


def watch_ranks(function: Callable[..., Any], size: int, *args: Any, deadline_s: float = 60.0) -> list[Outcome]:
    """Like `run_ranks`, for tests in which ranks are meant to raise or die."""
    with tempfile.TemporaryDirectory() as folder:
        start = time.monotonic()
        pipes: list[Connection] = []
        processes = []
        for rank in range(size):
            here, there = _context.Pipe(duplex=False)
            process = _context.Process(
                target=_rank_main, args=(function, rank, size, folder, there, deadline_s, dict(os.environ), args)
            )
            process.start()
            there.close()
            pipes.append(here)
            processes.append(process)
        outcomes = [Outcome() for _ in range(size)]
        waiting = dict(zip(pipes, range(size), strict=True))
        while waiting:
            ready = wait(list(waiting), timeout=max(0.0, start + deadline_s + 10 - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                rank = waiting.pop(pipe)  # type: ignore[call-overload]
                outcomes[rank].seconds = time.monotonic() - start
                with contextlib.suppress(EOFError):  # died without a word; its exit code says how
                    outcomes[rank].value, outcomes[rank].error, outcomes[rank].trace = pipe.recv()  # type: ignore[union-attr]
        for rank, process in enumerate(processes):
            process.join(timeout=5)
            if process.is_alive():
                process.kill()
                process.join()
                outcomes[rank].error = ("Watchdog", f"rank {rank} did not end within {deadline_s} s")
            outcomes[rank].exitcode = process.exitcode
            stacks = Path(folder, f"stacks{rank}")
            if stacks.exists() and stacks.stat().st_size:
                outcomes[rank].trace += stacks.read_text()
        return outcomes


def _rank_main(
    function: Callable[..., Any],
    rank: int,
    size: int,
    folder: str,
    pipe: Connection,
    deadline_s: float,
    environ: dict[str, str],
    args: tuple[Any, ...],
) -> None:
    import torch
    import torch.distributed as dist

    os.environ.clear()
    os.environ.update(environ)
    # One name for the job of all ranks, as a launcher would give them.
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR=folder, MASTER_PORT="0"
    )
    stacks = open(Path(folder, f"stacks{rank}"), "w")  # noqa: SIM115 - must outlive this function for the watchdog
    faulthandler.dump_traceback_later(deadline_s, exit=True, file=stacks)
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=size)
        value = function(rank, *args)
        pipe.send((value, None, ""))
        dist.destroy_process_group()
    except BaseException as error:  # reported to the parent, whatever it is
        pipe.send((None, (type(error).__name__, str(error)), traceback.format_exc()))
        sys.stdout.flush()
        os._exit(1)
    finally:
        faulthandler.cancel_dump_traceback_later()
