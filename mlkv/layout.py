"""The geometry of KV: the only place that knows heads, ranks and strides.

A *host page* holds `page_tokens` consecutive tokens of every layer and every real KV head of the model,
whatever the tensor-parallel size of the engine that wrote it::

    [ header | head 0 | head 1 | ... ]      head h = [layer][plane][token][dim]

A rank's heads are one contiguous run of bytes, so an engine with any TP size reads what any other wrote.
A *plane* is one kind of data kept for each token (K, V, a scale) or once for each page (a recurrent state).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch

from mlkv.errors import ConfigError
from mlkv.page import header_bytes

LAYOUT_VERSION = 1
"""Version of the order of bytes within a page. Part of the fingerprint: other versions never match."""

PAGE_ALIGN_BYTES = 4096
"""Pages start on multiples of this, so that O_DIRECT and device copies take them as they are."""

HEAD_ALIGN_BYTES = 16
"""Planes and heads start on multiples of this, the widest load a GPU thread issues."""


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


@dataclass(frozen=True)
class Plane:
    """One kind of data in a page.

    Attributes:
        name: unique within a layout, such as "k", "v", "k_scale", "latent".
        dtype: element type as it lies in the engine's pool and in the page.
        dim: elements for one token (or one page) of one head in one layer.
        per: "token" for data with one row a token; "page" for a state kept once a page and copied whole.
    """

    name: str
    dtype: torch.dtype
    dim: int
    per: Literal["token", "page"] = "token"

    def rows(self, page_tokens: int) -> int:
        return page_tokens if self.per == "token" else 1

    def bytes_per_page(self, page_tokens: int) -> int:
        """Bytes of this plane for one head of one layer in one page, padded to `HEAD_ALIGN_BYTES`."""
        return _round_up(self.rows(page_tokens) * self.dim * self.dtype.itemsize, HEAD_ALIGN_BYTES)


@dataclass(frozen=True)
class KVLayout:
    """Geometry of a model's KV cache over all ranks.

    Attributes:
        num_layers: decoder layers that have KV.
        num_kv_heads: real KV heads of the model, before any padding or replication (1 for MLA).
        page_tokens: tokens in one page.
        planes: what is kept for each head and layer, in the order of the page.
    """

    num_layers: int
    num_kv_heads: int
    page_tokens: int
    planes: tuple[Plane, ...]

    def __post_init__(self) -> None:
        for field in ("num_layers", "num_kv_heads", "page_tokens"):
            if getattr(self, field) < 1:
                raise ConfigError(f"layout: {field} must be at least 1, got {getattr(self, field)}")
        if not self.planes:
            raise ConfigError("layout: planes must not be empty")
        if len({plane.name for plane in self.planes}) != len(self.planes):
            raise ConfigError(f"layout: plane names must differ, got {[p.name for p in self.planes]}")
        for plane in self.planes:
            if plane.dim < 1:
                raise ConfigError(f"layout: plane {plane.name!r} must have dim of at least 1, got {plane.dim}")

    @classmethod
    def gqa(
        cls, *, num_layers: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, page_tokens: int
    ) -> KVLayout:
        """Grouped-query (or multi-head) attention: one K and one V row a token."""
        planes = (Plane("k", dtype, head_dim), Plane("v", dtype, head_dim))
        return cls(num_layers, num_kv_heads, page_tokens, planes)

    @classmethod
    def mla(cls, *, num_layers: int, latent_dim: int, dtype: torch.dtype, page_tokens: int) -> KVLayout:
        """Multi-head latent attention: one latent row a token, which every rank holds whole."""
        return cls(num_layers, 1, page_tokens, (Plane("latent", dtype, latent_dim),))

    @cached_property
    def plane_offsets(self) -> tuple[int, ...]:
        """Byte offset of each plane within one layer of one head."""
        offsets, at = [], 0
        for plane in self.planes:
            offsets.append(at)
            at += plane.bytes_per_page(self.page_tokens)
        return tuple(offsets)

    @cached_property
    def layer_bytes(self) -> int:
        """Bytes of one layer of one head in one page."""
        return sum(plane.bytes_per_page(self.page_tokens) for plane in self.planes)

    @cached_property
    def head_bytes(self) -> int:
        """Bytes of one head in one page: the unit that is checksummed."""
        return self.num_layers * self.layer_bytes

    @cached_property
    def header_bytes(self) -> int:
        return header_bytes(self.num_kv_heads)

    @cached_property
    def payload_bytes(self) -> int:
        return self.num_kv_heads * self.head_bytes

    @cached_property
    def page_bytes(self) -> int:
        """Bytes between the starts of two pages in the pool."""
        return _round_up(self.header_bytes + self.payload_bytes, PAGE_ALIGN_BYTES)

    @cached_property
    def fingerprint(self) -> bytes:
        """16 bytes that differ whenever the meaning of a page's bytes differs. Independent of the TP size."""
        text = "|".join(
            [
                f"mlkv-layout-{LAYOUT_VERSION}",
                f"layers={self.num_layers}",
                f"heads={self.num_kv_heads}",
                f"tokens={self.page_tokens}",
                *(f"{p.name}:{p.dtype}:{p.dim}:{p.per}" for p in self.planes),
            ]
        )
        return hashlib.blake2b(text.encode(), digest_size=16).digest()

    def head_offset(self, head: int) -> int:
        """Byte offset of a head's slice within a page."""
        return self.header_bytes + head * self.head_bytes


@dataclass(frozen=True)
class RankSlice:
    """The heads of a page that one rank reads, and those that it writes.

    Attributes:
        head_start, num_heads: the rank reads real heads [head_start, head_start + num_heads); may be none.
        num_written_heads: how many of them, from the front, this rank also writes. Where KV heads are
            replicated, exactly one rank writes each head.
    """

    head_start: int
    num_heads: int
    num_written_heads: int

    @classmethod
    def of_rank(cls, num_kv_heads: int, tp: int, rank: int) -> RankSlice:
        """The slice of `rank` among `tp` ranks.

        With at least as many heads as ranks each rank has `ceil(heads / tp)` local heads, of which the last
        ranks may have fewer real ones (3 heads on 2 ranks: 2 and 1), the rest being padding that is never
        stored. With fewer heads than ranks and `tp` a multiple, heads are replicated over `tp / heads`
        neighbouring ranks, the first of which writes. Otherwise the ranks past the last head hold padding only.
        """
        if tp < 1 or not 0 <= rank < tp:
            raise ConfigError(f"rank {rank} is not one of {tp} tensor-parallel ranks")
        if num_kv_heads < tp and tp % num_kv_heads == 0:
            copies = tp // num_kv_heads
            return cls(rank // copies, 1, 1 if rank % copies == 0 else 0)
        chunk = -(-num_kv_heads // tp)
        start = min(num_kv_heads, rank * chunk)
        count = min(num_kv_heads, start + chunk) - start
        return cls(start, count, count)

    @staticmethod
    def local_kv_heads(num_kv_heads: int, tp: int) -> int:
        """KV heads in each rank's pool tensors, padding included."""
        return -(-num_kv_heads // tp)


class KVPool:
    """The engine's paged KV tensors as seen by one rank: for each layer and plane a strided view.

    `views[layer][plane]` has shape `[num_blocks, block_tokens, local_heads, dim]`; for a plane kept per page
    `[num_blocks, local_heads, dim]`. Slot `s` is token `s % block_tokens` of block `s // block_tokens`. The
    views may have any strides, so joined K/V, token-major and head-major pools need no copies.
    """

    def __init__(
        self, layout: KVLayout, views: Sequence[Sequence[torch.Tensor]], *, block_tokens: int | None = None
    ) -> None:
        """`block_tokens` is needed only when no plane is kept per token and so none shows it."""
        if len(views) != layout.num_layers:
            raise ConfigError(f"pool has {len(views)} layers, the layout {layout.num_layers}")
        by_token = [at for at, plane in enumerate(layout.planes) if plane.per == "token"]
        first = views[0][by_token[0] if by_token else 0]
        if first.dim() != (4 if by_token else 3):
            raise ConfigError(f"pool views of layer 0 have the wrong number of dimensions: {tuple(first.shape)}")
        if not by_token and block_tokens is None:
            raise ConfigError("pool has no plane kept per token: give block_tokens")
        self.num_blocks = int(first.shape[0])
        self.block_tokens = int(first.shape[1]) if by_token else int(block_tokens or 0)
        if self.block_tokens < 1 or block_tokens not in (None, self.block_tokens):
            raise ConfigError(f"block_tokens={block_tokens} contradicts views of {self.block_tokens} tokens")
        self.local_heads = int(first.shape[-2])
        self.device = first.device
        if layout.page_tokens % self.block_tokens:
            raise ConfigError(
                f"page_tokens={layout.page_tokens} is not a multiple of the pool's block of "
                f"{self.block_tokens} tokens"
            )
        for layer, planes in enumerate(views):
            if len(planes) != len(layout.planes):
                raise ConfigError(f"pool layer {layer} has {len(planes)} planes, layout {len(layout.planes)}")
            for plane, view in zip(layout.planes, planes, strict=True):
                shape: tuple[int, ...] = (self.num_blocks, self.block_tokens, self.local_heads, plane.dim)
                if plane.per == "page":
                    shape = (self.num_blocks, self.local_heads, plane.dim)
                if tuple(view.shape) != shape or view.dtype != plane.dtype or view.device != self.device:
                    raise ConfigError(
                        f"pool layer {layer} plane {plane.name!r} is {tuple(view.shape)} {view.dtype} on "
                        f"{view.device}; expected {shape} {plane.dtype} on {self.device}"
                    )
        self.layout = layout
        self.views = tuple(tuple(planes) for planes in views)

    @property
    def num_slots(self) -> int:
        return self.num_blocks * self.block_tokens

    @classmethod
    def from_layers(
        cls,
        layout: KVLayout,
        *,
        k: Sequence[torch.Tensor],
        v: Sequence[torch.Tensor],
        block_tokens: int = 1,
    ) -> KVPool:
        """Separate K and V tensors for each layer, each `[num_slots, local_heads, head_dim]`."""
        if len(k) != len(v):
            raise ConfigError(f"pool has {len(k)} K tensors and {len(v)} V tensors")
        for tensor in (*k, *v):
            if tensor.dim() != 3 or tensor.shape[0] % block_tokens:
                raise ConfigError(
                    f"pool tensors must be [num_slots, local_heads, head_dim] with whole blocks of "
                    f"{block_tokens} tokens, got {tuple(tensor.shape)}"
                )
        return cls(
            layout,
            [[t.view(-1, block_tokens, *t.shape[1:]) for t in pair] for pair in zip(k, v, strict=True)],
        )
