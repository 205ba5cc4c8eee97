"""The whole system in one thread: replicas of ranks, the stores of their hosts, and everything that may happen.

Actions. In stories and transcripts they stand as lines, see `script`. Ranks are numbered over all replicas.

======================================  ========================================================================
`request REPLICA ID TEXT WISHES`        a request arrives; WISHES as in `engine.WISHES`, separated by blanks
`abort REPLICA ID`, `preempt ...`       it is given up; it is given up and starts anew under the same id
`clear REPLICA`                         the engine forgets every stored page
`step REPLICA`                          all ranks do the rest of one step: post, decide, apply
`post RANK`, `apply RANK`               one rank enters its next step; one rank takes the decision of its step
`decide REPLICA`                        the master decides
`gather RANK ID`                        an offload on one rank has left its device slots
`finish RANK KIND ID`                   a transfer on one rank ends well (KIND: load, offload)
`fail RANK KIND ID PAGES`               it fails after so many good pages
`break RANK`                            all its transfers in flight fail at once, with no good page
`serve REPLICA`, `answer REPLICA`       the owner handles the master's oldest request; its oldest answer arrives
`talk REPLICA`                          the owner handles everything the master asked, and all answers arrive
`land REPLICA`                          all copies in flight end well, on every rank
`tick SECONDS`                          time passes
`press STORE PAGES`                     a neighbour stores a prompt of its own: pressure on the pool
`rot STORE PAGE RANK`                   the bytes of one group rank's slice of a page rot
`kill RANK`, `reap RANK`                a process is dying; it is gone, with its copies
`lose REPLICA`, `leave RANK`            the deadline of those who wait passes; a rank that ended takes leave
`restart REPLICA`                       all ranks are gone, the launcher starts them again
`die STORE`                             the owner of a store dies
`diverge RANK MANNER`, `trip REPLICA`   a rank makes other calls than the others; the master fails to decide
`settle`                                everything in flight completes; then nothing may be left
======================================  ========================================================================
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, cast

import torch

from mlkv.dist.explore import Action, Violation, VirtualClock, World
from mlkv.explore.engine import WISHES
from mlkv.explore.footprint import freeze
from mlkv.explore.narrate import NOTHING
from mlkv.explore.parts import Shape
from mlkv.explore.rank import Transfer, VirtualRank
from mlkv.explore.replica import VirtualReplica
from mlkv.explore.retelling import simpler
from mlkv.explore.script import describe_action
from mlkv.explore.store import VirtualStore, describe_reply, describe_request

_COUNTERS = frozenset(
    # What only counts or only names, and never decides. Which steps ranks are in, a replica tells itself.
    ("step", "stats", "lines", "_totals", "shape", "_layout", "_clock", "_labels", "newest_label")
)


class VirtualWorld(World):
    """See the module.

    Attributes:
        stores: by number, see `Shape.store_of_replica`; a dead one is replaced when a replica starts anew.
        replicas: in their current generations.
    """

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.clock = VirtualClock()
        self.stores = {number: self._new_store(number) for number in shape.store_numbers}
        self.replicas = [self._new_replica(index, 1) for index in range(shape.num_replicas)]
        self._lines: list[str] | None = None

    def _new_store(self, number: int) -> VirtualStore:
        store = VirtualStore(number, self.shape.num_pages, self.shape.num_ranks, self.shape.parts.service)
        for text in self.shape.stored:
            store.store(text)
        return store

    def _new_replica(self, index: int, generation: int) -> VirtualReplica:
        number = self.shape.store_of_replica(index)
        if not self.stores[number].is_alive:
            self.stores[number] = self._new_store(number)
        return VirtualReplica(index, generation, self.shape, self.stores[number], self.clock)

    @property
    def lines(self) -> list[str] | None:
        return self._lines

    @lines.setter
    def lines(self, lines: list[str] | None) -> None:
        self._lines = lines
        for replica in self.replicas:
            replica.lines = lines

    def say(self, line: str) -> None:
        if self._lines is not None:
            self._lines.append(line)

    def locate(self, number: int) -> tuple[VirtualReplica, int]:
        """The replica of a rank, and its group rank."""
        return self.replicas[number // self.shape.num_ranks], number % self.shape.num_ranks

    def rank(self, number: int) -> VirtualRank:
        replica, rank = self.locate(number)
        return replica.ranks[rank]

    # What happens

    def apply(self, action: Action) -> bool:
        verb = str(action[0])
        method = getattr(self, f"_do_{verb}", None)
        if method is None:
            raise ValueError(f"{verb!r} is not an action; see mlkv.explore.world")
        return bool(method(*action[1:]))

    def _do_request(self, replica: int, request_id: str, text: str, wishes: str = "") -> bool:
        wanted = frozenset(wishes.split())
        if not wanted <= set(WISHES):
            raise ValueError(f"wishes are {', '.join(WISHES)}, not {wishes!r}")
        engine = self.replicas[replica].engine
        return engine.num_requests < self.shape.max_requests and engine.order_request(request_id, text, wanted)

    def _do_abort(self, replica: int, request_id: str) -> bool:
        return self.replicas[replica].engine.order_abort(request_id, lives_on=False)

    def _do_preempt(self, replica: int, request_id: str) -> bool:
        return self.replicas[replica].engine.order_abort(request_id, lives_on=True)

    def _do_clear(self, replica: int) -> bool:
        return self.replicas[replica].engine.order_clear()

    def _do_step(self, replica: int) -> bool:
        here = self.replicas[replica]
        happened = False
        for rank in range(len(here.ranks)):
            if here.can_post(rank):
                here.post(rank)
                happened = True
        if here.can_decide:
            here.decide()
            happened = True
        for rank in range(len(here.ranks)):
            if here.can_apply(rank):
                here.apply(rank)
                happened = True
        return happened

    def _do_post(self, number: int) -> bool:
        replica, rank = self.locate(number)
        if not replica.can_post(rank):
            return False
        replica.post(rank)
        return True

    def _do_decide(self, replica: int) -> bool:
        if not self.replicas[replica].can_decide:
            return False
        self.replicas[replica].decide()
        return True

    def _do_apply(self, number: int) -> bool:
        replica, rank = self.locate(number)
        if not replica.can_apply(rank):
            return False
        replica.apply(rank)
        return True

    def _find(self, number: int, kind: str, request_id: str) -> tuple[VirtualRank, Transfer | None]:
        rank = self.rank(number)
        return rank, rank.find(kind, request_id)

    def _do_gather(self, number: int, request_id: str) -> bool:
        rank, transfer = self._find(number, "offload", request_id)
        if transfer is None or transfer.gathered is not None:
            return False
        rank.gather(transfer)
        return True

    def _do_finish(self, number: int, kind: str, request_id: str) -> bool:
        rank, transfer = self._find(number, kind, request_id)
        if transfer is None:
            return False
        num_good = rank.finish(transfer)
        if num_good < len(transfer.pages):
            self.say(f"{num_good} of {len(transfer.pages)} pages are good")
        return True

    def _do_fail(self, number: int, kind: str, request_id: str, num_good: int) -> bool:
        rank, transfer = self._find(number, kind, request_id)
        if transfer is None or not 0 <= num_good < len(transfer.pages):
            return False
        rank.finish(transfer, num_good)
        return True

    def _do_break(self, number: int) -> bool:
        rank = self.rank(number)
        for transfer in list(rank.transfers.values()):
            self.say(f"the {transfer.touch.kind} of {transfer.touch.request_id} fails")
            rank.finish(transfer, 0)
        return True

    def _do_serve(self, replica: int) -> bool:
        here = self.replicas[replica]
        if not here.client.num_asked or not here.can_ask:
            return False
        request, reply = here.client.serve()
        if self._lines is not None:
            self.say(f"{describe_request(request)}: {describe_reply(reply)}")
        return True

    def _do_answer(self, replica: int) -> bool:
        here = self.replicas[replica]
        if not here.client.num_answered or not here.can_ask:
            return False
        here.client.deliver()
        return True

    def _do_talk(self, replica: int) -> bool:
        happened = False
        while self._do_serve(replica):
            happened = True
        while self._do_answer(replica):
            happened = True
        return happened

    def _do_land(self, replica: int) -> bool:
        happened = False
        for rank in self.replicas[replica].ranks:
            for transfer in list(rank.transfers.values()):
                num_good, num_pages = rank.finish(transfer), len(transfer.pages)
                if num_good < num_pages:
                    self.say(f"rank {rank.number} finds {num_good} of {num_pages} pages good")
                happened = True
        return happened

    def _do_tick(self, seconds: int) -> bool:
        self.clock.advance(seconds)
        return True

    def _do_press(self, number: int, num_pages: int) -> bool:
        store = self.stores[number]
        if not store.is_alive:
            return False
        granted = store.press(num_pages)
        self.say(f"{granted} of {num_pages} pages were given to the neighbour")
        return True

    def _do_rot(self, number: int, text: str, piece: int) -> bool:
        page = self.stores[number].find_written(text, piece)
        if page is None:
            return False
        self.stores[number].rotten.add((page, piece))
        return True

    def _do_kill(self, number: int) -> bool:
        replica, rank = self.locate(number)
        return replica.kill(rank)

    def _do_reap(self, number: int) -> bool:
        replica, rank = self.locate(number)
        return replica.reap(rank)

    def _do_lose(self, replica: int) -> bool:
        return self.replicas[replica].lose()

    def _do_leave(self, number: int) -> bool:
        replica, rank = self.locate(number)
        return replica.leave(rank)

    def _do_restart(self, replica: int) -> bool:
        old = self.replicas[replica]
        if not old.is_gone:
            return False
        self.replicas[replica] = self._new_replica(replica, old.generation + 1)
        self.replicas[replica].lines = self._lines
        return True

    def _do_die(self, number: int) -> bool:
        was_alive, self.stores[number].is_alive = self.stores[number].is_alive, False
        return was_alive

    def _do_diverge(self, number: int, manner: str) -> bool:
        replica, rank = self.locate(number)
        return replica.diverge(rank, manner)

    def _do_trip(self, replica: int) -> bool:
        return self.replicas[replica].trip()

    # Rest

    def is_settled(self) -> bool:
        return all(replica.is_settled for replica in self.replicas)

    def settle(self) -> None:
        try:
            self._settle()
        finally:
            if self._lines is not None:
                self._lines[:] = [line for line in self._lines if not line.endswith(NOTHING)]

    def _settle(self) -> None:
        requests = sum(len(replica.engine.requests) for replica in self.replicas)
        # A request takes some ten steps from arrival to end; blocks may make them wait for each other.
        for _ in range(20 + 14 * requests):
            if self.is_settled():
                break
            for replica in list(self.replicas):
                self._settle_once(replica)
        else:
            waiting = [f"replica {r.index}: {r.describe_waiting()}" for r in self.replicas if not r.is_settled]
            raise Violation(
                "nobody waits for ever", f"everything completes, and still waits: {'; '.join(waiting)}"
            )
        for replica in self.replicas:
            if replica.store.is_alive:
                self._check_rest(replica.store)

    def _settle_once(self, replica: VirtualReplica) -> None:
        for rank in replica.ranks:
            for transfer in list(rank.transfers.values()):
                rank.finish(transfer)
            replica.reap(rank.group_rank)
        replica.lose()
        for rank in replica.ranks:
            replica.leave(rank.group_rank)
        if self._do_restart(replica.index):
            return
        while replica.can_ask and replica.client.num_asked:
            replica.client.serve()
        while replica.client.num_answered:
            replica.client.deliver()
        self._do_step(replica.index)

    def _check_rest(self, store: VirtualStore) -> None:
        counts = store.index.counts()
        if counts.leases or counts.reservations or counts.reserved or counts.quarantined:
            raise Violation("nothing is held when nothing is in flight", f"store {store.number}: {counts}")

    # For exhaustive exploration

    def enabled(self) -> Sequence[Action]:
        raise NotImplementedError("a world of any size has too many actions to list; see mlkv.explore.small")

    def state(self) -> list[object]:
        """All that what follows may depend on."""
        return [self.replicas, self.stores]

    def fingerprint(self) -> Hashable:
        return hash(freeze(self.state(), _COUNTERS))

    def snapshot(self) -> bytes:
        buffer = io.BytesIO()
        pickler = pickle.Pickler(buffer, pickle.HIGHEST_PROTOCOL)
        # Slots of offloads that wait for their pages. The general way of torch takes half a millisecond.
        pickler.dispatch_table = {torch.Tensor: _reduce_slots, memoryview: _reduce_view}
        pickler.dump(self)
        return buffer.getvalue()

    def describe(self, action: Action) -> str:
        return describe_action(action, one_replica=self.shape.num_replicas == 1)

    def simpler(self, actions: Sequence[Action]) -> Iterator[list[Action]]:
        return simpler(actions, self.shape.num_ranks)


def _reduce_view(view: memoryview) -> tuple[Callable[[Any, str], memoryview], tuple[object, str]]:
    """The index keeps views of whole arrays beside these, for quick access; each stays a view of its array."""
    return _view_of, (view.obj, view.format)


def _view_of(array: Any, item_format: str) -> memoryview:
    view = memoryview(array)
    return view if view.format == item_format else view.cast("B")


def _reduce_slots(slots: torch.Tensor) -> tuple[Callable[[list[int]], torch.Tensor], tuple[list[int]]]:
    return torch.tensor, (cast("list[int]", slots.tolist()),)
