"""What every rank of the main job does around its work, whichever engine serves it: start, books, last word."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from mlkv import MLKVError, MultiLevelCache
from mlkv.engine import plan as files
from mlkv.engine.plan import JobPlan
from mlkv.engine.processes import die_with_parent
from mlkv.engine.source import silence_transformers
from mlkv.engine.watch import RankGone, Watch
from mlkv.errors import DeadlineExceeded, RankLost, StoreLost

_REPLICAS_DEADLINE_S = 1800.0
"""For the other replicas to finish, before the store that all of them share is counted and a rank may end."""

DRAIN_DEADLINE_S = 60.0
"""For transfers that are still in flight when the last request is answered."""

_AUDIT_S = 0.05


def run_rank(work: Callable[[JobPlan, Path], None]) -> None:
    """A rank's whole process: do `work(plan, folder of this start)` of the plan that the command line names.

    If that ends with an error, leaves word of it in the folder, and ends the process with status 1.
    """
    die_with_parent(signal.SIGKILL)
    rank = int(os.environ["RANK"])
    logging.basicConfig(level=logging.INFO, format=f"rank {rank}: %(levelname)s %(name)s: %(message)s")
    plan = files.read(Path(sys.argv[1]), JobPlan)
    folder = files.start_folder(Path(plan.run_folder))
    folder.mkdir(exist_ok=True)
    silence_transformers()
    fail = _LastWord(plan, folder, rank)
    watch = Watch(folder, rank, plan.tp * plan.dp, plan.tp, plan.deadline_s, fail)
    try:
        work(plan, folder)
    except BaseException as error:  # reported to the launcher, whatever it is
        reason = watch.explain(error)
        if reason is not error:
            reason.__cause__ = error
        fail(reason)
    watch.close()


def books_path(folder: Path, replica: int) -> Path:
    """Where the master of a replica leaves what was served, and the store's books."""
    return folder / f"replica{replica}.json"


def count_pages(cache: MultiLevelCache, plan: JobPlan, folder: Path, replica: int) -> files.StoreAudit:
    """The books of the store once every replica has drained: they share it, and until then hold pages.

    Where its owner is gone there are none: the audit fails and says so, and what was served is still compared.
    """
    _drained(folder, replica).touch()
    _await_replicas(plan, folder)
    give_up_at = time.monotonic() + DRAIN_DEADLINE_S
    while True:
        try:
            report = cache.audit()
        except StoreLost as error:
            return files.StoreAudit.unknown(str(error))
        audit = files.StoreAudit(**{name: getattr(report, name) for name in files.StoreAudit.__struct_fields__})
        # What is still written to lower tiers, or read from them, is held until that is over.
        if audit.conserved or not plan.tiers or time.monotonic() > give_up_at:
            return audit
        time.sleep(_AUDIT_S)


def await_books(plan: JobPlan, folder: Path, replica: int) -> None:
    """Stay a client of the store until the master of this replica has counted it, for the other ranks.

    Raises RankGone: the master does not come to it. It ended its last step when this rank did.
    """
    master = replica * plan.tp
    _await_rank(master, _drained(folder, replica), plan.deadline_s)
    _await_replicas(plan, folder)
    _await_rank(master, books_path(folder, replica), _books_deadline_s(plan))


def report_rank(cache: MultiLevelCache, outputs_digest: str, plan: JobPlan, folder: Path) -> None:
    """Leave this rank's result, and stay until every rank has left its own.

    A rank that ended before would not hear of the loss of one that has not reported yet.

    Raises RankGone: a rank does not leave one, though nothing but the books of the store can hold it up any more.
    """
    rank = int(os.environ["RANK"])
    stats = cache.stats()
    result = files.RankResult(
        rank=rank,
        results_digest=cache.results_digest.hex(),
        outputs_digest=outputs_digest,
        steps=stats.steps,
        loaded_pages=stats.loaded_pages,
        loaded_bytes=stats.loaded_bytes,
        loaded_pages_by_tier=stats.loaded_pages_by_tier,
        offloaded_pages=stats.offloaded_pages,
        offloaded_bytes=stats.offloaded_bytes,
        failed_loads=stats.failed_loads,
        failed_offloads=stats.failed_offloads,
        agree_us=stats.agree_us,
        channel=stats.channel,
    )
    files.write(result, folder / f"rank{rank}.json")
    give_up_at = time.monotonic() + _books_deadline_s(plan) + plan.deadline_s
    for other in range(plan.tp * plan.dp):
        _await_rank(other, folder / f"rank{other}.json", max(0.0, give_up_at - time.monotonic()))


def _drained(folder: Path, replica: int) -> Path:
    """Says that nothing of a replica is in flight any more."""
    return folder / f"drained{replica}"


def _books_deadline_s(plan: JobPlan) -> float:
    return plan.deadline_s + (DRAIN_DEADLINE_S if plan.tiers else 0.0)


def _await_replicas(plan: JobPlan, folder: Path) -> None:
    files.wait_for([_drained(folder, index) for index in range(plan.dp)], _REPLICAS_DEADLINE_S)


def _await_rank(rank: int, path: Path, deadline_s: float) -> None:
    """Until a rank has left this file. A rank that ends is told of by `Watch`; one that stands still is not."""
    try:
        files.wait_for([path], deadline_s)
    except DeadlineExceeded as error:
        raise RankGone(rank, str(error)) from None


class _LastWord:
    """How a rank ends early: it leaves word, once, and goes.

    It goes without the destructors of communicators, which may wait for the other ranks.
    """

    def __init__(self, plan: JobPlan, folder: Path, rank: int) -> None:
        self._plan, self._folder, self._rank = plan, folder, rank
        self._lock = threading.Lock()

    def __call__(self, error: BaseException) -> NoReturn:
        """Also from another thread than the one that runs the rank."""
        with self._lock:
            files.write(
                files.RankError(
                    rank=self._rank,
                    at=time.time(),
                    kind=type(error).__name__,
                    message=str(error),
                    expected=isinstance(error, MLKVError),
                    trace="".join(traceback.format_exception(error)),
                    lost=self._lost(error),
                ),
                self._folder / f"error{self._rank}.json",
            )
            traceback.print_exception(error)
            sys.stderr.flush()
            os._exit(1)

    def _lost(self, error: BaseException) -> int:
        if isinstance(error, RankLost):  # names a rank of the replica
            return self._rank // self._plan.tp * self._plan.tp + error.rank
        return error.rank if isinstance(error, RankGone) else -1
