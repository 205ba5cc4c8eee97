"""What transfer benchmarks share: geometries, pools of random bytes, clocks, and work to run beside them."""

from __future__ import annotations

import math
import mmap
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

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mlkv.kernels.cuda import STREAM_PRIORITY, CudaDevice, make_ready
from mlkv.kernels.host_pages import HostPages, PageBatch
from mlkv.kernels.staged import StagedTransferEngine
from mlkv.kernels.torch_kernels import TorchKernels
from mlkv.layout import KVLayout, KVPool, RankSlice

MAX_TRANSFER_BYTES = 16 << 30  # 512 pages of 256 tokens of the 8B model
STAGING_BYTES = 256 << 20  # the default of the library's settings
RAW_BYTES = 512 << 20  # 10 ms of a link of 55 GB/s, so that how long it takes to begin hardly counts
REPEATS = 5


@dataclass
class Case:
    """One rank's part of a model: its geometry and a name for the table."""

    name: str
    layout: KVLayout
    part: RankSlice

    @property
    def piece_bytes(self) -> int:
        return self.part.num_heads * self.layout.head_bytes


def llama(tp: int, page_tokens: int) -> Case:
    """Llama-3.1-8B: 32 layers, 8 KV heads of 128, bf16."""
    layout = KVLayout.gqa(
        num_layers=32, num_kv_heads=8, head_dim=128, dtype=torch.bfloat16, page_tokens=page_tokens
    )
    return Case(f"llama-8b tp={tp}", layout, RankSlice.of_rank(8, tp, 0))


def deepseek(page_tokens: int) -> Case:
    """DeepSeek-V3: 61 layers with a latent of 512 + 64, bf16."""
    layout = KVLayout.mla(num_layers=61, latent_dim=576, dtype=torch.bfloat16, page_tokens=page_tokens)
    return Case("deepseek mla", layout, RankSlice(0, 1, 1))


class Host:
    """Page-aligned host memory that all cases share, as the pool of the library would be."""

    def __init__(self, num_bytes: int) -> None:
        self._map = mmap.mmap(-1, num_bytes)
        self.bytes = np.frombuffer(self._map, np.uint8)
        self.bytes[::4096] = 1  # touch every page once, so that no copy pays for it

    def pool(self, layout: KVLayout, num_pages: int) -> np.ndarray:
        return self.bytes[: num_pages * layout.page_bytes]


@dataclass
class Rig:
    """A case on the device, with an engine over as many pages as are moved at once."""

    case: Case
    engine: StagedTransferEngine[int]
    pool: KVPool
    pages: PageBatch
    slots: torch.Tensor
    pause_s: float = 0.0
    """Between polls, where transfers are queued by a thread that needs the interpreter as well."""
    verifies: bool = True
    """Whether sums are made; without them every load fails, and only its time is of interest."""

    def offload(self, num_pages: int) -> Any:
        return self.engine.offload(*self._first(num_pages))

    def load(self, num_pages: int) -> Any:
        return self.engine.load(*self._first(num_pages))

    def _first(self, num_pages: int) -> tuple[PageBatch, torch.Tensor]:
        return self.pages[:num_pages], self.slots[: num_pages * self.case.layout.page_tokens]

    def seconds(self, direction: str, num_pages: int, repeats: int = REPEATS) -> float:
        """Median time from the call until `poll` says that it is over, as a caller sees it."""
        return statistics.median([self.once(direction, num_pages) for _ in range(repeats + 1)][1:])

    def share_of_raw(self, direction: str, num_pages: int, raw: RawCopies, repeats: int = REPEATS) -> float:
        """Rate of a transfer over that of a raw copy right before it, which others disturb alike; the median."""
        num_bytes = num_pages * self.case.piece_bytes
        self.once(direction, num_pages)
        shares = []
        for _ in range(repeats):
            rate = raw.rate(direction)
            shares.append(num_bytes / self.once(direction, num_pages) / rate)
        return statistics.median(shares)

    def once(self, direction: str, num_pages: int) -> float:
        """Seconds of one transfer that finds the device idle."""
        move = self.engine.load if direction == "load" else self.engine.offload
        pages, slots = self._first(num_pages)
        torch.cuda.synchronize()
        start = time.perf_counter()
        transfer: Any = move(pages, slots)
        while not transfer.poll():
            if self.pause_s:
                time.sleep(self.pause_s)
        seconds = time.perf_counter() - start
        self.check(transfer, num_pages)
        return seconds

    def check(self, transfer: Any, num_pages: int) -> None:
        num_good = getattr(transfer, "num_good", num_pages) if self.verifies else num_pages
        if transfer.error is not None or num_good != num_pages:
            raise SystemExit(f"{self.case.name}: transfer of {num_pages} pages went wrong: {transfer.error}")


@contextmanager
def rig(
    host: Host,
    case: Case,
    num_pages: int,
    *,
    kernels: str = "triton",
    checksum: bool = True,
    transfer: str = "auto",
    batched: bool = True,
    priority: int = STREAM_PRIORITY,
    kernel_options: dict[str, int] | None = None,
    staging_bytes: int = STAGING_BYTES,
    **options: int,
) -> Iterator[Rig]:
    """A case with pools of random bytes and all of its pages stored once."""
    from mlkv.kernels.triton_kernels import TritonKernels

    layout, heads = case.layout, max(1, case.part.num_heads)
    num_slots = num_pages * layout.page_tokens
    views = []
    for _ in range(layout.num_layers):
        planes = []
        for plane in layout.planes:
            row = heads * plane.dim * plane.dtype.itemsize
            raw = torch.randint(-(2**63), 2**63 - 1, (num_slots * row // 8,), device="cuda")
            planes.append(raw.view(torch.uint8).view(plane.dtype).view(num_slots, 1, heads, plane.dim))
        views.append(planes)
    pool = KVPool(layout, views)
    pages = HostPages(host.pool(layout, num_pages), layout, case.part, bytes(16), writes_identity=True)
    if kernels == "torch":
        moving: Any = TorchKernels(pool, case.part)
    else:
        moving = TritonKernels(pool, case.part, checksum=checksum, **(kernel_options or {}))
    device = CudaDevice(pool.device, pages, moving, batched_copies=batched, priority=priority)
    engine: StagedTransferEngine[int] = StagedTransferEngine(
        pool,
        pages,
        device,
        staging_bytes=max(staging_bytes, case.piece_bytes),
        max_tasks=64,
        transfer=transfer,  # type: ignore[arg-type]
        **options,
    )
    make_ready(engine, pool, pages, device)
    order = np.random.default_rng(1)
    indices = order.permutation(num_pages).astype(np.int32)
    keys = order.bytes(16 * num_pages)
    batch = PageBatch(indices, keys, keys, np.arange(1, num_pages + 1, dtype=np.uint64))
    # Pages lie anywhere in the pool, the tokens of a page in blocks of 16 neighbours.
    blocks = torch.from_numpy(order.permutation(num_slots // 16))
    slots = (blocks[:, None] * 16 + torch.arange(16)).flatten()
    pause_s = 2e-5 if kernels == "torch" else 0.0
    made = Rig(case, engine, pool, batch, slots, pause_s=pause_s, verifies=checksum)
    try:
        stored = made.offload(num_pages)
        while not stored.poll():
            time.sleep(0.001)
        made.check(stored, num_pages)
        yield made
    finally:
        torch.cuda.synchronize()
        engine.close(30)


class RawCopies:
    """Single copies between the device and pinned memory, of `RAW_BYTES`, timed by device events."""

    def __init__(self) -> None:
        self._on_host = torch.empty(RAW_BYTES, dtype=torch.uint8, pin_memory=True).random_()
        self._on_device = torch.empty(RAW_BYTES, dtype=torch.uint8, device="cuda")
        for direction in ("load", "offload"):
            self.rate(direction)  # the first one is slower

    def rate(self, direction: str) -> float:
        """Bytes per second of one copy."""
        to_device = direction == "load"
        target, source = (self._on_device, self._on_host) if to_device else (self._on_host, self._on_device)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        target.copy_(source, non_blocking=True)
        end.record()
        end.synchronize()
        return RAW_BYTES * 1e3 / float(start.elapsed_time(end))


def compute_loads() -> dict[str, Callable[[], None]]:
    """What a model does, in three extremes."""
    a = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(a)
    large = torch.randn(256 << 20, device="cuda", dtype=torch.bfloat16)

    # Eight layers of an 8B model decoding a batch of 64: small matmuls over weights that do not fit the cache.
    x = torch.randn(64, 4096, device="cuda", dtype=torch.bfloat16)
    shapes = ((4096, 6144), (4096, 4096), (4096, 28672), (14336, 4096))
    weights = [[torch.randn(s, device="cuda", dtype=torch.bfloat16) * 0.01 for s in shapes] for _ in range(8)]

    def decode() -> None:
        hidden = x
        for qkv, o, up, down in weights:
            attended = torch.nn.functional.rms_norm(hidden @ qkv, (6144,))[:, :4096]
            hidden = hidden + attended @ o
            gate, value = torch.nn.functional.rms_norm(hidden @ up, (28672,)).chunk(2, dim=-1)
            hidden = hidden + (torch.nn.functional.silu(gate) * value) @ down

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        decode()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        decode()

    def matmul() -> None:
        torch.mm(a, b, out=out)

    def bandwidth() -> None:
        large.mul_(1.0)

    return {"matmul": matmul, "bandwidth": bandwidth, "decode graph": graph.replay}


def device_seconds(work: Callable[[], None], count: int, meanwhile: Callable[[], Any] | None = None) -> float:
    """Time of the device for so many turns of the work. `meanwhile` is called until they are over."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    for _ in range(count):
        work()
    end.record()
    while meanwhile is not None and not end.query():
        meanwhile()
        time.sleep(0.0005)
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def slowdown(
    work: Callable[[], None], bench: Rig, direction: str, repeats: int = 7, share: float = 0.4
) -> tuple[float, float]:
    """Time of the work beside a transfer over its time alone, and the transfer's own slowdown.

    Args:
        share: of the transfer's time alone that the work takes alone. It has to be over before the transfer is.
    """
    num_pages = len(bench.pages)
    alone_s = bench.seconds(direction, num_pages, repeats=2)
    device_seconds(work, 20)
    one_s = device_seconds(work, 50) / 50
    count = max(4, int(share * alone_s / one_s))
    ratios, transfers = [], []
    for _ in range(repeats):
        torch.cuda.synchronize()
        without = device_seconds(work, count)
        torch.cuda.synchronize()
        start = time.perf_counter()
        transfer = bench.load(num_pages) if direction == "load" else bench.offload(num_pages)
        time.sleep(0.001)
        # Polled like by an engine, or a long transfer would stop where what is queued ahead of the device ends.
        beside = device_seconds(work, count, meanwhile=transfer.poll)
        was_running = not transfer.poll()
        while not transfer.poll():
            pass
        transfers.append((time.perf_counter() - start) / alone_s)
        bench.check(transfer, num_pages)
        if was_running:
            ratios.append(beside / without)
    return (statistics.median(ratios) if ratios else math.nan), statistics.median(transfers)
