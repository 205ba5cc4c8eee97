"""Registering the host pool with CUDA, so that copies from and to it are asynchronous and at link speed."""

from __future__ import annotations

import ctypes
import logging
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import torch

log = logging.getLogger(__name__)

PIECE_BYTES = 64 << 20
"""Registered at a time. The driver refuses single registrations of hundreds of GiB and holds a lock during each,
so pieces keep neighbours alive; pieces of 64 to 128 MiB, several at once, register 12 GB/s on an H200's host."""

_MADV_POPULATE_WRITE = 23  # linux/mman.h
_libc = ctypes.CDLL(None)

_NUM_THREADS = 4  # more gain nothing: the driver serialises part of each registration


class Registrar(Protocol):
    """The two CUDA calls that pinning needs. They return a status, 0 for success."""

    def register(self, address: int, num_bytes: int) -> int: ...

    def unregister(self, address: int) -> int: ...


class CudaRegistrar:
    """`Registrar` over the CUDA driver, whose refusals, unlike the runtime's, leave no error pending."""

    _PORTABLE = 1  # CU_MEMHOSTREGISTER_PORTABLE: pinned for every context of this process

    def __init__(self, library: ctypes.CDLL, device: torch.device) -> None:
        self._library = library
        # Pieces are registered from several threads, and a thread begins without a context. torch does not make
        # one current where the device index is the thread's default already, so it is done by hand.
        self._context = ctypes.c_void_p()
        with torch.cuda.device(device):
            torch.cuda.synchronize(device)
            library.cuCtxGetCurrent(ctypes.byref(self._context))

    def register(self, address: int, num_bytes: int) -> int:
        self._library.cuCtxSetCurrent(self._context)
        return int(
            self._library.cuMemHostRegister_v2(
                ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), ctypes.c_uint(self._PORTABLE)
            )
        )

    def unregister(self, address: int) -> int:
        self._library.cuCtxSetCurrent(self._context)
        return int(self._library.cuMemHostUnregister(ctypes.c_void_p(address)))


class PinnedMemory:
    """Memory registered with CUDA until `close`, or until this object is dropped.

    Attributes:
        is_pinned: False when a registration was refused. Then none of the memory is registered, a warning was
            logged, and copies from and to it still work, only slower and not asynchronously.

    Args:
        address, num_bytes: the memory; the address a multiple of the system's page size.
        unit_bytes: what is copied in one go lies within one multiple of this. The driver refuses a copy that
            touches two registrations, so a piece holds whole units.
        progress: called with (bytes registered, `num_bytes`) after each piece.
    """

    def __init__(
        self,
        address: int,
        num_bytes: int,
        registrar: Registrar,
        *,
        unit_bytes: int = 1,
        piece_bytes: int = PIECE_BYTES,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        self._registrar = registrar
        self._pieces: list[int] = []
        # Memory that stays registered after it was freed makes the driver refuse copies of whoever gets it next.
        weakref.finalize(self, _unregister, registrar, self._pieces).atexit = False
        self.is_pinned = True
        piece_bytes = max(1, piece_bytes // unit_bytes) * unit_bytes
        starts = range(0, num_bytes, piece_bytes)
        refusals = []
        with ThreadPoolExecutor(_NUM_THREADS, "mlkv-pin") as threads:
            statuses = threads.map(lambda start: self._pin(address, start, num_bytes, piece_bytes), starts)
            for start, status in zip(starts, statuses, strict=True):
                if status == 0:
                    self._pieces.append(address + start)
                    if progress is not None:
                        progress(min(start + piece_bytes, num_bytes), num_bytes)
                elif status is not None:
                    refusals.append(status)
        if refusals:
            _unregister(registrar, self._pieces)
            log.warning(
                "host pool of %d MiB could not be pinned (CUDA status %d after %d pieces): transfers go on from "
                "pageable memory, slower and less asynchronous. Raise the memlock limit (ulimit -l) or make the "
                "pool smaller.",
                num_bytes >> 20,
                refusals[0],
                len(starts) - len(refusals),
            )

    def close(self) -> None:
        """Unregister. Idempotent; nothing may be copying any more."""
        _unregister(self._registrar, self._pieces)
        self.is_pinned = False

    def _pin(self, address: int, start: int, num_bytes: int, piece_bytes: int) -> int | None:
        """Status of registering the piece at `start`; None when it was not tried."""
        if not self.is_pinned:  # one was refused: the rest would only be rolled back
            return None
        size = min(piece_bytes, num_bytes - start)
        _populate(address + start, size)
        status = self._registrar.register(address + start, size)
        if status:
            self.is_pinned = False
        return status


def _populate(address: int, num_bytes: int) -> None:
    """Have the system take the memory now, many of its pages at a time.

    Registration would take them one by one, under its lock: 2 GiB of new shared memory took two ranks 4.6 s so. A
    kernel before Linux 5.14 refuses this, and then it is as it was.
    """
    _libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), _MADV_POPULATE_WRITE)


def _unregister(registrar: Registrar, pieces: list[int]) -> None:
    while pieces:
        piece = pieces.pop()
        status = registrar.unregister(piece)
        if status:
            log.warning("CUDA did not unregister pinned memory at %#x (status %d)", piece, status)
