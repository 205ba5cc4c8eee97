"""What a virtual world is made of, and how large it is."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from functools import cached_property

from mlkv.dist import Master
from mlkv.explore.rank import NamedMember, VirtualRank
from mlkv.explore.words import layout_for
from mlkv.layout import KVLayout
from mlkv.lifecycle import Lifecycle
from mlkv.planner import Planner
from mlkv.store.service import StoreService

ANSWER_DEADLINE_S = 1.0


@dataclass(frozen=True)
class Parts:
    """The code under exploration. Only planted faults put other classes here."""

    member: type[NamedMember] = NamedMember
    master: type[Master] = Master
    lifecycle: type[Lifecycle] = Lifecycle
    planner: type[Planner] = Planner
    service: type[StoreService] = StoreService
    rank: type[VirtualRank] = VirtualRank


@dataclass(frozen=True)
class Shape:
    """Size of a world.

    Attributes:
        num_ranks: ranks of each replica.
        num_hosts: each has one store, which its replicas share. A replica that spans hosts has a store of its own:
            its pages have the same numbers on each of its hosts, where every rank keeps its own slice.
        num_pages: of each store.
        num_blocks: device blocks of each rank, one page each.
        is_late: decisions are applied one step after the exchange that brought them.
        max_requests: of one replica at once.
        slow_copies: in random runs, copies take many steps, so that many are in flight.
        max_tasks, max_questions: bounds of lifecycle and planner.
        stored: prompts that every store has from the start.
    """

    num_replicas: int = 1
    num_ranks: int = 2
    num_hosts: int = 1
    num_pages: int = 8
    num_blocks: int = 12
    is_late: bool = False
    max_requests: int = 6
    slow_copies: bool = False
    max_tasks: int = 64
    max_questions: int = 64
    stored: tuple[str, ...] = ()
    parts: Parts = field(default=Parts(), compare=False)

    @cached_property
    def layout(self) -> KVLayout:
        return layout_for(self.num_ranks)

    def host_of_rank(self, number: int) -> int:
        """Ranks are spread over the hosts in order."""
        return number * self.num_hosts // (self.num_replicas * self.num_ranks)

    def store_of_replica(self, replica: int) -> int:
        """Number of its store: that of its host, or one of its own."""
        first = self.host_of_rank(replica * self.num_ranks)
        last = self.host_of_rank((replica + 1) * self.num_ranks - 1)
        return first if first == last else self.num_hosts + replica

    @property
    def store_numbers(self) -> list[int]:
        return sorted({self.store_of_replica(replica) for replica in range(self.num_replicas)})

    @classmethod
    def by_chance(cls, rng: random.Random, parts: Parts = Parts()) -> Shape:
        """A small world: most faults need only two ranks and a few pages, and there they are easy to follow.

        One in six has room for more requests, whose copies take long: some faults need many in flight.
        """
        crowded = rng.random() < 1 / 6
        return cls(
            num_replicas=rng.choice((1, 1, 1, 2, 2, 3)),
            num_ranks=rng.choice((2, 2, 2, 3, 4)),
            num_hosts=rng.choice((1, 1, 1, 2)),
            num_pages=40 if crowded else rng.choice((4, 6, 8, 12)),
            num_blocks=60 if crowded else rng.choice((6, 10, 16)),
            is_late=rng.random() < 0.25,
            max_requests=14 if crowded else rng.choice((3, 6)),
            slow_copies=crowded,
            max_tasks=64 if crowded else rng.choice((3, 64, 64)),
            max_questions=rng.choice((2, 64, 64)),
            stored=rng.choice(((), ("the cat sat on the mat",), ("the dog ran home",))),
            parts=parts,
        )
