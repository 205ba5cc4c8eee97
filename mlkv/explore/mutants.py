"""Planted faults: the mistakes that systems of this kind were found to make, each in a few lines.

They show that the explorer would find them. Nothing of the library imports this module but the explorer's command
line, and only when it is asked for a mutant by name.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mlkv.dist import Decision, Master, Progress
from mlkv.dist.protocol import Divergence
from mlkv.explore.parts import Parts
from mlkv.explore.rank import Call, NamedMember, VirtualRank
from mlkv.lifecycle import Lifecycle
from mlkv.planner import Planner
from mlkv.store import wire
from mlkv.store.service import StoreService
from mlkv.tasks import StepResult


class _PollsItself(Master):
    """The master takes its own events for everybody's."""

    def decide(self, progress: Sequence[Progress], facts: Sequence[bytes]) -> Decision:
        own = progress[0]
        alone = [Progress(r.step, r.counts, r.digests, own.marks, r.failures) for r in progress]
        return super().decide(alone, facts)


class _Trusting(NamedMember):
    """A follower that pops what it is told to, finished or not."""

    def apply(self, decision: Decision) -> tuple[range, range, range]:
        at = 1 - self._lag
        loaded, released, offloaded = map(max, self._published[at], decision.marks)
        self._published[at] = (loaded, released, offloaded)
        return super().apply(decision)


class _PopsByOwnEvent(NamedMember):
    """A follower pops what has finished on itself instead of what was agreed."""

    def apply(self, decision: Decision) -> tuple[range, range, range]:
        before = self._agreed
        popped = super().apply(decision)
        if self.rank == 0:
            return popped
        self._agreed = self._published[1 - self._lag]
        loaded, released, offloaded = (range(a + 1, b + 1) for a, b in zip(before, self._agreed, strict=True))
        return loaded, released, offloaded


class _FreesOnSubmit(Lifecycle):
    """The lease of a load is given back when its copies were started."""

    def load(self, request_id: str, slots: torch.Tensor) -> int:
        task = self.answered(request_id)
        number = super().load(request_id, slots)
        if isinstance(self._planner, _ReleasesEarly):
            self._planner.release_early(task.call)
        return number


class _ReleasesEarly(Planner):
    """Keeps in mind what a load reads, for its end, but not the pages."""

    def release_early(self, call: int) -> None:
        lease, matched = self._leases[call]
        self._tell(wire.Release([lease]))
        self._leases[call] = (0, matched)

    def _tell(self, request: wire.Request) -> None:
        if request != wire.Release([0]):
            super()._tell(request)


class _SkipsWhenIdle(VirtualRank):
    """A follower that has nothing to report stays away from the exchange."""

    def skips_message(self, calls: Sequence[Call]) -> bool:
        return self.group_rank > 0 and self.is_idle and not calls


class _CountsOnly(Master):
    """Ranks are compared by how many calls they made, not by which."""

    def _find_divergence(self, progress: Sequence[Progress]) -> Divergence | None:
        own = progress[0].digests
        return super()._find_divergence([Progress(r.step, r.counts, own, r.marks, r.failures) for r in progress])


class _RetriesWithoutQuarantine(Planner):
    """A page found bad is released like any other."""

    def finish_load(self, call: int, first_bad: int | None) -> None:
        super().finish_load(call, None)


class _AppliesLater(VirtualRank):
    """A busy follower puts a decision by and applies it together with the next one's step."""

    _put_by: StepResult | None = None

    def receive(self, message: bytes) -> StepResult:
        result = super().receive(message)
        if self.group_rank == 0:
            return result
        late, self._put_by = self._put_by, None
        if late is None and self.transfers:
            self._put_by, result = result, StepResult()
        return late or result


class _PublishesOnRelease(Lifecycle):
    """Pages count as stored when their offload has left the device, not when it has reached the host."""

    def _pop_released(self, number: int, failure: object, result: StepResult) -> None:
        super()._pop_released(number, None, result)
        if self._planner is not None:
            task = self._offloading[number]
            self._planner.commit(task.call, task.num_pages_moved)


class _CommitsOnce(Planner):
    def commit(self, call: int, num_good: int) -> None:
        if call in self._reservations:
            super().commit(call, num_good)


class _ReclaimsTheLost(StoreService):
    """What a replica holds is taken back when the first of its ranks is gone."""

    def leave(self, group_name: bytes, member: int) -> None:
        group = self._groups[group_name]
        members = set(group.members) - {member}
        group.members = {member}
        super().leave(group_name, member)
        if members:
            for other in members:
                self.join(group_name, other)


class _RanksFailAlone(Master):
    """What failed on the master failed; what failed on another rank is nobody's business."""

    def _note_failure(self, rank: int, failure: object) -> None:
        if rank == 0:
            super()._note_failure(rank, failure)  # type: ignore[arg-type]


class _AbortForgets(Lifecycle):
    """An abort calls the slots free at once, whatever still copies from or to them."""

    def abort(self, request_id: str) -> None:
        super().abort(request_id)
        if self._touching.get(request_id):
            self.early_released.append(request_id)

    def _untouch(self, request_id: str, result: StepResult) -> None:
        super()._untouch(request_id, StepResult())


class _ForgetsTheLease(Planner):
    """A lookup that is given up before its answer keeps what the answer grants."""

    def _take_matched(self, question: object, reply: wire.Matched) -> None:
        if not question.dropped:  # type: ignore[attr-defined]
            super()._take_matched(question, reply)  # type: ignore[arg-type]


class _HitsWhatIsThere(VirtualRank):
    """The whole prompt may be a hit, and nothing is left to compute."""

    def make_calls(self, calls: Sequence[Call]) -> None:
        super().make_calls([(*c[:2], f"{c[2]} x", *c[3:]) if c[0] == "lookup" else c for c in calls])


MUTANTS: dict[str, Parts] = {
    "master-polls-itself": Parts(master=_PollsItself, member=_Trusting),
    "follower-pops-by-own-event": Parts(member=_PopsByOwnEvent),
    "free-on-submit": Parts(lifecycle=_FreesOnSubmit, planner=_ReleasesEarly),
    "skip-when-idle": Parts(rank=_SkipsWhenIdle),
    "count-without-digest": Parts(master=_CountsOnly),
    "retry-without-quarantine": Parts(planner=_RetriesWithoutQuarantine),
    "applied-in-different-steps": Parts(rank=_AppliesLater),
    "publish-on-release": Parts(lifecycle=_PublishesOnRelease, planner=_CommitsOnce),
    "reclaim-on-first-loss": Parts(service=_ReclaimsTheLost),
    "failure-of-one-rank-ignored": Parts(master=_RanksFailAlone),
    "abort-forgets-copies": Parts(lifecycle=_AbortForgets),
    "dropped-lookup-keeps-lease": Parts(planner=_ForgetsTheLease),
    "whole-prompt-is-a-hit": Parts(rank=_HitsWhatIsThere),
}
