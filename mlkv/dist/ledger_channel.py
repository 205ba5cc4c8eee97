"""The channel for ranks of one host: reports and decisions in shared memory, a few microseconds per step."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol, TypeVar

from mlkv.dist.channel import Channel
from mlkv.dist.ledger import (
    FAREWELL_BYTES,
    MASK,
    NUM_SLOTS,
    PIECE_BYTES,
    TOKEN_OF_NEXT_KIND,
    TOKEN_OF_NEXT_STEP,
    Kind,
    Ledger,
)
from mlkv.dist.liveness import Processes
from mlkv.dist.patience import LOOK_S, Patience, spins_for
from mlkv.dist.replica import Replica
from mlkv.errors import AgreementError, MLKVError, RankLost

_GRACE_S = 1.0
"""How much longer than the deadline a rank waits for a leader that itself waits: it will know whom to name. The
leader came later, so its own deadline ends later."""

_QUICK_POLLS = 200  # of a word, before the bookkeeping of a `Patience` is worth its price

_NO_STEP = 1 << 40  # what a garbled token shows; no job comes so far

_T = TypeVar("_T")


class DecidesHere(Protocol):
    """What the leader of a host does with its reports; a `Decider`, where that host has all ranks."""

    def decide(self, step: int, reports: Sequence[bytes]) -> bytes:
        """From the reports of this host's ranks, ascending, to the message for them. May raise RankLost."""


class HostLedger:
    """One exchange per step among the ranks of one host; the lowest of them leads. Collective over the replica.

    The leader makes the memory as a memfd and the others open it under the leader's `/proc/<pid>/fd`; once mapped
    it has no name, so the kernel frees it with the last process, however that ends.

    Raises MLKVError, on every rank of the replica, when one of them cannot map it.
    """

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self._ranks = replica.neighbours
        self._own = self._ranks.index(replica.rank)
        self.leads = self._own == 0
        self._ledger = _open_everywhere(replica)
        self._processes = Processes(replica)
        self._deadline_s = replica.deadline_s
        # Under torchrun other replicas may keep cores of this host busy as well.
        spins = spins_for(max(len(self._ranks), int(os.environ.get("LOCAL_WORLD_SIZE", "0"))))
        self._spins = spins
        self._quick_polls = min(_QUICK_POLLS, spins)
        # Where ranks take turns on the cores, who waits sleeps until it is woken; else nobody pays for waking.
        self._waits = self._ledger.waits() if not spins else None
        self._last_report: bytes | None = None
        self._reports: list[bytes] = [b""] * len(self._ranks)  # of the leader
        self._followers = [(at, self._ledger.token_at[at]) for at in range(1, len(self._ranks))]
        self._next_slot = 1
        self._read_by_all = 1
        self._step = 0
        self._same = self._ledger.token(0, Kind.SAME)
        self._token_at = self._ledger.token_at[self._own]
        self._left = False
        self._closed = False

    # -- one step ------------------------------------------------------------------------------------------

    def exchange(self, step: int, report: bytes, decider: DecidesHere) -> bytes:
        """Hand in a report; the message that the leader makes of those of all ranks of this host.

        An engine calls this in every step, with cold caches, and mostly all reports are as before. So that case
        is told by one word of each rank, and handled here with few calls.

        Args:
            decider: asked on the leader only.
        """
        if step != self._step + 1:
            raise AgreementError(f"step {step} exchanged after step {self._step}; each step is exchanged once")
        self._step = step
        # What words say in this step: as before or nothing, and in full.
        same = self._same = (self._same + TOKEN_OF_NEXT_STEP) & MASK
        full = (same + TOKEN_OF_NEXT_KIND) & MASK
        ledger = self._ledger
        words = ledger.words
        if report == self._last_report:
            words[self._token_at] = same
        else:
            self._last_report = report
            ledger.put_report(self._own, step, report)
        if not self.leads:
            return self._follow(step, same, full)
        reports = self._reports
        reports[0] = report
        try:
            for follower, at in self._followers:
                for _ in range(self._quick_polls):
                    word = words[at]
                    if word == same or word == full:
                        break
                else:
                    word = self._await_report(follower, step, same, full)
                if word == full:
                    reports[follower] = self._read_report(follower, step)
            message = decider.decide(step, reports)
            if message:
                self._tell(step, Kind.FULL, message)
            else:
                words[ledger.decision_at] = same
                if self._waits is not None:
                    self._waits.wake(ledger.decision_at)
        except RankLost as lost:
            self._tell(step, Kind.LOST, json.dumps([lost.rank, lost.step, lost.why]).encode())
            raise
        return message

    def _follow(self, step: int, same: int, full: int) -> bytes:
        """Wait for the leader's message."""
        if self._waits is not None:
            self._waits.wake(self._token_at)
        words, at = self._ledger.words, self._ledger.decision_at
        for _ in range(self._quick_polls):
            word = words[at]
            if word == same:
                return b""
            if word == full:
                break
        else:
            if self._await_decision(step, same, full) == same:
                return b""
        return self._read_message(step)

    def leave(self, why: str, lost: RankLost | None = None) -> None:
        """Take no further step: whoever waits for this rank learns it at once, and about whom, if one was lost."""
        if self._left:
            return
        self._left = True
        who = self._replica.rank if lost is None else lost.rank
        text = json.dumps([who, why])
        if len(text) > FAREWELL_BYTES:
            text = json.dumps([who, why.encode("ascii", "replace").decode()[: FAREWELL_BYTES - 100] + "..."])
        self._ledger.put_farewell(self._own, self._step, text.encode())
        if self._waits is not None:
            self._waits.wake(self._token_at)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self.leave("it closed its cache")
            self._processes.close()
            if self._waits is not None:
                self._waits.close()
            self._ledger.close()

    # -- the leader's side ---------------------------------------------------------------------------------

    def _await_report(self, follower: int, step: int, same: int, full: int) -> int:
        words, at = self._ledger.words, self._ledger.token_at[follower]
        patience = Patience(self._deadline_s, self._spins)
        while True:
            word = words[at]
            if word in (same, full):
                return word
            if self._pause(patience, at, word):
                self._look_at(follower, step, "its report", lambda: words[at] in (same, full))
                if patience.expired and words[at] not in (same, full):
                    raise self._missing(follower, step)

    def _read_report(self, follower: int, step: int) -> bytes:
        report = self._ledger.get_report(follower, step)
        if report is None:
            report = self._until(lambda: self._ledger.get_report(follower, step), follower, step, "its report")
        return report

    def _tell(self, step: int, kind: Kind, message: bytes) -> None:
        ledger = self._ledger
        view = memoryview(message)
        # Announced first, so that a message longer than the ring is read while it is written.
        ledger.words[ledger.decision_at] = ledger.token(step, kind)
        if self._waits is not None:
            self._waits.wake(ledger.decision_at)
        for offset in range(0, len(message), PIECE_BYTES):
            if self._next_slot - self._read_by_all >= NUM_SLOTS:
                self._await_room(step)
            ledger.put_piece(self._next_slot, view, offset)
            self._next_slot += 1

    def _await_room(self, step: int) -> None:
        oldest = self._next_slot - NUM_SLOTS
        for follower, _ in self._followers:

            def has_read(follower: int = follower) -> bool | None:
                return True if self._ledger.cursor(follower) > oldest else None

            self._until(has_read, follower, step, "reading the decision")
        self._read_by_all = min(self._ledger.cursor(follower) for follower, _ in self._followers)

    # -- a follower's side ---------------------------------------------------------------------------------

    def _await_decision(self, step: int, same: int, full: int) -> int:
        words, at = self._ledger.words, self._ledger.decision_at
        lost = self._ledger.token(step, Kind.LOST)
        patience = Patience(self._deadline_s, self._spins)
        while True:
            word = words[at]
            if word in (same, full):
                return word
            if word == lost:
                raise self._told_lost(step)
            if self._pause(patience, at, word):
                self._look_at(0, step, "its decision", lambda: words[at] in (same, full, lost))
                if patience.expired and words[at] not in (same, full, lost):
                    self._blame(step, patience)

    def _blame(self, step: int, patience: Patience) -> None:
        """At the deadline: who keeps the decision from coming?"""
        for at in range(len(self._ranks)):
            reached, kind = self._ledger.read_token(self._ledger.words[self._ledger.token_at[at]])
            if kind is Kind.LEFT:
                self._look_at(at, step, "its report", lambda: False)
            if reached < step:
                raise self._missing(at, step)
        if patience.waited_s > self._deadline_s + _GRACE_S:
            raise RankLost(
                self._ranks[0],
                step,
                f"all ranks of its host came to step {step}, but no decision within {patience.waited_s:.1f} s",
            )

    def _read_message(self, step: int) -> bytes:
        ledger = self._ledger
        pieces: list[bytes] = []
        length, total = 0, -1
        while length < total or total < 0:
            found = self._read_piece(total)
            if found is None:
                found = self._until(partial(self._read_piece, total), 0, step, "its decision")
            total, piece = found
            pieces.append(piece)
            length += len(piece)
            self._next_slot += 1
            ledger.put_cursor(self._own, self._next_slot)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _read_piece(self, total: int) -> tuple[int, bytes] | None:
        """The next piece, of a message of `total` bytes where that is known."""
        found = self._ledger.get_piece(self._next_slot)
        # A leader that loses a rank half way through a message breaks it off and tells that in the next slot.
        return None if found is None or total not in (-1, found[0]) else found

    def _told_lost(self, step: int) -> RankLost:
        rank, at_step, why = json.loads(self._read_message(step))
        if rank == self._replica.rank:
            return RankLost(self._ranks[0], at_step, f"it gave up waiting for this rank: {why}")
        return RankLost(rank, at_step, why)

    # -- both ----------------------------------------------------------------------------------------------

    def _pause(self, patience: Patience, at: int, word: int) -> bool:
        """Let time pass while `word` stands at this place; True when it is time to look around."""
        if self._waits is None:
            return patience.pause()
        self._waits.wait(at, word, LOOK_S)
        return patience.look_due()

    def _until(self, poll: Callable[[], _T | None], at: int, step: int, what: str) -> _T:
        """What `poll` returns once it is not None; meanwhile watches the rank at this place of the host."""
        patience = Patience(self._deadline_s, self._spins)
        while True:
            found = poll()
            if found is not None:
                return found
            if patience.pause():
                self._look_at(at, step, what, lambda: poll() is not None)
                if patience.expired:
                    raise RankLost(
                        self._ranks[at], step, f"waited {self._deadline_s:g} s for {what}, which stays unreadable"
                    )

    def _look_at(self, at: int, step: int, what: str, came: Callable[[], bool]) -> None:
        """Raise if the rank at this place of the host is known not to come. It may just have: then `came`."""
        reached, kind = self._ledger.read_token(self._ledger.words[self._ledger.token_at[at]])
        rank = self._ranks[at]
        lost: RankLost | None = None
        if kind is Kind.LEFT and reached <= step:
            farewell = self._ledger.get_farewell(at, reached)
            if farewell is not None:
                lost = self._after_farewell(at, step, reached, farewell)
        elif step < reached < _NO_STEP:
            why = f"it runs ahead: it is at step {reached}, rank {self._replica.rank} at {step}"
            lost = RankLost(rank, step, why)
        if lost is None and rank in self._processes.find_gone():
            lost = RankLost(rank, step, f"{self._processes.describe(rank)}; waited for {what}")
        if lost is not None and not came():
            raise lost

    def _after_farewell(self, at: int, step: int, reached: int, farewell: bytes) -> RankLost:
        who, why = json.loads(farewell)
        if who == self._ranks[at]:
            return RankLost(who, step, f"{why} after step {reached}")
        if who == self._replica.rank:
            return RankLost(self._ranks[at], step, f"it gave up waiting for this rank: {why}")
        return RankLost(who, step, why)

    def _missing(self, at: int, step: int) -> RankLost:
        reached, _ = self._ledger.read_token(self._ledger.words[self._ledger.token_at[at]])
        where = f"it is still at step {reached}" if reached < step else "its word is unreadable"
        why = f"it did not come to step {step} within {self._deadline_s:g} s; {where}"
        return RankLost(self._ranks[at], step, why)


class LedgerChannel(HostLedger, Channel):
    """All ranks of a replica on one host; the master leads and decides."""

    name = "ledger"


def _open_everywhere(replica: Replica) -> Ledger:
    ranks = replica.neighbours
    leader = ranks[0]
    # Each host's memory has a session of its own.
    session = (replica.session + leader) % (1 << 63)
    fd, ledger, error = -1, None, None
    try:
        if replica.rank == leader:
            fd, ledger = Ledger.create(len(ranks), session)
    except MLKVError as problem:
        error = problem
    try:
        their_fd = replica.all_ints(fd)[leader]
        if replica.rank != leader and their_fd >= 0:
            try:
                path = f"/proc/{replica.places[leader].pid}/fd/{their_fd}"
                ledger = Ledger.attach(path, len(ranks), session)
            except MLKVError as problem:
                error = problem
        mapped = replica.all_ints(0 if ledger is None else 1)
    finally:
        if fd >= 0:
            os.close(fd)
    if ledger is not None and all(mapped):
        return ledger
    if ledger is not None:
        ledger.close()
    raise error or MLKVError(f"rank {mapped.index(0)} of this replica cannot map the ledger of its host")
