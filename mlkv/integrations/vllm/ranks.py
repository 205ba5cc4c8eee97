"""Where the facade lives, and who talks to whom, in each of vLLM's ways of running workers.

One process (tensor parallel size 1, and every rank under torchrun): scheduler and worker share a `LocalRank`. Its
`MultiLevelCache` agrees with the other ranks of the replica; nobody else would. One scheduler and worker
processes: the scheduler has a central cache (`CentralScheduler`), its orders travel in vLLM's connector metadata,
workers (`RemoteRank`) answer in its worker metadata, and its aggregator waits for the slowest of them.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from mlkv import (
    NOTHING_TOLD,
    DeadlineExceeded,
    MultiLevelCache,
    RankSlice,
    RemoteMover,
    Replica,
    StepResult,
    TransferOrder,
    TransferReport,
    TransferWorker,
)
from mlkv.integrations.vllm.metrics import MLKVStats, StatsSource
from mlkv.integrations.vllm.scheduler import NO_OUTCOME, Outcome, SchedulerSide
from mlkv.integrations.vllm.settings import Settings

_DRAIN_DEADLINE_S = 60.0
_DRAIN_POLL_S = 0.0002


@dataclass
class StepOrders(KVConnectorMetadata):  # type: ignore[misc]
    """From the scheduler to every worker.

    `loads`: number of a load -> vLLM's request id and the blocks that the load fills.
    """

    orders: list[TransferOrder] = field(default_factory=list)
    loads: dict[int, tuple[str, list[int]]] = field(default_factory=dict)


NO_ORDERS = StepOrders()
"""Of idle steps, and where scheduler and worker share a process; only to be read."""


@dataclass
class StepReport(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """From the workers to the scheduler."""

    report: TransferReport

    def aggregate(self, other: KVConnectorWorkerMetadata) -> StepReport:
        assert isinstance(other, StepReport)
        return StepReport(self.report.merge(other.report))


class LocalRank:
    """Worker and scheduler of one rank in one process.

    Attributes:
        scheduler: once `serve` has been called, which is before the first step.
        has_counted: whether a step has told something since `take_stats`.
    """

    scheduler: SchedulerSide

    def __init__(self, settings: Settings, kv_caches: dict[str, torch.Tensor]) -> None:
        pool = settings.pool(kv_caches)
        replica, rank_slice = self._place(settings)
        self.cache = MultiLevelCache(settings.config, settings.layout, pool, replica, rank_slice=rank_slice)
        self._stats = StatsSource()
        self.has_counted = False
        self._early = NO_OUTCOME

    def _place(self, settings: Settings) -> tuple[Replica, RankSlice | None]:
        """The ranks to agree with, and the heads of this one if not the usual."""
        if settings.tp == 1:
            return Replica.single(), None
        from vllm.distributed.parallel_state import get_tp_group

        return Replica.from_group(get_tp_group().cpu_group, deadline_s=settings.config.agree.deadline_s), None

    def serve(self, scheduler: SchedulerSide) -> None:
        """From now on work for this scheduler. vLLM makes it after the worker, and before the first step."""
        scheduler.cache = self.cache
        self.scheduler = scheduler

    def step(self) -> Outcome:
        """The one step of the cache in a step of the engine.

        vLLM calls it right behind the place where it would have loads started, which is behind the model: new
        blocks have been cleared by then.
        """
        scheduler = self.scheduler
        if scheduler.loads:
            scheduler.start_loads()
        result = self.cache.step()
        if result is NOTHING_TOLD and self._early is NO_OUTCOME:
            if not scheduler.computes:
                scheduler.rest()
            return NO_OUTCOME
        self.has_counted = True
        early, self._early = self._early, NO_OUTCOME
        return early.plus(scheduler.on_step(result))

    def drain(self) -> None:
        """Step until nothing is in flight. For when the last request has ended: nobody would step any more.

        All ranks end their last request in the same step, so all of them come here, and leave together.
        """
        self.scheduler.start_stores()
        give_up_at = time.monotonic() + _DRAIN_DEADLINE_S
        while self.cache.pending:
            if time.monotonic() > give_up_at:
                raise DeadlineExceeded(f"{self.cache.pending} copies did not end within {_DRAIN_DEADLINE_S:g} s")
            result = self.cache.step()
            if result:
                self._early = self._early.plus(self.scheduler.on_step(result))
                self.has_counted = True
            time.sleep(_DRAIN_POLL_S)

    def take_stats(self) -> MLKVStats | None:
        """What was counted since the last call, as far as it has come to something."""
        if not self.has_counted:
            return None
        self.has_counted = False
        return self._stats.take(self.cache.counters)

    def close(self) -> None:
        self.cache.close()


class RemoteRank:
    """A worker in a process of its own: executes orders, tells vLLM which loads are over here."""

    def __init__(self, settings: Settings, kv_caches: dict[str, torch.Tensor], rank: int) -> None:
        self._page_blocks = settings.layout.page_tokens // settings.block_tokens
        self._half = TransferWorker(
            settings.config,
            settings.layout,
            settings.pool(kv_caches),
            engine=settings.engine,
            rank=rank,
            size=settings.tp,
        )
        self._loads: dict[int, tuple[str, list[int], int]] = {}
        self._report = TransferReport()

    def before_model(self, orders: StepOrders) -> None:
        self._execute(orders, "load")

    def after_model(self, orders: StepOrders) -> None:
        self._execute(orders, "offload")

    def _execute(self, orders: StepOrders, kind: str) -> None:
        for order in orders.orders:
            if order.kind == kind:
                if kind == "load":
                    request_id, blocks = orders.loads[order.number]
                    self._loads[order.number] = (request_id, blocks, len(order.pages))
                self._half.execute(order)

    def step(self) -> Outcome:
        completions = self._half.poll()
        if not completions:
            return NO_OUTCOME
        outcome = Outcome()
        self._report = TransferReport.of(completions)
        for done in completions:
            if done.kind != "loaded":
                continue
            request_id, blocks, num_pages = self._loads.pop(done.number)
            outcome.received.add(request_id)
            if done.num_good is not None:
                # The load may begin within a page, at blocks that the device had; count from the end.
                num_bad = (num_pages - done.num_good) * self._page_blocks
                outcome.bad_blocks.update(blocks[max(0, len(blocks) - num_bad) :])
        return outcome

    def take_report(self) -> StepReport | None:
        report, self._report = self._report, TransferReport()
        return StepReport(report) if report.workers else None

    def close(self) -> None:
        self._half.close()


class CentralScheduler:
    """The scheduler's process where workers have processes of their own."""

    def __init__(self, settings: Settings, scheduler: SchedulerSide) -> None:
        self._mover = RemoteMover(settings.tp)
        self._scheduler = scheduler
        self._stats = StatsSource()
        num_slots = settings.num_blocks * settings.block_tokens
        self.cache = MultiLevelCache.central(
            settings.config, settings.layout, self._mover, engine=settings.engine, num_slots=num_slots
        )
        scheduler.cache = self.cache

    def plan(self) -> StepOrders:
        """The orders of this step of the engine."""
        self._scheduler.start_loads()
        self._scheduler.start_stores()
        self._step()
        orders = self._mover.take_orders()
        return StepOrders(orders, self._scheduler.take_load_ids()) if orders else NO_ORDERS

    def hear(self, report: Any) -> None:
        """The aggregated report of a step's workers, if they had anything to tell."""
        if isinstance(report, StepReport):
            self._mover.hear(report.report)
        if self.cache.pending:  # else there is nothing that could end: the step of `plan` is enough
            result = self._step()
            if not result and not self._scheduler.computes:
                self._scheduler.rest()

    def take_stats(self) -> MLKVStats | None:
        """What was counted since the last call."""
        return self._stats.take(self.cache.counters)

    def _step(self) -> StepResult:
        result = self.cache.step()
        # Workers tell vLLM themselves which loads are over; here only leases and blocks are given back.
        self._scheduler.on_step(result)
        return result

    def close(self) -> None:
        self.cache.close()


def make_worker_half(settings: Settings, kv_caches: dict[str, torch.Tensor]) -> LocalRank | RemoteRank:
    """For the process that has the KV tensors."""
    if settings.one_process:
        return LocalRank(settings, kv_caches)
    from vllm.distributed.parallel_state import get_tp_group

    return RemoteRank(settings, kv_caches, get_tp_group().rank_in_group)
