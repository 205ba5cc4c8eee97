"""The store-side half of the facade: asks the owner process, never blocks, and treats a failing store as a miss.

Stands alone for engines that bring their own agreement (one central scheduler): it knows nothing of ranks or
device memory. Each question carries a number of the caller's, its *call*.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Union

import numpy as np
import numpy.typing as npt

from mlkv.errors import DeadlineExceeded, StoreError, StoreLost
from mlkv.store import Invalidate, Stale, StoreClient, wire

log = logging.getLogger(__name__)

_NO_PAGES = np.empty(0, np.int32)
_NO_GENERATIONS = np.empty(0, np.uint64)


@dataclass(frozen=True)
class HitAnswer:
    """Lookup `call` found these pages, from the root; leased until `drop` or `finish_load`.

    indices: int32 `[n]`; generations: uint64 `[n]`.
    """

    call: int
    indices: npt.NDArray[np.int32] = field(default_factory=lambda: _NO_PAGES)
    generations: npt.NDArray[np.uint64] = field(default_factory=lambda: _NO_GENERATIONS)


@dataclass(frozen=True)
class ReserveAnswer:
    """Offload `call` is to write pages `first`, `first + 1`, ... of its chain; none when all are taken care of."""

    call: int
    first: int = 0
    indices: npt.NDArray[np.int32] = field(default_factory=lambda: _NO_PAGES)
    generations: npt.NDArray[np.uint64] = field(default_factory=lambda: _NO_GENERATIONS)


@dataclass(frozen=True)
class StoredAnswer:
    """Offload `call` is settled: `num_pages` from the front of its chain are readable. `reason` if it failed."""

    call: int
    num_pages: int
    reason: str = ""


@dataclass(frozen=True)
class EpochAnswer:
    """Others have invalidated the namespace: questions about an epoch before this one find nothing."""

    epoch: int


Answer = Union[HitAnswer, ReserveAnswer, StoredAnswer, EpochAnswer]  # noqa: UP007 - an alias evaluated on Python 3.10


@dataclass
class _Question:
    call: int
    kind: str  # "match", "reserve", "commit" or "tell" (no answer wanted)
    deadline: float
    dropped: bool = False


class Planner:
    """Lookups, reservations and their ends, batched onto one connection to the owner.

    Args:
        client: a connected client of the owner of this host.
        answer_deadline_s: what the owner has not answered by then is a miss.
        max_questions: questions without an answer at once; more are answered as a miss at once.
        lookup_wait_s: how long the owner may let a lookup wait for lower tiers; below `answer_deadline_s`.
        clock: seconds, as `time.monotonic`; another one where time is virtual.

    Attributes:
        epoch: of the namespace whose keys are asked for from now on, see `Namespace.epoch`.
        asked, answers: questions without an answer, by ticket, and answers not polled yet. While both are empty,
            `poll` finds nothing.
    """

    def __init__(
        self,
        client: StoreClient,
        answer_deadline_s: float,
        max_questions: int,
        lookup_wait_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._deadline_s = answer_deadline_s
        self._max_questions = max_questions
        self._lookup_wait_s = lookup_wait_s
        self._clock = clock
        self.epoch = 0
        self.asked: dict[int, _Question] = {}
        self._leases: dict[int, tuple[int, wire.Matched]] = {}  # call -> its lease and what it covers
        self._reservations: dict[int, wire.Reserved] = {}
        self.answers: list[Answer] = []
        self._lost = False

    def lookup(self, call: int, keys: bytes) -> None:
        """Ask for the longest readable prefix of a chain of keys (16 bytes each). A HitAnswer follows."""
        self._ask(call, "match", wire.Match(keys, len(keys) // 16, self._lookup_wait_s, self.epoch))

    def reserve(self, call: int, keys: bytes) -> None:
        """Ask for pages for what is missing of a chain. A ReserveAnswer follows.

        If it names pages, `commit` (or `drop`, before anything is written) must follow; if it names none, a
        StoredAnswer follows by itself.
        """
        self._ask(call, "reserve", wire.Reserve(keys, epoch=self.epoch))

    def commit(self, call: int, num_good: int) -> None:
        """All ranks are done writing; the first `num_good` reserved pages are right. A StoredAnswer follows."""
        reserved = self._reservations.pop(call)
        self._ask(call, "commit", wire.Commit(reserved.reservation, num_good))

    def finish_load(self, call: int, first_bad: int | None) -> None:
        """All ranks are done reading. `first_bad`: which leased page did not verify; its key is forgotten."""
        lease, matched = self._leases.pop(call)
        if first_bad is not None:
            page = matched.page_ids[first_bad : first_bad + 1].tobytes()
            generation = matched.page_generations[first_bad : first_bad + 1].tobytes()
            self._tell(wire.Quarantine(page, generation))
        self._tell(wire.Release([lease]))

    def count_sources(self, call: int, first: int, num_pages: int) -> Counter[str]:
        """How many of pages [first, first + num_pages) of an answered lookup each tier has brought for it.

        The rest was in host memory. Before `finish_load` or `drop`.
        """
        sources = self._leases[call][1].sources[first : first + num_pages]
        return Counter(self._client.tiers[source - 1] for source in sources if source)

    def drop(self, call: int) -> None:
        """Give back what a call holds or will be given, before anything was read or written for it."""
        for question in self.asked.values():
            if question.call == call:
                question.dropped = True
        self.answers = [
            answer for answer in self.answers if isinstance(answer, EpochAnswer) or answer.call != call
        ]
        if call in self._leases:
            self._tell(wire.Release([self._leases.pop(call)[0]]))
        if call in self._reservations:
            self._tell(wire.Cancel(self._reservations.pop(call).reservation))

    def clear(self) -> None:
        """Forget every page. What is being loaded stays leased; what is being written will not be published."""
        self._tell(wire.Clear())

    def invalidate(self, epoch: int) -> None:
        """Begin this epoch of the namespace, or one that others have begun after it: an EpochAnswer follows then.

        Waits until the owner has it on record, for `answer_deadline_s` at most: from when this returns on, no page
        of an older epoch may come back, whoever is killed.
        """
        self.epoch = epoch
        if self._lost:
            return
        try:
            opened = self._client.call(Invalidate(epoch=epoch), self._deadline_s)
        except StoreLost as error:
            self._lose(error)
        except (StoreError, DeadlineExceeded) as error:
            log.error("older pages are not found by this engine, but may be by one that starts later: %s", error)
        else:
            if not opened.is_saved:
                log.warning("a lower tier does not know yet that older pages are invalid; the store keeps trying")
            if opened.epoch != epoch:
                self.answers.append(EpochAnswer(opened.epoch))

    def poll(self) -> Sequence[Answer]:
        """What was answered since the last poll, in order. Never blocks and never raises for a failing store."""
        self._take_arrived()
        now = self._clock()
        for question in self.asked.values():
            if not question.dropped and question.deadline < now:
                # Its reply may still come; whatever that grants is given back then.
                log.warning("the store did not answer a %s within %g s", question.kind, self._deadline_s)
                question.dropped = True
                self._answer_nothing(question, f"no answer from the store within {self._deadline_s:g} s")
        answers, self.answers = self.answers, []
        return answers

    def settle(self, deadline_s: float) -> None:
        """Wait until the owner has answered everything that was sent, so that its books show it.

        What it answers is kept for the next poll. Raises DeadlineExceeded.
        """
        end = time.monotonic() + deadline_s
        while self.asked and not self._lost:
            if time.monotonic() > end:
                raise DeadlineExceeded(f"the store left {len(self.asked)} questions open for {deadline_s:g} s")
            self._take_arrived()
            time.sleep(0.0005)

    def _take_arrived(self) -> None:
        if self._lost or not self.asked:  # the owner speaks only when asked
            return
        try:
            for ticket, reply in self._client.poll():
                if ticket not in self.asked:
                    return  # giving back what an earlier reply granted found the store gone, and all was answered
                self._take(self.asked.pop(ticket), reply)
        except StoreLost as error:
            self._lose(error)

    def _ask(self, call: int, kind: str, request: wire.Request) -> None:
        question = _Question(call, kind, self._clock() + self._deadline_s)
        if self._lost:
            self._answer_nothing(question, "the store is gone")
        elif kind != "commit" and len(self.asked) >= self._max_questions:
            self._answer_nothing(question, f"{self._max_questions} questions to the store are open")
        else:
            self._send(question, request)

    def _tell(self, request: wire.Request) -> None:
        if not self._lost:
            self._send(_Question(0, "tell", float("inf")), request)

    def _send(self, question: _Question, request: wire.Request) -> None:
        try:
            self.asked[self._client.submit(request)] = question
        except StoreLost as error:
            self._lose(error)
            self._answer_nothing(question, "the store is gone")
        except StoreError as error:
            log.warning("the store takes no %s: %s", question.kind, error)
            self._answer_nothing(question, str(error))

    def _take(self, question: _Question, reply: wire.Reply) -> None:
        if isinstance(reply, wire.Matched):
            self._take_matched(question, reply)
        elif isinstance(reply, wire.Reserved):
            self._take_reserved(question, reply)
        elif isinstance(reply, wire.Published):
            self._take_published(question, reply)
        elif isinstance(reply, Stale):
            if reply.epoch != self.epoch:
                self.answers.append(EpochAnswer(reply.epoch))
            if not question.dropped:
                self._answer_nothing(question, "the namespace was invalidated")
        elif isinstance(reply, wire.Failed):
            log.warning("the store refused a %s: %s", question.kind, reply.message)
            if not question.dropped:
                self._answer_nothing(question, reply.message)

    def _take_matched(self, question: _Question, reply: wire.Matched) -> None:
        if question.dropped:
            if reply.lease:
                self._tell(wire.Release([reply.lease]))
            return
        if reply.lease:
            self._leases[question.call] = (reply.lease, reply)
        self.answers.append(HitAnswer(question.call, reply.page_ids, reply.page_generations))

    def _take_reserved(self, question: _Question, reply: wire.Reserved) -> None:
        if question.dropped:
            if reply.reservation:
                self._tell(wire.Cancel(reply.reservation))
            return
        self.answers.append(ReserveAnswer(question.call, reply.first, reply.page_ids, reply.page_generations))
        if reply.reservation:
            self._reservations[question.call] = reply
        else:
            self.answers.append(StoredAnswer(question.call, reply.num_ready))

    def _take_published(self, question: _Question, reply: wire.Published) -> None:
        if not question.dropped:
            self.answers.append(StoredAnswer(question.call, reply.num_readable))

    def _answer_nothing(self, question: _Question, why: str) -> None:
        if question.kind == "match":
            self.answers.append(HitAnswer(question.call))
        elif question.kind == "reserve":
            self.answers += [ReserveAnswer(question.call), StoredAnswer(question.call, 0, why)]
        elif question.kind == "commit":
            self.answers.append(StoredAnswer(question.call, 0, why))

    def _lose(self, error: StoreLost) -> None:
        log.warning("%s; from now on every lookup is a miss", error)
        self._lost = True
        asked, self.asked = self.asked, {}
        for question in asked.values():
            if not question.dropped:
                self._answer_nothing(question, "the store is gone")
