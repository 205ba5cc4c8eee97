"""The disk tier beside what the disk gives without it, in one run: rates, CPU time, and the time of a restart.

All sides move the same number of bytes in pages of the same size with as many requests at once, around the page
cache. They take turns, and a ratio is the median over the rounds of tier / raw: other users of the disk come and
go in seconds, and hit all.

The raw reference comes twice: as it is, and with its memory in large pages as well, as the host pool has it where
the system allows (see `mlkv.store.shared_memory`).
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import platform
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from mlkv.bench.raw_disk import Direction, Pass, raw_disk
from mlkv.errors import MLKVError
from mlkv.layout import KVLayout
from mlkv.page import PageIdentity, write_identity
from mlkv.store.pool import HostPool, create_pool_file
from mlkv.store.shared_memory import large_page_bytes
from mlkv.store.tiers import StoredPage
from mlkv.store.tiers.catalog import Catalog, Row, max_catalog_bytes
from mlkv.store.tiers.disk import DiskTier
from mlkv.store.tiers.disk_folder import DiskFolder
from mlkv.store.tiers.slab import Slab

_GIB = 1 << 30
_PAGE_BYTES = (256 << 10, 1 << 20, 8 << 20)
_DEPTH = 8
_RECOVERED_PAGES = 100_000
_CHAIN_PAGES = 64
_FINGERPRINT = b"benchmark-of-disk"[:16]
_DIRECTIONS: tuple[Direction, ...] = ("write", "read")

_Side = Literal["tier", "raw", "raw_large"]
_SIDES: tuple[_Side, ...] = ("tier", "raw", "raw_large")


def run(directory: Path, *, size_bytes: int = _GIB, num_rounds: int = 5) -> dict[str, Any]:
    """Run the benchmark in a folder of its own below `directory`. Returns what `--json` writes.

    Args:
        size_bytes: moved in each pass; the benchmark needs memory for it once and room on the disk twice.

    Raises MLKVError when there is no room, or the tier or the raw reference fails.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        free_bytes = shutil.disk_usage(directory).free
        if free_bytes < 3 * size_bytes:
            raise MLKVError(f"{directory} has {free_bytes} bytes free, the benchmark needs {3 * size_bytes}")
        with tempfile.TemporaryDirectory(dir=directory, prefix="mlkv-bench-") as name:
            folder = Path(name)
            rows = [
                row for page_bytes in _PAGE_BYTES for row in _compare(folder, page_bytes, size_bytes, num_rounds)
            ]
            recovery_s, recovery_cpu_s = _recovery(folder / "recovery")
    except OSError as error:
        raise MLKVError(f"the benchmark cannot use {directory}: {error}") from error
    return {
        "benchmark": "disk",
        "directory": str(directory),
        "size_bytes": size_bytes,
        "depth": _DEPTH,
        "rounds": num_rounds,
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "rows": rows,
        "recovered_pages": _RECOVERED_PAGES,
        "recovery_s": round(recovery_s, 3),
        "recovery_cpu_s": round(recovery_cpu_s, 3),
    }


def report(result: dict[str, Any]) -> str:
    """The result as a table for people."""
    lines = [
        f"{result['size_bytes'] / _GIB:g} GiB a pass, {result['depth']} requests at once, medians of "
        f"{result['rounds']} rounds",
        f"{'':15}{'tier':^18}{'raw':^25}{'raw, large pages':^25}",
        f"{'page':>8} {'':6}" + f"{'GiB/s':>9}{'CPU-s/G':>9}" + 2 * f"{'GiB/s':>9}{'CPU-s/G':>9}{'ratio':>7}",
    ]
    for row in result["rows"]:
        sides = [f"{row[side]['gib_per_s']:>9.2f}{row[side]['cpu_s_per_gib']:>9.3f}" for side in _SIDES]
        lines.append(
            f"{row['page_bytes'] // 1024:>4} KiB {row['direction']:6}"
            f"{sides[0]}{sides[1]}{row['tier_over_raw']:>7.2f}{sides[2]}{row['tier_over_raw_large']:>7.2f}"
        )
    lines.append(f"raw: {result['rows'][0]['raw_reference']}; ratio: tier / raw in GiB/s")
    if any(row["raw_reference"] == "plain threads" for row in result["rows"]):
        lines.append("fio is not installed: the raw reference is plain O_DIRECT calls on threads")
    if not all(row["is_direct"] for row in result["rows"]):
        lines.append("the tier could not use O_DIRECT here: its pages went through the page cache")
    large_share = min(row["large_page_share"] for row in result["rows"])
    if large_share < 0.9:
        lines.append(f"the host pool has {large_share:.0%} in large pages of memory; see docs/operations.md")
    lines.append(
        f"restart with {result['recovered_pages']} pages: {result['recovery_s']:.3f} s, "
        f"of it {result['recovery_cpu_s']:.3f} s of CPU, the best of three"
    )
    return "\n".join(lines)


def write(result: dict[str, Any], path: Path) -> None:
    path.write_text(json.dumps(result, indent=2) + "\n")


def _compare(folder: Path, page_bytes: int, size_bytes: int, num_rounds: int) -> list[dict[str, Any]]:
    num_pages = size_bytes // page_bytes
    pool_fd = create_pool_file(num_pages, page_bytes)
    pool = HostPool(pool_fd, num_pages, page_bytes)
    shape = (folder / "raw", num_pages * page_bytes, page_bytes, _DEPTH)
    raw, raw_large = raw_disk()(*shape), raw_disk()(*shape, large_pages=True)
    tier = DiskTier(folder / "tier", page_bytes, max_catalog_bytes(num_pages) + size_bytes, threads=_DEPTH)
    try:
        tier.connect(pool.buffer)
        stored = _fill(pool)
        large_page_share = large_page_bytes(pool.buffer) / len(pool.buffer)
        workload = _Workload(tier, pool, stored)
        sides: dict[_Side, Callable[[Direction], Pass]] = {
            "tier": workload.measure,
            "raw": raw.measure,
            "raw_large": raw_large.measure,
        }
        # The collector would go through all of torch again and again, which the owner process does not have.
        gc.collect()
        gc.freeze()
        # A first pass over new files measures the file system's bookkeeping, on either side.
        for direction in _DIRECTIONS:
            raw.measure(direction)
            workload.measure(direction)
        rounds: dict[Direction, list[dict[_Side, Pass]]] = {direction: [] for direction in _DIRECTIONS}
        for number in range(num_rounds):
            order = _SIDES if number % 2 else _SIDES[::-1]
            for direction in _DIRECTIONS:
                rounds[direction].append({side: sides[side](direction) for side in order})
        is_direct = tier.is_direct
    finally:
        tier.close()
        pool.close()
        os.close(pool_fd)
        shutil.rmtree(folder / "tier", ignore_errors=True)
        raw.file.unlink(missing_ok=True)
        gc.unfreeze()
    return [
        {
            "page_bytes": page_bytes,
            "direction": direction,
            **{side: _median([one[side] for one in rounds[direction]]) for side in _SIDES},
            "tier_over_raw": _median_ratio(rounds[direction], "raw"),
            "tier_over_raw_large": _median_ratio(rounds[direction], "raw_large"),
            "raw_reference": raw.name,
            "is_direct": is_direct,
            "large_page_share": round(large_page_share, 3),
            "rounds": [{side: asdict(one[side]) for side in _SIDES} for one in rounds[direction]],
        }
        for direction in _DIRECTIONS
    ]


def _median(passes: Sequence[Pass]) -> dict[str, float]:
    return {
        "gib_per_s": round(statistics.median(one.gib_per_s for one in passes), 3),
        "cpu_s_per_gib": round(statistics.median(one.cpu_s_per_gib for one in passes), 4),
    }


def _median_ratio(rounds: Sequence[dict[_Side, Pass]], raw: _Side) -> float:
    return round(statistics.median(one["tier"].gib_per_s / one[raw].gib_per_s for one in rounds), 3)


class _Workload:
    """Passes over all pages, with as many calls at once as a `TierRunner` makes."""

    def __init__(self, tier: DiskTier, pool: HostPool, stored: list[StoredPage]) -> None:
        self._tier = tier
        self._pages = [pool.page(number) for number in range(len(stored))]
        self._stored = stored

    def measure(self, direction: Direction) -> Pass:
        if direction == "write":
            self._tier.delete([page.key for page in self._stored])  # or nothing would be written
        move: Callable[[slice], bool] = self._write if direction == "write" else self._read
        batch = self._tier.batch_pages
        batches = [slice(start, start + batch) for start in range(0, len(self._stored), batch)]
        with ThreadPoolExecutor(self._tier.concurrency) as callers:
            cpu_s, start_s = time.process_time(), time.perf_counter()
            done = list(callers.map(move, batches))
            cpu_s, wall_s = time.process_time() - cpu_s, time.perf_counter() - start_s
        if not all(done):
            raise MLKVError(f"the disk tier could not {direction} every page")
        gib = len(self._stored) * self._pages[0].nbytes / _GIB
        return Pass(gib / wall_s, cpu_s / gib)

    def _write(self, part: slice) -> bool:
        return bool(self._tier.write(self._stored[part], self._pages[part]).all())

    def _read(self, part: slice) -> bool:
        return bool(self._tier.read([page.key for page in self._stored[part]], self._pages[part]).all())


def _fill(pool: HostPool) -> list[StoredPage]:
    """Give every page a header and bytes that do not compress away."""
    noise = np.random.default_rng(1).integers(0, 256, pool.page_bytes, np.uint8)
    layout = KVLayout.gqa(num_layers=1, num_kv_heads=1, head_dim=64, dtype=torch.float16, page_tokens=4)
    stored = [_stored_page(number) for number in range(pool.num_pages)]
    for number, page in enumerate(stored):
        data = np.frombuffer(pool.page(number), np.uint8)
        data[:] = noise
        write_identity(data, layout, PageIdentity(page.key, page.parent, page.fingerprint, page.generation))
    return stored


def _stored_page(number: int) -> StoredPage:
    """Pages in chains of `_CHAIN_PAGES`."""
    parent = _FINGERPRINT if number % _CHAIN_PAGES == 0 else _key(number - 1)
    return StoredPage(_key(number), parent, _FINGERPRINT, number + 1)


def _key(number: int) -> bytes:
    return hashlib.blake2b(number.to_bytes(8, "little"), digest_size=16).digest()


def _recovery(directory: Path) -> tuple[float, float]:
    """Wall and CPU time until a tier is usable again after a run that has left `_RECOVERED_PAGES` pages."""
    page_bytes = 4096  # the time depends on the number of pages, not on their size
    limit_bytes = max_catalog_bytes(_RECOVERED_PAGES) + _RECOVERED_PAGES * page_bytes
    folder = DiskFolder(directory, page_bytes)
    slab = Slab(folder.slab_path, page_bytes, 1)
    slab.grow(_RECOVERED_PAGES)
    slab.close()
    catalog = Catalog(folder.catalog_path)
    pages = [_stored_page(number) for number in range(_RECOVERED_PAGES)]
    catalog.change(
        insert=[Row(slot, page.key, page.parent, page.generation, slot + 1) for slot, page in enumerate(pages)]
    )
    catalog.close()
    folder.release()
    times_s: list[tuple[float, float]] = []
    for _ in range(3):
        tier = DiskTier(directory, page_bytes, limit_bytes)
        cpu_s, start_s = time.process_time(), time.perf_counter()
        tier.connect(memoryview(b""))
        times_s.append((time.perf_counter() - start_s, time.process_time() - cpu_s))
        found = tier.contains([page.key for page in pages])
        tier.close()
        if found != _RECOVERED_PAGES:
            raise MLKVError(f"a restart found {found} of {_RECOVERED_PAGES} pages")
    return min(times_s)  # it is work of one core, to which other work on the machine only adds
