"""Several ranks with simulated devices over one host pool, whose all-gathers are stepped like everything else."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import torch
from kernel_cases import FINGERPRINT, PoolCase
from sim_device import SimDevice, SimEvent, SimKernels, SimStream

from mlkv.kernels.cooperative import Cooperation
from mlkv.kernels.host_pages import HostPages
from mlkv.kernels.staged import StagedTransferEngine
from mlkv.layout import RankSlice

_RUBBISH = 0xDD


class Gather:
    """One all-gather: it moves all bytes at the moment when the last rank's stream gets to it."""

    def __init__(self, size: int) -> None:
        self.outs: dict[int, torch.Tensor] = {}
        self.parts: dict[int, torch.Tensor] = {}
        self.over = SimEvent()
        self._size = size

    def arrive(self, rank: int, out: torch.Tensor, part: torch.Tensor) -> None:
        start = part.data_ptr() - out.data_ptr()
        # From now on the device may write anything anywhere but into this rank's own part.
        out[:start] = _RUBBISH
        out[start + len(part) :] = _RUBBISH
        self.outs[rank], self.parts[rank] = out, part
        if len(self.outs) == self._size:
            assert len({len(out) for out in self.outs.values()}) == 1, "ranks gather different lengths"
            whole = torch.cat([self.parts[rank] for rank in range(self._size)])
            for out in self.outs.values():
                out.copy_(whole)
            self.over.done = True


class SimExchange:
    """See `mlkv.kernels.cooperative.Exchange`. Gathers meet in the order in which each rank queued them."""

    def __init__(self, rank: int, size: int, gathers: list[Gather]) -> None:
        self.rank, self.size = rank, size
        self._gathers = gathers  # shared by the ranks
        self._next = 0
        self.aborted = False
        self.fails = False

    def all_gather(self, out: torch.Tensor, part: torch.Tensor, stream: SimStream) -> None:
        if self.fails:
            raise RuntimeError("the communicator is broken")
        if self._next == len(self._gathers):
            self._gathers.append(Gather(self.size))
        gather = self._gathers[self._next]
        self._next += 1
        stream.run(lambda: gather.arrive(self.rank, out, part))
        stream.work.append((None, gather.over))

    def abort(self) -> None:
        self.aborted = True
        for gather in self._gathers[: self._next]:
            gather.over.done = True  # streams go on, with whatever is in memory


class SimRank:
    """One rank of a `SimGroup`. Its engine cooperates from the start in loads of any size."""

    def __init__(
        self,
        rank: int,
        size: int,
        gathers: list[Gather],
        case: PoolCase,
        host: np.ndarray,
        rank_slice: RankSlice,
        *,
        staging_pages: int,
        segment_pages: int,
        chunks_ahead: int,
        deadline_s: float,
    ) -> None:
        self.case = case
        pages = HostPages(host, case.pool.layout, rank_slice, FINGERPRINT, writes_identity=rank == 0)
        self.device = SimDevice(SimKernels(case.pool, rank_slice))
        self.exchange = SimExchange(rank, size, gathers)
        self.engine: StagedTransferEngine[SimStream] = StagedTransferEngine(
            case.pool,
            pages,
            self.device,
            staging_bytes=staging_pages * pages.read_bytes,
            max_tasks=16,
            segment_bytes=segment_pages * pages.read_bytes,
            chunks_ahead=chunks_ahead,
            exchange=self.exchange,
            exchange_deadline_s=deadline_s,
        )
        assert self.engine.cooperation is not None
        self.cooperation: Cooperation[SimStream] = self.engine.cooperation
        self.cooperation.begin(0)


class SimGroup:
    """Ranks that read the same heads of one host pool, stepped together in random order."""

    def __init__(
        self,
        build: Callable[..., PoolCase],
        host: np.ndarray,
        heads: int,
        *,
        size: int,
        seed: int = 0,
        staging_pages: int = 6,
        segment_pages: int = 1,
        chunks_ahead: int = 1 << 30,
        deadline_s: float = 1e9,
    ) -> None:
        gathers: list[Gather] = []
        self.order = random.Random(seed)
        self.ranks = [
            SimRank(
                rank,
                size,
                gathers,
                build(seed=100 * seed + rank),
                host,
                RankSlice(0, heads, heads if rank == 0 else 0),
                staging_pages=staging_pages,
                segment_pages=segment_pages,
                chunks_ahead=chunks_ahead,
                deadline_s=deadline_s,
            )
            for rank in range(size)
        ]

    def step_any(self) -> bool:
        """One piece of work of some rank. False when none can go on."""
        return any(rank.device.step_any(self.order) for rank in self.order.sample(self.ranks, len(self.ranks)))

    def run_until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            if not self.step_any():
                assert condition(), "nothing can go on: a stream waits for what never comes"
                return
