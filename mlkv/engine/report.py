"""What a person sees of the main job: progress while it runs, a table at the end, and the same as JSON."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from mlkv.engine import plan as files
from mlkv.engine.audits import Audit
from mlkv.engine.plan import JobPlan, RankResult, ReplicaResult, Served

_PHASES = {
    "": "starting ranks, loading the model",
    "off": "serving with the cache off",
    "noise": "cache off in other chunks, to measure noise",
    "on": "serving with the cache on",
    "done": "checking",
}

_SOURCES = ("computed", "device", "host")

_LABELS = {"computed": "computed", "device": "found on the device", "host": "loaded from the host"}
"""Of the tokens of prompts by where their KV came from; of any other tier it is "loaded from" its name."""


class ProgressView:
    """Follows the replicas' progress files: a bar on a terminal, a line for each phase elsewhere."""

    def __init__(self, console: Console, plan: JobPlan) -> None:
        self._console, self._plan = console, plan
        self._folder = Path(plan.run_folder)
        self._total = len(plan.phases) * sum(map(len, plan.asks))
        self._shown = ""
        self._start = time.monotonic()
        self._bar: Progress | None = None
        if console.is_terminal:
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("requests"),
                TimeElapsedColumn(),
                console=console,
                transient=True,
            )
            self._task = self._bar.add_task(_PHASES[""], total=self._total)

    def __enter__(self) -> ProgressView:
        if self._bar is not None:
            self._bar.start()
        else:
            self._say(_PHASES[""])
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self) -> None:
        """Read what the replicas have written so far."""
        found = files.read_all(files.newest_start(self._folder), "progress*.json", files.Progress)
        if not found:
            return
        order = self._plan.phases
        done = sum(order.index(p.phase) * p.total + p.done for p in found)
        # Replicas go on by themselves; the slowest one says where the job is.
        slowest = min(order.index(p.phase) for p in found)
        phase = "done" if done == self._total else order[slowest]
        if self._bar is not None:
            self._bar.update(self._task, completed=done, description=_PHASES[phase])
        elif phase != self._shown:
            self._say(_PHASES[phase])
        self._shown = phase

    def _say(self, text: str) -> None:
        self._console.print(f"[{time.monotonic() - self._start:5.1f} s] {text}", markup=False, highlight=False)


def summarise(
    plan: JobPlan, replicas: Sequence[ReplicaResult], ranks: Sequence[RankResult], audits: Sequence[Audit]
) -> dict[str, Any]:
    """All of the report, as it is written to the JSON file."""
    served = {phase: [s for replica in replicas for s in replica.served[phase]] for phase in plan.phases}
    masters = [result for result in ranks if result.rank % plan.tp == 0]
    requests = []
    for without, with_cache in zip(_sorted(served["off"]), _sorted(served["on"]), strict=True):
        requests.append(
            {
                "id": with_cache.request_id,
                "prompt_tokens": with_cache.prompt_tokens,
                "tokens": _tokens([with_cache]),
                "ttft_s": {"on": with_cache.ttft_s, "off": without.ttft_s},
                "answer": with_cache.text,
            }
        )
    return {
        "world": {"tp": plan.tp, "dp": plan.dp, "backend": plan.backend, "device": plan.device},
        "model": {"name": plan.model.name, "digest": plan.model.digest, "dtype": plan.dtype},
        "settings": {
            "engine": plan.engine,
            "page_tokens": plan.page_tokens,
            "device_pool_tokens": plan.pool_pages * plan.page_tokens,
            "host_cache_bytes": plan.host_bytes,
            "max_new_tokens": plan.max_new_tokens,
            "concurrency": plan.concurrency,
            "faults": plan.faults,
            "channel": masters[0].channel,
        },
        "tokens": _by_tier(_tokens(served["on"]), plan, masters),
        "tokens_off": _tokens(served["off"]),
        "ttft_s": {"on": _ttft(served["on"]), "off": _ttft(served["off"])},
        "seconds": {phase: max(replica.seconds[phase] for replica in replicas) for phase in plan.phases},
        "pages": {
            "loaded": sum(result.loaded_pages for result in masters),
            "offloaded": sum(result.offloaded_pages for result in masters),
        },
        "bytes": {
            "loaded": sum(result.loaded_bytes for result in ranks),
            "offloaded": sum(result.offloaded_bytes for result in ranks),
        },
        "failed": {
            "loads": sum(result.failed_loads for result in masters),
            "offloads": sum(result.failed_offloads for result in masters),
        },
        "step_us": {name: max(result.agree_us[name] for result in masters) for name in ("p50", "p99")},
        "steps": sum(result.steps for result in masters),
        "audits": {audit.name: audit.passed for audit in audits},
        "audit_details": {audit.name: audit.detail for audit in audits},
        "requests": requests,
    }


def _sorted(served: Sequence[Served]) -> list[Served]:
    return sorted(served, key=lambda s: s.request_id)


def _tokens(served: Sequence[Served]) -> dict[str, int]:
    return {source: sum(getattr(s, f"{source}_tokens") for s in served) for source in _SOURCES}


def _by_tier(tokens: dict[str, int], plan: JobPlan, masters: Sequence[RankResult]) -> dict[str, int]:
    """Of the tokens loaded from host memory, those that a lower tier had brought there for their request.

    Tiers that are there are named also when they brought nothing.
    """
    pages = dict.fromkeys(plan.tiers, 0)
    for result in masters:
        for tier, count in result.loaded_pages_by_tier.items():
            # A remote store is called by what it is (s3, redis): here it is the one below the disk.
            where = "disk" if tier == "disk" else "remote"
            pages[where] = pages.get(where, 0) + count
    below = {tier: count * plan.page_tokens for tier, count in pages.items()}
    return {**tokens, "host": tokens["host"] - sum(below.values()), **below}


def _ttft(served: Sequence[Served]) -> dict[str, float]:
    p50, p95 = np.percentile([s.ttft_s for s in served], [50, 95])
    return {"p50": float(p50), "p95": float(p95)}


def print_report(console: Console, report: dict[str, Any]) -> None:
    """The table that a person reads."""
    world, model, settings = report["world"], report["model"], report["settings"]
    tokens, before, ttft = report["tokens"], report["tokens_off"], report["ttft_s"]
    where = " in vLLM" if settings["engine"] == "vllm" else ""
    console.print(
        f"{model['name']} in {model['dtype']}{where}, tp={world['tp']} dp={world['dp']}, {world['backend']} on "
        f"{world['device']}: {len(report['requests'])} requests, device pool of "
        f"{settings['device_pool_tokens']:,} tokens",
        soft_wrap=True,
        markup=False,
        highlight=False,
    )
    table = Table()
    table.add_column("")
    for name in ("cache off", "cache on", "on / off"):
        table.add_column(name, justify="right")
    for source, count in tokens.items():
        label = _LABELS.get(source, f"loaded from {source}")
        table.add_row(f"prompt tokens {label}", f"{before.get(source, 0):,}", f"{count:,}", "")
    for name in ("p50", "p95"):
        off, on = ttft["off"][name], ttft["on"][name]
        table.add_row(f"time to first token, {name}", f"{off:.3f} s", f"{on:.3f} s", f"{on / off:.2f}")
    seconds = report["seconds"]
    table.add_row(
        "whole workload",
        f"{seconds['off']:.1f} s",
        f"{seconds['on']:.1f} s",
        f"{seconds['on'] / seconds['off']:.2f}",
        end_section=True,
    )
    for label, way in (("offloaded, device to host", "offloaded"), ("loaded, host to device", "loaded")):
        moved = f"{report['bytes'][way] / 1e6:,.1f} MB"
        table.add_row(label, "", f"{report['pages'][way]:,} pages", moved)
    failed = report["failed"]
    if failed["loads"] or failed["offloads"]:
        table.add_row("failed loads, offloads", "", f"{failed['loads']}, {failed['offloads']}", "")
    step = report["step_us"]
    table.add_row("agreement per step, p50 / p99", "", f"{step['p50']:,.0f} / {step['p99']:,.0f} us", "")
    console.print(table)
    for name, passed in report["audits"].items():
        line = Text("  ok    " if passed else "  FAILED", style="green" if passed else "bold red")
        line.append(f" {name.replace('_', ' ')}: ", style="default").append(
            report["audit_details"][name], style="default"
        )
        console.print(line, soft_wrap=True)
    if settings["faults"]:
        console.print(f"  with faults: {settings['faults']}", highlight=False, markup=False)
