"""Gather and scatter between the engine's paged KV tensors and the head slices of pages, in torch operations.

The plain version: it works on every device and for every stride, and is what the faster kernels are compared
with. Only bytes are moved, so element types that have no arithmetic on a device are no special case.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from mlkv.layout import KVPool, Plane, RankSlice

_INTEGERS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}


def gather(pool: KVPool, slots: torch.Tensor, rank_slice: RankSlice, out: torch.Tensor) -> None:
    """Copy tokens of the pool into head slices: the heads that this rank writes.

    Args:
        slots: int64 `[num_pages * page_tokens]` on the pool's device, all valid. A plane kept per page is read
            from the block of the page's first slot.
        out: uint8 `[num_pages, num_written_heads, head_bytes]` on the pool's device, any strides over pages.
            Every byte is written, the padding between planes with zeros.
    """
    for plane, view, rows in _planes(pool, out, rank_slice.num_written_heads):
        if plane.per == "page":
            blocks = slots[:: pool.layout.page_tokens] // pool.block_tokens
            rows[:, :, 0] = view.index_select(0, blocks)
            continue
        rows_by_token = rows.transpose(1, 2)  # [num_pages, page_tokens, num_heads, words]
        rows_by_token.copy_(_read_tokens(view, slots, pool.block_tokens).view(rows_by_token.shape))
    for start, end in _padding(pool):
        out[:, :, start:end] = 0


def scatter(pool: KVPool, slots: torch.Tensor, rank_slice: RankSlice, pages: torch.Tensor) -> None:
    """Copy head slices into tokens of the pool: the heads that this rank reads.

    Args:
        slots: int64 `[num_pages * page_tokens]` on the pool's device; -1: leave this token out. A plane kept per
            page goes to the block of the page's first slot, and is left out when that is -1.
        pages: uint8 `[num_pages, num_heads, head_bytes]` on the pool's device, any strides over pages.

    On CUDA this waits for the device once, to learn how many slots are -1.
    """
    page_tokens = pool.layout.page_tokens
    kept_tokens = (slots >= 0).nonzero().flatten()
    kept_pages = (slots[::page_tokens] >= 0).nonzero().flatten()
    for plane, view, rows in _planes(pool, pages, rank_slice.num_heads):
        if plane.per == "page":
            blocks = slots[::page_tokens][kept_pages] // pool.block_tokens
            view.index_copy_(0, blocks, rows[:, :, 0].index_select(0, kept_pages))
            continue
        page, token = kept_tokens // page_tokens, kept_tokens % page_tokens
        _write_tokens(view, slots[kept_tokens], pool.block_tokens, rows[page, :, token])


def _planes(
    pool: KVPool, slices: torch.Tensor, num_heads: int
) -> Iterator[tuple[Plane, torch.Tensor, torch.Tensor]]:
    """For each layer and plane: the pool's view of `num_heads` heads, and the rows of the pages.

    Both are of one integer type, as wide as strides and addresses allow: views `[num_blocks, block_tokens,
    num_heads, words]` or `[num_blocks, num_heads, words]`, rows `[num_pages, num_heads, rows, words]`.
    """
    layout = pool.layout
    if slices.shape[1] != num_heads or slices.shape[2] != layout.head_bytes:
        raise ValueError(f"pages of {tuple(slices.shape[1:])}; expected {(num_heads, layout.head_bytes)}")
    if not slices.numel():
        return
    for layer, views in enumerate(pool.views):
        for plane, view, offset in zip(layout.planes, views, layout.plane_offsets, strict=True):
            start = layer * layout.layer_bytes + offset
            row_bytes = plane.dim * plane.dtype.itemsize
            num_rows = plane.rows(layout.page_tokens)
            part = slices[:, :, start : start + num_rows * row_bytes]
            words = _as_integers(view[..., :num_heads, :])
            yield plane, words, part.view(words.dtype).view(*slices.shape[:2], num_rows, words.shape[-1])


def _as_integers(view: torch.Tensor) -> torch.Tensor:
    """The same memory as the widest integer type that the last dimension, strides and address allow."""
    itemsize = view.dtype.itemsize
    raw = view.view(_INTEGERS[itemsize])
    if raw.stride(-1) != 1:
        return raw
    row_bytes = raw.shape[-1] * itemsize
    steps = [raw.stride(dim) * itemsize for dim in range(raw.dim() - 1)]
    steps += [row_bytes, raw.data_ptr(), int(raw.storage_offset()) * itemsize]
    for width, dtype in _INTEGERS.items():
        if width > itemsize and all(step % width == 0 for step in steps):
            return raw.view(dtype)
    return raw


def _flat_tokens(view: torch.Tensor) -> torch.Tensor | None:
    """`[num_slots, num_heads, words]` where blocks and tokens are one dimension in memory, else None."""
    blocks, tokens = view.shape[0], view.shape[1]
    if tokens == 1 or view.stride(0) == tokens * view.stride(1):
        return view.as_strided((blocks * tokens, *view.shape[2:]), (view.stride(0) // tokens, *view.stride()[2:]))
    return None


def _read_tokens(view: torch.Tensor, slots: torch.Tensor, block_tokens: int) -> torch.Tensor:
    flat = _flat_tokens(view)
    if flat is not None:
        return flat.index_select(0, slots)
    return view[slots // block_tokens, slots % block_tokens]


def _write_tokens(view: torch.Tensor, slots: torch.Tensor, block_tokens: int, rows: torch.Tensor) -> None:
    flat = _flat_tokens(view)
    if flat is not None:
        flat.index_copy_(0, slots, rows)
    else:
        view[slots // block_tokens, slots % block_tokens] = rows


def _padding(pool: KVPool) -> Iterator[tuple[int, int]]:
    """Runs of bytes of a head slice that belong to no element."""
    layout = pool.layout
    for layer in range(layout.num_layers):
        for plane, offset in zip(layout.planes, layout.plane_offsets, strict=True):
            start = layer * layout.layer_bytes + offset
            used = plane.rows(layout.page_tokens) * plane.dim * plane.dtype.itemsize
            padded = plane.bytes_per_page(layout.page_tokens)
            if used < padded:
                yield start + used, start + padded
