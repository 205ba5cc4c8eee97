"""What the sections of bench_node.py share on each rank: its place, host memory of all ranks, engines, clocks."""

from __future__ import annotations

import mmap
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mlkv import KVLayout, KVPool, MLKVConfig, RankSlice, Replica
from mlkv.cooperation import Partnership
from mlkv.kernels import PageBatch, TransferEngine

DEADLINE_S = 60.0  # of anything that a rank waits for
STAGING_BYTES = 256 << 20  # the default of the library's settings
BLOCK_TOKENS = 16


@dataclass
class Node:
    """One rank: every rank of the benchmark is one of a single replica on this host."""

    rank: int
    size: int
    device: torch.device
    replica: Replica

    @classmethod
    def join(cls, folder: Path) -> Node:
        """Meet the other ranks, by what the environment tells."""
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        method = f"file://{folder}/rendezvous"
        if os.environ["NODE_DEVICE"] == "cuda":
            device = torch.device("cuda", rank)
            torch.cuda.set_device(device)
            dist.init_process_group("nccl", init_method=method, rank=rank, world_size=size, device_id=device)
        else:
            device = torch.device("cpu")
            torch.set_num_threads(1)
            dist.init_process_group("gloo", init_method=method, rank=rank, world_size=size)
        return cls(rank, size, device, Replica.from_world(tp=size, deadline_s=DEADLINE_S))

    @property
    def on_cuda(self) -> bool:
        return self.device.type == "cuda"

    def synchronize(self) -> None:
        if self.on_cuda:
            torch.cuda.synchronize()

    def together(self, work: Callable[[], None]) -> float:
        """Seconds from the first rank's start of `work` to the last one's end of it. Collective."""
        self.synchronize()
        self.replica.min_int(0)
        start = time.monotonic_ns()
        work()
        end = time.monotonic_ns()
        return (max(self.replica.all_ints(end)) - min(self.replica.all_ints(start))) / 1e9

    def median_together(self, work: Callable[[], None], repeats: int) -> float:
        """Median of `together` after one that does not count. Collective."""
        return statistics.median([self.together(work) for _ in range(repeats + 1)][1:])


class SharedHost:
    """Host memory that all ranks map, touched once. It has no name, so nothing of it stays behind. Collective."""

    def __init__(self, node: Node, num_bytes: int) -> None:
        own = os.memfd_create("bench-node") if node.rank == 0 else -1
        if node.rank == 0:
            os.ftruncate(own, num_bytes)
        pid, number = node.replica.all_ints(os.getpid())[0], node.replica.all_ints(own)[0]
        file = own if node.rank == 0 else os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR)
        self._map = mmap.mmap(file, num_bytes)
        node.replica.min_int(0)  # rank 0 keeps its own open until all have it
        os.close(file)
        self.bytes = np.frombuffer(self._map, np.uint8)
        # Each rank touches a part: the kernel clears pages at a few GB/s for one thread.
        share = -(-num_bytes // node.size)
        self.bytes[node.rank * share : (node.rank + 1) * share : 4096] = 1
        node.replica.min_int(0)


@dataclass(frozen=True)
class Geometry:
    """A model's pages as the ranks of a node share them. `replicated`: every rank reads the same heads."""

    name: str
    layout: KVLayout
    replicated: bool

    def part(self, node: Node) -> RankSlice:
        if self.replicated:
            heads = self.layout.num_kv_heads
            return RankSlice(0, heads, heads if node.rank == 0 else 0)
        return RankSlice.of_rank(self.layout.num_kv_heads, node.size, node.rank)


def llama(*, small: bool) -> Geometry:
    """Llama-3.1-8B: 32 layers, 8 KV heads of 128, bf16; pages of 64 tokens. `small`: two layers of it."""
    layout = KVLayout.gqa(
        num_layers=2 if small else 32, num_kv_heads=8, head_dim=128, dtype=torch.bfloat16, page_tokens=64
    )
    return Geometry("llama-8b", layout, replicated=False)


def deepseek(*, small: bool) -> Geometry:
    """DeepSeek-V3: 61 layers with a latent of 512 + 64, bf16; pages of 64 tokens. `small`: four layers of it."""
    layout = KVLayout.mla(num_layers=4 if small else 61, latent_dim=576, dtype=torch.bfloat16, page_tokens=64)
    return Geometry("deepseek mla", layout, replicated=True)


@dataclass
class Moving:
    """An engine of one rank over a set of pages that are stored."""

    node: Node
    engine: TransferEngine
    pool: KVPool
    pages: PageBatch
    slots: torch.Tensor
    rank_bytes: int  # of the page set, read by this rank
    created_s: float  # first rank's start to last rank's end of making the engines, which pins the host memory

    def load(self) -> None:
        self.finish(self.engine.load(self.pages, self.slots))

    def offload(self) -> None:
        self.finish(self.engine.offload(self.pages, self.slots))

    def finish(self, transfer: Any) -> None:
        end = time.monotonic() + DEADLINE_S
        while not transfer.poll():
            if time.monotonic() > end:
                raise SystemExit(f"rank {self.node.rank}: a transfer did not end within {DEADLINE_S:g} s")
            if not self.node.on_cuda:
                time.sleep(0.0001)  # a thread of this process does the copying
        good = getattr(transfer, "num_good", len(self.pages))
        if transfer.error is not None or good != len(self.pages):
            raise SystemExit(f"rank {self.node.rank}: {good} of {len(self.pages)} pages: {transfer.error}")

    def fingerprint(self) -> int:
        """A number over every byte of the pool and its place."""
        total = 0
        for at, view in enumerate(plane for planes in self.pool.views for plane in planes):
            words = view.reshape(-1).view(torch.int64)
            weights = torch.arange(1, len(words) + 1, device=words.device)
            total += (2 * at + 1) * int((words * weights).sum())
        return total % (1 << 62)

    def poison(self) -> None:
        for planes in self.pool.views:
            for view in planes:
                view.view(torch.uint8).fill_(0xA5)


@contextmanager
def moving(
    node: Node, host: SharedHost, geometry: Geometry, num_pages: int, *, cooperative: bool = False
) -> Iterator[Moving]:
    """An engine with a pool of random bytes, all pages of it stored. Collective."""
    layout, part = geometry.layout, geometry.part(node)
    heads = (
        layout.num_kv_heads if geometry.replicated else RankSlice.local_kv_heads(layout.num_kv_heads, node.size)
    )
    num_blocks = num_pages * layout.page_tokens // BLOCK_TOKENS
    torch.manual_seed(node.rank)
    views = []
    for _ in range(layout.num_layers):
        planes = []
        for plane in layout.planes:
            words = num_blocks * BLOCK_TOKENS * heads * plane.dim * plane.dtype.itemsize // 8
            raw = torch.randint(-(2**63), 2**63 - 1, (words,), device=node.device)
            planes.append(raw.view(plane.dtype).view(num_blocks, BLOCK_TOKENS, heads, plane.dim))
        views.append(planes)
    pool = KVPool(layout, views)
    mode = "on" if cooperative else "off"
    config = MLKVConfig(model="node", page_tokens=layout.page_tokens, move={"cooperative": mode})
    partnership = Partnership(config, node.replica, part, node.device)
    made: list[TransferEngine] = []

    def create() -> None:
        engine = TransferEngine.create(
            pool,
            host.bytes[: num_pages * layout.page_bytes],
            layout=layout,
            rank_slice=part,
            fingerprint=bytes(16),
            writes_identity=node.rank == 0,
            staging_bytes=STAGING_BYTES,
            exchange=partnership.exchange,
            exchange_deadline_s=DEADLINE_S,
        )
        made.append(engine)

    created_s = node.together(create)
    engine = made[0]
    partnership.settle(engine.cooperation)
    order = np.random.default_rng(1)  # pages and blocks lie in the same random order on every rank
    indices, keys = order.permutation(num_pages).astype(np.int32), order.bytes(16 * num_pages)
    pages = PageBatch(indices, keys, keys, np.arange(1, num_pages + 1, dtype=np.uint64))
    blocks = torch.from_numpy(order.permutation(num_blocks))
    slots = (blocks[:, None] * BLOCK_TOKENS + torch.arange(BLOCK_TOKENS)).flatten()
    rank_bytes = num_pages * part.num_heads * layout.head_bytes
    bench = Moving(node, engine, pool, pages, slots, rank_bytes, created_s)
    bench.offload()
    node.replica.min_int(0)  # no rank loads what another still writes
    try:
        yield bench
    finally:
        node.synchronize()
        engine.close(DEADLINE_S)


def raw_copy(node: Node, num_bytes: int, direction: str) -> Callable[[], None]:
    """One pinned copy of so many bytes over this rank's link, waited for; on the CPU one copy of memory."""
    on_host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=node.on_cuda).random_()
    on_device = torch.empty(num_bytes, dtype=torch.uint8, device=node.device)
    target, source = (on_device, on_host) if direction == "load" else (on_host, on_device)

    def copy() -> None:
        target.copy_(source, non_blocking=True)
        node.synchronize()

    return copy
