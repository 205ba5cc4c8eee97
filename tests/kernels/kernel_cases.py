"""Pools of every shape, and a plain reference of what a page holds, written as loops over single rows."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from mlkv.kernels import PageBatch, TransferEngine
from mlkv.layout import KVLayout, KVPool, Plane, RankSlice

FINGERPRINT = bytes(range(16))
POISON = 0xA5

DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp8": torch.float8_e4m3fn,
    "int8": torch.int8,
}


def random_bytes(shape: tuple[int, ...], dtype: torch.dtype, seed: int, device: str = "cpu") -> torch.Tensor:
    """A tensor of random bytes, so that each row differs from each other row."""
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, 256, (*shape[:-1], shape[-1] * dtype.itemsize), generator=generator, dtype=torch.uint8)
    return raw.view(dtype).to(device)


def gqa(dtype: str = "bf16", *, layers: int = 2, heads: int = 4, dim: int = 8, page_tokens: int = 16) -> KVLayout:
    return KVLayout.gqa(
        num_layers=layers, num_kv_heads=heads, head_dim=dim, dtype=DTYPES[dtype], page_tokens=page_tokens
    )


def int8_with_scales(*, heads: int = 4, page_tokens: int = 16, dim: int = 8) -> KVLayout:
    planes = (
        Plane("k", torch.int8, dim),
        Plane("v", torch.int8, dim),
        Plane("k_scale", torch.float16, 1),
        Plane("v_scale", torch.float32, 1),
    )
    return KVLayout(2, heads, page_tokens, planes)


def with_page_state(*, heads: int = 2, page_tokens: int = 16) -> KVLayout:
    planes = (
        Plane("k", torch.bfloat16, 8),
        Plane("v", torch.bfloat16, 8),
        Plane("state", torch.float32, 48, per="page"),
        Plane("conv", torch.bfloat16, 5, per="page"),
    )
    return KVLayout(2, heads, page_tokens, planes)


@dataclass
class PoolCase:
    """A pool and the tensors that own its memory."""

    pool: KVPool
    storages: list[torch.Tensor]

    def copy(self, build: Callable[[list[torch.Tensor] | None], PoolCase]) -> PoolCase:
        return build([storage.clone() for storage in self.storages])


SHAPES = (
    "separate",
    "head_major",
    "joined_kv_first",
    "joined_block_first",
    "joined_dim",
    "one_tensor",
)


def build_pool(
    shape: str,
    layout: KVLayout,
    *,
    num_blocks: int,
    block_tokens: int,
    local_heads: int,
    seed: int = 0,
    device: str = "cpu",
    storages: list[torch.Tensor] | None = None,
) -> PoolCase:
    """A pool of one of `SHAPES`. Joined shapes want K and V of one dtype and dim; other planes lie separately."""
    owned: list[torch.Tensor] = []
    counter = iter(range(10_000))

    def tensor(dims: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        at = next(counter)
        made = storages[at] if storages is not None else random_bytes(dims, dtype, seed * 1000 + at, device)
        owned.append(made)
        return made

    def alone(plane: Plane) -> torch.Tensor:
        if plane.per == "page":
            return tensor((num_blocks, local_heads, plane.dim), plane.dtype)
        if shape == "head_major":
            raw = tensor((num_blocks, local_heads, block_tokens, plane.dim), plane.dtype)
            return raw.transpose(1, 2)
        return tensor((num_blocks, block_tokens, local_heads, plane.dim), plane.dtype)

    def joined(first: Plane, whole: torch.Tensor | None, layer: int) -> list[torch.Tensor]:
        dim, dtype = first.dim, first.dtype
        if shape == "joined_kv_first":
            raw = tensor((2, num_blocks, block_tokens, local_heads, dim), dtype)
            return [raw[0], raw[1]]
        if shape == "joined_block_first":
            raw = tensor((num_blocks, 2, block_tokens, local_heads, dim), dtype)
            return [raw[:, 0], raw[:, 1]]
        if shape == "joined_dim":
            raw = tensor((num_blocks, local_heads, block_tokens, 2 * dim), dtype).transpose(1, 2)
            return [raw[..., :dim], raw[..., dim:]]
        assert whole is not None
        raw = whole[layer].view(num_blocks, block_tokens, 2 * local_heads, dim)
        return [raw[:, :, :local_heads], raw[:, :, local_heads:]]

    planes = layout.planes
    whole = None
    if shape == "one_tensor":
        whole = tensor(
            (layout.num_layers, num_blocks * block_tokens, 2 * local_heads, planes[0].dim), planes[0].dtype
        )
    views = []
    for layer in range(layout.num_layers):
        if shape in ("separate", "head_major") or len(planes) == 1:
            views.append([alone(plane) for plane in planes])
        else:
            views.append(joined(planes[0], whole, layer) + [alone(plane) for plane in planes[2:]])
    return PoolCase(KVPool(layout, views), owned)


def row_bytes(row: torch.Tensor) -> bytes:
    return row.cpu().contiguous().view(torch.uint8).numpy().tobytes()


def cells(
    layout: KVLayout, page_slots: list[int], block_tokens: int
) -> Iterator[tuple[int, int, int, tuple[int, ...], int]]:
    """The rows of one head of one page: layer, plane, row, place in the pool view, byte offset in the slice."""
    for layer in range(layout.num_layers):
        for at, plane in enumerate(layout.planes):
            start = layer * layout.layer_bytes + layout.plane_offsets[at]
            size = plane.dim * plane.dtype.itemsize
            if plane.per == "page":
                yield layer, at, 0, (page_slots[0] // block_tokens,), start
                continue
            for token, slot in enumerate(page_slots):
                yield layer, at, token, (slot // block_tokens, slot % block_tokens), start + token * size


def reference_page(pool: KVPool, page_slots: list[int], num_heads: int) -> np.ndarray:
    """What a page of these slots holds: uint8 `[num_heads, head_bytes]`."""
    layout = pool.layout
    out = np.zeros((num_heads, layout.head_bytes), np.uint8)
    for layer, at, _, place, offset in cells(layout, page_slots, pool.block_tokens):
        for head in range(num_heads):
            data = row_bytes(pool.views[layer][at][(*place, head)])
            out[head, offset : offset + len(data)] = np.frombuffer(data, np.uint8)
    return out


def reference_scatter(pool: KVPool, page_slots: list[int], slices: np.ndarray) -> None:
    """Write a page's slices uint8 `[num_heads, head_bytes]` into the pool, leaving out slots of -1."""
    layout = pool.layout
    for layer, at, token, place, offset in cells(layout, page_slots, pool.block_tokens):
        if page_slots[token] < 0:
            continue
        plane = layout.planes[at]
        size = plane.dim * plane.dtype.itemsize
        for head in range(len(slices)):
            data = torch.from_numpy(slices[head, offset : offset + size].copy()).view(plane.dtype)
            pool.views[layer][at][(*place, head)] = data.to(pool.device)


def same_bytes(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(
        torch.equal(a.cpu().contiguous().view(torch.uint8), b.cpu().contiguous().view(torch.uint8))
        for a, b in zip(one, other, strict=True)
    )


def random_slots(num_pages: int, layout: KVLayout, num_blocks: int, block_tokens: int, seed: int) -> torch.Tensor:
    """Slots of whole pages: tokens of a block stay together, blocks are in random order. int64, flat."""
    generator = torch.Generator().manual_seed(seed)
    need = num_pages * layout.page_tokens // block_tokens
    blocks = torch.randperm(num_blocks, generator=generator)[:need]
    assert len(blocks) == need, "the pool is too small for this case"
    return (blocks[:, None] * block_tokens + torch.arange(block_tokens)).flatten()


def batch(indices: list[int], *, generation: int = 7, salt: int = 0) -> PageBatch:
    keys = [bytes([salt]) * 8 + index.to_bytes(8, "little", signed=True) for index in indices]
    parents = [b"\0" * 16, *keys[:-1]]
    return PageBatch(
        np.array(indices, np.int32),
        b"".join(keys),
        b"".join(parents[: len(indices)]),
        np.arange(generation, generation + len(indices), dtype=np.uint64),
    )


def host_pool(layout: KVLayout, num_pages: int, fill: int = POISON) -> np.ndarray:
    """Poisoned host memory, aligned as a mapping would be."""
    raw = np.full(num_pages * layout.page_bytes + 4096, fill, np.uint8)
    start = -raw.ctypes.data % 4096
    return raw[start : start + num_pages * layout.page_bytes]


def page_of(host: np.ndarray, layout: KVLayout, index: int) -> np.ndarray:
    return host[index * layout.page_bytes : (index + 1) * layout.page_bytes]


def make_engine(pool: KVPool, host: np.ndarray, rank_slice: RankSlice, **options: object) -> TransferEngine:
    settings: dict[str, object] = {
        "layout": pool.layout,
        "rank_slice": rank_slice,
        "fingerprint": FINGERPRINT,
        "writes_identity": True,
        "staging_bytes": max(1, 3 * pool.layout.payload_bytes),
    }
    return TransferEngine.create(pool, host, **(settings | options))  # type: ignore[arg-type]


def wait_until(condition: Callable[[], bool], deadline_s: float = 20.0) -> None:
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, "did not happen before the deadline"
        time.sleep(0.0005)


def finish_load(engine: TransferEngine, pages: PageBatch, slots: torch.Tensor) -> tuple[int, str | None]:
    transfer = engine.load(pages, slots)
    wait_until(transfer.poll)
    return transfer.num_good, transfer.error


def finish_offload(engine: TransferEngine, pages: PageBatch, slots: torch.Tensor) -> str | None:
    transfer = engine.offload(pages, slots)
    wait_until(transfer.poll)
    assert transfer.poll_released()
    return transfer.error
