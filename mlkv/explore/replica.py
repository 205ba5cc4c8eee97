"""A replica: its ranks, the channel between them, and what must be equal on all of them."""

from __future__ import annotations

from functools import partial
from typing import cast

import msgspec

from mlkv.dist import Decision
from mlkv.dist.agreement import Decisions
from mlkv.dist.explore import Violation, VirtualClock
from mlkv.errors import AgreementError, CacheUsageError, MasterFailed, RankLost, RanksDiverged
from mlkv.explore.engine import VirtualEngine
from mlkv.explore.footprint import footprint
from mlkv.explore.narrate import describe_calls, describe_result, in_short
from mlkv.explore.parts import ANSWER_DEADLINE_S, Shape
from mlkv.explore.rank import Call, Ended, VirtualRank
from mlkv.explore.store import VirtualClient, VirtualStore
from mlkv.planner import Planner
from mlkv.store import StoreClient
from mlkv.tasks import StepResult

_STEPS_PER_WEIGHING = 16
_STATE_PER_TASK = 24
_STATE_AT_REST = 160
"""Values that member and master of one rank may hold for each task in flight, and at most with none."""


class VirtualReplica:
    """One generation of a replica.

    A step goes: each rank makes the engine's calls and posts its report; when all have come it is decided; each
    rank applies the decision, that of the step before if the shape is late. The leader of each host decides from
    the same reports, as the channels between hosts do it; the ranks of a host take the message of their leader.

    Attributes:
        step, applied: of each rank, how many steps it has begun and ended.
        lines: where the story goes, if one is told.
    """

    def __init__(
        self, index: int, generation: int, shape: Shape, store: VirtualStore, clock: VirtualClock
    ) -> None:
        self.index = index
        self.generation = generation
        self.store = store
        self.group = f"replica {index} generation {generation}".encode()
        self.engine = VirtualEngine(shape.num_blocks)
        self.client = VirtualClient(store, self.group)
        self._lag = int(shape.is_late)
        self._has_neighbours = shape.num_replicas > 1
        planner: Planner = shape.parts.planner(
            cast(StoreClient, self.client), ANSWER_DEADLINE_S, shape.max_questions, clock=clock
        )
        first = index * shape.num_ranks
        self.ranks = [
            shape.parts.rank(first + rank, rank, shape, store, self.group, None if rank else planner)
            for rank in range(shape.num_ranks)
        ]
        hosts = [shape.host_of_rank(rank.number) for rank in self.ranks]
        self._host = [host - hosts[0] for host in hosts]
        masters = [
            shape.parts.master(shape.num_ranks, None if host else self.ranks[0].member)
            for host in range(self._host[-1] + 1)
        ]
        self._master = masters[0]
        self._leaders = [Decisions(master, shape.num_ranks) for master in masters]
        for rank in self.ranks:
            store.service.join(self.group, rank.number)
        self.step = [0] * shape.num_ranks
        self.applied = [0] * shape.num_ranks
        self.lines: list[str] | None = None
        self._decided = 0  # steps
        self._reports: dict[int, dict[int, bytes]] = {}  # step -> rank -> what it sent
        self._messages: dict[int, list[bytes]] = {}  # step -> by host, until all ranks have taken it
        self._plans: dict[int, list[Call]] = {}
        self._results: dict[int, tuple[StepResult, list[tuple[str, int, bytes]]]] = {}
        self._diverging: tuple[int, str] | None = None  # rank and manner, from its next step on
        self._diverged: tuple[int, int] | None = None  # rank and step, once it has
        self._tripping = False
        self._tripped = False

    def frozen(self) -> object:
        """For fingerprints: everything, with steps counted from that of the slowest rank."""
        base = min(self.applied)
        state = {name: value for name, value in vars(self).items() if name not in ("lines", "clock")}
        state["step"] = [step - base for step in self.step]
        state["applied"] = [step - base for step in self.applied]
        state["_decided"] = self._decided - base
        state["_diverged"] = self._diverged is not None
        state["_messages"] = [
            (step - base, [message and msgspec.msgpack.decode(message, type=Decision) for message in messages])
            for step, messages in self._messages.items()
        ]
        for name in ("_reports", "_plans", "_results"):
            state[name] = [(step - base, value) for step, value in state[name].items()]
        return state

    # What is possible now

    def can_post(self, rank: int) -> bool:
        if self._diverged is not None and self._diverged[0] == rank and self.step[rank] + 1 not in self._plans:
            return False  # what it knows is not what the others know, so it must not plan for them
        return self.ranks[rank].is_running and self.step[rank] == self.applied[rank]

    def can_apply(self, rank: int) -> bool:
        wanted = self.step[rank] - self._lag
        ready = wanted == 0 or wanted in self._messages
        return self.ranks[rank].is_running and self.step[rank] > self.applied[rank] and ready

    @property
    def can_decide(self) -> bool:
        return self.ranks[0].is_running and len(self._reports.get(self._decided + 1, ())) == len(self.ranks)

    # A step

    def post(self, rank: int) -> None:
        """A rank enters its next step and sends its report."""
        here = self.ranks[rank]
        step = self.step[rank] + 1
        if step not in self._plans:
            self._plans[step] = self.engine.plan()
            if self._plans[step]:
                self._say(f"step {step}: every rank calls {describe_calls(self._plans[step])}")
        calls = self._plans[step]
        self.step[rank] = step
        if all(begun >= step for begun in self.step):
            del self._plans[step]
        try:
            here.make_calls(self._diverge(rank, step, calls))
        except CacheUsageError:
            if self._diverged is None or self._diverged[0] != rank:
                raise
            # It called something else before, and what it calls now does not fit; its engine dies of that.
            self.kill(rank)
            return
        here.poll()
        if here.skips_message(calls):
            self._take_result(rank, StepResult())
            self._check_together(rank)
        else:
            self._reports.setdefault(step, {})[rank] = here.member.report()

    def decide(self) -> None:
        """All have been heard: every leader decides."""
        self._decided += 1
        step = self._decided
        sent = self._reports.pop(step)
        reports = [sent[rank] for rank in range(len(self.ranks))]
        self._leaders[0].facts = partial(_trip, self) if self._tripping else self.ranks[0].lifecycle.collect_facts
        note = self._leaders[0].note()
        self._messages[step] = [leader.decide(step, reports, note) for leader in self._leaders]
        if step % _STEPS_PER_WEIGHING == 0:
            self._check_footprint()

    def apply(self, rank: int) -> None:
        """A rank takes the message of its step, or of the one before, and ends its step."""
        wanted = self.step[rank] - self._lag
        message = self._messages[wanted][self._host[rank]] if wanted else b""
        try:
            result = self.ranks[rank].receive(message)
        except AgreementError as error:
            self._end(rank, error)
            return
        if self._diverged is not None and wanted >= self._diverged[1]:
            who, since = self._diverged
            raise Violation(
                "a rank that diverged is named",
                f"rank {self.ranks[who].number} made other calls in step {since}, and step {wanted} was agreed",
            )
        self._take_result(rank, result)
        if all(done >= wanted + self._lag for done in self.applied):
            self._messages.pop(wanted, None)

    def _take_result(self, rank: int, result: StepResult) -> None:
        self.applied[rank] += 1
        step = self.applied[rank]
        if self._diverged is not None and self._diverged[0] == rank:
            # What is applied late can differ on it for once, before the exchange that names it.
            return
        known = self._results.get(step)
        if known is None:
            for line in describe_result(result):
                self._say(f"step {step}: {line}")
            known = self._results[step] = (result, self.engine.take(result))
        elif known[0] != result:
            raise Violation(
                "every rank has the same results",
                f"step {step}: rank {self.ranks[rank].number} has {in_short(result)}, "
                f"another rank {in_short(known[0])}",
            )
        self.ranks[rank].check_device(known[1])
        if all(done >= step for done in self.applied):
            del self._results[step]

    def _check_together(self, rank: int) -> None:
        slowest = min(range(len(self.step)), key=lambda other: self.applied[other])
        if self.step[rank] > self.applied[slowest] + 2 + self._lag:
            waits = self.ranks[slowest].number
            ahead = f"rank {self.ranks[rank].number} is in step {self.step[rank]} and never sent its message"
            raise Violation(
                "nobody waits for ever", f"rank {waits} waits in step {self.applied[slowest] + 1}; {ahead}"
            )

    def _check_footprint(self) -> None:
        for rank in {0, len(self.ranks) - 1}:
            in_flight = self.ranks[rank].lifecycle.pending
            held = footprint(self.ranks[rank].member) + (0 if rank else footprint(self._master))
            allowed = _STATE_AT_REST + len(self.ranks) * 12 * (rank == 0) + _STATE_PER_TASK * in_flight
            if held > allowed:
                raise Violation(
                    "state is bounded by what is in flight",
                    f"the agreement of rank {self.ranks[rank].number} holds {held} values for {in_flight} tasks",
                )

    # Faults

    def diverge(self, rank: int, manner: str) -> bool:
        """From now on this rank's next calls are not those of the others: "other" arguments, or one "more"."""
        if self._diverging or self._diverged or not self._is_whole:
            return False
        self._diverging = (rank, manner)
        return True

    def _diverge(self, rank: int, step: int, calls: list[Call]) -> list[Call]:
        if self._diverging is None or self._diverging[0] != rank:
            return calls
        manner = self._diverging[1]
        if manner == "other":
            for at, call in enumerate(calls):
                if call[0] in ("lookup", "offload"):
                    self._diverging, self._diverged = None, (rank, step)
                    return [*calls[:at], (call[0], f"{call[1]}'", *call[2:]), *calls[at + 1 :]]
            return calls  # nothing to get wrong in this step
        self._diverging, self._diverged = None, (rank, step)
        return [*calls, ("lookup", "stray", "a prompt nobody else has", 0)]

    def trip(self) -> bool:
        """The master's next attempt to decide fails."""
        if self._tripping or not self._is_whole:
            return False
        self._tripping = True
        return True

    def note_trip(self) -> None:
        self._tripping, self._tripped = False, True

    @property
    def _is_whole(self) -> bool:
        return all(rank.is_running for rank in self.ranks)

    def kill(self, rank: int) -> bool:
        """The process of a rank is dying. Its copies may go on until it is gone."""
        if not self.ranks[rank].is_running:
            return False
        self.ranks[rank].ended = Ended(killed=True)
        return True

    @property
    def is_leaving(self) -> bool:
        """Some ranks have taken the decision of a step, others can and have not."""
        waiting = [rank for rank in range(len(self.ranks)) if self.can_apply(rank)]
        return bool(waiting) and any(done > self.applied[waiting[0]] for done in self.applied)

    @property
    def can_lose(self) -> bool:
        """Whether a rank waits for one that will not come."""
        return not self._is_whole and not self.can_decide and bool(self._waiting)

    @property
    def _waiting(self) -> list[VirtualRank]:
        return [
            rank
            for rank in self.ranks
            if rank.is_running and not self.can_post(rank.group_rank) and not self.can_apply(rank.group_rank)
        ]

    def lose(self) -> bool:
        """The deadline passes on every rank that waits for one that will not come."""
        if not self.can_lose:
            return False
        lost = next((rank for rank in self.ranks if rank.ended is not None and rank.ended.killed), None)
        for rank in self._waiting:
            who = 0 if lost is None else lost.group_rank
            rank.ended = Ended(RankLost(who, self.step[rank.group_rank], "no report within the deadline"))
            self._say(f"rank {rank.number} ends: {rank.ended.error}")
        return True

    def leave(self, rank: int) -> bool:
        """A rank that ended with an error closes its cache: it waits for its own copies, then takes leave."""
        here = self.ranks[rank]
        if here.ended is None or here.ended.killed or here.ended.gone or here.transfers:
            return False
        self._go(here)
        return True

    def reap(self, rank: int) -> bool:
        """The process of a killed rank is gone, and its copies with it."""
        here = self.ranks[rank]
        if here.ended is None or not here.ended.killed or here.ended.gone:
            return False
        here.drop_transfers()
        self._go(here)
        return True

    def _go(self, rank: VirtualRank) -> None:
        assert rank.ended is not None
        rank.ended.gone = True
        if rank.store.is_alive:
            rank.store.service.leave(self.group, rank.number)
            rank.store.check_books()

    @property
    def is_gone(self) -> bool:
        return all(rank.ended is not None and rank.ended.gone for rank in self.ranks)

    @property
    def can_ask(self) -> bool:
        """Whether the owner may still hear from the master."""
        return self.ranks[0].ended is None or not self.ranks[0].ended.gone

    def _end(self, rank: int, error: AgreementError) -> None:
        expected = False
        if isinstance(error, RanksDiverged) and self._diverged is not None:
            # A master that diverges cannot know it: then it finds that somebody else did.
            who, step = self._diverged
            expected = error.step == step and (error.rank == who or who == 0)
        elif isinstance(error, MasterFailed):
            expected = self._tripped
        if not expected:
            raise Violation(
                "no error without a cause", f"rank {self.ranks[rank].number} ends: {type(error).__name__}: {error}"
            )
        self.ranks[rank].ended = Ended(error)
        self._say(f"rank {self.ranks[rank].number} ends: {error}")

    def _say(self, line: str) -> None:
        if self.lines is not None:
            self.lines.append(f"replica {self.index}, {line}" if self._has_neighbours else line)

    # Rest

    @property
    def is_settled(self) -> bool:
        """Nothing is in flight on any rank, and nobody waits for anything."""
        return (
            self._is_whole
            and self.engine.is_idle
            and not (self.client.num_asked or self.client.num_answered or self.client.num_arrived)
            and all(not rank.transfers and not rank.lifecycle.pending for rank in self.ranks)
        )

    @property
    def is_between_steps(self) -> bool:
        """No rank has begun a step that others have not."""
        return len(set(self.step)) == 1

    def describe(self) -> list[str]:
        """Where each rank is, and what it copies."""
        lines = []
        for rank in self.ranks:
            begun, done = self.step[rank.group_rank], self.applied[rank.group_rank]
            where = f"in step {begun}" if begun > done else f"after step {done}"
            copies = [f"{t.touch.kind} of {t.touch.request_id}" for t in rank.transfers.values()]
            lines.append(
                f"rank {rank.number} {rank.describe_state(where)}: {', '.join(copies) or 'copies nothing'}"
            )
        return lines

    def describe_waiting(self) -> str:
        """What keeps this replica from being settled."""
        requests = [f"{r.request_id} wants {r.wants.name.lower()}" for r in self.engine.requests.values()]
        requests += [f"{name} waits for its slots" for name in self.engine.draining]
        copies = [f"rank {r.number} copies {t.touch.request_id}" for r in self.ranks for t in r.transfers.values()]
        pending = [f"rank {r.number} has {r.lifecycle.pending} tasks" for r in self.ranks if r.lifecycle.pending]
        asked = [f"the store owes {self.client.num_asked + self.client.num_answered} answers"]
        return "; ".join(requests + copies + pending + (asked if self.client.num_asked else [])) or "its ranks"


def _trip(replica: VirtualReplica) -> list[bytes]:
    """Stands for whatever may fail on the master while it collects its facts."""
    replica.note_trip()
    raise RuntimeError("tripped")
