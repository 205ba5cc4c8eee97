"""The pool as a kernel sees it: for every layer and plane an address and strides, in a small table of integers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mlkv.layout import HEAD_ALIGN_BYTES, KVPool, Plane

COLUMNS = 5
"""Of a row of the table: address of block 0, token 0, head 0; bytes from block to block, token to token, head to
head; byte offset of the plane in a head slice."""


@dataclass(frozen=True)
class PlaneGroup:
    """Planes whose rows are equally long, so that one kernel launch moves them all.

    Attributes:
        rows: table, one tuple of `COLUMNS` integers for each layer and plane of the group.
        num_rows: rows of a plane in a page: tokens, or 1 for planes kept per page.
        row_bytes: bytes of a row.
        padding_bytes: zeros between the last row of a plane and the next plane.
        unit_bytes: the widest of 4, 2 and 1 that divides every address, stride and row. Words of 4 bytes are what
            the checksum is made of; wider accesses come from neighbouring words when `is_aligned`.
        is_aligned: whether 16 bytes divide all of them.
        per_page: rows belong to the block of the page's first slot.
    """

    rows: tuple[tuple[int, ...], ...]
    num_rows: int
    row_bytes: int
    padding_bytes: int
    unit_bytes: int
    is_aligned: bool
    per_page: bool


def plane_groups(pool: KVPool) -> list[PlaneGroup]:
    """The pool's planes in groups. Raises ValueError when elements of a row do not lie side by side."""
    layout = pool.layout
    kinds: dict[tuple[str, int], list[int]] = {}
    for at, plane in enumerate(layout.planes):
        kinds.setdefault((plane.per, plane.dim * plane.dtype.itemsize), []).append(at)
    return [_group(pool, members) for members in kinds.values()]


def _group(pool: KVPool, members: Sequence[int]) -> PlaneGroup:
    layout = pool.layout
    first = layout.planes[members[0]]
    row_bytes, num_rows = first.dim * first.dtype.itemsize, first.rows(layout.page_tokens)
    rows = []
    for layer, views in enumerate(pool.views):
        for at in members:
            offset = layer * layout.layer_bytes + layout.plane_offsets[at]
            rows.append((*_address_and_strides(layout.planes[at], views[at]), offset))
    divisor = math.gcd(row_bytes, *(number for row in rows for number in row[:-1]))
    return PlaneGroup(
        rows=tuple(rows),
        num_rows=num_rows,
        row_bytes=row_bytes,
        padding_bytes=first.bytes_per_page(layout.page_tokens) - num_rows * row_bytes,
        unit_bytes=math.gcd(divisor, 4),
        is_aligned=divisor % HEAD_ALIGN_BYTES == 0,
        per_page=first.per == "page",
    )


def _address_and_strides(plane: Plane, view: torch.Tensor) -> tuple[int, int, int, int]:
    if view.shape[-1] > 1 and view.stride(-1) != 1:
        raise ValueError(f"elements of plane {plane.name!r} do not lie side by side: strides {view.stride()}")
    steps = [step * view.dtype.itemsize for step in view.stride()[:-1]]
    if plane.per == "page":
        steps.insert(1, 0)
    # A step that is never taken must not spoil the divisor.
    sizes = (view.shape[0], 1 if plane.per == "page" else view.shape[1], view.shape[-2])
    block, token, head = (step if size > 1 else 0 for step, size in zip(steps, sizes, strict=True))
    return view.data_ptr(), block, token, head
