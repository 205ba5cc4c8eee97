"""Agreements over each channel on ranks of this machine, some of them on pretended hosts."""

from __future__ import annotations

import random
from dataclasses import dataclass

from mlkv.dist import Agreement, Mark, Place, Replica, Stream


@dataclass(frozen=True)
class Way:
    """A channel, and how many hosts the ranks pretend to run on, as equal neighbouring groups."""

    channel: str
    late: str = "off"
    hosts: int = 1

    def __str__(self) -> str:
        return f"{self.channel}-{'late-' if self.late == 'on' else ''}{self.hosts}"


OBJECT = Way("object")
LEDGER = Way("ledger")
TENSOR = Way("tensor")
TENSOR_LATE = Way("tensor", "on", 4)
HIERARCHICAL = Way("hierarchical", "off", 2)
HIERARCHICAL_LATE = Way("hierarchical", "on", 2)
ALL = [OBJECT, LEDGER, TENSOR, TENSOR_LATE, HIERARCHICAL, HIERARCHICAL_LATE]


def replica_of(rank: int, size: int, hosts: int, deadline_s: float = 20.0) -> Replica:
    here = Place.here()
    place = Place(here.host ^ (rank * hosts // size), here.pid)
    return Replica.from_world(tp=size, deadline_s=deadline_s, place=place)


def agreement_of(rank: int, size: int, way: Way, deadline_s: float = 20.0) -> Agreement:
    return Agreement(replica_of(rank, size, way.hosts, deadline_s), way.channel, late=way.late)


class Work:
    """Tasks that every rank submits alike and each finishes in its own order, at its own time."""

    def __init__(self, agreement: Agreement, rank: int) -> None:
        self._member = agreement.member
        self._order = random.Random(rank)
        self._unfinished: dict[Mark, list[int]] = {mark: [] for mark in Mark}
        self._step = 0

    def go_on(self) -> None:
        """What happens on this rank before its next step."""
        if self._step % 3 == 0:
            for stream in (Stream.LOADS, Stream.OFFLOADS):
                number = self._member.record(stream, b"%d" % self._step, "t")
                for mark in Mark:
                    if mark.stream is stream:
                        self._unfinished[mark].append(number)
        for mark in Mark:
            # Now and then this rank finishes nothing, or a few tasks in any order.
            for _ in range(self._order.randrange(3)):
                if self._unfinished[mark]:
                    number = self._unfinished[mark].pop(self._order.randrange(len(self._unfinished[mark])))
                    failed = self._order.random() < 0.2
                    self._member.finish(mark, number, self._order.randrange(4) if failed else None)
        self._step += 1
