"""The rank-side half of the facade: starts resolved transfers and tells which of them finished here.

Stands alone for engines that bring their own agreement: it knows nothing of other ranks.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import numpy.typing as npt
import torch

from mlkv.config import MLKVConfig
from mlkv.errors import DeadlineExceeded
from mlkv.faults import Fault, FaultPlan
from mlkv.kernels import (
    Cooperation,
    Exchange,
    LoadTransfer,
    OffloadTransfer,
    PageBatch,
    TransferEngine,
    TransferPath,
)
from mlkv.layout import KVLayout, KVPool, RankSlice

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Completion:
    """Something that finished on this rank.

    Attributes:
        kind: "loaded", "released" or "offloaded".
        number: the number given to `load` or `offload`.
        num_good: None when all went well; else how many leading pages are right.
        reason: why it failed.
    """

    kind: str
    number: int
    num_good: int | None = None
    reason: str = ""


@dataclass
class _InFlight:
    number: int
    num_pages: int
    fault: Fault
    load: LoadTransfer | None = None
    offload: OffloadTransfer | None = None
    refused: str = ""
    released: bool = False
    done_at: float | None = None  # when this rank saw the copy finished, for delayed reports


class _PinningProgress:
    """Says now and then how much of a large host pool is pinned, which takes a second for 12 GB or so."""

    _EVERY_S = 2.0

    def __init__(self) -> None:
        self._next_at = time.monotonic() + self._EVERY_S

    def __call__(self, done_bytes: int, total_bytes: int) -> None:
        if time.monotonic() >= self._next_at:
            self._next_at = time.monotonic() + self._EVERY_S
            log.info("pinning the host pool: %.1f of %.1f GiB", done_bytes / (1 << 30), total_bytes / (1 << 30))


class Mover:
    """Transfers of one rank between its KV pool and the host pages.

    Args:
        host: the whole host pool, uint8 `[num_pages * page_bytes]`, shared by the ranks of the host.
        fingerprint: of the namespace, as it stands in page headers.
        rank: of this replica.
        writes_identity: whether this rank writes the identity part of page headers, which one rank of each host
            does; default: rank 0.
        exchange: with the ranks that read the same heads, for cooperative loads.
        exchange_deadline_s: how long one may wait for those ranks; default: as the ranks of a step.
    """

    def __init__(
        self,
        config: MLKVConfig,
        layout: KVLayout,
        pool: KVPool,
        host: npt.NDArray[np.uint8],
        *,
        rank_slice: RankSlice,
        fingerprint: bytes,
        rank: int,
        writes_identity: bool | None = None,
        exchange: Exchange[int] | None = None,
        exchange_deadline_s: float | None = None,
    ) -> None:
        self._layout = layout
        self._rank = rank
        self._slice = rank_slice
        self._host = host
        self._faults = FaultPlan.parse(config.faults)
        self._engine = TransferEngine.create(
            pool,
            host,
            layout=layout,
            rank_slice=rank_slice,
            fingerprint=fingerprint,
            writes_identity=rank == 0 if writes_identity is None else writes_identity,
            staging_bytes=int(config.move.staging_bytes),
            max_tasks=config.move.max_tasks,
            # `create` refuses what is none of its ways, so the cast hides nothing.
            transfer=cast(TransferPath, os.environ.get("MLKV_TRANSFER") or config.move.transfer),
            on_pinned=_PinningProgress() if rank == 0 else None,
            exchange=exchange,
            exchange_deadline_s=exchange_deadline_s or config.agree.deadline_s,
        )
        self._loads: deque[_InFlight] = deque()
        self._offloads: deque[_InFlight] = deque()

    @property
    def in_flight(self) -> int:
        return len(self._loads) + len(self._offloads)

    @property
    def cooperation(self) -> Cooperation[int] | None:
        """Of its loads with those of other ranks; None without an exchange."""
        return self._engine.cooperation

    def load(self, number: int, pages: PageBatch, slots: torch.Tensor) -> None:
        """Start copying host pages into slots (int64 `[num_pages * page_tokens]`, -1: leave this token)."""
        fault = self._faults.fault(self._rank, "load", number)
        if fault.corrupt and len(pages):
            self._flip_a_byte(pages, fault.pick)
        entry = _InFlight(number, len(pages), fault)
        try:
            entry.load = self._engine.load(pages, slots)
        except Exception as error:  # a transfer that cannot start is a failed transfer, not a dead engine
            entry.refused = f"{type(error).__name__}: {error}"
            log.warning("load %d could not start: %s", number, entry.refused)
        self._loads.append(entry)

    def offload(self, number: int, pages: PageBatch, slots: torch.Tensor) -> None:
        """Start copying slots (int64 `[num_pages * page_tokens]`) into host pages."""
        fault = self._faults.fault(self._rank, "offload", number)
        entry = _InFlight(number, len(pages), fault)
        try:
            entry.offload = self._engine.offload(pages, slots)
        except Exception as error:  # as above
            entry.refused = f"{type(error).__name__}: {error}"
            log.warning("offload %d could not start: %s", number, entry.refused)
        self._offloads.append(entry)

    def poll(self) -> Sequence[Completion]:
        """What finished since the last poll. Never blocks."""
        if not self._loads and not self._offloads:
            return ()
        now = time.monotonic()
        done = [self._load_completion(entry) for entry in _take_finished(self._loads, now)]
        for entry in self._offloads:
            if not entry.released and self._has_released(entry, now):
                entry.released = True
                done.append(Completion("released", entry.number))
        done += [self._offload_completion(entry) for entry in _take_finished(self._offloads, now)]
        return done

    def close(self, deadline_s: float) -> None:
        """Wait for running copies, then let go of the pool. Raises DeadlineExceeded."""
        end = time.monotonic() + deadline_s
        if self.cooperation is not None:
            self.cooperation.hurry(deadline_s / 2)  # other ranks may be gone
        while any(not _copied(entry) for entry in (*self._loads, *self._offloads)):
            if time.monotonic() > end:
                raise DeadlineExceeded(
                    f"rank {self._rank}: {self.in_flight} transfers still run after {deadline_s:g} s"
                )
            time.sleep(0.001)
        self._engine.close(max(0.0, end - time.monotonic()))

    def _has_released(self, entry: _InFlight, now: float) -> bool:
        if entry.offload is None:
            return True
        # An injected delay must not report slots free before the later events of the same task may
        # be reported at all, or the plan would try nothing; so it holds back this one as well.
        return entry.offload.poll_released() and (not entry.fault.delay_s or _is_due(entry, now))

    def _load_completion(self, entry: _InFlight) -> Completion:
        num_good = 0 if entry.load is None else entry.load.num_good
        reason = entry.refused or (entry.load.error if entry.load is not None else None) or ""
        return self._completion("loaded", entry, num_good, reason)

    def _offload_completion(self, entry: _InFlight) -> Completion:
        reason = entry.refused or (entry.offload.error if entry.offload is not None else None) or ""
        return self._completion("offloaded", entry, 0 if reason else entry.num_pages, reason)

    def _completion(self, kind: str, entry: _InFlight, num_good: int, reason: str) -> Completion:
        if entry.fault.good_fraction is not None:
            reason = reason or "failed by the fault plan"
            num_good = min(num_good, int(entry.fault.good_fraction * entry.num_pages))
        if num_good == entry.num_pages and not reason:
            return Completion(kind, entry.number)
        reason = reason or f"page {num_good} of {entry.num_pages} did not verify"
        return Completion(kind, entry.number, num_good, reason)

    def _flip_a_byte(self, pages: PageBatch, pick: float) -> None:
        """Damage one byte of a page where this rank reads it, in host memory, as a rotten cell would."""
        size = self._slice.num_heads * self._layout.head_bytes
        if not size:
            return
        at = int(pick * len(pages) * size)
        page = int(pages.indices[at // size])
        offset = self._layout.head_offset(self._slice.head_start) + at % size
        self._host[page * self._layout.page_bytes + offset] ^= 0xFF


def _copied(entry: _InFlight) -> bool:
    transfer = entry.load or entry.offload
    return transfer is None or transfer.poll()


def _is_due(entry: _InFlight, now: float) -> bool:
    """Whether a finished copy may be reported now, that is, after its injected delay."""
    if entry.done_at is None:
        if not _copied(entry):
            return False
        entry.done_at = now
    return now >= entry.done_at + entry.fault.delay_s


def _take_finished(queue: deque[_InFlight], now: float) -> list[_InFlight]:
    # Streams finish in order, so only the front needs to be asked.
    finished = []
    while queue and _is_due(queue[0], now):
        finished.append(queue.popleft())
    return finished
