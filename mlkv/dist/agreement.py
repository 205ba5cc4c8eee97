"""One rank's agreement with its replica: the protocol's state machines joined by a channel."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from mlkv.dist.channel import Channel, open_channel
from mlkv.dist.protocol import Decision, Mark, Master, Member, Progress, TaskFailure, Words
from mlkv.dist.replica import Replica
from mlkv.errors import AgreementError

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
    failures: dict[tuple[Mark, int], TaskFailure]
    facts: tuple[bytes, ...]


class Agreement:
    """Call `step` exactly once per engine step on every rank of the replica.

    Attributes:
        member: where this rank records what it does and finishes.
    """

    def __init__(self, replica: Replica, channel: str = "auto") -> None:
        self._replica = replica
        self._channel: Channel = open_channel(channel, replica)
        self._broken: AgreementError | None = None
        self._costs_s: deque[float] = deque(maxlen=_SAMPLES_KEPT)
        self.member = Member(replica.rank)
        self._master = Master(replica.size, self.member) if replica.is_master else None

    @property
    def channel_name(self) -> str:
        return self._channel.name

    def step(self, facts: Callable[[], Sequence[bytes]]) -> Agreed:
        """Exchange progress, let the master decide, apply its decision.

        Args:
            facts: called on the master only, while it decides.

        Raises:
            RankLost, RanksDiverged, MasterFailed: the replica cannot go on. Every later step raises the same.
        """
        if self._broken is not None:
            raise self._broken
        start = time.perf_counter()
        try:
            words = self.member.progress().to_words()
            message = self._channel.exchange(words, None if self._master is None else self._decider(facts))
            decision = msgspec.msgpack.decode(message, type=Decision)
            popped = self.member.apply(decision)
        except AgreementError as error:
            self._broken = error
            raise
        self._costs_s.append(time.perf_counter() - start)
        failures = {(Mark(f.mark), f.number): f for f in decision.failures}
        return Agreed(popped, failures, decision.facts)

    def cost_us(self) -> dict[str, float]:
        """Percentiles of the time a step spent agreeing, waiting for slower ranks included."""
        if not self._costs_s:
            return {"p50": 0.0, "p99": 0.0}
        p50, p99 = np.percentile(np.fromiter(self._costs_s, float), [50, 99]) * 1e6
        return {"p50": float(p50), "p99": float(p99)}

    def close(self) -> None:
        self._channel.close()

    def _decider(self, facts: Callable[[], Sequence[bytes]]) -> Callable[[Sequence[Words]], bytes]:
        master = self._master
        assert master is not None

        def decide(words: Sequence[Words]) -> bytes:
            reports = [Progress.from_words(row) for row in words]
            try:
                decision = master.decide(reports, facts())
            except Exception as error:  # whatever it is, the followers wait for an answer and must get it
                decision = Decision(reports[0].step, master_error=f"{type(error).__name__}: {error}")
            return msgspec.msgpack.encode(decision)

        return decide
