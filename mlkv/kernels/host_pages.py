"""One rank's view of the host pool: its run of heads in every page, and the headers it reads and writes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from mlkv import page
from mlkv.errors import ConfigError
from mlkv.layout import KVLayout, RankSlice

_FEW_PAGES = 8
"""Headers of up to this many pages are looked at one by one, which costs less than arrays of them."""

_FEW_HEADS = 4
"""The same for what binds the sums of one page."""


@dataclass(frozen=True)
class PageBatch:
    """Resolved pages of one transfer, in the order of their slots.

    Attributes:
        indices: int32 `[n]`, which pages of the host pool.
        keys: `16 * n` bytes, the key of each page.
        parents: `16 * n` bytes, the key of the page before each; only offloads need it, loads may leave it empty.
        generations: uint64 `[n]`, which write of the page is meant.

    Raises ValueError for other types and for lengths that do not agree.
    """

    indices: npt.NDArray[np.int32]
    keys: bytes
    parents: bytes
    generations: npt.NDArray[np.uint64]

    def __post_init__(self) -> None:
        n = len(self.indices)
        if self.indices.dtype != np.int32 or self.generations.dtype != np.uint64:
            raise ValueError(
                f"page batch wants int32 indices and uint64 generations, got {self.indices.dtype} and "
                f"{self.generations.dtype}"
            )
        if len(self.keys) != 16 * n or len(self.parents) not in (0, 16 * n) or len(self.generations) != n:
            raise ValueError(
                f"page batch of {n} indices has {len(self.keys)} bytes of keys, {len(self.parents)} of parents "
                f"and {len(self.generations)} generations; keys and parents take 16 bytes a page"
            )

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, part: slice) -> PageBatch:
        start, stop, step = part.indices(len(self))
        if step != 1:
            raise ValueError("a page batch can only be cut into runs")
        cut = slice(16 * start, 16 * stop)
        return PageBatch(self.indices[start:stop], self.keys[cut], self.parents[cut], self.generations[start:stop])


class HostRun:
    """A rank's run of heads in one page, where it lies. See `device.Staging`."""

    __slots__ = ("_bytes", "address")

    def __init__(self, run: npt.NDArray[np.uint8], address: int) -> None:
        self._bytes = run
        self.address = address

    @property
    def memory(self) -> torch.Tensor:
        return torch.from_numpy(self._bytes)


class HostPages:
    """The host pool as one rank uses it.

    Args:
        pool: uint8, the whole host pool, a whole number of pages long; writable.
        fingerprint: 16 bytes, of the namespace.
    """

    def __init__(
        self,
        pool: npt.NDArray[np.uint8] | memoryview,
        layout: KVLayout,
        rank_slice: RankSlice,
        fingerprint: bytes,
        *,
        writes_identity: bool,
    ) -> None:
        flat = np.frombuffer(pool, np.uint8)
        if not flat.flags.writeable:
            raise ConfigError("host pool is read-only: map it for writing")
        if not len(flat) or len(flat) % layout.page_bytes:
            raise ConfigError(f"host pool of {len(flat)} bytes is not whole pages of {layout.page_bytes} bytes")
        if len(fingerprint) != 16:
            raise ConfigError(f"namespace fingerprint must be 16 bytes, got {len(fingerprint)}")
        if rank_slice.head_start + rank_slice.num_heads > layout.num_kv_heads:
            raise ConfigError(f"{rank_slice} reaches past the {layout.num_kv_heads} KV heads of the layout")
        self.layout = layout
        self.rank_slice = rank_slice
        self.writes_identity = writes_identity
        self.pages = flat.reshape(-1, layout.page_bytes)
        self.address = int(flat.ctypes.data)
        self.num_pages = len(self.pages)
        self._identities = page.identity_records(self.pages)
        sums, start = page.checksum_tables(self.pages, layout), rank_slice.head_start
        self._read_sums = sums[:, start : start + rank_slice.num_heads]
        self._written_sums = sums[:, start : start + rank_slice.num_written_heads]
        self._fingerprint = fingerprint
        self._start = layout.head_offset(rank_slice.head_start)

    @property
    def read_bytes(self) -> int:
        """Bytes of one page that this rank reads; contiguous."""
        return self.rank_slice.num_heads * self.layout.head_bytes

    @property
    def written_bytes(self) -> int:
        """Bytes of one page that this rank writes, from the same start."""
        return self.rank_slice.num_written_heads * self.layout.head_bytes

    def check(self, batch: PageBatch) -> None:
        """Raise ValueError when a page lies outside the pool."""
        if len(batch) <= _FEW_PAGES:
            indices = batch.indices.tolist()
            is_outside = bool(indices) and not 0 <= min(indices) <= max(indices) < self.num_pages
        else:  # as unsigned numbers, so that negative ones are too large as well
            is_outside = int(batch.indices.view(np.uint32).max()) >= self.num_pages
        if is_outside:
            raise ValueError(f"page indices must be in [0, {self.num_pages}), got {batch.indices.tolist()}")

    def run_addresses(self, batch: PageBatch) -> npt.NDArray[np.int64]:
        """Address of this rank's run of heads in each page: int64 `[n]`."""
        addresses = np.empty(len(batch), np.int64)
        self.write_run_addresses(batch, addresses)
        return addresses

    def write_run_addresses(self, batch: PageBatch, out: npt.NDArray[np.int64]) -> None:
        """Fill `out`, int64 `[n]`, with the address of this rank's run of heads in each page."""
        np.multiply(batch.indices, self.layout.page_bytes, out=out, dtype=np.int64)
        out += self.address + self._start

    def run_of(self, batch: PageBatch) -> HostRun:
        """This rank's run of heads in the one page of a batch."""
        index = int(batch.indices[0])
        run = self.pages[index, self._start : self._start + self.read_bytes]
        return HostRun(run, self.address + index * self.layout.page_bytes + self._start)

    def read_runs(self, batch: PageBatch, out: npt.NDArray[np.uint8]) -> None:
        """Copy this rank's run of each page to `out`, uint8 `[n, read_bytes]`."""
        for row, index in zip(out, batch.indices, strict=True):
            row[:] = self.pages[index, self._start : self._start + self.read_bytes]

    def write_runs(self, batch: PageBatch, runs: npt.NDArray[np.uint8]) -> None:
        """Copy `runs`, uint8 `[n, written_bytes]`, into this rank's run of each page."""
        for row, index in zip(runs, batch.indices, strict=True):
            self.pages[index, self._start : self._start + self.written_bytes] = row

    def num_identified(self, batch: PageBatch) -> int:
        """Length of the longest prefix of pages whose identity is the one that the batch names."""
        if len(batch) <= _FEW_PAGES:
            return self._num_identified_of_few(batch)
        same = page.identities_match(
            self._identities[batch.indices],
            self.layout,
            keys=batch.keys,
            fingerprint=self._fingerprint,
            generations=batch.generations,
        )
        return _prefix(same)

    def _num_identified_of_few(self, batch: PageBatch) -> int:
        for at, (index, generation) in enumerate(
            zip(batch.indices.tolist(), batch.generations.tolist(), strict=True)
        ):
            key = batch.keys[16 * at : 16 * at + 16]
            if not page.identity_matches(self.pages[index], self.layout, key, self._fingerprint, generation):
                return at
        return len(batch)

    def expected_sums(self, batch: PageBatch) -> npt.NDArray[np.uint64]:
        """Payload checksums that the headers promise for the heads read here: uint64 `[n, num_heads]`."""
        if len(batch) == 1:  # without an index of arrays, which costs more than the rest
            table = self._read_sums[int(batch.indices[0])][None]
        else:
            table = self._read_sums[batch.indices]
        promised: npt.NDArray[np.uint64] = table - self._bindings(batch, self.rank_slice.num_heads)
        return promised

    def write_identities(self, batch: PageBatch) -> None:
        """Write the identities of pages, if that is this rank's job; at any time before their sums.

        A page with the identity of a write and not yet its sums does not verify: sums are bound to their write.
        """
        if self.writes_identity and len(batch):
            self._identities[batch.indices] = page.pack_identities(
                self.layout,
                keys=batch.keys,
                parents=batch.parents,
                fingerprint=self._fingerprint,
                generations=batch.generations,
            )

    def sum_bindings(self, batch: PageBatch) -> npt.NDArray[np.uint64]:
        """What ties the sums of the heads written here to their writes: uint64 `[n, num_written_heads]`."""
        return self._bindings(batch, self.rank_slice.num_written_heads)

    def write_sums(
        self, indices: npt.NDArray[np.int32], sums: npt.NDArray[np.uint64], bindings: npt.NDArray[np.uint64]
    ) -> None:
        """Write the checksums of this rank's heads; with them the pages are complete.

        Args:
            indices: int32 `[n]`, which pages.
            sums: uint64 `[n, num_written_heads]`, payload checksums of the bytes written to these pages.
            bindings: of `sum_bindings`.
        """
        self._written_sums[indices] = sums + bindings

    def _bindings(self, batch: PageBatch, num_heads: int) -> npt.NDArray[np.uint64]:
        if len(batch) == 1 and num_heads <= _FEW_HEADS:
            key, generation, start = batch.keys, int(batch.generations[0]), self.rank_slice.head_start
            bound = [page.binding(key, generation, head) for head in range(start, start + num_heads)]
            return np.array([bound], np.uint64)
        return page.bindings(batch.keys, batch.generations, self.rank_slice.head_start, num_heads)


def num_verified(expected: npt.NDArray[np.uint64], found: npt.NDArray[np.uint64]) -> int:
    """Length of the longest prefix of pages whose sums `[n, num_heads]` are all as expected."""
    if expected.tobytes() == found.tobytes():  # nearly always, and quickest
        return len(expected)
    return _prefix((expected == found).all(axis=1))


def _prefix(good: npt.NDArray[np.bool_]) -> int:
    return len(good) if good.all() else int(np.argmin(good))
