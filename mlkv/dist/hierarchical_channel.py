"""The channel for several hosts of several ranks: `ledger` inside each host, their leaders over `tensor`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mlkv.dist.channel import Channel, Decider
from mlkv.dist.ledger_channel import HostLedger
from mlkv.dist.replica import Replica
from mlkv.dist.tensor_channel import TensorChannel, open_tensor
from mlkv.errors import RankLost


@dataclass(frozen=True)
class _AcrossHosts:
    """What the leader of a host does with its reports: all leaders hear them, and each decides the same."""

    between: TensorChannel
    decider: Decider

    def decide(self, step: int, reports: Sequence[bytes]) -> bytes:
        return self.between.exchange(step, b"".join(reports), self.decider)


class HierarchicalChannel(Channel):
    """The lowest rank of each host leads it. Collective over the replica.

    A leader collects its host's reports, exchanges them with the other leaders, decides like each of them, and
    gives the message to its host. When one host loses a rank, its leader posts that for the others.
    """

    name = "hierarchical"

    def __init__(self, replica: Replica, *, late: bool) -> None:
        self.late = late
        self._host = HostLedger(replica)
        self._between: TensorChannel | None = None
        if self._host.leads:
            self._between = open_tensor(replica, late, replica.host_ranks)

    def exchange(self, step: int, report: bytes, decider: Decider) -> bytes:
        if self._between is not None:
            return self._host.exchange(step, report, _AcrossHosts(self._between, decider))
        return self._host.exchange(step, report, decider)

    def leave(self, why: str, lost: RankLost | None) -> None:
        if lost is not None and self._between is not None:
            self._between.leave(why, lost)
        self._host.leave(why, lost)

    def close(self) -> None:
        self._host.close()
        if self._between is not None:
            self._between.close()
