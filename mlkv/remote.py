"""The two halves of copying for engines with one scheduler process and workers elsewhere.

The scheduler's process holds a `MultiLevelCache.central`, whose mover is a `RemoteMover`: instead of copying it
hands out *orders*, which the engine carries to its workers with whatever it sends them in every step. Each worker
executes them with a `TransferWorker` and sends *reports* back; a copy is done when every worker has said so.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np
import numpy.typing as npt
import torch

from mlkv.address import owner_socket
from mlkv.config import MLKVConfig
from mlkv.errors import CacheUsageError, ConfigError
from mlkv.kernels import PageBatch
from mlkv.keys import Namespace
from mlkv.layout import KVLayout, KVPool, RankSlice
from mlkv.mover import Completion, Mover
from mlkv.store import StoreClient


@dataclass(frozen=True)
class TransferOrder:
    """One copy that every worker is to make. Can be pickled.

    Attributes:
        kind: "load" or "offload".
        number: of this copy among those of its kind; for a load the number that `MultiLevelCache.load` returned.
        pages: the host pages.
        slots: int64 `[len(pages) * page_tokens]`, the same slots on every worker; -1 in a load: leave this token.
    """

    kind: str
    number: int
    pages: PageBatch
    slots: npt.NDArray[np.int64]


@dataclass
class TransferReport:
    """What finished on one worker, or on several, since the last report. Can be pickled.

    Attributes:
        workers: (kind, number) -> how many workers finished it, `kind` as in `Completion`.
        failures: (kind, number) -> the fewest good pages and why, where a worker failed.
    """

    workers: dict[tuple[str, int], int] = field(default_factory=dict)
    failures: dict[tuple[str, int], tuple[int, str]] = field(default_factory=dict)

    @classmethod
    def of(cls, completions: Iterable[Completion]) -> TransferReport:
        report = cls()
        for done in completions:
            report.workers[done.kind, done.number] = 1
            if done.num_good is not None:
                report.failures[done.kind, done.number] = (done.num_good, done.reason)
        return report

    def merge(self, other: TransferReport) -> TransferReport:
        """Both together, as one report."""
        merged = TransferReport(dict(self.workers), dict(self.failures))
        for entry, workers in other.workers.items():
            merged.workers[entry] = merged.workers.get(entry, 0) + workers
        for entry, failure in other.failures.items():
            merged.failures[entry] = min(failure, merged.failures.get(entry, failure))
        return merged


class RemoteMover:
    """Takes the place of a `Mover` where the copying happens in other processes.

    Args:
        num_workers: a copy is complete when so many have reported it.
    """

    def __init__(self, num_workers: int) -> None:
        if num_workers < 1:
            raise ConfigError(f"num_workers must be at least 1, got {num_workers}")
        self._num_workers = num_workers
        self._orders: list[TransferOrder] = []
        self._open: set[tuple[str, int]] = set()  # what workers have yet to report
        self._heard = TransferReport()

    @property
    def in_flight(self) -> int:
        """Copies that some worker has not finished."""
        return len({number for kind, number in self._open if kind == "loaded"}) + len(
            {number for kind, number in self._open if kind == "offloaded"}
        )

    def load(self, number: int, pages: PageBatch, slots: torch.Tensor) -> None:
        self._order("load", number, pages, slots, "loaded")

    def offload(self, number: int, pages: PageBatch, slots: torch.Tensor) -> None:
        self._order("offload", number, pages, slots, "released", "offloaded")

    def take_orders(self) -> list[TransferOrder]:
        """Orders since the last call. Every worker must execute each exactly once, in this order."""
        orders, self._orders = self._orders, []
        return orders

    def hear(self, report: TransferReport) -> None:
        """Workers have reported. Raises CacheUsageError for a copy that was never ordered or is over."""
        for entry in report.workers:
            if entry not in self._open:
                raise CacheUsageError(f"workers report {entry[0]} {entry[1]}, which is not in flight")
        self._heard = self._heard.merge(report)

    def poll(self) -> Sequence[Completion]:
        """What all workers have finished since the last poll."""
        if not self._heard.workers:
            return ()
        done = [entry for entry, workers in self._heard.workers.items() if workers >= self._num_workers]
        completions = []
        for entry in sorted(done, key=lambda entry: (entry[1], entry[0] == "offloaded")):
            del self._heard.workers[entry]
            self._open.discard(entry)
            failure = self._heard.failures.pop(entry, None)
            completions.append(Completion(*entry) if failure is None else Completion(*entry, *failure))
        return completions

    def close(self, deadline_s: float) -> None:
        """Nothing is held here; workers close their own half."""

    def _order(self, kind: str, number: int, pages: PageBatch, slots: torch.Tensor, *ends: str) -> None:
        self._orders.append(TransferOrder(kind, number, pages, slots.numpy()))
        self._open.update((end, number) for end in ends)


class TransferWorker:
    """One worker's half: executes orders on its KV tensors.

    Args:
        engine: a name that the scheduler's process and its workers share, and no other engine of the store.
        rank, size: of this worker among those that share the model's heads.
        rank_slice: default: `RankSlice.of_rank`.

    Raises:
        ConfigError, StoreError: as `MultiLevelCache`.
    """

    def __init__(
        self,
        config: MLKVConfig,
        layout: KVLayout,
        pool: KVPool,
        *,
        engine: str,
        rank: int,
        size: int,
        rank_slice: RankSlice | None = None,
    ) -> None:
        self._client = connect_member(config, layout, engine, rank)
        if rank_slice is None:
            rank_slice = RankSlice.of_rank(layout.num_kv_heads, size, rank)
        self._mover = Mover(
            config,
            layout,
            pool,
            np.frombuffer(self._client.pool, np.uint8),
            rank_slice=rank_slice,
            fingerprint=Namespace(config.model, layout, config.version).fingerprint,
            rank=rank,
        )

    @property
    def in_flight(self) -> int:
        return self._mover.in_flight

    def execute(self, order: TransferOrder) -> None:
        """Start a copy, after the work queued so far on the current stream. Returns at once."""
        start = self._mover.load if order.kind == "load" else self._mover.offload
        start(order.number, order.pages, torch.from_numpy(order.slots))

    def poll(self) -> Sequence[Completion]:
        """What finished here since the last poll; `TransferReport.of` makes it a report. Never blocks."""
        return self._mover.poll()

    def close(self, deadline_s: float = 30.0) -> None:
        """Wait for running copies, then leave the store. Raises DeadlineExceeded."""
        try:
            self._mover.close(deadline_s)
        finally:
            self._client.close()


def connect_member(config: MLKVConfig, layout: KVLayout, engine: str, rank: int) -> StoreClient:
    """A connection to the owner in the name of `engine`, whose processes hold leases together."""
    store = config.store
    if not store.name:
        # Its processes have nothing else in common from which each could name the same owner.
        name = "engine-" + blake2b(engine.encode(), digest_size=8).hexdigest()
        store = store.model_copy(update={"name": name})
    return StoreClient.connect(
        owner_socket(store),
        host_bytes=int(store.host_bytes),
        page_bytes=layout.page_bytes,
        group=blake2b(engine.encode(), digest_size=16).digest(),
        rank=rank,
        deadline_s=store.connect_deadline_s,
        linger_s=store.linger_s,
        disk=store.disk,
        remote=store.remote,
        admission=store.admission,
        policy=store.policy,
        quotas=store.quotas,
        metrics=config.metrics,
    )
