"""What moves pages between one rank's KV pool and the host pool, seen from outside.

Transfers own no cache state: resolved page indices and slots go in, something to poll comes out. The caller's side
of the contract: the target slots of a load and the source slots of an offload are left alone until the transfer
says that it has finished with them, and the host pages stay leased (load) or reserved (offload) until it is done.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from mlkv.errors import CacheUsageError, ConfigError
from mlkv.kernels.host_pages import HostPages, PageBatch
from mlkv.layout import KVLayout, KVPool, RankSlice

if TYPE_CHECKING:
    from mlkv.kernels.cooperative import Cooperation, Exchange

EXCHANGE_DEADLINE_S = 60.0
"""Default wait of a cooperative load for the other ranks, as that of a step for them."""

TransferPath = Literal["auto", "staged", "direct"]
"""How bytes cross between host and device, see `staged.choose_path`."""


class LoadTransfer(ABC):
    """A load in flight.

    Attributes:
        num_good: once `poll()` is true: pages, counted from the front, that verified and lie in their slots.
            Slots of later pages may hold anything.
        error: once `poll()` is true: what went wrong, None if nothing did. A page that does not verify is no
            error: it ends the good prefix.
    """

    num_good: int
    error: str | None

    @abstractmethod
    def poll(self) -> bool:
        """Whether it is over, well or not: no slot is written and no page read any more. Never blocks."""


class OffloadTransfer(ABC):
    """An offload in flight.

    Attributes:
        error: once `poll()` is true: what went wrong, None when payload and header are complete.
    """

    error: str | None

    @abstractmethod
    def poll_released(self) -> bool:
        """Whether its slots are no longer read and may be used for other tokens. Never blocks."""

    @abstractmethod
    def poll(self) -> bool:
        """Whether it is over, well or not: no page is written any more. Never blocks."""


class TransferEngine(ABC):
    """Loads and offloads of one rank. Make one with `create`. Its methods are called from one thread.

    Every submission is accepted or refused at once; nothing blocks but `close`. One that finds `max_tasks` of
    its direction in flight comes back already over, with an error that says so.

    Attributes:
        cooperation: of its loads with those of other ranks that read the same heads; None without an exchange.
    """

    cooperation: Cooperation[Any] | None = None

    def __init__(self, pool: KVPool, host: HostPages, max_tasks: int) -> None:
        if pool.layout != host.layout:
            raise ConfigError("the KV pool and the host pool have different layouts")
        if host.rank_slice.num_heads > pool.local_heads:
            raise ConfigError(
                f"this rank reads {host.rank_slice.num_heads} heads, its pool tensors have {pool.local_heads}"
            )
        if max_tasks < 1:
            raise ConfigError(f"max_tasks must be at least 1, got {max_tasks}")
        self._pool = pool
        self._host = host
        self._max_tasks = max_tasks

    @staticmethod
    def create(
        pool: KVPool,
        host: npt.NDArray[np.uint8] | memoryview,
        *,
        layout: KVLayout,
        rank_slice: RankSlice,
        fingerprint: bytes,
        writes_identity: bool,
        staging_bytes: int,
        max_tasks: int = 1024,
        transfer: TransferPath = "auto",
        on_pinned: Callable[[int, int], None] | None = None,
        exchange: Exchange[Any] | None = None,
        exchange_deadline_s: float = EXCHANGE_DEADLINE_S,
    ) -> TransferEngine:
        """The engine for the pool's device.

        Args:
            pool: the engine's KV tensors on this rank.
            host: uint8, the whole host pool, a whole number of `layout.page_bytes` long.
            rank_slice: the heads that this rank reads and writes.
            fingerprint: 16 bytes, of the namespace, as it stands in page headers.
            writes_identity: whether this rank writes the identity part of headers. True on exactly one rank of
                a replica, whether or not that rank has heads to write.
            staging_bytes: bound of the staging memory, for each direction. On CUDA this is device memory, and an
                offload of up to this size has released its slots before its first page has left the device.
            max_tasks: bound of the loads, and of the offloads, in flight.
            transfer: on CUDA, force the staged or the direct path; "auto" chooses for each transfer.
            on_pinned: on CUDA, called with (bytes done, bytes in all) while the host pool is pinned.
            exchange: with the ranks that read the same heads, for cooperative loads. These are off until
                `cooperation.begin` is called, and need equal loads in equal order on all of those ranks.
            exchange_deadline_s: how long a cooperative load may wait for the other ranks.

        Raises:
            ConfigError: when a size or a shape does not fit.
        """
        pages = HostPages(host, layout, rank_slice, fingerprint, writes_identity=writes_identity)
        if staging_bytes < pages.read_bytes:
            raise ConfigError(
                f"staging_bytes={staging_bytes} holds no page: this rank reads {pages.read_bytes} bytes of each"
            )
        if transfer not in ("auto", "staged", "direct"):
            raise ConfigError(f"transfer must be auto, staged or direct, got {transfer!r}")
        # Imported here, because the engines import this module and each is needed on its own device only.
        if pool.device.type == "cpu":
            from mlkv.kernels.cpu import CpuTransferEngine
            from mlkv.kernels.host_device import open_host_engine

            if exchange is not None:
                return open_host_engine(
                    pool,
                    pages,
                    staging_bytes=staging_bytes,
                    max_tasks=max_tasks,
                    exchange=exchange,
                    exchange_deadline_s=exchange_deadline_s,
                )
            return CpuTransferEngine(pool, pages, staging_bytes=staging_bytes, max_tasks=max_tasks)
        if pool.device.type == "cuda":
            from mlkv.kernels.cuda import open_cuda_engine

            return open_cuda_engine(
                pool,
                pages,
                staging_bytes=staging_bytes,
                max_tasks=max_tasks,
                transfer=transfer,
                on_pinned=on_pinned,
                exchange=exchange,
                exchange_deadline_s=exchange_deadline_s,
            )
        raise ConfigError(f"no transfers for KV pools on {pool.device}; CPU and CUDA are supported")

    @abstractmethod
    def load(self, pages: PageBatch, slots: torch.Tensor) -> LoadTransfer:
        """Start copying pages into slots, after the work queued so far on the caller's current stream.

        Args:
            slots: int64 `[n * page_tokens]`, on the CPU or on the pool's device; -1: leave this token out.

        Raises:
            CacheUsageError: for slots or pages that do not fit, or after `close`.
        """

    @abstractmethod
    def offload(self, pages: PageBatch, slots: torch.Tensor) -> OffloadTransfer:
        """Start copying slots into pages, after the work queued so far on the caller's current stream.

        Args:
            slots: int64 `[n * page_tokens]`, on the CPU or on the pool's device, none of them -1.

        Raises:
            CacheUsageError: for slots or pages that do not fit, or after `close`.
        """

    @abstractmethod
    def close(self, deadline_s: float) -> None:
        """Drop what has not begun, wait for what has, and let go of the pools. Idempotent.

        Raises:
            DeadlineExceeded: when something still runs at the deadline; pools must then stay alive.
        """

    def _check(self, pages: PageBatch, slots: torch.Tensor, lowest: int) -> None:
        num_slots = len(pages) * self._pool.layout.page_tokens
        if slots.dtype != torch.int64 or slots.dim() != 1 or slots.numel() != num_slots:
            raise CacheUsageError(
                f"{len(pages)} pages need int64 slots of shape ({num_slots},), got {slots.dtype} "
                f"{tuple(slots.shape)}"
            )
        if lowest >= 0 and len(pages.parents) != len(pages.keys):
            raise CacheUsageError("an offload needs the parent key of every page")
        # Values of slots on a device are not looked at: that would wait for the device.
        if not slots.is_cpu:
            if slots.device != self._pool.device:
                raise CacheUsageError(f"slots are on {slots.device}, the KV pool on {self._pool.device}")
        elif num_slots:
            numbers = slots.numpy()
            # As unsigned numbers, so that those below the lowest are too large as well. Few operations, since each
            # of numpy's costs some 10 us while its code is not in the processor's caches.
            above = np.maximum.reduce((numbers - lowest if lowest else numbers).view(np.uint64))
            if above >= self._pool.num_slots - lowest:
                raise CacheUsageError(
                    f"slots must be in [{lowest}, {self._pool.num_slots}), got {numbers.min()} to {numbers.max()}"
                )
        self._check_pages(pages)

    def _check_pages(self, pages: PageBatch) -> None:
        try:
            self._host.check(pages)
        except ValueError as error:
            raise CacheUsageError(str(error)) from None
