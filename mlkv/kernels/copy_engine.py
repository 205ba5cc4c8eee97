"""Batches of copies between host and device memory on the copy engine, through the CUDA driver.

One `cuMemcpyBatchAsync` takes a whole chunk: pieces of 1 MiB reach 0.91 of the link on an H200, one call for each
piece 0.81. Drivers before 12.8 do not have it; there each piece is a call.
"""

from __future__ import annotations

import ctypes

import numpy as np
import numpy.typing as npt

from mlkv.kernels.driver import check

_ORDER_STREAM = 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM: sources are read when the stream gets there
_ORDER_ANY = 3  # CU_MEMCPY_SRC_ACCESS_ORDER_ANY: sources hold their final bytes already and may be read early


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Attributes(ctypes.Structure):
    """CUmemcpyAttributes. The locations are hints for managed memory, unused here."""

    _fields_ = (
        ("src_access_order", ctypes.c_int),
        ("src_location", _Location),
        ("dst_location", _Location),
        ("flags", ctypes.c_uint),
    )


class CopyEngine:
    """Copies queued on a stream of the current context.

    Args:
        library: the CUDA driver.
        batched: False: one call for each piece, also where the driver has batches.
    """

    def __init__(self, library: ctypes.CDLL, *, batched: bool = True) -> None:
        self._library = library
        # Version 2 (CUDA 13) differs from version 1 (12.8) in having no argument for the failed index.
        self._batch_v2 = getattr(library, "cuMemcpyBatchAsync_v2", None) if batched else None
        self._batch_v1 = getattr(library, "cuMemcpyBatchAsync", None) if batched else None
        self._one = library.cuMemcpyAsync
        # Signatures are declared once, so that calls take plain numbers.
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        common = (pointer, pointer, pointer, size, pointer, pointer, size)
        self._one.argtypes = (ctypes.c_uint64, ctypes.c_uint64, size, pointer)
        if self._batch_v2 is not None:
            self._batch_v2.argtypes = (*common, pointer)
        if self._batch_v1 is not None:
            self._batch_v1.argtypes = (*common, pointer, pointer)
        self._attributes = {order: _Attributes(src_access_order=order) for order in (_ORDER_STREAM, _ORDER_ANY)}
        self._attribute_addresses = {order: ctypes.addressof(made) for order, made in self._attributes.items()}
        self._first_index, self._failed = ctypes.c_size_t(0), ctypes.c_size_t(0)
        self._sizes = np.empty(0, np.uint64)

    @property
    def is_batched(self) -> bool:
        return self._batch_v2 is not None or self._batch_v1 is not None

    def copy(
        self,
        stream: int,
        targets: npt.NDArray[np.int64],
        sources: npt.NDArray[np.int64],
        piece_bytes: int,
        *,
        sources_are_final: bool,
    ) -> None:
        """Queue copies of `piece_bytes` from each source address to the target address beside it, int64 `[n]`.

        Args:
            stream: raw handle, not that of the default stream, which batches refuse.
            sources_are_final: the sources hold the bytes meant already, whatever is queued before on the stream.

        Raises:
            RuntimeError: when the driver refuses.
        """
        count = len(targets)
        if count == 1 or not self.is_batched:
            for target, source in zip(targets.tolist(), sources.tolist(), strict=True):
                self._check(self._one(target, source, piece_bytes, stream))
            return
        if len(self._sizes) < count or self._sizes[0] != piece_bytes:
            self._sizes = np.full(count, piece_bytes, np.uint64)
        # The driver has read these arrays when the call returns.
        targets, sources = np.ascontiguousarray(targets), np.ascontiguousarray(sources)
        arguments = (
            _address(targets),
            _address(sources),
            _address(self._sizes),
            count,
            self._attribute_addresses[_ORDER_ANY if sources_are_final else _ORDER_STREAM],
            ctypes.addressof(self._first_index),
            1,
        )
        if self._batch_v2 is not None:
            self._check(self._batch_v2(*arguments, stream))
        elif self._batch_v1 is not None:
            self._check(self._batch_v1(*arguments, ctypes.addressof(self._failed), stream))

    def _check(self, status: int) -> None:
        if status:
            check(self._library, status, "a copy between host and device")


def _address(array: npt.NDArray[np.int64] | npt.NDArray[np.uint64]) -> int:
    # A third of the time of `array.ctypes.data`.
    address: int = array.__array_interface__["data"][0]
    return address
