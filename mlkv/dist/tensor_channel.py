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
from collections.abc import Callable, Sequence
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


class TensorExchange:
    """One all-gather per step among the leaders of teams of ranks. Not thread-safe.

    Args:
        teams: the group ranks of the replica that each participant speaks for; together all of them. The first
            rank of a team takes part for it; that of the first team is the master.
        late: return in each step what the step before exchanged, and let the exchange of this step go on.
    """

    def __init__(self, replica: Replica, teams: Sequence[Sequence[int]], *, late: bool) -> None:
        leaders = [team[0] for team in teams]
        self._replica = replica
        self._teams = teams
        self._own = own = leaders.index(replica.rank)
        # A group of its own, because an exchange may be under way while the replica's group is used. Not made by
        # `dist.new_group`: its names count the groups that a rank is in, which may differ between leaders.
        store = PrefixStore(f"{replica.unique_name('tensor')}/", _get_default_store())
        timeout = datetime.timedelta(seconds=replica.deadline_s)
        self._group: Any = dist.ProcessGroupGloo(store, own, len(leaders), timeout)
        self._late = late
        self._note_at = _HEAD_WORDS + max(map(len, teams)) * _REPORT_WORDS
        words = self._note_at + NOTE_ROOM_BYTES // 8
        row, rows = np.zeros(words, np.int64), np.zeros((len(teams), words), np.int64)
        # Views that index and slice several times as fast as numpy's.
        self._row, self._rows = row.data, rows.reshape(-1).data
        self._row_bytes, self._rows_bytes = self._row.cast("B"), self._rows.cast("B")
        self._row_starts = range(0, len(teams) * words, words)
        self._report_starts = [0] * replica.size  # in bytes, by group rank
        for start, team in zip(self._row_starts, teams, strict=True):
            for place, rank in enumerate(team):
                self._report_starts[rank] = 8 * (start + _HEAD_WORDS) + place * REPORT_BYTES
        self._packed = b""
        self._note = b""
        self._verdicts = Verdicts(replica, leaders)
        self._suspect = leaders[1 if own == 0 else 0]  # who it was a collective does not tell; see Verdicts
        # Called once a step with the same tensors, so they are made once.
        source, targets = [torch.from_numpy(row)], [[torch.from_numpy(each) for each in rows]]

        def gather() -> Any:
            return self._group.allgather(targets, source)

        self._gather: _Inline | _Behind = _Behind(gather) if late else _Inline(gather)

    def exchange(self, step: int, reports: Sequence[bytes], decider: Decider) -> bytes:
        """Bring the reports of this team to all, return the message of this step (or of the last, if late)."""
        if not self._late:
            self._start(step, reports, decider)
            return self._finish(step, decider)
        message = self._finish(step - 1, decider) if step > 1 else b""
        self._start(step, reports, decider)
        return message

    def post(self, lost: RankLost) -> None:
        self._verdicts.post(lost)

    def close(self) -> None:
        self._gather.close(_CLOSE_DEADLINE_S)
        self._verdicts.close()

    def _start(self, step: int, reports: Sequence[bytes], decider: Decider) -> None:
        self._note = note = decider.note() if self._own == 0 else b""
        self._row[0], self._row[1] = step, len(note)
        packed = reports[0] if len(reports) == 1 else b"".join(reports)
        if packed != self._packed:
            self._packed = packed
            self._row_bytes[8 * _HEAD_WORDS : 8 * _HEAD_WORDS + len(packed)] = packed
        if 0 < len(note) <= NOTE_ROOM_BYTES:
            self._row_bytes[8 * self._note_at : 8 * self._note_at + len(note)] = note
        self._gather.start()

    def _finish(self, step: int, decider: Decider) -> bytes:
        self._wait(step, self._gather, "its words")
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
            note = self._fetch_note(step, note_bytes)
        return decider.decide(step, reports, note)

    def _fetch_note(self, step: int, note_bytes: int) -> bytes:
        """The second message of a step."""
        words = np.zeros(-(-note_bytes // 8), np.int64)
        if self._own == 0:
            words.view(np.uint8)[:note_bytes] = np.frombuffer(self._note, np.uint8)
        tensor = torch.from_numpy(words)

        message = _Inline(lambda: self._group.broadcast(tensor, 0))
        message.start()
        self._wait(step, message, "the rest of its facts")
        return words.tobytes()[:note_bytes]

    def _wait(self, step: int, gather: _Inline | _Behind, what: str) -> None:
        patience = Patience(self._verdicts.patience_s)
        try:
            while not gather.is_done():
                if patience.pause():
                    lost = self._verdicts.look(step, self._suspect)
                    if lost is not None and not gather.is_done():
                        raise lost
                    if patience.expired:
                        why = f"waited {patience.waited_s:.1f} s for {what}"
                        raise self._verdicts.conclude(step, self._suspect, why, patience.waited_s)
            gather.result()
        except RuntimeError as error:
            why = f"a connection broke while waiting for {what} ({error})"
            raise self._verdicts.conclude(step, self._suspect, why, patience.waited_s) from error


class _Inline:
    """Starts the collective on the calling thread."""

    def __init__(self, launch: Callable[[], Any]) -> None:
        self._launch = launch
        self._work: Any = None

    def start(self) -> None:
        self._work = self._launch()

    def is_done(self) -> bool:
        return bool(self._work.is_completed())

    def result(self) -> None:
        """Raises RuntimeError when the collective failed."""
        self._work.wait()

    def close(self, deadline_s: float) -> None:
        """Nothing runs between two steps."""


class _Behind:
    """Starts and awaits the collective on a thread of its own.

    Starting one costs 40 to 90 us of the calling thread and handing it over costs a few; the thread waits inside
    Gloo, without the interpreter lock. At most one is under way, which bounds both queues.
    """

    def __init__(self, launch: Callable[[], Any]) -> None:
        self._launch = launch
        self._orders: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[RuntimeError | None] = queue.SimpleQueue()
        self._failure: RuntimeError | None = None
        self._running = False
        self._thread = threading.Thread(target=self._run, name="mlkv-agree", daemon=True)
        self._thread.start()

    def start(self) -> None:
        self._running = True
        self._orders.put(True)

    def is_done(self) -> bool:
        if self._running and not self._results.empty():
            self._failure = self._results.get_nowait()
            self._running = False
        return not self._running

    def result(self) -> None:
        if self._failure is not None:
            raise self._failure

    def close(self, deadline_s: float) -> None:
        """The last exchange ends when all ranks have begun it; one that cannot is left to its own deadline."""
        self._orders.put(False)
        self._thread.join(deadline_s)

    def _run(self) -> None:
        while self._orders.get():
            try:
                self._launch().wait()
            except RuntimeError as error:
                self._results.put(error)
            else:
                self._results.put(None)


class TensorChannel(Channel):
    """Every rank takes part in the all-gather itself."""

    name = "tensor"

    def __init__(self, replica: Replica, *, late: bool) -> None:
        self.late = late
        self._exchange = TensorExchange(replica, [(rank,) for rank in range(replica.size)], late=late)

    def exchange(self, step: int, report: bytes, decider: Decider) -> bytes:
        return self._exchange.exchange(step, [report], decider)

    def leave(self, why: str, lost: RankLost | None) -> None:
        if lost is not None:
            self._exchange.post(lost)

    def close(self) -> None:
        self._exchange.close()
