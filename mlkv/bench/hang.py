"""What a remote store that hangs for ever costs an engine: its step time, as a ratio to no remote store at all.

Three caches of one process take turns: one without a remote store, one whose server takes connections and never
says a word, and one whose server lets clients in and hangs on whatever they ask then. A step is some milliseconds
of matrix multiplication with the calls of an engine that gets a new prompt every few steps: lookup, offload,
`step`. No prompt is ever found, so each lookup asks the tiers, and each offload is written to them.

A turn is one prompt: all steps until the next one, so that what a prompt causes in the engine's process falls into
its own turn. In a round each cache has one turn, and all orders of turns come up equally often. What a mode costs
is the median over the rounds of its turn's time to that of the cache without a remote store: some tens of
milliseconds lie between the two, so that what else the machine does meets both. Rounds go on until that is known
well enough, or for too long.
"""

from __future__ import annotations

import itertools
import json
import os
import platform
import socket
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mlkv import KVLayout, KVPool, MLKVConfig, MultiLevelCache, Replica
from mlkv.bench.paired import Ratio, paired_ratio
from mlkv.errors import MLKVError

MODES = ("no remote", "never answers", "hangs when asked")

_PAGE_TOKENS = 16
_PROMPT_TOKENS = 256
_STEPS_PER_PROMPT = 8
_WARM_STEPS = 64
_ROUNDS_AT_ONCE = 60  # a multiple of the number of orders
_MIN_ROUNDS = 240
"""About half a minute, in which the servers have failed often enough to be left alone for longer and longer."""

_MAX_S = 150.0
_WANTED_HALF_WIDTH = 0.007
"""A third of the 2% that are asked about."""

_STEP_S = 0.004
_CALL_DEADLINE_S = 1.0
"""Of a call to the server. Shorter than by default, so that the run sees many calls given up and tried again."""

_DRAIN_S = 60.0


class HangingServer:
    """A server on loopback that speaks just enough of Redis' protocol to be believed.

    Args:
        lets_in: answer what clients say at first (AUTH, SELECT, PING), and nothing else; else nothing at all.
    """

    def __init__(self, *, lets_in: bool) -> None:
        self._lets_in = lets_in
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._connections: list[socket.socket] = []
        self.url = f"redis://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()
        for connection in self._connections:
            connection.close()

    def _accept(self) -> None:
        while True:
            try:
                connection = self._listener.accept()[0]
            except OSError:
                return  # closed
            self._connections.append(connection)
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            while data := connection.recv(1 << 20):
                if self._lets_in and b"PING" in data:
                    connection.sendall(b"+PONG\r\n")
        except OSError:
            return  # closed by either side


@dataclass
class _Engine:
    """An engine of one rank, without a model."""

    cache: MultiLevelCache
    pool_tokens: int
    work: Callable[[], None]
    turns: list[list[float]] = field(default_factory=list)
    """Seconds of each measured step, by turn."""
    hit_steps: list[int] = field(default_factory=list)
    num_steps: int = 0
    _asked: dict[str, int] = field(default_factory=dict)

    def step(self) -> float:
        """One step; returns its seconds."""
        start = time.perf_counter()
        if self.num_steps % _STEPS_PER_PROMPT == 0:
            self._begin_prompt()
        self.work()
        result = self.cache.step()
        took_s = time.perf_counter() - start
        for request_id in result.hits:
            self.hit_steps.append(self.num_steps - self._asked.pop(request_id))
        self.num_steps += 1
        return took_s

    def take_turn(self) -> None:
        self.turns.append([self.step() for _ in range(_STEPS_PER_PROMPT)])

    def _begin_prompt(self) -> None:
        number = self.num_steps
        tokens = np.arange(number * 1000, number * 1000 + _PROMPT_TOKENS)
        self._asked[f"ask {number}"] = number
        self.cache.lookup(f"ask {number}", tokens)
        slots = torch.arange(_PROMPT_TOKENS) + number // _STEPS_PER_PROMPT * _PROMPT_TOKENS % self.pool_tokens
        # Another prompt than the one that was asked for, or the next lookup would have to wait for this offload.
        self.cache.offload(f"keep {number}", tokens + 500, slots)


def run(max_s: float = _MAX_S) -> dict[str, Any]:
    """Run the benchmark, measuring for about `max_s` at most. Returns what `--json` writes."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ExitStack() as stack:
            servers = {
                "never answers": stack.enter_context(closing(HangingServer(lets_in=False))),
                "hangs when asked": stack.enter_context(closing(HangingServer(lets_in=True))),
            }
            work = _calibrated_work()
            engines = {
                mode: _engine(stack, mode, servers[mode].url if mode in servers else None, work) for mode in MODES
            }
            for _ in range(_WARM_STEPS):
                for engine in engines.values():
                    engine.step()
            _measure(engines, max_s)
            for mode, engine in engines.items():
                _drain(mode, engine)
            rows = _rows(engines)
    finally:
        torch.set_num_threads(threads)
    return {
        "benchmark": "hang",
        "cores": len(os.sched_getaffinity(0)),
        "machine": platform.machine(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "rows": rows,
    }


def report(result: dict[str, Any]) -> str:
    """The result as a table for people."""
    lines = [
        f"{'remote store':18}{'step p50':>10}{'p99':>13}{'of no remote':>16}{'95% between':>20}"
        f"{'failed calls':>14}{'hit after steps, p50 / max':>28}"
    ]
    for row in result["rows"]:
        lines.append(
            f"{row['remote']:18}{row['p50_ms']:>7.3f} ms{row['p99_ms']:>10.3f} ms{row['ratio']:>16.4f}"
            f"{row['ratio_low']:>11.4f} .. {row['ratio_high']:.4f}{row['failed_calls']:>13}"
            f"{row['hit_steps_p50']:>21.0f} / {row['hit_steps_max']:.0f}"
        )
    return "\n".join(lines)


def write(result: dict[str, Any], path: Path) -> None:
    path.write_text(json.dumps(result, indent=2) + "\n")


def _calibrated_work() -> Callable[[], None]:
    """Matrix multiplications that take about `_STEP_S`."""
    matrix = torch.rand(192, 192)
    fastest_s = float("inf")
    for _ in range(100):  # the fastest is what it takes when nobody else runs
        start = time.perf_counter()
        matrix @ matrix
        fastest_s = min(fastest_s, time.perf_counter() - start)
    times = max(1, round(_STEP_S / fastest_s))

    def work() -> None:
        for _ in range(times):
            matrix @ matrix

    return work


def _engine(stack: ExitStack, mode: str, url: str | None, work: Callable[[], None]) -> _Engine:
    layout = KVLayout.gqa(num_layers=4, num_kv_heads=2, head_dim=64, dtype=torch.float32, page_tokens=_PAGE_TOKENS)
    pool_tokens = 8 * _PROMPT_TOKENS
    tensors = [[torch.zeros(pool_tokens, 2, 64) for _ in range(4)] for _ in ("k", "v")]
    pool = KVPool.from_layers(layout, k=tensors[0], v=tensors[1])
    remote = None if url is None else {"url": url, "deadline_s": _CALL_DEADLINE_S}
    config = MLKVConfig(
        model="bench",
        page_tokens=_PAGE_TOKENS,
        store={
            "host_bytes": 512 * layout.page_bytes,
            "name": f"bench-{os.getpid()}-{mode.replace(' ', '-')}",
            "remote": remote,
        },
    )
    cache = stack.enter_context(closing(MultiLevelCache(config, layout, pool, Replica.single())))
    return _Engine(cache, pool_tokens, work)


def _measure(engines: dict[str, _Engine], max_s: float) -> None:
    # Every order equally often, so that what one does to the next evens out.
    orders = list(itertools.permutations(engines.values()))
    num_rounds = 0
    stop_at = time.monotonic() + max_s
    while time.monotonic() < stop_at:
        for number in range(_ROUNDS_AT_ONCE):
            for engine in orders[number % len(orders)]:
                engine.take_turn()
        num_rounds += _ROUNDS_AT_ONCE
        # When to stop depends on how sure the ratios are and never on what they are, which would favour one side.
        if num_rounds >= _MIN_ROUNDS and all(
            _ratio(engine, engines[MODES[0]]).half_width < _WANTED_HALF_WIDTH for engine in engines.values()
        ):
            return


def _ratio(engine: _Engine, without: _Engine) -> Ratio:
    return paired_ratio(np.array(engine.turns).sum(axis=1), np.array(without.turns).sum(axis=1))


def _drain(mode: str, engine: _Engine) -> None:
    give_up_at = time.monotonic() + _DRAIN_S
    while engine.cache.pending:
        if time.monotonic() > give_up_at:
            raise MLKVError(f"{mode}: requests were in flight {_DRAIN_S:g} s after the last step")
        engine.cache.step()


def _rows(engines: dict[str, _Engine]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for mode, engine in engines.items():
        tiers = engine.cache.audit().tiers
        seconds = np.array(engine.turns)  # [turns, steps]
        p50, p99 = np.percentile(seconds, [50, 99])
        ratio = _ratio(engine, engines[MODES[0]])
        rows.append(
            {
                "remote": mode,
                "steps": seconds.size,
                "p50_ms": float(p50) * 1e3,
                "p99_ms": float(p99) * 1e3,
                "ratio": ratio.median,
                "ratio_low": ratio.low,
                "ratio_high": ratio.high,
                "failed_calls": sum(sum(tier.failures.values()) for tier in tiers),
                "hit_steps_p50": float(np.median(engine.hit_steps)),
                "hit_steps_max": float(max(engine.hit_steps)),
            }
        )
    return rows
