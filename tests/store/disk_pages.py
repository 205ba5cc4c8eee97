"""What the tests of the disk tier share: real pages with a header and checksums, and memory for them."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from store_helpers import key

from mlkv.layout import KVLayout
from mlkv.page import (
    PageIdentity,
    binding,
    checksum_table,
    payload_checksum,
    verify_own_header,
    verify_page,
    write_identity,
)
from mlkv.store.tiers import StoredPage
from mlkv.store.tiers.catalog import max_catalog_bytes
from mlkv.store.tiers.disk import DiskTier

LAYOUT = KVLayout.gqa(num_layers=2, num_kv_heads=2, head_dim=16, dtype=torch.float32, page_tokens=7)
PAGE_BYTES = LAYOUT.page_bytes
FINGERPRINT = b"n" * 16
NO_POOL = memoryview(b"")

assert PAGE_BYTES == 4096 == LAYOUT.header_bytes + LAYOUT.payload_bytes


def limit_for(num_pages: int, page_bytes: int = PAGE_BYTES) -> int:
    """The smallest limit that holds so many pages."""
    return max_catalog_bytes(num_pages) + num_pages * page_bytes


def page_of(text: str, generation: int = 1) -> StoredPage:
    """The last page of a prompt in which every letter is a page."""
    return StoredPage(key(text), key(text[:-1]), FINGERPRINT, generation)


def chain_of(text: str, generation: int = 1) -> list[StoredPage]:
    return [page_of(text[:end], generation) for end in range(1, len(text) + 1)]


def keys_of(pages: Sequence[StoredPage]) -> list[bytes]:
    return [page.key for page in pages]


@lru_cache(maxsize=4096)
def bytes_of(page: StoredPage) -> bytes:
    """What a page holds: bytes that only this write of this key has."""
    data = np.zeros(PAGE_BYTES, np.uint8)
    chance = np.random.default_rng([*page.key, page.generation % (1 << 63)])
    data[LAYOUT.header_bytes :] = chance.integers(0, 256, LAYOUT.payload_bytes, np.uint8)
    write_identity(data, LAYOUT, PageIdentity(page.key, page.parent, page.fingerprint, page.generation))
    for head in range(LAYOUT.num_kv_heads):
        at = LAYOUT.head_offset(head)
        total = payload_checksum(data[at : at + LAYOUT.head_bytes]) + binding(page.key, page.generation, head)
        checksum_table(data, LAYOUT)[head] = total % (1 << 64)
    return data.tobytes()


class Memory:
    """Pages aligned like those of a host pool, handed out in turn and never again."""

    def __init__(self, num_pages: int = 4096) -> None:
        self._memory = memoryview(mmap.mmap(-1, num_pages * PAGE_BYTES))
        self._next = 0

    def blank(self, count: int) -> list[memoryview]:
        """Pages full of a byte that no test writes everywhere."""
        views = []
        for _ in range(count):
            at = self._next % (len(self._memory) // PAGE_BYTES) * PAGE_BYTES
            views.append(self._memory[at : at + PAGE_BYTES])
            views[-1][:] = b"\xee" * PAGE_BYTES
            self._next += 1
        return views

    def filled(self, pages: Sequence[StoredPage]) -> list[memoryview]:
        views = self.blank(len(pages))
        for view, page in zip(views, pages, strict=True):
            view[:] = bytes_of(page)
        return views


MEMORY = Memory()


def write(tier: DiskTier, pages: Sequence[StoredPage]) -> list[bool]:
    return tier.write(pages, MEMORY.filled(pages)).tolist()


def read(tier: DiskTier, pages: Sequence[StoredPage]) -> list[bool]:
    """Which pages the tier gave. Fails if one that it gave is not a whole page of its key."""
    views = MEMORY.blank(len(pages))
    good = tier.read(keys_of(pages), views).tolist()
    for page, view, is_good in zip(pages, views, good, strict=True):
        if is_good:
            header = verify_own_header(np.frombuffer(view, np.uint8))
            assert header is not None, f"torn bytes under {page.key.hex()}"
            assert header.identity.key == page.key, f"bytes of something else under {page.key.hex()}"
    return good


def verifies(view: memoryview, page: StoredPage) -> bool:
    return verify_page(np.frombuffer(view, np.uint8), LAYOUT, page.key, page.fingerprint, page.generation)


def read_everything(tier: DiskTier) -> tuple[set[bytes], set[bytes]]:
    """Read every key that the tier lists: those it gave, and those it did not. What it gave must be whole."""
    given, refused = set(), set()
    for found in tier.scan(b"", 1 << 20):
        (view,) = MEMORY.blank(1)
        if tier.read([found], [view]).all():
            header = verify_own_header(np.frombuffer(view, np.uint8))
            assert header is not None, "a torn page"
            assert header.identity.key == found
            given.add(found)
        else:
            refused.add(found)
    return given, refused


def opened(directory: Path, num_pages: int = 64, **options: Any) -> DiskTier:
    tier = DiskTier(directory, PAGE_BYTES, limit_for(num_pages), **options)
    tier.connect(NO_POOL)
    return tier


def opened_and_checked(directory: Path) -> Iterator[DiskTier]:
    """For fixtures: a tier whose books must be right when the test is over."""
    tier = opened(directory)
    yield tier
    check_slots(tier)
    tier.close()


def present(tier: DiskTier, pages: Sequence[StoredPage]) -> list[bool]:
    """Which pages are there, without using them."""
    keys = set(tier.scan(b"", 1 << 20))
    return [page.key in keys for page in pages]


def shelf_of(directory: Path) -> Path:
    """Where a tier keeps its slab and its catalog."""
    (shelf,) = (path for path in directory.iterdir() if path.name.endswith(f"-{PAGE_BYTES}"))
    return shelf


def occupied_bytes(directory: Path) -> int:
    """What the file system says that a folder takes, without the folders themselves."""
    return sum(file.lstat().st_blocks * 512 for file in directory.rglob("*") if file.is_file())


def overwrite(file: Path, offset: int, data: bytes) -> None:
    fd = os.open(file, os.O_WRONLY)
    os.pwrite(fd, data, offset)
    os.close(fd)


def check_slots(tier: DiskTier) -> None:
    """Every slot is in exactly one state, links and candidates are counted right. While no call runs."""
    volume: Any = tier._opened
    index = volume.index
    present = list(index._slot_of.values())
    slots = sorted([*index._free, *present, *index._condemned])
    assert slots == list(range(volume.slab.num_slots)), "a slot is lost, or in two states"
    assert not index._intents
    assert not index._readers
    assert not index._cleaned_but_read
    children: dict[bytes, int] = {}
    for slot in present:
        children[index._parent[slot]] = children.get(index._parent[slot], 0) + 1
    assert index._children == children
    assert index.recency.num_candidates == sum(index._key[slot] not in children for slot in present)
    rows = {slot: key for slot, key, *_ in volume.catalog.rows()}
    assert {slot: index._key[slot] for slot in present} == {
        slot: key for slot, key in rows.items() if slot not in index._condemned
    }
