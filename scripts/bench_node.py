#!/usr/bin/env python3
"""All GPUs of one host at once: what agreeing, moving and losing a rank cost, and whether links add up.

    python scripts/bench_node.py [--json FILE]                 on all GPUs of this machine
    python scripts/bench_node.py --cpu --ranks 8 [--json FILE] small sizes over Gloo, for trying the script

Each section runs in processes of its own under a time limit, and one that fails does not stop the next. Prints a
short table last, with what is to be reached; exit status 1 when something is not, or a section failed. The whole
output of every section goes to a folder beside FILE (or a temporary one).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
SECTIONS = ("links", "cooperative", "beside", "kill", "agree", "job")
# Of each start of ranks.
LIMIT_S = {"links": 75.0, "cooperative": 75.0, "beside": 75.0, "kill": 45.0, "agree": 150.0, "job": 150.0}
COOPERATIVE_LINKS = {2: 1.85, 4: 3.2, 8: 5.0}  # to reach, by number of ranks
AGREE_US = 15.0
OF_LINKS = 0.9


@dataclass
class Bench:
    """A run: where, with how many ranks, what came out and how it compares."""

    num_ranks: int
    device: str
    folder: Path
    budget_s: float
    data: dict[str, Any] = field(default_factory=dict)
    lines: list[tuple[str, str, str, str]] = field(default_factory=list)
    started_at: float = field(default_factory=time.monotonic)
    num_cores: int = field(default_factory=lambda: len(os.sched_getaffinity(0)))

    def row(self, what: str, value: str, goal: str = "", met: bool | None = None) -> None:
        self.lines.append((what, value, goal, "" if met is None else "yes" if met else "NO"))

    def goal(self, what: str, value: str, goal: str, met: bool) -> None:
        """A row whose goal is for GPUs: memory of a CPU has no links, and few cores serve many ranks."""
        self.row(what, value, *((goal, met) if self.device == "cuda" else ("", None)))

    def limit_s(self, section: str) -> float:
        """Time for a section: its own, as far as the whole run has it. Ranks that share cores take longer."""
        crowd = max(1.0, self.num_ranks / self.num_cores)
        return min(LIMIT_S[section] * crowd, self.started_at + self.budget_s * crowd - time.monotonic())

    def environment(self) -> dict[str, str]:
        environ = dict(os.environ, NODE_DEVICE=self.device, OMP_NUM_THREADS="1")
        environ["PYTHONPATH"] = f"{HERE.parent}:{environ.get('PYTHONPATH', '')}"
        environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        # Multicast over NVLink can put the GPUs of a shared host out of service, and nothing here needs it.
        environ.setdefault("NCCL_NVLS_ENABLE", "0")
        return environ


class SectionFailed(Exception):
    """A section did not end well; the message says how."""


def run_ranks(bench: Bench, section: str, name: str, *, victims: tuple[int, ...] = ()) -> Path:
    """The ranks of a section of node_sections.py; returns the folder with what they left.

    Raises SectionFailed when one that is not a victim ends badly, or at the limit.
    """
    folder = bench.folder / name.replace(":", "-")
    shutil.rmtree(folder, ignore_errors=True)  # ranks of an earlier run met there
    folder.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + bench.limit_s(section)
    logs = [open(folder / f"rank{rank}.log", "w") for rank in range(bench.num_ranks)]  # noqa: SIM115  closed below
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank, log in enumerate(logs):
            environ = bench.environment() | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            # One name for the job of all ranks, as a launcher would give them; they meet in the folder.
            environ |= {"WORLD_SIZE": str(bench.num_ranks), "MASTER_ADDR": str(folder), "MASTER_PORT": "0"}
            command = [sys.executable, str(HERE / "node_sections.py"), name, str(folder)]
            processes.append(subprocess.Popen(command, env=environ, stdout=log, stderr=log))
        waiting = set(range(bench.num_ranks))
        while waiting:
            for rank in sorted(waiting):
                code = processes[rank].poll()
                if code is not None:
                    waiting.discard(rank)
                    if code and rank not in victims:
                        raise SectionFailed(
                            f"rank {rank} ended with {code}: {last_line(folder / f'rank{rank}.log')}"
                        )
            if time.monotonic() > end:
                raise SectionFailed(f"ranks {sorted(waiting)} did not end within the limit")
            time.sleep(0.05)
    finally:
        for process in processes:
            process.kill()
            process.wait()
        for log in logs:
            log.close()
    return folder


def run_command(bench: Bench, section: str, command: list[str]) -> None:
    """A script of its own, its output in the folder. Raises SectionFailed."""
    log = bench.folder / f"{section}.log"
    with open(log, "w") as out:
        process = subprocess.Popen(
            command, env=bench.environment(), stdout=out, stderr=out, start_new_session=True, cwd=HERE.parent
        )
        try:
            code = process.wait(bench.limit_s(section))
        except subprocess.TimeoutExpired:
            raise SectionFailed(f"did not end within {bench.limit_s(section):.0f} s") from None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)  # a launcher ends its ranks
                try:
                    process.wait(15)
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
    if code:
        raise SectionFailed(f"ended with {code}: {last_line(log)}")


def last_line(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][:300] if lines else "no output"


def links(bench: Bench) -> None:
    found = json.loads((run_ranks(bench, "links", "links") / "result.json").read_text())
    bench.data["links"] = found
    for direction in ("load", "offload"):
        one, raw = found["one_link_gb_per_s"][direction], found["raw_gb_per_s"][direction]
        bench.row(f"raw {direction}s of all ranks at once, as links", f"{raw / one:.2f} x {one:.1f} GB/s")
        ratio = found[direction]["of_raw"]
        bench.goal(f"{direction}s of all ranks, of these", f"{ratio:.3f}", f">= {OF_LINKS}", ratio >= OF_LINKS)
    gib = found["pool_bytes"] / (1 << 30)
    bench.row(f"registering {gib:.2f} GiB in every rank", f"{found['pinned_s']:.2f} s")


def cooperative(bench: Bench) -> None:
    found = json.loads((run_ranks(bench, "cooperative", "cooperative") / "result.json").read_text())
    bench.data["cooperative"] = found
    bench.row("latent pages, each rank alone", f"{found['alone']['links']:.2f} links")
    reached, goal = found["cooperative"]["links"], COOPERATIVE_LINKS.get(bench.num_ranks)
    if goal is None:
        bench.row("latent pages, cooperative", f"{reached:.2f} links")
    else:
        bench.goal("latent pages, cooperative", f"{reached:.2f} links", f">= {goal}", reached >= goal)
    equal = found["alone"]["equal"] and found["cooperative"]["equal"]
    bench.row("the same bytes on every rank", str(equal).lower(), "true", equal)


def beside(bench: Bench) -> None:
    found = json.loads((run_ranks(bench, "beside", "beside") / "result.json").read_text())
    bench.data["beside"] = found
    for name, row in found.items():
        loop = "load over too soon" if row["slowdown"] is None else f"{row['slowdown']:.3f}"
        bench.row(f"all-reduce loop beside a {name}", f"{loop}, the load itself {row['own']:.2f}")


def kill(bench: Bench) -> None:
    bench.data["kill"] = {}
    for victim in (0, bench.num_ranks - 1):
        folder = run_ranks(bench, "kill", f"kill:{victim}", victims=(victim,))
        survivors = [rank for rank in range(bench.num_ranks) if rank != victim]
        told = [json.loads((folder / f"result{rank}.json").read_text()) for rank in survivors]
        bench.data["kill"][f"rank {victim}"] = told
        right = all(row["named"] == victim for row in told)
        slowest = max(row["seconds"] for row in told)
        bench.row(
            f"kill -9 of rank {victim}: named by all others in", f"{1e3 * slowest:.0f} ms", "its rank", right
        )


def agree(bench: Bench) -> None:
    steps, bench_steps = ("10000", "5000") if bench.device == "cuda" else ("300", "200")
    command = [
        sys.executable,
        str(HERE / "agree_gpus.py"),
        str(bench.folder / "agree"),
        f"--device={bench.device}",
    ]
    command += [f"--ranks={bench.num_ranks}", f"--steps={steps}", f"--bench-steps={bench_steps}"]
    run_command(bench, "agree", command)
    found = json.loads((bench.folder / "agree" / "agree.json").read_text())
    bench.data["agree"] = found
    for row in found["rows"]:
        idle, busy = row["idle"]["p50_us"], row["busy"]["p50_us"]
        what, value = f"agreement p50, {row['channel']}: idle, busy", f"{idle:.1f}, {busy:.1f} us"
        if row["channel"] == "ledger":
            bench.goal(what, value, f"< {AGREE_US:g}", max(idle, busy) < AGREE_US)
        else:
            bench.row(what, value)
    for row in found["traffic"]:
        fine = row["equal"] and row["drained"] and not row["wrong_tokens"] and not row["held_pages_and_leases"]
        what = f"{row['steps']} steps of random traffic, {row['channel']}"
        bench.row(what, "equal, no leak, bytes right" if fine else "WRONG", "equal", fine)


def job(bench: Bench) -> None:
    model, most_ranks = ("random:1b", 32) if bench.device == "cuda" else ("random:tiny", 6)  # its query heads
    tp = min(bench.num_ranks, most_ranks)
    report = bench.folder / "job.json"
    command = [sys.executable, "-m", "mlkv.engine.launch", f"--model={model}", f"--tp={tp}"]
    command += [f"--device={bench.device}", f"--json={report}"]
    failure = ""
    try:
        run_command(bench, "job", command)
    except SectionFailed as error:
        failure = str(error)
    if not report.exists():
        raise SectionFailed(failure)
    found = json.loads(report.read_text())
    bench.data["job"] = {name: value for name, value in found.items() if name != "requests"}
    ratios = ", ".join(f"{found['ttft_s']['on'][p] / found['ttft_s']['off'][p]:.2f}" for p in ("p50", "p95"))
    bench.row(f"main job, {model}, tp={tp}: first token on / off, p50, p95", ratios)
    wrong = [name for name, passed in found["audits"].items() if not passed]
    told = f"all {len(found['audits'])} true" if not wrong else f"FALSE: {', '.join(wrong)}"
    bench.row("its audits", told, "true", not wrong)


def machine(bench: Bench) -> dict[str, Any]:
    code = (
        "import json, torch; cuda = torch.cuda.is_available(); print(json.dumps({'torch': torch.__version__, "
        "'device': torch.cuda.get_device_name() if cuda else 'cpu', 'gpus': torch.cuda.device_count()}))"
    )
    # In a process of its own, so that this one holds no context on a GPU.
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    found: dict[str, Any] = json.loads(output.stdout.splitlines()[-1])
    return found | {"cores": bench.num_cores, "ranks": bench.num_ranks}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything measured to this file")
    parser.add_argument("--cpu", action="store_true", help="CPU tensors over Gloo instead of GPUs")
    parser.add_argument("--ranks", type=int, metavar="N", help="default: the number of GPUs; 2 with --cpu")
    parser.add_argument(
        "--sections", default=",".join(SECTIONS), help=f"some of {', '.join(SECTIONS)}; default all"
    )
    parser.add_argument("--budget-s", type=float, default=400.0, help="for all sections (400)")
    options = parser.parse_args()
    unknown = set(options.sections.split(",")) - set(SECTIONS)
    if unknown:
        parser.error(f"unknown sections {', '.join(sorted(unknown))}; there are {', '.join(SECTIONS)}")
    folder = Path(tempfile.mkdtemp(prefix="bench-node-"))
    if options.json is not None:
        folder = options.json.absolute().with_suffix(".d")
        folder.mkdir(parents=True, exist_ok=True)
    bench = Bench(options.ranks or 2, "cpu" if options.cpu else "cuda", folder, options.budget_s)
    found = machine(bench)
    if not options.cpu:
        if found["gpus"] < 2:
            print(
                f"bench_node takes two GPUs or more, this machine shows {found['gpus']}; see --cpu",
                file=sys.stderr,
            )
            return 2
        bench.num_ranks = found["ranks"] = options.ranks or found["gpus"]
    bench.data["machine"] = found
    print(" ".join(f"{key}={value}" for key, value in found.items()), f"output in {folder}", flush=True)
    steps: dict[str, Callable[[Bench], None]] = {
        "links": links,
        "cooperative": cooperative,
        "beside": beside,
        "kill": kill,
        "agree": agree,
        "job": job,
    }
    for name in SECTIONS:
        if name not in options.sections.split(","):
            continue
        start, first = time.monotonic(), len(bench.lines)
        try:
            if bench.limit_s(name) <= 0:
                raise SectionFailed(f"not begun: {options.budget_s:g} s are over")
            steps[name](bench)
        except (SectionFailed, OSError, KeyError, ValueError) as error:
            bench.row(f"section {name}", f"FAILED: {error}", "", False)
        for line in bench.lines[first:]:
            print("  " + "  ".join(line), flush=True)
        print(f"[{name}: {time.monotonic() - start:.0f} s]", flush=True)
        # Written after each section, so that a run that is cut short leaves what it has.
        bench.data["table"] = bench.lines
        if options.json is not None:
            options.json.write_text(json.dumps(bench.data, indent=1))
    print(f"\n{'what':62} {'here':>30} {'to reach':>10}  met")
    for what, value, goal, met in bench.lines:
        print(f"{what:62} {value:>30} {goal:>10}  {met}")
    return 1 if any(line[3] == "NO" for line in bench.lines) else 0


if __name__ == "__main__":
    sys.exit(main())
