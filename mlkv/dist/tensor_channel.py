"""The channel across hosts: one all-gather of fixed size per step, from which every rank decides alike.

Each participant contributes one row of int64::

    step | bytes of the master's note | reports of its team, padded | the note, if it fits

Every participant has all reports and the note then, so each computes the same decision by itself: one crossing of
the network instead of two. A note too long for its place follows as a second message; its length stands in the
master's row, so all participants know of it.
"""

from __future__ import annotations

import datetime
import queue
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from mlkv.dist.channel import Channel, Decider
from mlkv.dist.patience import Patience
from mlkv.dist.protocol import REPORT_BYTES
from mlkv.dist.replica import Replica
from mlkv.dist.verdict import Verdicts
from mlkv.errors import RankLost

NOTE_ROOM_BYTES = 2048
"""Place for a note in each row; longer ones cost a second message. A hit of 100 pages takes 1.2 KB."""

_HEAD_WORDS = 2
_REPORT_WORDS = REPORT_BYTES // 8
_CLOSE_DEADLINE_S = 2.0


class _Rows:
    """The rows of all participants: written, gathered and read one step after the other. Not thread-safe."""

    def __init__(self, group: Any, teams: Sequence[Sequence[int]], own: int, num_ranks: int) -> None:
        self._group, self._teams, self._own = group, teams, own
        self._note_at = _HEAD_WORDS + max(map(len, teams)) * _REPORT_WORDS
        words = self._note_at + NOTE_ROOM_BYTES // 8
        row, rows = np.zeros(words, np.int64), np.zeros((len(teams), words), np.int64)
        # Views that index and slice several times as fast as numpy's.
        self._row, self._rows = row.data, rows.reshape(-1).data
        self._row_bytes, self._rows_bytes = self._row.cast("B"), self._rows.cast("B")
        self._row_starts = range(0, len(teams) * words, words)
        self._report_starts = [0] * num_ranks  # in bytes, by group rank
        for start, team in zip(self._row_starts, teams, strict=True):
            for place, rank in enumerate(team):
                self._report_starts[rank] = 8 * (start + _HEAD_WORDS) + place * REPORT_BYTES
        self._packed = b""
        self._note = b""
        # Gathered once a step with the same tensors, so they are made once.
        self._source, self._targets = [torch.from_numpy(row)], [[torch.from_numpy(each) for each in rows]]

    def write(self, step: int, packed: bytes, note: bytes) -> None:
        """Fill this participant's row. `packed`: the reports of its team."""
        self._note = note
        self._row[0], self._row[1] = step, len(note)
        if packed != self._packed:
            self._packed = packed
            self._row_bytes[8 * _HEAD_WORDS : 8 * _HEAD_WORDS + len(packed)] = packed
        if 0 < len(note) <= NOTE_ROOM_BYTES:
            self._row_bytes[8 * self._note_at : 8 * self._note_at + len(note)] = note

    def gather(self) -> Any:
        """Start the all-gather; to be waited for."""
        return self._group.allgather(self._targets, self._source)

    def message(self, step: int, decider: Decider, complete: Callable[[Any], None]) -> bytes:
        """What follows from the gathered rows. `complete` waits for a collective: the second message, if any."""
        rows, rows_bytes = self._rows, self._rows_bytes
        for index, start in enumerate(self._row_starts):
            if rows[start] != step:
                why = f"it is at step {rows[start]}, others at {step}"
                return decider.refuse(step, self._teams[index][0], why)
        reports = [bytes(rows_bytes[start : start + REPORT_BYTES]) for start in self._report_starts]
        note_bytes = rows[1]
        if not note_bytes:
            return decider.decide(step, reports, b"")
        if note_bytes <= NOTE_ROOM_BYTES:
            note = bytes(rows_bytes[8 * self._note_at : 8 * self._note_at + note_bytes])
        else:
            note = self._fetch_note(note_bytes, complete)
        return decider.decide(step, reports, note)

    def _fetch_note(self, note_bytes: int, complete: Callable[[Any], None]) -> bytes:
        words = np.zeros(-(-note_bytes // 8), np.int64)
        if self._own == 0:
            words.view(np.uint8)[:note_bytes] = np.frombuffer(self._note, np.uint8)
        complete(self._group.broadcast(torch.from_numpy(words), 0))
        return words.tobytes()[:note_bytes]


class TensorChannel(Channel):
    """One all-gather per step among all ranks, or among the leaders of teams of ranks.

    Args:
        teams: the group ranks of the replica that each participant speaks for; together all of them. The first
            rank of a team takes part for it; that of the first team is the master. Default: each rank for itself.
    """

    name = "tensor"

    def __init__(self, replica: Replica, teams: Sequence[Sequence[int]] | None = None) -> None:
        if teams is None:
            teams = [(rank,) for rank in range(replica.size)]
        leaders = [team[0] for team in teams]
        own = leaders.index(replica.rank)
        self._has_note = own == 0
        # A group of its own, because an exchange may be under way while the replica's group is used. Not made by
        # `dist.new_group`: its names count the groups that a rank is in, which may differ between leaders.
        store = PrefixStore(f"{replica.unique_name('tensor')}/", _get_default_store())
        timeout = datetime.timedelta(seconds=replica.deadline_s)
        group = dist.ProcessGroupGloo(store, own, len(leaders), timeout)
        self._rows = _Rows(group, teams, own, replica.size)
        self._verdicts = Verdicts(replica, leaders)
        self._suspect = leaders[1 if own == 0 else 0]  # who it was a collective does not tell; see Verdicts

    def exchange(self, step: int, report: bytes, decider: Decider) -> bytes:
        """As of every channel; `report` is those of all ranks of this rank's team, joined in their order."""
        self._rows.write(step, report, decider.note() if self._has_note else b"")
        complete = partial(self._complete, step)
        complete(self._rows.gather())
        return self._rows.message(step, decider, complete)

    def leave(self, why: str, lost: RankLost | None) -> None:
        if lost is not None:
            self._verdicts.post(lost)

    def close(self) -> None:
        self._verdicts.close()

    def _complete(self, step: int, work: Any) -> None:
        """Wait for a collective, watching the others meanwhile."""
        start = time.monotonic()
        self._wait(step, work.is_completed)
        try:
            work.wait()
        except RuntimeError as error:
            raise self._broken(step, error, time.monotonic() - start) from error

    def _wait(self, step: int, is_done: Callable[[], bool]) -> None:
        patience = Patience(self._verdicts.patience_s)
        while not is_done():
            if patience.pause():
                lost = self._verdicts.look(step, self._suspect)
                if lost is not None and not is_done():
                    raise lost
                if patience.expired:
                    why = f"waited {patience.waited_s:.1f} s for its words"
                    raise self._verdicts.conclude(step, self._suspect, why, patience.waited_s)

    def _broken(self, step: int, error: Exception, waited_s: float) -> Exception:
        if not isinstance(error, RuntimeError):
            return error
        why = f"a connection broke while waiting for its words ({error})"
        return self._verdicts.conclude(step, self._suspect, why, waited_s)


class LateTensorChannel(TensorChannel):
    """Returns in each step what the step before exchanged, and lets the exchange of this step go on.

    Exchanges and decides on a thread of its own: starting a collective costs 40 to 90 us of the calling thread,
    reading what it brought ten more; waking a thread costs five. That thread waits inside Gloo, without the
    interpreter lock. One exchange is under way at most.
    """

    late = True

    def __init__(self, replica: Replica, teams: Sequence[Sequence[int]] | None = None) -> None:
        super().__init__(replica, teams)
        # Of the newest exchange: None while it is under way or has failed, empty before the first.
        self._message: bytes | None = b""
        self._error: Exception | None = None
        # The exchange to make. The thread reads it when `_orders` says so: True to go on, False to end.
        self._step, self._report, self._note = 0, b"", b""
        self._decider: Decider
        self._orders: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="mlkv-agree", daemon=True)
        self._thread.start()

    def exchange(self, step: int, report: bytes, decider: Decider) -> bytes:
        # This is what agreeing adds to a step. A processor that comes from other work has to fetch each piece of
        # code and each object anew, so it pays for how many they are, hardly for instructions.
        message = self._message
        if message is None:
            message = self._await_message(step - 1)
        self._note = decider.note() if self._has_note else b""
        self._step = step
        self._report = report
        self._decider = decider
        self._message = None
        self._orders.put(True)
        return message

    def close(self) -> None:
        """The last exchange ends when all ranks have begun it; one that cannot is left to its own deadline."""
        self._orders.put(False)
        self._thread.join(_CLOSE_DEADLINE_S)
        super().close()

    def _await_message(self, step: int) -> bytes:
        """The message of `step`, which has been under way since then."""
        start = time.monotonic()
        self._wait(step, self._is_done)
        if self._error is not None:
            raise self._broken(step, self._error, time.monotonic() - start) from self._error
        assert self._message is not None
        return self._message

    def _is_done(self) -> bool:
        return self._message is not None or self._error is not None

    def _run(self) -> None:
        while self._orders.get():
            try:
                self._rows.write(self._step, self._report, self._note)
                self._rows.gather().wait()
                self._message = self._rows.message(self._step, self._decider, lambda work: work.wait())
            except Exception as error:  # whatever it is, the thread that steps waits for an outcome
                self._error = error


def open_tensor(replica: Replica, late: bool, teams: Sequence[Sequence[int]] | None = None) -> TensorChannel:
    """See `TensorChannel`. Collective over the participants."""
    return LateTensorChannel(replica, teams) if late else TensorChannel(replica, teams)
