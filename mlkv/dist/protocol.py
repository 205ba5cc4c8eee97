"""The step protocol as a pure state machine: no sockets, clocks, threads or tensors.

Once per engine step every rank sends one `Progress` (fixed size) and receives one `Decision`:

    Member.progress() --> [channel] --> Master.decide() --> [channel] --> Member.apply()

*Streams* are what ranks must do alike: the facade calls they make, the loads and the offloads they submit. Each
rank numbers the entries of each stream 1, 2, 3, ... and keeps a running digest of their identities. *Marks* are
how far each rank has finished: a mark of n says "entries 1..n of my stream are done here". The master moves each
mark to the minimum over ranks, and every rank pops exactly the entries up to it.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import IntEnum
from hashlib import blake2b

import msgspec
import numpy as np
import numpy.typing as npt

from mlkv.errors import AgreementError, MasterFailed, RanksDiverged

MAX_FAILURES = 8
"""Failures one rank reports in one step. More wait for the next step, and their marks wait with them."""

_LABELS_KEPT = 8  # newest entries named in an error

_REPORT = struct.Struct(f"<{10 + 3 * MAX_FAILURES}q")
REPORT_BYTES = _REPORT.size
"""Of `Progress.pack`; the same in every step."""

Words = npt.NDArray[np.int64]


class Stream(IntEnum):
    CALLS = 0
    LOADS = 1
    OFFLOADS = 2


class Mark(IntEnum):
    LOADED = 0
    RELEASED = 1  # the gather has left the slots of an offload
    OFFLOADED = 2

    @property
    def stream(self) -> Stream:
        return Stream.LOADS if self is Mark.LOADED else Stream.OFFLOADS


class TaskFailure(msgspec.Struct, frozen=True, array_like=True):
    """Entry `number` failed at `mark` having `num_good` leading pages right; `rank` saw the fewest."""

    mark: int
    number: int
    num_good: int
    rank: int = -1


class Progress(msgspec.Struct, frozen=True, array_like=True):
    """What one rank publishes in one step. Counts and marks never decrease."""

    step: int
    counts: tuple[int, int, int]
    digests: tuple[int, int, int]
    marks: tuple[int, int, int]
    failures: tuple[TaskFailure, ...] = ()

    WORDS = 1 + 9 + 1 + 3 * MAX_FAILURES

    def pack(self) -> bytes:
        """The report: `REPORT_BYTES` bytes, everything but the step, which channels carry themselves."""
        numbers = [number for f in self.failures for number in (f.mark, f.number, f.num_good)]
        padding = [0] * (3 * MAX_FAILURES - len(numbers))
        return _REPORT.pack(*self.counts, *self.digests, *self.marks, len(self.failures), *numbers, *padding)

    @classmethod
    def unpack(cls, step: int, report: bytes) -> Progress:
        """Raises ValueError when these bytes are no report."""
        if len(report) != REPORT_BYTES:
            raise ValueError(f"a report has {REPORT_BYTES} bytes, not {len(report)}")
        values = _REPORT.unpack(report)
        if not 0 <= values[9] <= MAX_FAILURES:
            raise ValueError(f"a report cannot tell {values[9]} failures")
        failures = tuple(TaskFailure(*values[10 + 3 * i : 13 + 3 * i]) for i in range(values[9]))
        return cls(step, values[0:3], values[3:6], values[6:9], failures)

    def to_words(self) -> Words:
        """int64 `[Progress.WORDS]`: the step, then the report."""
        return np.frombuffer(self.step.to_bytes(8, "little", signed=True) + self.pack(), np.int64).copy()

    @classmethod
    def from_words(cls, words: Words) -> Progress:
        return cls.unpack(int(words[0]), words[1:].tobytes())


class Divergence(msgspec.Struct, frozen=True, array_like=True):
    """A rank whose stream differs from the master's."""

    rank: int
    why: str


class Decision(msgspec.Struct, frozen=True, array_like=True):
    """What every rank applies in one step.

    Attributes:
        marks: for each `Mark`, the number up to which all ranks have finished.
        failures: the entries up to the marks that failed somewhere, with the fewest good pages of any rank.
        facts: what only the master knows, opaque here, to be applied in this order before the marks.
        diverged, master_error: set instead of all that when the replica cannot go on.
    """

    step: int
    marks: tuple[int, int, int] = (0, 0, 0)
    failures: tuple[TaskFailure, ...] = ()
    facts: tuple[bytes, ...] = ()
    diverged: Divergence | None = None
    master_error: str = ""


def _chain(digest: int, identity: bytes) -> int:
    new = blake2b(digest.to_bytes(8, "little", signed=True) + identity, digest_size=8).digest()
    return int.from_bytes(new, "little", signed=True)


class Member:
    """One rank's part of the protocol. State is O(entries in flight), not O(entries done).

    Args:
        late: whether the decision of a step is applied one step later, see `apply`.
    """

    def __init__(self, rank: int, *, late: bool = False) -> None:
        self.rank = rank
        self.step = 0
        self._lag = int(late)
        self._counts = [0, 0, 0]
        self._digests = [0, 0, 0]
        self._done = [0, 0, 0]  # per mark: longest finished prefix here
        self._done_beyond: tuple[set[int], ...] = (set(), set(), set())
        self._unreported: dict[tuple[int, int], int] = {}  # (mark, number) -> good pages
        self._changed = True  # whether the next report may differ from the last
        self._report = b""
        # Marks published in the newest step and in the one before, to which a late decision belongs.
        self._published: list[tuple[int, int, int]] = [(0, 0, 0), (0, 0, 0)]
        self._agreed = (0, 0, 0)
        self._labels: list[tuple[int, Stream, int, str]] = []  # the newest: (step that publishes it, ...)

    def record(self, stream: Stream, identity: bytes, label: str) -> int:
        """Append an entry to a stream and return its number. `label` names it in errors."""
        self._changed = True
        self._counts[stream] += 1
        self._digests[stream] = _chain(self._digests[stream], identity)
        self._labels.append((self.step + 1, stream, self._counts[stream], label))
        del self._labels[:-_LABELS_KEPT]
        return self._counts[stream]

    def finish(self, mark: Mark, number: int, num_good: int | None = None) -> None:
        """This rank finished entry `number` (in any order); with `num_good` it failed after so many good pages.

        A second report of the same entry changes nothing.
        """
        if not 0 < number <= self._counts[mark.stream]:
            raise AgreementError(f"{mark.name.lower()} {number} was never submitted on rank {self.rank}")
        beyond = self._done_beyond[mark]
        if number <= self._done[mark] or number in beyond:
            return
        self._changed = True
        if num_good is not None:
            self._unreported[mark, number] = num_good
        beyond.add(number)
        while self._done[mark] + 1 in beyond:
            self._done[mark] += 1
            beyond.remove(self._done[mark])

    def report(self) -> bytes:
        """What to send in the next step, packed: `progress().pack()`, and quick when nothing has changed."""
        if self._changed:
            self._report = self.progress().pack()
        else:
            self.step += 1
            self._published[0] = self._published[1]
        return self._report

    def progress(self) -> Progress:
        """What to send in the next step."""
        self.step += 1
        marks = list(self._done)
        reported: list[TaskFailure] = []
        for (mark, number), num_good in sorted(self._unreported.items(), key=lambda item: item[0][1]):
            if number > self._done[mark]:
                continue
            if len(reported) == MAX_FAILURES:
                # A mark may pass a failure only together with its report.
                marks[mark] = min(marks[mark], number - 1)
            else:
                reported.append(TaskFailure(mark, number, num_good))
        reported = [failure for failure in reported if failure.number <= marks[failure.mark]]
        for failure in reported:
            del self._unreported[failure.mark, failure.number]
        # A failure is told once, and one that found no room is told next time.
        self._changed = bool(reported)
        published = (marks[0], marks[1], marks[2])
        self._published = [self._published[1], published]
        return Progress(
            self.step,
            (self._counts[0], self._counts[1], self._counts[2]),
            (self._digests[0], self._digests[1], self._digests[2]),
            published,
            tuple(reported),
        )

    def apply(self, decision: Decision) -> tuple[range, range, range]:
        """Accept a decision; for each mark the numbers that are to be popped now, in order.

        It must be the decision of the newest step, or of the one before if this member is late.

        Raises:
            RanksDiverged, MasterFailed: the decision says so.
            AgreementError: the decision does not follow from what this rank published.
        """
        if decision.diverged is not None:
            lost = decision.diverged
            raise RanksDiverged(
                lost.rank, decision.step, f"{lost.why}; newest here: {self.describe_newest(decision.step)}"
            )
        if decision.master_error:
            raise MasterFailed(f"the master could not decide step {decision.step}: {decision.master_error}")
        if decision.step != self.step - self._lag:
            expected = f"{self.step - self._lag}" + (", decided one step late" if self._lag else "")
            raise AgreementError(
                f"rank {self.rank} expects the decision of step {expected}; this one is for {decision.step}"
            )
        published = self._published[1 - self._lag]
        popped = []
        for mark in Mark:
            old, new = self._agreed[mark], decision.marks[mark]
            if not old <= new <= published[mark]:
                raise AgreementError(
                    f"step {decision.step}: the master moved {mark.name.lower()} from {old} to {new}, but rank "
                    f"{self.rank} has finished {published[mark]}"
                )
            popped.append(range(old + 1, new + 1))
        self._agreed = decision.marks
        return popped[0], popped[1], popped[2]

    def describe_newest(self, step: int) -> str:
        """The entries published in `step` and since, for error messages about its decision."""
        newest = [
            f"{stream.name.lower()}[{number}]={label}"
            for published, stream, number, label in self._labels
            if published >= step
        ]
        return ", ".join(newest) or "nothing since the last step"


class Master:
    """The deciding half. Decides only from what all ranks have published and from the facts of group rank 0.

    The same progress and facts give the same decision wherever it is computed.

    Args:
        own: the member of group rank 0, for naming its entries in errors; None where it is not at hand.
    """

    def __init__(self, size: int, own: Member | None) -> None:
        self._size = size
        self._own = own
        self._marks = (0, 0, 0)
        self._last: list[Progress] = [Progress(0, (0, 0, 0), (0, 0, 0), (0, 0, 0))] * size
        self._failed: dict[tuple[int, int], TaskFailure] = {}  # (mark, number) -> fewest good pages

    def decide(self, progress: Sequence[Progress], facts: Sequence[bytes]) -> Decision:
        """The decision of one step from the progress of all ranks, indexed by group rank."""
        step = progress[0].step
        diverged = self._find_divergence(progress)
        if diverged is not None:
            return Decision(step, diverged=diverged)
        for rank, report in enumerate(progress):
            for failure in report.failures:
                self._note_failure(rank, failure)
        self._last = list(progress)
        lowest = [min(values) for values in zip(*(report.marks for report in progress), strict=True)]
        self._marks = (lowest[0], lowest[1], lowest[2])
        due = [key for key in self._failed if key[1] <= self._marks[key[0]]]
        failures = tuple(self._failed.pop(key) for key in sorted(due))
        return Decision(step, self._marks, failures, tuple(facts))

    def _note_failure(self, rank: int, failure: TaskFailure) -> None:
        # Failed on any rank is failed on all; what remains good is what is good on every rank.
        key = (failure.mark, failure.number)
        known = self._failed.get(key)
        if known is None or failure.num_good < known.num_good:
            self._failed[key] = TaskFailure(failure.mark, failure.number, failure.num_good, rank)

    def _find_divergence(self, progress: Sequence[Progress]) -> Divergence | None:
        own = progress[0]
        for rank, report in enumerate(progress):
            if report.step != own.step:
                return Divergence(rank, f"it is at step {report.step}, the master at {own.step}")
            if report.counts != own.counts or report.digests != own.digests:
                return Divergence(rank, self._describe_difference(rank, report, own))
            if report.marks == self._last[rank].marks:
                continue
            for mark in Mark:
                if not self._last[rank].marks[mark] <= report.marks[mark] <= report.counts[mark.stream]:
                    return Divergence(
                        rank,
                        f"its mark {mark.name.lower()} went from {self._last[rank].marks[mark]} to "
                        f"{report.marks[mark]} with {report.counts[mark.stream]} submitted",
                    )
        return None

    def _describe_difference(self, rank: int, report: Progress, own: Progress) -> str:
        newest = "" if self._own is None else f"; newest on the master: {self._own.describe_newest(own.step)}"
        for stream in Stream:
            name = stream.name.lower()
            if report.counts[stream] != own.counts[stream]:
                return f"it has made {report.counts[stream]} {name}, the master {own.counts[stream]}{newest}"
            if report.digests[stream] != own.digests[stream]:
                first = self._last[rank].counts[stream] + 1
                return f"its {name} {first}..{own.counts[stream]} are not the master's{newest}"
        raise AssertionError("the reports do not differ")
