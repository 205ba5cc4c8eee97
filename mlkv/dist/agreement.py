"""One rank's agreement with its replica: the protocol's state machines joined by a channel."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from types import MappingProxyType

import msgspec
import numpy as np

from mlkv.dist import stacks
from mlkv.dist.channel import Channel
from mlkv.dist.choice import open_channel
from mlkv.dist.protocol import Decision, Divergence, Mark, Master, Member, Progress, TaskFailure
from mlkv.dist.replica import Replica
from mlkv.errors import AgreementError, CacheUsageError, MLKVError, RankLost

_SAMPLES_KEPT = 65536  # newest step costs, for percentiles


@dataclass(frozen=True)
class Agreed:
    """What one step agreed, the same on every rank.

    Attributes:
        popped: for each `Mark` the entry numbers that are done everywhere, in order.
        failures: those among them that failed somewhere.
        facts: the master's facts, in order.
    """

    popped: tuple[range, range, range]
    failures: Mapping[tuple[Mark, int], TaskFailure]
    facts: tuple[bytes, ...]


NOTHING_AGREED = Agreed((range(0), range(0), range(0)), MappingProxyType({}), ())
"""What `Agreement.step` returns, this very object, when no mark moved and there are no facts."""


class _Note(msgspec.Struct, frozen=True, array_like=True):
    """What the master adds to a step: its facts, or why it has none to give."""

    facts: tuple[bytes, ...] = ()
    error: str = ""


_encode = msgspec.msgpack.Encoder().encode
_decode_note = msgspec.msgpack.Decoder(_Note).decode
_decode_decision = msgspec.msgpack.Decoder(Decision).decode


class Agreement:
    """Call `step` exactly once per engine step on every rank of the replica. Collective over the replica.

    Args:
        channel, late: see `open_channel`.
        dump_stacks: when a rank is lost, write the Python stacks of this process to stderr, and ask the lost one
            for its own if it runs on this host (SIGUSR2).

    Attributes:
        member: where this rank records what it does and finishes.
        late: whether a step gives what the step before has agreed.
    """

    def __init__(
        self, replica: Replica, channel: str = "auto", *, late: str = "auto", dump_stacks: bool = False
    ) -> None:
        self._replica = replica
        self._channel: Channel = open_channel(channel, late, replica)
        self.late = self._channel.late
        self.member = Member(replica.rank, late=self.late)
        master = Master(replica.size, self.member if replica.is_master else None)
        self._decisions = Decisions(master, replica.size)
        self._broken: AgreementError | None = None
        self._stepping = False
        self._costs_s: deque[float] = deque(maxlen=_SAMPLES_KEPT)
        self._dump_stacks = dump_stacks
        if dump_stacks:
            stacks.answer_requests()

    @property
    def channel_name(self) -> str:
        return self._channel.name

    def step(self, facts: Callable[[], Sequence[bytes]] | None = None) -> Agreed:
        """Exchange progress, let the master decide, apply the decision.

        Args:
            facts: called on the master only, once; None where it is known that there are none.

        Raises:
            RankLost, RanksDiverged, MasterFailed: the replica cannot go on. Every later step raises the same.
            CacheUsageError: another thread is in a step of this agreement.
        """
        if self._broken is not None:
            raise self._broken
        if self._stepping:
            raise CacheUsageError(f"step {self.member.step} still runs in another thread; there is one at a time")
        self._stepping = True
        start = perf_counter()
        member = self.member
        self._decisions.facts = facts
        try:
            report = member.report()
            message = self._channel.exchange(member.step, report, self._decisions)
            agreed = self._apply(_decode_decision(message)) if message else NOTHING_AGREED
        except AgreementError as error:
            self._break(error)
            raise
        except BaseException as error:
            # Whatever it is (Ctrl-C, a failing engine hook), half an exchange is made: the others must not wait.
            self._break(AgreementError(f"step {member.step} was left by {type(error).__name__}: {error}"))
            raise
        finally:
            self._stepping = False
        self._costs_s.append(perf_counter() - start)
        return agreed

    def cost_us(self) -> dict[str, float]:
        """Percentiles of the time a step spent agreeing, waiting for slower ranks included."""
        if not self._costs_s:
            return {"p50": 0.0, "p99": 0.0}
        p50, p99 = np.percentile(np.fromiter(self._costs_s, float), [50, 99]) * 1e6
        return {"p50": float(p50), "p99": float(p99)}

    def close(self) -> None:
        """Leave the replica. Not collective: others that still step are told, where the channel can."""
        if self._broken is None:
            self._broken = AgreementError("this rank has left the agreement")
        self._channel.close()

    def _apply(self, decision: Decision) -> Agreed:
        popped = self.member.apply(decision)
        failures = {(Mark(f.mark), f.number): f for f in decision.failures}
        return Agreed(popped, failures, decision.facts)

    def _break(self, error: AgreementError) -> None:
        self._broken = error
        lost = error if isinstance(error, RankLost) else None
        self._channel.leave(f"{type(error).__name__}: {error}" if lost is None else lost.why, lost)
        if self._dump_stacks and lost is not None:
            place = self._replica.places[lost.rank]
            same_host = place.host == self._replica.places[self._replica.rank].host
            stacks.dump(str(lost), ask_pid=place.pid if same_host and lost.rank != self._replica.rank else None)


class Decisions:
    """The protocol's master as channels use it: on the master alone, or the same on every rank (`tensor`).

    Attributes:
        facts: what `note` asks, on the master; None when there are none.
    """

    def __init__(self, master: Master, size: int) -> None:
        self._master = master
        self._last_reports: list[bytes] = [b""] * size
        self._marks = (0, 0, 0)
        self.facts: Callable[[], Sequence[bytes]] | None = None

    def note(self) -> bytes:
        if self.facts is None:
            return b""
        try:
            facts = self.facts()
        except Exception as error:  # whatever it is, the followers wait for an answer and must get it
            return _encode(_Note(error=f"{type(error).__name__}: {error}"))
        return _encode(_Note(tuple(facts))) if facts else b""

    def decide(self, step: int, reports: Sequence[bytes], note: bytes | None = None) -> bytes:
        if note is None and self.facts is not None:
            note = self.note()
        if not note and reports == self._last_reports:
            return b""
        try:
            told = _decode_note(note) if note else _Note()
            if told.error:
                return _encode(Decision(step, master_error=told.error))
            progress = [Progress.unpack(step, report) for report in reports]
            decision = self._master.decide(progress, told.facts)
        except (MLKVError, ValueError) as error:  # malformed words: nothing follows from them
            return _encode(Decision(step, master_error=f"{type(error).__name__}: {error}"))
        self._last_reports = list(reports)
        same_marks, self._marks = decision.marks == self._marks, decision.marks
        if same_marks and not decision.failures and not decision.facts and decision.diverged is None:
            return b""
        return _encode(decision)

    def refuse(self, step: int, rank: int, why: str) -> bytes:
        return _encode(Decision(step, diverged=Divergence(rank, why)))
