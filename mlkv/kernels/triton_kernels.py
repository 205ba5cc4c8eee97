"""Gather with checksum and scatter with checksum as one Triton kernel for each group of planes.

Tiles of rows pass through registers: read from one side, weighted and summed, written to the other. For every
item of work the sum of what was moved is left in pinned host memory; nothing is added up or compared on the
device, so there are no atomics, nothing to clear before and nothing to copy after. For one page of one head in
Llama-3.1-8B geometry (64 tokens) that is 32 sums of 8 bytes for 1 MiB moved.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mlkv.kernels.device import Staging, Words
from mlkv.kernels.driver import quick_driver
from mlkv.kernels.launch import Launch, launch_of
from mlkv.kernels.pool_table import COLUMNS, PlaneGroup, plane_groups
from mlkv.layout import KVPool, RankSlice

_NUM_WARPS = 16
_TILE_BYTES = 32 << 10
"""In registers at a time: with 16 warps, four independent 16-byte loads a thread. On an H200, gather and scatter
move 1.82 TB/s; with tiles of 8 KiB and 4 warps 1.72, and one program alone then moves half as much."""

_ITEM_BYTES = 32 << 10
"""Moved by a program at a time, and summed into one of the numbers that reach the host."""

_MAX_PROGRAMS = 4096
"""Programs of one launch; each goes on to the next item until there are none. Fewer were tried beside a model on
an H200, and the fewer, the worse: each takes a multiprocessor that the model's matmuls would fill. A loop of them
beside a load takes 1.07 of its time with this bound, 1.11 with 64 programs, 1.20 with 16."""

_WORDS_PER_PROGRAM = 1024


@triton.jit
def _word_weight(word):  # type: ignore[no-untyped-def]
    """`page.checksum_weights` of a word's position in its slice (uint32), widened to 64 bits."""
    word ^= word >> 16
    word *= 0x85EBCA6B
    word ^= word >> 13
    word *= 0xC2B2AE35
    word ^= word >> 16
    return (word | 1).to(tl.uint64)


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["num_slices", "num_heads", "head_bytes", "num_parts", "first_part", "items_per_slice"],
    # Chunks begin anywhere in these; a second compilation would be in the middle of somebody's request.
    do_not_specialize_on_alignment=["slots", "sums"],
)
def _move_pages(  # type: ignore[no-untyped-def]
    slots,
    pages,
    sums,
    table,
    num_slices,
    num_heads,
    head_bytes,
    num_parts,
    first_part,
    items_per_slice,
    SCATTER: tl.constexpr,
    ADDRESSES: tl.constexpr,
    PER_PAGE: tl.constexpr,
    ALIGNED: tl.constexpr,
    CHECKSUM: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ENTRIES: tl.constexpr,
    ROWS: tl.constexpr,
    ROW_UNITS: tl.constexpr,
    UNIT_BYTES: tl.constexpr,
    PADDING_BYTES: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_UNITS: tl.constexpr,
    SUMMED_UNITS: tl.constexpr,
    SAME_STRIDES: tl.constexpr,
):
    """An item is `ENTRIES` (layer, plane) rows of the table for one slice, that is, one head of one page."""
    if UNIT_BYTES == 4:
        unit = tl.uint32
    elif UNIT_BYTES == 2:
        unit = tl.uint16
    else:
        unit = tl.uint8
    item = tl.program_id(0)
    while item < num_slices * items_per_slice:
        # Heads of a page next to each other in time, as they are in the pool.
        slice_of_all = item % num_slices
        part = item // num_slices
        page = slice_of_all // num_heads
        head = slice_of_all % num_heads
        if ADDRESSES:
            slice_address = tl.load(pages + page) + head.to(tl.int64) * head_bytes
        else:
            slice_address = pages.to(tl.int64) + (page.to(tl.int64) * num_heads + head) * head_bytes
        total = tl.zeros([TILE_ROWS, TILE_UNITS // SUMMED_UNITS], tl.uint64)
        padding_total = tl.zeros([16], tl.uint64)
        # The rows of all entries in one sequence, so that one tile spans entries: a program that waits for many
        # loads at once is sooner done, and in the way of the model for a shorter time.
        for first_row in range(0, ENTRIES * ROWS, TILE_ROWS):
            row = first_row + tl.arange(0, TILE_ROWS)
            is_row = row < ENTRIES * ROWS
            at = table + (part * ENTRIES + row // ROWS) * COLUMNS
            in_entry = row % ROWS
            if SAME_STRIDES:
                block_step = tl.load(table + 1)
                token_step = tl.load(table + 2)
                head_step = tl.load(table + 3)
            else:
                block_step = tl.load(at + 1, mask=is_row, other=0)
                token_step = tl.load(at + 2, mask=is_row, other=0)
                head_step = tl.load(at + 3, mask=is_row, other=0)
            address = tl.load(at, mask=is_row, other=0) + head * head_step
            plane_offset = tl.load(at + 4, mask=is_row, other=0)
            if PER_PAGE:
                slot = tl.load(slots + page * PAGE_TOKENS + row * 0)
                place = address + (slot // BLOCK_TOKENS) * block_step
            else:
                slot = tl.load(slots + page * PAGE_TOKENS + in_entry, mask=is_row, other=-1)
                place = address + (slot // BLOCK_TOKENS) * block_step + (slot % BLOCK_TOKENS) * token_step
            for first_unit in range(0, ROW_UNITS, TILE_UNITS):
                column = first_unit + tl.arange(0, TILE_UNITS)
                inside = is_row[:, None] & (column < ROW_UNITS)[None, :]
                used = inside & (slot >= 0)[:, None]
                in_plane = (in_entry * ROW_UNITS)[:, None] + column[None, :]
                paged = place[:, None] + (column * UNIT_BYTES)[None, :]
                packed = (slice_address + plane_offset)[:, None] + in_plane * UNIT_BYTES
                if ALIGNED:
                    paged = tl.multiple_of(paged, [1, 16])
                    packed = tl.multiple_of(packed, [1, 16])
                paged = paged.to(tl.pointer_type(unit))
                packed = packed.to(tl.pointer_type(unit))
                if ALIGNED:
                    paged = tl.max_contiguous(tl.multiple_of(paged, [1, 16]), [1, TILE_UNITS])
                    packed = tl.max_contiguous(tl.multiple_of(packed, [1, 16]), [1, TILE_UNITS])
                if SCATTER:
                    data = tl.load(packed, mask=inside, other=0)
                    tl.store(paged, data, mask=used)
                else:
                    data = tl.load(paged, mask=used, other=0)
                    tl.store(packed, data, mask=inside)
                if CHECKSUM:
                    if UNIT_BYTES == 4:
                        word = (plane_offset // 4).to(tl.uint32)[:, None] + in_plane.to(tl.uint32)
                        products = data.to(tl.uint64) * _word_weight(word)
                    else:
                        byte = plane_offset.to(tl.uint32)[:, None] + in_plane.to(tl.uint32) * UNIT_BYTES
                        value = data.to(tl.uint64) << ((byte % 4) * 8).to(tl.uint64)
                        products = value * _word_weight(byte // 4)
                    # Neighbours are in one thread, so this keeps fewer sums in registers.
                    total += tl.sum(
                        tl.reshape(products, [TILE_ROWS, TILE_UNITS // SUMMED_UNITS, SUMMED_UNITS]), axis=2
                    )
        if PADDING_BYTES > 0:
            for entry in range(ENTRIES):
                byte = tl.arange(0, 16)
                start = tl.load(table + (part * ENTRIES + entry) * COLUMNS + 4) + ROWS * ROW_UNITS * UNIT_BYTES
                padding = (slice_address + start + byte).to(tl.pointer_type(tl.uint8))
                inside_padding = byte < PADDING_BYTES
                if SCATTER:
                    # Zeros of a good page; a page in which they are not must not verify.
                    value = tl.load(padding, mask=inside_padding, other=0).to(tl.uint64)
                    byte_of_slice = start.to(tl.uint32) + byte.to(tl.uint32)
                    value = value << ((byte_of_slice % 4) * 8).to(tl.uint64)
                    padding_total += value * _word_weight(byte_of_slice // 4)
                else:
                    tl.store(padding, tl.zeros([16], tl.uint8), mask=inside_padding)
        if CHECKSUM:
            result = tl.sum(tl.sum(total, axis=1), axis=0) + tl.sum(padding_total, axis=0)
            sum_at = slice_of_all.to(tl.int64) * num_parts + first_part + part
            tl.store(sums + sum_at, result.to(tl.int64))
        item += tl.num_programs(0)


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["source", "target"])  # type: ignore[untyped-decorator]
def _copy_words(source, target, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + at, tl.load(source + at, mask=at < count), mask=at < count)


_IS_INTERPRETED = not isinstance(_move_pages, triton.runtime.JITFunction)


class _Launch:
    """A group of planes with the shape of its kernel, compiled when first needed for each way of using it."""

    def __init__(
        self, pool: KVPool, group: PlaneGroup, item_bytes: int, first_part: int, *, checksum: bool
    ) -> None:
        plane_bytes = group.num_rows * group.row_bytes
        # A whole number of items, so that all are alike and none has a bound to check.
        wanted = max(1, item_bytes // plane_bytes)
        entries = max(n for n in range(1, wanted + 1) if len(group.rows) % n == 0)
        row_units = group.row_bytes // group.unit_bytes
        max_units = _TILE_BYTES // group.unit_bytes
        exact = row_units & -row_units  # its largest divisor that is a power of two: tiles without idle lanes
        if exact >= 32 or exact == row_units:
            tile_units = min(exact, max_units)
        else:
            tile_units = min(triton.next_power_of_2(row_units), max_units)
        tile_rows = min(triton.next_power_of_2(entries * group.num_rows), max(1, max_units // tile_units))
        self.num_parts = len(group.rows) // entries
        self._first_part = first_part
        self._head_bytes = pool.layout.head_bytes
        self._table = torch.tensor(group.rows, dtype=torch.int64).to(pool.device)
        self._constants = {
            "PER_PAGE": group.per_page,
            "ALIGNED": group.is_aligned,
            "CHECKSUM": checksum,
            "PAGE_TOKENS": pool.layout.page_tokens,
            "BLOCK_TOKENS": pool.block_tokens,
            "COLUMNS": COLUMNS,
            "ENTRIES": entries,
            "ROWS": group.num_rows,
            "ROW_UNITS": row_units,
            "UNIT_BYTES": group.unit_bytes,
            "PADDING_BYTES": group.padding_bytes,
            "TILE_ROWS": tile_rows,
            "TILE_UNITS": tile_units,
            "SUMMED_UNITS": min(4, tile_units),
            "SAME_STRIDES": len({row[1:4] for row in group.rows}) == 1,
        }
        self._table_address = self._table.data_ptr()
        self._compiled: dict[tuple[bool, bool], Launch] = {}

    def run(
        self,
        num_pages: int,
        num_heads: int,
        num_parts: int,
        max_programs: int,
        slots: Words,
        pages: Staging | Words,
        sums: Words,
        stream: int,
        *,
        scatter: bool,
    ) -> None:
        direct = isinstance(pages, Words)
        num_slices = num_pages * num_heads
        num_items = num_slices * self.num_parts
        # A direct launch is small, or the device is idle.
        num_programs = num_items if direct else min(num_items, max_programs)
        numbers = (num_slices, num_heads, self._head_bytes, num_parts, self._first_part, self.num_parts)
        if _IS_INTERPRETED:
            memory = pages.tensor if isinstance(pages, Words) else pages.memory
            constants = (scatter, direct, *self._constants.values())
            _move_pages[num_programs,](slots.tensor, memory, sums.tensor, self._table, *numbers, *constants)
            return
        launch = self._compiled.get((scatter, direct))
        if launch is None:
            launch = self._compiled[scatter, direct] = self._compile(numbers, scatter=scatter, direct=direct)
        launch(num_programs, stream, slots.address, pages.address, sums.address, self._table_address, *numbers)

    def _compile(self, numbers: tuple[int, ...], *, scatter: bool, direct: bool) -> Launch:
        constants = (scatter, direct, *self._constants.values())
        pages = torch.int64 if direct else torch.uint8
        kernel = _move_pages.warmup(
            torch.int64,
            pages,
            torch.int64,
            torch.int64,
            *numbers,
            *constants,
            grid=(1,),
            num_warps=_NUM_WARPS,
        )
        return launch_of(quick_driver(), kernel, "PPPPiiiiii", constants)


class TritonKernels:
    """See `device.PageKernels`.

    Args:
        checksum: False leaves sums unwritten; only for measuring what they cost.
        item_bytes, max_programs: how work is split; see the constants.

    Raises:
        ValueError: for a pool whose rows are not contiguous.
    """

    reaches_host = True
    takes_stream = True

    def __init__(
        self,
        pool: KVPool,
        rank_slice: RankSlice,
        *,
        checksum: bool = True,
        item_bytes: int = _ITEM_BYTES,
        max_programs: int = _MAX_PROGRAMS,
    ) -> None:
        self._pool = pool  # the table has addresses of its tensors
        self._slice = rank_slice
        self._max_programs = max_programs
        self._fetch: Launch | None = None  # compiled when first needed
        self._launches: list[_Launch] = []
        self.num_parts = 0
        for group in plane_groups(pool):
            launch = _Launch(pool, group, item_bytes, self.num_parts, checksum=checksum)
            self._launches.append(launch)
            self.num_parts += launch.num_parts

    def fetch(self, source: Words, target: Words, stream: int) -> None:
        num_programs = triton.cdiv(target.length, _WORDS_PER_PROGRAM)
        if _IS_INTERPRETED:
            _copy_words[num_programs,](source.tensor, target.tensor, target.length, _WORDS_PER_PROGRAM)
            return
        if self._fetch is None:
            kernel = _copy_words.warmup(torch.int64, torch.int64, target.length, _WORDS_PER_PROGRAM, grid=(1,))
            self._fetch = launch_of(quick_driver(), kernel, "PPi", (_WORDS_PER_PROGRAM,))
        self._fetch(num_programs, stream, source.address, target.address, target.length)

    def gather(self, num_pages: int, slots: Words, pages: Staging | Words, sums: Words, stream: int) -> None:
        heads, parts, most = self._slice.num_written_heads, self.num_parts, self._max_programs
        for launch in self._launches:
            launch.run(num_pages, heads, parts, most, slots, pages, sums, stream, scatter=False)

    def scatter(self, num_pages: int, slots: Words, pages: Staging | Words, sums: Words, stream: int) -> None:
        heads, parts, most = self._slice.num_heads, self.num_parts, self._max_programs
        for launch in self._launches:
            launch.run(num_pages, heads, parts, most, slots, pages, sums, stream, scatter=True)
