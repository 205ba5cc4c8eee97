"""Main jobs whose ranks are struck at a chosen moment, and what must hold afterwards.

The ranks run the main job itself (`mlkv.engine.job`), but are forked from a server that has imported everything,
so that a job takes seconds. Without torchrun each rank is a process of its own that finds the others by
environment variables, as under Slurm: nobody ends the survivors, so what they find out by themselves is seen.
Under torchrun's agent, which ends survivors at once, it is seen whether a restarted job completes.
"""

from __future__ import annotations

import ctypes
import faulthandler
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from mlkv.engine import job, options
from mlkv.engine import plan as files
from mlkv.engine.audits import run_audits
from mlkv.engine.model import DTYPES, check_model
from mlkv.engine.planning import make_plan
from mlkv.engine.watch import PATIENCE_S
from mlkv.store import Report, Stats, StoreClient
from mlkv.store.rendezvous import is_listening

ROOT = Path(__file__).resolve().parents[1]

DEADLINE_S = 4.0
"""`agree.deadline_s` of these jobs."""

_NOTICE_S = DEADLINE_S + 2 * PATIENCE_S
"""For survivors to end. Who is gone is seen at once, but one that never checked in only at the deadline."""

_CONNECT_S = 3 * DEADLINE_S
"""`store.connect_deadline_s`: an owner's start takes a second or two of a busy machine."""

_STALL_NOTICE_S = _CONNECT_S + 3 * PATIENCE_S
"""As `_NOTICE_S` where nobody ends: the longest wait there is, for a stopped rank that starts the owner."""

_LIFE_LIMIT_S = 60.0  # of one job; it takes a few seconds
_OWNER_END_S = 12.0  # one that is still starting must first find that nobody waits for it
_STACKS_S = 0.3  # to write them
_PR_SET_CHILD_SUBREAPER = 36
_KEPT = "kept"  # `store.name` of an owner that outlives the job

Kind = Literal["kill", "exit", "raise", "stall"]

_context = multiprocessing.get_context("forkserver")


def prepare() -> None:
    """Once, before the first job: settings of all jobs, and this process as the parent of whatever they leave."""
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "scripts")])
    os.environ["MLKV_AGREE__DEADLINE_S"] = str(DEADLINE_S)
    os.environ["MLKV_STORE__CONNECT_DEADLINE_S"] = str(_CONNECT_S)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    os.environ["OMP_NUM_THREADS"] = "1"
    _context.set_forkserver_preload(["kill_rig"])
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    # Started now, so that it is no child that a job has left.
    starter = _context.Process(target=time.sleep, args=(0.0,))
    starter.start()
    starter.join()


@dataclass(frozen=True)
class Strike:
    """What happens to one rank of a job. `moment_s`: after its start."""

    kind: Kind
    victim: int
    moment_s: float


@dataclass
class Job:
    """A main job in a folder of its own: a tiny model with random weights, prompts that share their beginning."""

    folder: Path
    dp: int
    keep: bool = False
    """Start the store's owner beforehand, to outlive the job."""

    def __post_init__(self) -> None:
        topics = ("a page of the cache", "a rank that is lost", "the deadline of a step", "a lease")
        lines = [f"{'Say in one sentence, and with care, what follows from this. ' * 3}{t}." for t in topics]
        prompts = self.folder / "prompts.txt"
        prompts.write_text("\n".join(lines * 2 * self.dp) + "\n")
        asked = ["--model", "random:tiny", "--device", "cpu", "--dp", str(self.dp), "--prompts", str(prompts)]
        # Late transfers, so that a rank is often struck while some are under way and pages are leased.
        asked += ["--max-new-tokens", "6", "--host-cache", "8MiB", "--faults", "delay=all:5-60ms"]
        chosen = options.parse(asked)
        self.run_folder = self.folder / "run"
        self.run_folder.mkdir(mode=0o700)
        self.plan = make_plan(chosen, self.run_folder, self.folder, lambda _message: None)
        files.write(self.plan, self.plan_path)
        self.size = self.plan.tp * self.plan.dp
        geometry = check_model(self.plan.model.prepared().config(), self.plan.tp)
        self._page_bytes = geometry.kv_layout(DTYPES[self.plan.dtype], self.plan.page_tokens).page_bytes
        self._owner: subprocess.Popen[bytes] | None = None
        if self.keep:
            self._start_owner()

    @property
    def plan_path(self) -> Path:
        return self.run_folder / "plan.json"

    @property
    def results(self) -> Path:
        return files.newest_start(self.run_folder)

    def environment(self) -> dict[str, str]:
        return {"MLKV_STORE__NAME": _KEPT} if self.keep else {}

    def phase(self, victim: int) -> str:
        """How far the replica of this rank is."""
        replica = victim // self.plan.tp
        if (self.results / f"replica{replica}.json").exists():
            return "teardown"
        progress = self.results / f"progress{replica}.json"
        return files.read(progress, files.Progress).phase if progress.exists() else "start-up"

    def answers(self) -> dict[str, list[int]]:
        replicas = files.read_all(self.results, "replica*.json", files.ReplicaResult)
        return {served.request_id: served.answer for r in replicas for served in r.served["on"]}

    def books(self) -> Report:
        """Of the owner that was kept."""
        client = StoreClient.connect(
            self._socket, host_bytes=self.plan.host_bytes, page_bytes=self._page_bytes, group=bytes(16), rank=0,
            deadline_s=_OWNER_END_S,
        )  # fmt: skip
        try:
            return client.call(Stats(audit=True), _OWNER_END_S)
        finally:
            client.close()

    def end_owner(self) -> None:
        if self._owner is not None:
            self._owner.terminate()
            self._owner.wait(_OWNER_END_S)

    @property
    def owner_pid(self) -> int:
        return -1 if self._owner is None else self._owner.pid

    @property
    def _socket(self) -> Path:
        return self.run_folder / f"{_KEPT}.sock"

    def _start_owner(self) -> None:
        command = [sys.executable, "-m", "mlkv.store.owner", "--socket", str(self._socket), "--keep"]
        command += ["--host-bytes", str(self.plan.host_bytes), "--page-bytes", str(self._page_bytes)]
        with open(self.folder / "owner.log", "wb") as log:
            self._owner = subprocess.Popen(command, stdout=log, stderr=log, cwd=self.folder)
        end = time.monotonic() + 2 * _OWNER_END_S
        while not is_listening(self._socket):
            if time.monotonic() > end:
                raise TimeoutError(
                    f"no owner listens at {self._socket}: {(self.folder / 'owner.log').read_text()}"
                )
            time.sleep(0.02)


# -- in a rank -----------------------------------------------------------------------------------------------


def run_rank(plan_path: str, environment: dict[str, str], log_folder: str, kind: str) -> None:
    """A rank's process: the main job's own `main`, with a signal that makes its code fail."""
    os.environ.update(environment)
    log = os.open(f"{log_folder}/rank{os.environ['RANK']}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)

    def fail(_signum: int, _frame: Any) -> NoReturn:
        if kind == "exit":
            os._exit(3)
        raise ZeroDivisionError("the code of the engine fails")

    signal.signal(signal.SIGUSR1, fail)
    faulthandler.register(signal.SIGUSR2)  # into the log, of a rank that does not end
    sys.argv = ["job", plan_path]
    job.main()


# -- without torchrun ----------------------------------------------------------------------------------------


@dataclass
class Ending:
    """How a job ended.

    Attributes:
        phase: when the strike fell; "" if the victim had ended before.
        problems: what should not be; empty for a good ending.
        named: survivors that named the victim; completed: those that had their results already.
        seconds: from the strike to the end of the last survivor.
    """

    phase: str
    problems: list[str]
    named: int = 0
    completed: int = 0
    seconds: float = 0.0


class Ranks:
    """The ranks of a job, each started by itself."""

    def __init__(self, work: Job, kind: str = "") -> None:
        self._job = work
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.processes = []
        self.start = time.monotonic()
        for rank in range(work.size):
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": work.size, "LOCAL_WORLD_SIZE": work.size}
            place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            environment = {name: str(value) for name, value in place.items()} | work.environment()
            arguments = (str(work.plan_path), environment, str(work.folder), kind)
            process = _context.Process(target=run_rank, args=arguments)
            process.start()
            self.processes.append(process)

    def wait(self, ranks: list[int], limit_s: float) -> list[int]:
        """Those that have not ended in time; they are killed."""
        end = time.monotonic() + limit_s
        for rank in ranks:
            self.processes[rank].join(max(0.0, end - time.monotonic()))
        stuck = [rank for rank in ranks if self.processes[rank].exitcode is None]
        for rank in stuck:
            os.kill(self.processes[rank].pid, signal.SIGUSR2)
        time.sleep(_STACKS_S if stuck else 0.0)
        for rank in stuck:
            self.processes[rank].kill()
            self.processes[rank].join()
        return stuck


def run_undisturbed(work: Job) -> float:
    """Seconds that it took. Raises RuntimeError when a rank fails."""
    ranks = Ranks(work)
    stuck = ranks.wait(list(range(work.size)), _LIFE_LIMIT_S)
    if stuck or any(process.exitcode for process in ranks.processes):
        logs = "".join((work.folder / f"rank{rank}.log").read_text()[-2000:] for rank in range(work.size))
        raise RuntimeError(f"the undisturbed job failed:\n{logs}")
    return time.monotonic() - ranks.start


def run_struck(work: Job, strike: Strike) -> Ending:
    """All ranks but the victim must end by an error that names it, unless their work was done."""
    ranks = Ranks(work, strike.kind)
    victim = ranks.processes[strike.victim]
    victim.join(max(0.0, ranks.start + strike.moment_s - time.monotonic()))
    ending = Ending(work.phase(strike.victim), [])
    if victim.exitcode is None:
        assert victim.pid is not None
        signals = {"kill": signal.SIGKILL, "stall": signal.SIGSTOP}
        os.kill(victim.pid, signals.get(strike.kind, signal.SIGUSR1))
        if strike.kind != "stall":
            victim.join(_NOTICE_S)  # a signal handler waits for the end of what its process is just in
    if victim.exitcode == 0:
        ending.phase = ""
    struck_at = time.monotonic()
    others = [rank for rank in range(work.size) if rank != strike.victim]
    stuck = ranks.wait(others, _STALL_NOTICE_S if strike.kind == "stall" else _NOTICE_S)
    ending.seconds = time.monotonic() - struck_at
    if strike.kind == "stall":
        victim.kill()
    victim.join()
    for rank in others:
        if rank in stuck:
            ending.problems.append(f"rank {rank} did not end within {ending.seconds:.1f} s")
        else:
            _judge(work, strike, rank, ranks.processes[rank].exitcode, ending)
    return ending


def _judge(work: Job, strike: Strike, rank: int, exitcode: int | None, ending: Ending) -> None:
    left = work.results / f"error{rank}.json"
    if left.exists():
        error = files.read(left, files.RankError)
        if error.lost == strike.victim:
            ending.named += 1
        else:
            ending.problems.append(f"rank {rank} names rank {error.lost}: {error.kind}: {error.message}")
    elif exitcode == 0 and (work.results / f"rank{strike.victim}.json").exists():
        ending.completed += 1  # the victim had left its results, so nothing was lost with it
    else:
        ending.problems.append(f"rank {rank} ended with status {exitcode} and said nothing")


# -- under torchrun ------------------------------------------------------------------------------------------


def run_restarted(work: Job, strike: Strike, answers: dict[str, list[int]]) -> Ending:
    """torchrun's agent starts all ranks again; the job must complete, with right books and the given answers."""
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=work.size,
        run_id=work.folder.name,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
        max_restarts=1,
        monitor_interval=0.1,
        start_method="forkserver",
    )
    ending = Ending("", [])
    striker = threading.Thread(target=_strike_when_due, args=(work, strike, ending))
    striker.start()
    start = time.monotonic()
    try:
        arguments = (str(work.plan_path), work.environment(), str(work.folder), strike.kind)
        elastic_launch(config, run_rank)(*arguments)
    except ChildFailedError as error:
        ending.problems.append(f"the job failed: {error}")
    striker.join()
    ending.seconds = time.monotonic() - start
    if ending.problems:
        return ending
    # In teardown the victim may have ended by itself, and a signal to it before its parent takes note is no error.
    # Had it been struck down, the agent, which sees how ranks end, would have started them again.
    if ending.phase not in ("", "teardown") and work.results.name == "start0":
        ending.problems.append("nothing was started again")
    replicas = files.read_all(work.results, "replica*.json", files.ReplicaResult)
    ranks = files.read_all(work.results, "rank*.json", files.RankResult)
    audits = run_audits(work.plan, replicas, ranks)
    ending.problems += [f"{audit.name}: {audit.detail}" for audit in audits if not audit.passed]
    if work.answers() != answers:
        ending.problems.append("the answers are not those of an undisturbed job")
    ending.completed = len(ranks)
    return ending


def _strike_when_due(work: Job, strike: Strike, ending: Ending) -> None:
    """The moment counts from when the victim has checked in."""
    present = work.run_folder / "start0" / f"present{strike.victim}.json"
    files.wait_for([present], _LIFE_LIMIT_S)
    handle = os.pidfd_open(files.read(present, files.CheckedIn).pid)
    time.sleep(strike.moment_s)
    phase = work.phase(strike.victim)
    try:
        signal.pidfd_send_signal(handle, signal.SIGKILL if strike.kind == "kill" else signal.SIGUSR1)
    except ProcessLookupError:
        return  # it had ended
    finally:
        os.close(handle)
    ending.phase = phase


# -- what is left --------------------------------------------------------------------------------------------


class Surroundings:
    """What was there before a job, so that what it has left is seen."""

    def __init__(self, work: Job) -> None:
        self._job = work
        self._shared = set(os.listdir("/dev/shm"))
        self._children = _children()

    def problems(self) -> list[str]:
        """Once the ranks have ended: processes, sockets, shared memory; the books of an owner that was kept."""
        problems = self._kept_books() if self._job.keep else []
        self._job.end_owner()
        end = time.monotonic() + _OWNER_END_S
        while (left := self._left()) and time.monotonic() < end:
            time.sleep(0.01)
        for pid, line in left.items():
            problems.append(f"process {pid} is left: {line}")
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        # Of the folder's files only the job's own records may remain.
        records = {"plan.json", "start0", "start1"}
        problems += [f"{path.name} is left" for path in self._job.run_folder.iterdir() if path.name not in records]
        shared = set(os.listdir("/dev/shm")) - self._shared
        problems += [f"/dev/shm/{name} is left" for name in sorted(shared) if "mlkv" in name]
        return problems

    def _kept_books(self) -> list[str]:
        end = time.monotonic() + _OWNER_END_S
        while True:
            books = self._job.books()
            held = books.leases, books.reservations, books.reserved, books.quarantined
            fine = not books.problem and not any(held) and books.free + books.ready == books.num_pages
            if fine:
                return []
            if time.monotonic() > end:
                return [f"the owner still holds something: {books}"]
            time.sleep(0.05)

    def _left(self) -> dict[int, str]:
        left = {}
        for pid in _children() - self._children - {self._job.owner_pid}:
            try:
                if os.waitpid(pid, os.WNOHANG) == (0, 0):
                    left[pid] = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
            except (ChildProcessError, FileNotFoundError):
                continue  # waited for by its owner, or just gone
        return left


def _children() -> set[int]:
    task = Path(f"/proc/self/task/{os.getpid()}/children")
    return {int(pid) for pid in task.read_text().split()}
