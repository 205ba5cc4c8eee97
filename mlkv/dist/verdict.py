"""Who was lost: one rank's finding, written where the others look before they blame the wrong one."""

from __future__ import annotations

import json
import os
import select
import time

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from mlkv.dist.replica import Place, Replica
from mlkv.errors import RankLost

_LOOK_S = 2.0  # how long to look for a better explanation before blaming the rank that was waited for


class Verdicts:
    """Posts and finds verdicts about lost ranks of one replica in the job's rendezvous store.

    The store lives outside the ranks (torchrun's agent) or in one of them; where it cannot be reached, the
    processes of this host are still looked at.
    """

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        members = "-".join(str(rank) for rank in replica.global_ranks)
        self._key = f"mlkv/lost/{members}"
        self._store = _get_default_store() if dist.is_initialized() else None

    def conclude(self, step: int, suspect: int, why: str) -> RankLost:
        """The error to raise when something failed while waiting for group rank `suspect`.

        Prefers what another rank has posted, then a process of this host that is gone, then the suspect.
        Posts the conclusion for the other ranks.
        """
        deadline = time.monotonic() + _LOOK_S
        while True:
            posted = self._read()
            if posted is not None:
                return RankLost(posted[0], posted[1], posted[2])
            gone = self._find_gone()
            if gone is not None:
                lost = RankLost(gone, step, f"its process (pid {self._replica.places[gone].pid}) is gone")
                break
            if time.monotonic() > deadline:
                lost = RankLost(suspect, step, why)
                break
            time.sleep(0.02)
        self._post(lost)
        return lost

    def _find_gone(self) -> int | None:
        here = Place.here().host
        for rank, place in enumerate(self._replica.places):
            if place.host == here and rank != self._replica.rank and not _is_alive(place.pid):
                return rank
        return None

    def _read(self) -> tuple[int, int, str] | None:
        if self._store is None:
            return None
        try:
            if not self._store.check([self._key]):
                return None
            rank, step, why = json.loads(self._store.get(self._key))
        except (RuntimeError, ValueError):  # the store's host is gone as well
            return None
        return int(rank), int(step), str(why)

    def _post(self, lost: RankLost) -> None:
        if self._store is None:
            return
        try:
            self._store.set(self._key, json.dumps([lost.rank, lost.step, lost.why]))
        except RuntimeError:  # the store's host is gone as well; each rank concludes for itself
            self._store = None


def _is_alive(pid: int) -> bool:
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    except OSError:  # no pidfd here (old kernel, seccomp): not known to be gone
        return True
    try:
        # Readable from the moment the process has exited, also while it is a zombie.
        return not select.select([handle], [], [], 0)[0]
    finally:
        os.close(handle)
