"""Who was lost, so that ranks of several hosts find the same: a roll call in the job's rendezvous store."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from mlkv.dist.liveness import Processes
from mlkv.dist.replica import Replica
from mlkv.errors import RankLost

_ROLL_CALL_S = 2.0  # how long to look for a better explanation before blaming the one rank that did not answer
_ROLL_CALL_SHARE = 0.25  # of the deadline, at most
_ROLL_CALL_POLL_S = 0.02
_LOOK_S = 0.05  # between two looks, by a rank that waits, whether somebody has opened a roll call


class Verdicts:
    """Finds out together with the other ranks who was lost, and remembers the first answer for all.

    The store lives outside the ranks (torchrun's agent) or in one of them; where it cannot be reached, each rank
    concludes for itself from what it waited for and from the processes of its host. All keys carry the session
    of the replica, so that nothing of an earlier start of the job is taken for news.

    Args:
        participants: the group ranks that exchange with each other and so would answer.
    """

    def __init__(self, replica: Replica, participants: Sequence[int]) -> None:
        self._replica = replica
        self._participants = tuple(participants)
        self._prefix = f"mlkv/{replica.session:x}/verdict"
        self._store = _get_default_store() if dist.is_initialized() else None
        self._processes = Processes(replica)
        self._look_at = 0.0
        self._roll_call_s = min(_ROLL_CALL_S, _ROLL_CALL_SHARE * replica.deadline_s)

    @property
    def patience_s(self) -> float:
        """How long to wait for a rank: what is left of the deadline serves to find out whom to name."""
        return self._replica.deadline_s - self._roll_call_s

    def look(self, step: int, suspect: int) -> RankLost | None:
        """For a rank that waits: the error to raise if somebody knows or suspects that a rank was lost."""
        gone = self._find_gone()
        if gone is not None:
            return self.conclude(step, suspect, "its connection broke")
        now = time.monotonic()
        if now < self._look_at:
            return None
        self._look_at = now + _LOOK_S
        if self._has("roll call"):
            return self.conclude(step, suspect, "it did not answer when another rank asked who is there")
        return None

    def conclude(self, step: int, suspect: int, why: str, waited_s: float = 0.0) -> RankLost:
        """The error to raise when something failed after `waited_s` of waiting for group rank `suspect`.

        Prefers what another rank has found, then a process of this host that is gone, then a rank that does not
        answer, then the suspect.
        """
        self._set("roll call", "open")
        self._set(f"here/{self._replica.rank}", str(step))
        start = time.monotonic()
        while True:
            found = self._found()
            if found is not None:
                return found
            gone = self._find_gone()
            if gone is not None:
                return self.post(RankLost(gone, step, self._processes.describe(gone)))
            silent = self._silent()
            asked_s = time.monotonic() - start
            # With several silent, those that only compute for long come within the deadline.
            left_s = self._replica.deadline_s - waited_s
            enough_s = self._roll_call_s if len(silent) == 1 else max(self._roll_call_s, left_s)
            if asked_s > enough_s or not silent or self._store is None:
                if silent and suspect not in silent:
                    suspect, why = silent[0], f"it did not answer when asked who is there: {why}"
                return self.post(RankLost(suspect, step, why))
            time.sleep(_ROLL_CALL_POLL_S)

    def post(self, lost: RankLost) -> RankLost:
        """Tell the others. Returns what holds for all: this, or what another rank posted before."""
        mine = json.dumps([lost.rank, lost.step, lost.why, self._replica.rank])
        self._set("roll call", "open")
        if self._store is not None:
            try:
                self._store.compare_set(f"{self._prefix}/lost", "", mine)
            except RuntimeError:
                self._store = None
        return self._found() or lost

    def close(self) -> None:
        self._processes.close()

    def _silent(self) -> list[int]:
        others = [rank for rank in self._participants if rank != self._replica.rank]
        return [rank for rank in others if not self._has(f"here/{rank}")]

    def _find_gone(self) -> int | None:
        return min(self._processes.find_gone(), default=None)

    def _found(self) -> RankLost | None:
        if self._store is None or not self._has("lost"):
            return None
        try:
            rank, step, why, author = json.loads(self._store.get(f"{self._prefix}/lost"))
        except (RuntimeError, ValueError):
            self._store = None
            return None
        if rank == self._replica.rank:
            return RankLost(author, step, f"it gave up waiting for this rank: {why}")
        return RankLost(rank, step, why)

    def _has(self, key: str) -> bool:
        if self._store is None:
            return False
        try:
            return bool(self._store.check([f"{self._prefix}/{key}"]))
        except RuntimeError:  # the store's host is gone; from now on each rank concludes for itself
            self._store = None
            return False

    def _set(self, key: str, value: str) -> None:
        if self._store is None:
            return
        try:
            self._store.set(f"{self._prefix}/{key}", value)
        except RuntimeError:  # as above
            self._store = None
