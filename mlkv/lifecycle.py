"""What each request has in flight, and what agreed facts and marks do to it; the same on every rank.

No communication happens here: calls record what to do, `collect_facts` tells what the master has learned,
`apply` takes what a step agreed. Only `mover` (copies of this rank) and `planner` (the master's line to the
store) reach outside, and both return at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from mlkv import facts
from mlkv.dist import Agreed, Mark, Member, Stream, TaskFailure
from mlkv.errors import CacheUsageError, MLKVError
from mlkv.facts import EpochFact, Fact, HitFact, ReserveFact, StoredFact
from mlkv.kernels import PageBatch
from mlkv.keys import KEY_BYTES
from mlkv.layout import KVLayout, RankSlice
from mlkv.observe import Observer, TaskKind
from mlkv.planner import EpochAnswer, HitAnswer, Planner, ReserveAnswer
from mlkv.tasks import (
    CacheStats,
    Failure,
    Hit,
    LoadStatus,
    LoadTask,
    OffloadStatus,
    OffloadTask,
    StepResult,
)

_INVALIDATED = "the cache was invalidated meanwhile"


class StartsTransfers(Protocol):
    """What is needed of a `Mover`: start a copy under a number. Its end reaches `Member.finish`."""

    def load(self, number: int, pages: PageBatch, slots: torch.Tensor) -> None: ...

    def offload(self, number: int, pages: PageBatch, slots: torch.Tensor) -> None: ...


class Lifecycle:
    """The tasks of one rank.

    Args:
        min_load_tokens: hits that save fewer tokens are not loaded.
        max_tasks: lookups, loads and offloads in flight; what exceeds it is a miss or is not stored.
        planner: on the master only.
        epoch: of the namespace at the start, see `Namespace.epoch`.

    Attributes:
        epoch: of the namespace now, the same on every rank.
        tasks: in flight, by the number of the call that began them. What the mover is at belongs to one of them.
        early, early_released: known on every rank without asking; told by the next `apply`.
    """

    def __init__(
        self,
        layout: KVLayout,
        rank_slice: RankSlice,
        member: Member,
        mover: StartsTransfers,
        planner: Planner | None,
        *,
        min_load_tokens: int,
        max_tasks: int,
        epoch: int = 0,
    ) -> None:
        self._layout = layout
        self._slice = rank_slice
        self._member = member
        self._mover = mover
        self._planner = planner
        self._min_load_tokens = min_load_tokens
        self._max_tasks = max_tasks
        self._begin_epoch(epoch)
        self._loads: dict[str, LoadTask] = {}  # the current one of each request
        self._offloads: dict[str, OffloadTask] = {}
        self.tasks: dict[int, LoadTask | OffloadTask] = {}
        self._loading: dict[int, LoadTask] = {}  # by number in the stream of loads
        self._offloading: dict[int, OffloadTask] = {}
        self._touching: dict[str, int] = {}  # transfers that still touch slots of an aborted request
        self._held: dict[str, list[Fact]] = {}  # facts for a request whose aborted self is not drained yet
        self.early: list[Fact] = []
        self.early_released: list[str] = []
        self.stats = CacheStats()
        self.observer: Observer | None = None

    @property
    def pending(self) -> int:
        """Tasks in flight."""
        return len(self.tasks)

    # -- calls ---------------------------------------------------------------------------------------------

    def lookup(self, request_id: str, keys: bytes, device_tokens: int) -> None:
        """Ask for the longest cached prefix of a chain of keys (16 bytes each)."""
        if request_id in self._loads:
            raise CacheUsageError(f"request {request_id!r} has a lookup or load already")
        call = self._record("lookup", request_id, keys[-KEY_BYTES:], len(keys), device_tokens)
        task = LoadTask(request_id, call, keys, device_tokens, device_tokens // self._layout.page_tokens)
        self._loads[request_id] = task
        self.tasks[call] = task
        self.stats.lookups += 1
        if self.observer is not None:
            self.observer.began("lookup", call, request_id)
        gain = len(keys) // KEY_BYTES * self._layout.page_tokens - device_tokens
        if gain < self._min_load_tokens or len(self.tasks) > self._max_tasks:
            self.early.append(HitFact(call, 0, b"", b""))
        elif self._planner is not None:
            self._planner.lookup(call, keys)

    def answered(self, request_id: str) -> LoadTask:
        """The answered hit of a request. Raises CacheUsageError when there is none."""
        task = self._loads.get(request_id)
        if task is None or task.status is not LoadStatus.HIT:
            raise CacheUsageError(f"request {request_id!r} has no answered hit to load")
        return task

    def load(self, request_id: str, slots: torch.Tensor) -> int:
        """Start the copy of an answered hit, return its number. slots: int64 `[pages to load * page_tokens]`."""
        task = self.answered(request_id)
        identity = f"{task.call}/".encode() + task.indices.tobytes() + task.generations.tobytes()
        number = self._member.record(Stream.LOADS, identity, request_id)
        task.status = LoadStatus.LOADING
        if self.observer is not None:
            self.observer.began("load", task.call, request_id)
        self._loading[number] = task
        keys = task.keys[task.first_page * KEY_BYTES : task.num_pages * KEY_BYTES]
        # The parents are only for writing a page's identity, which a load does not do.
        self._mover.load(number, PageBatch(task.indices, keys, keys, task.generations), slots)
        return number

    def decline(self, request_id: str) -> None:
        """Do not use a lookup, answered or not."""
        task = self._loads.get(request_id)
        if task is None or task.status is LoadStatus.LOADING:
            raise CacheUsageError(f"request {request_id!r} has no lookup that could be declined")
        self._record("decline", request_id)
        del self._loads[request_id]
        self._give_up(task)

    def offload(self, request_id: str, keys: bytes, root: bytes, slots: torch.Tensor) -> None:
        """Store the pages of a chain below `root`. slots: int64, `page_tokens` for each key."""
        if request_id in self._offloads:
            raise CacheUsageError(f"request {request_id!r} has an offload in flight already")
        call = self._record("offload", request_id, keys[-KEY_BYTES:], len(keys))
        task = OffloadTask(request_id, call, keys, root, slots)
        self._offloads[request_id] = task
        self.tasks[call] = task
        if self.observer is not None:
            self.observer.began("offload", call, request_id)
        if not keys or len(self.tasks) > self._max_tasks:
            reason = f"more than {self._max_tasks} tasks are in flight" if keys else ""
            self.early += [ReserveFact(call, 0, b"", b""), StoredFact(call, 0, reason)]
        elif self._planner is not None:
            self._planner.reserve(call, keys)

    def abort(self, request_id: str) -> None:
        """Give up what the request has in flight; `released` lists it once its slots are untouched."""
        self._record("abort", request_id)
        touching = self._touching.get(request_id, 0)
        load = self._loads.pop(request_id, None)
        if load is not None and load.status is LoadStatus.LOADING:
            touching += 1
        elif load is not None:
            self._give_up(load)
        offload = self._offloads.pop(request_id, None)
        if offload is not None:
            offload.aborted = True
            if offload.status is OffloadStatus.ASKED:
                self._give_up(offload)
            elif offload.status is OffloadStatus.COPYING:
                touching += 1
        self._held.pop(request_id, None)
        if touching:
            self._touching[request_id] = touching
        else:
            self.early_released.append(request_id)

    def clear(self) -> None:
        """Forget every stored page."""
        self._record("clear", "")
        if self._planner is not None:
            self._planner.clear()

    def invalidate(self) -> None:
        """Begin the next epoch. What is in flight has KV of before: loads of it fail, offloads are not stored."""
        self._record("invalidate", "")
        for task in self.tasks.values():
            task.is_stale = True
        self.epoch += 1
        if self._planner is not None:
            self._planner.invalidate(self.epoch)

    def _begin_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        if self._planner is not None:
            self._planner.epoch = epoch

    def _record(self, name: str, request_id: str, *details: object) -> int:
        identity = repr((name, request_id, details)).encode()
        return self._member.record(Stream.CALLS, identity, f"{name}({request_id})")

    def _end(self, task: LoadTask | OffloadTask, num_tokens: int, why: str = "") -> None:
        """Tell the observer that what the task is at is over."""
        if self.observer is None:
            return
        kind: TaskKind = "offload"
        if isinstance(task, LoadTask):
            if task.status is LoadStatus.HIT:
                return  # the lookup is over, and the load has not begun
            kind = "lookup" if task.status is LoadStatus.ASKED else "load"
        self.observer.ended(kind, task.call, task.request_id, num_tokens, why)

    def _give_up(self, task: LoadTask | OffloadTask) -> None:
        self._end(task, 0, "given up")
        del self.tasks[task.call]
        self._drop(task.call)

    def _drop(self, call: int) -> None:
        if self._planner is not None:
            self._planner.drop(call)

    # -- the master's facts --------------------------------------------------------------------------------

    def collect_facts(self) -> Sequence[bytes]:
        """What the store has answered since the last step. On the master only."""
        assert self._planner is not None
        answers = self._planner.poll()
        if not answers:
            return ()
        found = []
        for answer in answers:
            fact: Fact
            if isinstance(answer, HitAnswer):
                fact = self._hit_fact(answer)
            elif isinstance(answer, EpochAnswer):
                fact = EpochFact(answer.epoch)
            elif isinstance(answer, ReserveAnswer):
                indices, generations = answer.indices.tobytes(), answer.generations.tobytes()
                fact = ReserveFact(answer.call, answer.first, indices, generations)
            else:
                fact = StoredFact(answer.call, answer.num_pages, answer.reason)
            found.append(facts.encode(fact))
        return found

    def _hit_fact(self, answer: HitAnswer) -> HitFact:
        task = self.tasks[answer.call]
        assert isinstance(task, LoadTask)
        gain = len(answer.indices) * self._layout.page_tokens - task.device_tokens
        if gain < self._min_load_tokens:
            self._drop(answer.call)
            return HitFact(answer.call, 0, b"", b"")
        first = task.first_page
        indices, generations = answer.indices[first:].tobytes(), answer.generations[first:].tobytes()
        return HitFact(answer.call, len(answer.indices), indices, generations)

    # -- applying a step, the same on every rank -----------------------------------------------------------

    def apply(self, agreed: Agreed) -> StepResult:
        """Take what a step agreed, facts before marks, and tell what it means for the engine.

        A step that agreed nothing need not call it, unless there is something `early`.
        """
        early, self.early = self.early, []
        result = StepResult(released=self.early_released)
        self.early_released = []
        for fact in (*early, *map(facts.decode, agreed.facts)):
            self._apply_fact(fact, result)
        if not any(agreed.popped):
            return result
        pop = {
            Mark.LOADED: self._pop_loaded,
            Mark.RELEASED: self._pop_released,
            Mark.OFFLOADED: self._pop_offloaded,
        }
        for mark in Mark:
            for number in agreed.popped[mark]:
                failure = agreed.failures.get((mark, number))
                pop[mark](number, failure, result)
        return result

    def _apply_fact(self, fact: Fact, result: StepResult) -> None:
        if isinstance(fact, EpochFact):
            if fact.epoch > self.epoch:
                self._begin_epoch(fact.epoch)
            return
        task = self.tasks.get(fact.call)
        if task is None:  # aborted or declined since it was asked
            return
        if task.request_id in self._touching and not (isinstance(task, OffloadTask) and task.aborted):
            self._held.setdefault(task.request_id, []).append(fact)
        elif isinstance(fact, HitFact) and isinstance(task, LoadTask):
            self._apply_hit(task, fact, result)
        elif isinstance(fact, ReserveFact) and isinstance(task, OffloadTask):
            self._apply_reserve(task, fact, result)
        elif isinstance(fact, StoredFact) and isinstance(task, OffloadTask):
            self._apply_stored(task, fact, result)
        else:
            raise MLKVError(f"{fact} does not fit {task}")

    def _apply_hit(self, task: LoadTask, fact: HitFact, result: StepResult) -> None:
        page_tokens = self._layout.page_tokens
        if not fact.num_pages or task.is_stale:
            if fact.num_pages:
                self._drop(task.call)
            del self._loads[task.request_id]
            del self.tasks[task.call]
            self._end(task, 0)
            result.hits[task.request_id] = Hit(0)
            return
        self._end(task, fact.num_pages * page_tokens)
        task.status = LoadStatus.HIT
        task.num_pages = fact.num_pages
        task.indices = np.frombuffer(fact.indices, np.int32)
        task.generations = np.frombuffer(fact.generations, np.uint64)
        hit = Hit(fact.num_pages * page_tokens, task.first_page * page_tokens)
        result.hits[task.request_id] = hit
        self.stats.hits += 1
        self.stats.hit_tokens += hit.num_tokens - task.device_tokens

    def _apply_reserve(self, task: OffloadTask, fact: ReserveFact, result: StepResult) -> None:
        slots, task.slots = task.slots, None
        if not fact.indices:
            task.status = OffloadStatus.COMMITTING
            self._tell_released(task)
            result.released.append(task.request_id)
            return
        assert slots is not None
        indices = np.frombuffer(fact.indices, np.int32)
        generations = np.frombuffer(fact.generations, np.uint64)
        identity = f"{task.call}/{fact.first}".encode() + fact.indices + fact.generations
        number = self._member.record(Stream.OFFLOADS, identity, task.request_id)
        task.status = OffloadStatus.COPYING
        task.num_pages_moved = len(indices)
        self._offloading[number] = task
        start, end = fact.first, fact.first + len(indices)
        chain = task.root + task.keys
        pages = PageBatch(
            indices,
            task.keys[start * KEY_BYTES : end * KEY_BYTES],
            chain[start * KEY_BYTES : end * KEY_BYTES],
            generations,
        )
        page_tokens = self._layout.page_tokens
        self._mover.offload(number, pages, slots[start * page_tokens : end * page_tokens])

    def _apply_stored(self, task: OffloadTask, fact: StoredFact, result: StepResult) -> None:
        del self.tasks[task.call]
        if task.aborted:
            self._end(task, 0, "aborted")
            return
        del self._offloads[task.request_id]
        num_tokens = 0 if task.is_stale else fact.num_pages * self._layout.page_tokens
        reason = task.failure or fact.reason or (_INVALIDATED if task.is_stale else "")
        self._end(task, num_tokens, reason)
        if reason:
            self.stats.failed_offloads += 1
            result.unstored[task.request_id] = Failure(num_tokens, reason)
        else:
            result.offloaded[task.request_id] = num_tokens

    def _pop_loaded(self, number: int, failure: TaskFailure | None, result: StepResult) -> None:
        task = self._loading.pop(number)
        del self.tasks[task.call]
        num_good = len(task.indices) if failure is None else failure.num_good
        num_used = 0 if task.is_stale else num_good
        if self._planner is not None:
            for tier, count in self._planner.count_sources(task.call, task.first_page, num_used).items():
                by_tier = self.stats.loaded_pages_by_tier
                by_tier[tier] = by_tier.get(tier, 0) + count
            self._planner.finish_load(task.call, None if failure is None else task.first_page + num_good)
        self.stats.loaded_pages += num_used
        self.stats.loaded_bytes += num_used * self._slice.num_heads * self._layout.head_bytes
        if self._loads.get(task.request_id) is not task:
            self._end(task, 0, "aborted")
            self._untouch(task.request_id, result)
            return
        del self._loads[task.request_id]
        num_tokens = (task.first_page + num_used) * self._layout.page_tokens
        if failure is None and not task.is_stale:
            self._end(task, num_tokens)
            result.loaded[task.request_id] = num_tokens
        else:
            self.stats.failed_loads += 1
            reason = _INVALIDATED
            if failure is not None and not task.is_stale:
                reason = f"rank {failure.rank} verified {num_good} of {len(task.indices)} pages"
            self._end(task, num_tokens, reason)
            result.failed[task.request_id] = Failure(max(num_tokens, task.device_tokens), reason)

    def _pop_released(self, number: int, _: TaskFailure | None, result: StepResult) -> None:
        task = self._offloading[number]
        task.status = OffloadStatus.STORING
        self._tell_released(task)
        if task.aborted:
            self._untouch(task.request_id, result)
        else:
            result.released.append(task.request_id)

    def _pop_offloaded(self, number: int, failure: TaskFailure | None, result: StepResult) -> None:
        task = self._offloading.pop(number)
        task.status = OffloadStatus.COMMITTING
        num_good = task.num_pages_moved if failure is None else failure.num_good
        if failure is not None:
            task.failure = f"rank {failure.rank} stored {num_good} of {task.num_pages_moved} pages"
        if task.is_stale:
            num_good = 0
        self.stats.offloaded_pages += num_good
        self.stats.offloaded_bytes += num_good * self._slice.num_written_heads * self._layout.head_bytes
        if self._planner is not None:
            self._planner.commit(task.call, num_good)

    def _tell_released(self, task: OffloadTask) -> None:
        if self.observer is not None:
            self.observer.released(task.call, task.request_id)

    def _untouch(self, request_id: str, result: StepResult) -> None:
        """One transfer less touches slots of an aborted request; the last one sets its next life free."""
        self._touching[request_id] -= 1
        if self._touching[request_id]:
            return
        del self._touching[request_id]
        result.released.append(request_id)
        for fact in self._held.pop(request_id, []):
            self._apply_fact(fact, result)
