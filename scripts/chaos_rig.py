"""A deployment of the chaos campaign: an owner above all tiers, engines on it, a strike, and what must hold after.

All processes are forked from a server that has imported everything, so that a run takes a few seconds. The disk's
folder and the remote servers live as long as the campaign: each run finds what the ones before have left.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import chaos_engine
from chaos_checks import END_S, Checks
from chaos_engine import LAYOUT, read_report
from chaos_site import DISK_BYTES, HOST_PAGES, MODEL, Case, Ending, Moment, Site, command_line

from mlkv import MLKVConfig
from mlkv.store import owner as owner_process
from mlkv.store.rendezvous import is_listening
from mlkv.store.settings import OwnerSettings
from mlkv.store_config import DiskConfig

_START_S = 40.0
_REST_S = 0.15
"""How long survivors go on after the strike."""

_PR_SET_CHILD_SUBREAPER = 36

_LATEST_S: dict[Moment, float] = {"start": 0.7, "traffic": 1.0, "end": 0.06}
"""From when a case's moment begins: the start of the first process, the first load of each engine, and its end."""

_context = multiprocessing.get_context("forkserver")


def prepare() -> None:
    """Once, before the first run: this process becomes the parent of whatever is left behind."""
    root = Path(__file__).resolve().parents[1]
    os.environ["PYTHONPATH"] = os.pathsep.join([str(root), str(root / "scripts")])
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    os.environ["OMP_NUM_THREADS"] = "1"
    _context.set_forkserver_preload(["chaos_rig"])
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    starter = _context.Process(target=time.sleep, args=(0.0,))  # so that the server is no child of a run
    starter.start()
    starter.join()


def be_owner(settings: OwnerSettings) -> None:
    """The process of an owner that somebody started by hand."""
    log = os.open(str(settings.log_file), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.exit(owner_process.run(settings))


class Run:
    """One run: traffic, a strike, the survivors' end, a restart, and all checks."""

    def __init__(self, case: Case, site: Site, folder: Path) -> None:
        self._case = case
        self._site = site
        self._folder = folder
        self._chance = random.Random(f"{case.number}/moment")
        self._remote = site.remote(case.remote)
        self._disk = DiskConfig(directory=site.disk, limit_bytes=DISK_BYTES, threads=2)
        self._socket = folder / "sockets" / "chaos.sock"
        self._owner: Any = None
        self._ranks: list[tuple[str, Any]] = []
        self.ending = Ending()
        self._checks = Checks(site, self._socket, self.ending, self._known)

    def do(self) -> Ending:
        start = time.monotonic()
        try:
            self._live_and_strike()
            self._end_survivors()
            if self._case.damage:
                self._damage()
            self._restart()
        except (RuntimeError, TimeoutError, AssertionError) as error:
            self._problem(f"{type(error).__name__}: {error}")
        finally:
            self._kill_all()
        self.ending.seconds = round(time.monotonic() - start, 2)
        return self.ending

    # -- traffic and the strike

    def _live_and_strike(self) -> None:
        case = self._case
        if not case.embedded:
            self._start_owner()
        due_s = self._chance.uniform(0.0, _LATEST_S[case.moment])
        begun = time.monotonic()
        if case.moment == "start":
            # Whatever there is when the moment comes is struck, be it the owner alone.
            while time.monotonic() < begun + due_s or not self._victims():
                if not self._ranks and (case.embedded or is_listening(self._socket)):
                    self._start_ranks()
                if time.monotonic() > begun + _START_S:
                    raise TimeoutError(f"within {_START_S} s there is nobody to strike")
                time.sleep(0.005)
            self._strike()
            if not self._ranks:
                return
        else:
            if not case.embedded:
                _wait_for(lambda: is_listening(self._socket), "the owner listens", _START_S)
            self._start_ranks()
            _wait_for(self._all_serve, "every engine has served a request", _START_S)
            if case.moment == "traffic":
                time.sleep(due_s)
                self._strike()
            else:
                time.sleep(self._chance.uniform(0.0, 0.3))
                self._stop_ranks()
                if case.victim == "owner" and self._owner is not None:
                    self._wait_for_ranks()
                    self._owner.terminate()  # it still writes what waits
                time.sleep(due_s)
                self._strike()
        time.sleep(_REST_S)

    def _all_serve(self) -> bool:
        if any(process.exitcode for _, process in self._ranks):
            raise RuntimeError("an engine ended before the strike")
        return all(read_report(self._report_of(name)).loads for name, _ in self._ranks)

    def _victims(self) -> list[int]:
        """Those that are there, of whom the case wants to strike."""
        ranks = [process.pid for _, process in self._ranks if process.exitcode is None]
        owner = self._owner_pid()
        victims = []
        if self._case.victim in ("owner", "both"):
            victims += [owner] if owner else []
        if self._case.victim in ("ranks", "both"):
            victims += ranks
        if self._case.victim == "rank":
            victims += ranks[self._chance.randrange(len(ranks)) :][:1] if ranks else []
        return victims

    def _strike(self) -> None:
        victims = self._victims()
        self._chance.shuffle(victims)
        for pid in victims:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                self.ending.struck = True

    # -- processes

    def _start_owner(self) -> None:
        settings = OwnerSettings(
            socket_path=self._socket,
            host_bytes=HOST_PAGES * LAYOUT.page_bytes,
            page_bytes=LAYOUT.page_bytes,
            keep=True,
            log_file=self._folder / "owner.log",
            disk=self._disk,
            remote=self._remote,
            admission=self._case.admission,
        )
        self._owner = _context.Process(target=be_owner, args=(settings,))
        self._owner.start()

    def _owner_pid(self) -> int:
        if self._owner is not None:
            return self._owner.pid if self._owner.exitcode is None else 0
        for pid in self._checks.left_processes():
            if "mlkv.store.owner" in command_line(pid) and str(self._socket) in command_line(pid):
                return pid
        return 0

    def _start_ranks(self) -> None:
        size = self._case.tp
        names = [f"engine{number}" for number in range(1 if size > 1 else self._case.engines)]
        for name in names:
            seeded = f"{name}.{self._case.number.replace('/', '-')}"
            for rank in range(size):
                self._start_rank(seeded, rank, size, reads=False)

    def _start_rank(self, name: str, rank: int, size: int, reads: bool) -> None:
        store = {"host_bytes": HOST_PAGES * LAYOUT.page_bytes, "directory": self._socket.parent, "name": "chaos"}
        store |= {"connect_deadline_s": 20.0, "disk": self._disk, "remote": self._remote}
        store |= {"admission": self._case.admission, "lookup_wait_s": 1.5 if reads else 0.5}
        config = MLKVConfig(
            model=MODEL, page_tokens=LAYOUT.page_tokens, store=store, agree={"deadline_s": 15.0}, faults=""
        )
        process = _context.Process(
            target=chaos_engine.run_rank, args=(config, rank, size, self._folder, name, reads)
        )
        process.start()
        self._ranks.append((f"{name}-{rank}", process))

    def _report_of(self, name: str) -> Path:
        return self._folder / f"{name}.json"

    def _stop_ranks(self) -> None:
        (self._folder / "stop").touch()

    def _wait_for_ranks(self) -> None:
        end = time.monotonic() + END_S
        for name, process in self._ranks:
            process.join(max(0.0, end - time.monotonic()))
            if process.exitcode is None:
                self._problem(f"{name} did not end within {END_S} s")
                process.kill()
                process.join()

    def _end_survivors(self) -> None:
        """Whatever still lives ends as it should, and leaves nothing."""
        self._stop_ranks()
        self._wait_for_ranks()
        struck_ranks = self._case.victim in ("rank", "ranks", "both")
        for name, process in self._ranks:
            self._judge_rank(name, process.exitcode, struck_ranks)
        self._ranks = []
        self._end_owner(was_struck=self._case.victim in ("owner", "both") and self.ending.struck)

    def _judge_rank(self, name: str, exitcode: int | None, struck_ranks: bool) -> None:
        told = read_report(self._report_of(name))
        self.ending.requests += told.requests
        self.ending.pages_loaded += told.pages
        for tier, pages in told.pages_by_tier.items():
            self.ending.pages_by_tier[tier] = self.ending.pages_by_tier.get(tier, 0) + pages
        self.ending.problems += [f"{name} got wrong bytes: {wrong}" for wrong in told.wrong]
        how = {0: "ended", -signal.SIGKILL: "killed"}.get(exitcode or 0, "failed")
        if how == "failed":
            # A lost neighbour ends a replica; an owner that goes while they connect ends an engine.
            lost = told.failure.startswith(("RankLost", "RuntimeError")) and struck_ranks and self._case.tp > 1
            refused = "Store" in told.failure.partition(":")[0] and self._case.moment == "start"
            how = "lost a rank" if lost else "found no store" if refused else how
        if how == "failed":
            self._problem(f"{name} ended with status {exitcode}: {told.failure or self._log_of(name)}")
        self.ending.engines_ended[how] = self.ending.engines_ended.get(how, 0) + 1

    def _end_owner(self, was_struck: bool) -> None:
        if self._owner is not None and self._owner.exitcode is None and not was_struck:
            self._checks.books()
            self._owner.terminate()
            self._owner.join(END_S)
            if self._owner.exitcode is None:
                self._problem(f"the owner did not end within {END_S} s")
                self._owner.kill()
        if self._owner is not None:
            self._owner.join(END_S)
            if self._owner.exitcode not in (0, -signal.SIGKILL):
                self._problem(f"the owner ended with status {self._owner.exitcode}: {self._log_of('owner')}")
        self._owner = None
        self._checks.leftovers(socket_may_stay=was_struck)

    def _kill_all(self) -> None:
        """After a run that went wrong, so that the next one does not suffer from it."""
        for process in [process for _, process in self._ranks] + [self._owner]:
            if process is not None and process.exitcode is None:
                process.kill()
                process.join()
        for pid in self._checks.left_processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    # -- damage

    def _damage(self) -> None:
        """What a bad disk does to the files, while nobody has them open."""
        slabs, catalogs = list(self._site.disk.glob("*/slab")), list(self._site.disk.glob("*/catalog*"))
        kinds = [("flip", slabs)] * 5 + [("cut", slabs), ("remove", slabs), ("flip", catalogs), ("cut", catalogs)]
        kind, files = self._chance.choice(kinds)
        if not files:
            return
        path = self._chance.choice(files)
        size = path.stat().st_size
        if kind == "remove" or not size:
            path.unlink()
        elif kind == "cut":
            os.truncate(path, self._chance.randrange(size))
        else:
            with open(path, "r+b", buffering=0) as file:
                for _ in range(24):
                    at = self._chance.randrange(size)
                    byte = os.pread(file.fileno(), 1, at)[0]
                    os.pwrite(file.fileno(), bytes([byte ^ 1 << self._chance.randrange(8)]), at)
        self.ending.damaged = f"{kind} {path.name}"

    # -- the restart and the checks

    def _restart(self) -> None:
        """A new owner on what is left: `mlkv verify`, all prompts loaded and compared, books, nothing left."""
        self._start_owner()
        _wait_for(lambda: is_listening(self._socket), "the new owner listens", _START_S)
        self._start_rank("reader", 0, 1, reads=True)
        reader, process = self._ranks[0]
        self._wait_for_ranks()
        told = read_report(self._report_of(reader))
        self.ending.pages_after_restart = dict(told.pages_by_tier)
        self.ending.problems += [f"after the restart, wrong bytes: {wrong}" for wrong in told.wrong]
        if process.exitcode:
            self._problem(f"the reader failed: {told.failure or self._log_of(reader)}")
        if told.failed_loads and not self.ending.damaged:
            self._problem(f"{told.failed_loads} loads failed after the restart, and nothing was damaged")
        self._ranks = []
        self._checks.verify("--socket", str(self._socket))
        self._end_owner(was_struck=False)
        self._checks.compare_disk()
        if self._case.remote != "none":
            self._checks.compare_remote(self._case.remote)

    def _known(self) -> set[int]:
        known = {process.pid for _, process in self._ranks}
        return known if self._owner is None else known | {self._owner.pid}

    def _log_of(self, name: str) -> str:
        path = self._folder / f"{name}.log"
        return path.read_text()[-1500:] if path.exists() else "it has left no log"

    def _problem(self, what: str) -> None:
        self.ending.problems.append(what)


def _wait_for(condition: Callable[[], bool], what: str, limit_s: float) -> None:
    end = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"not within {limit_s} s: {what}")
        time.sleep(0.01)
