"""Pages that were damaged where they lie, in each tier, found by real loads: a miss, counted, never an answer."""

from __future__ import annotations

import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr
from remote_engines import Pool, stored
from remote_servers import MooncakeMaster, RedisServer, S3Server, running
from store_helpers import eventually

from mlkv import Replica
from mlkv.page import HEADER_IDENTITY_BYTES
from mlkv.store.tiers import Tier
from mlkv.store.tiers.open import open_remote
from mlkv.store_config import RemoteConfig
from tests.cache.bench import PAGE_TOKENS, Rank, layout_of, slots_of, tokens_of

LAYOUT = layout_of(2)

HEADER_FIELDS = {
    "magic": 0,
    "version": 4,
    "heads": 6,
    "tokens": 8,
    "head bytes": 12,
    "generation": 16,
    "fingerprint": 24,
    "key": 40,
    "parent": 56,
    "crc": 72,
}
PAYLOAD = {
    "checksum of head 0": HEADER_IDENTITY_BYTES,
    "checksum of head 1": HEADER_IDENTITY_BYTES + 15,
    "first byte": LAYOUT.header_bytes,
    "end of head 0": LAYOUT.head_offset(1) - 1,
    "last byte": LAYOUT.head_offset(1) + LAYOUT.head_bytes - 1,
}
FLIPS = {**HEADER_FIELDS, **PAYLOAD}
PROMPTS = {place: tokens_of(3 * PAGE_TOKENS + 1, seed) for seed, place in enumerate(FLIPS)}
SLOTS = slots_of(0, 3 * PAGE_TOKENS + 1)


class Below(ABC):
    """A tier below an owner: its settings, and a way to damage what lies in it while no owner runs."""

    @property
    @abstractmethod
    def settings(self) -> dict[str, Any]: ...

    @abstractmethod
    def flip(self, key: bytes, offset: int) -> None: ...


class Disk(Below):
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @property
    def settings(self) -> dict[str, Any]:
        return {"disk": {"directory": self._folder, "limit_bytes": 8 << 20}}

    def flip(self, key: bytes, offset: int) -> None:
        (slab,) = self._folder.glob("*/slab")
        content = bytearray(slab.read_bytes())
        (slot,) = [at for at in range(0, len(content), LAYOUT.page_bytes) if content[at + 40 : at + 56] == key]
        content[slot + offset] ^= 4
        slab.write_bytes(content)


class Remote(Below):
    """Damages pages as another host could: reads them, and stores them with one bit changed."""

    def __init__(self, owners: RemoteConfig, own: RemoteConfig | None = None) -> None:
        self._config = owners
        self._pool = Pool(LAYOUT.page_bytes, 1)
        self.tier: Tier = open_remote(own or owners, LAYOUT.page_bytes)
        self.tier.connect(self._pool.memory)

    @property
    def settings(self) -> dict[str, Any]:
        return {"remote": self._config}

    def flip(self, key: bytes, offset: int) -> None:
        page = self._pool.page(0)
        assert self.tier.read([key], [page])[0]
        page[offset] ^= 4
        self.tier.delete([key])
        assert self.tier.write(stored([key]), [page])[0]


@pytest.fixture(params=["disk", "redis", "s3", "mooncake"])
def below(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Below]:
    kind = request.param
    servers = {"redis": RedisServer, "s3": S3Server, "mooncake": MooncakeMaster}
    if kind == "disk":
        yield Disk(tmp_path)
        return
    if servers[kind].missing():
        pytest.skip(servers[kind].missing())
    with running(servers[kind](tmp_path / kind)) as server:
        if isinstance(server, S3Server):
            remote = Remote(
                RemoteConfig(
                    url=f"s3://{server.BUCKET}/kv",
                    endpoint=server.endpoint,
                    access_key_id=SecretStr(server.ACCESS_KEY),
                    secret_access_key=SecretStr(server.SECRET_KEY),
                )
            )
        elif isinstance(server, MooncakeMaster):
            # What an owner lends goes with it, so it lies in memory that this process lends.
            owners = RemoteConfig(url=server.url, segment_bytes=0)
            remote = Remote(owners, owners.model_copy(update={"segment_bytes": 256 << 20}))
        else:
            assert isinstance(server, RedisServer)
            remote = Remote(RemoteConfig(url=server.url))
        try:
            yield remote
        finally:
            remote.tier.close()


@pytest.fixture
def sockets() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="mlkv-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def new_rank(below: Below, sockets: Path) -> Rank:
    """Of a new owner, which is connected to the tier."""
    store = {"directory": sockets, "name": "damaged", "answer_deadline_s": 10.0, **below.settings}
    rank = Rank(Replica.single(), store=store)
    eventually(lambda: rank.cache.audit().tiers[0].connected, "the owner is connected")
    return rank


def count_written(rank: Rank) -> int:
    return rank.cache.audit().tiers[0].bytes_written // LAYOUT.page_bytes


def fetch(rank: Rank, place: str, num_tokens: int) -> None:
    """Load a prompt: `num_tokens` must come, and be right. A lookup whose wait was over before is repeated."""
    tokens = PROMPTS[place]
    give_up_at = time.monotonic() + 20.0
    while True:
        rank.poison()
        found = rank.fetch(place, tokens, SLOTS)
        if found == num_tokens:
            break
        assert found < num_tokens, f"{place}: {found} tokens"
        assert time.monotonic() < give_up_at, f"{place}: {found} tokens; {rank.cache.audit()}"
    assert rank.wrong_tokens(tokens[:num_tokens], SLOTS[:num_tokens]) == [], place


@pytest.mark.timeout(200)
def test_a_flipped_bit_anywhere_is_a_miss_that_is_counted_and_made_up_for(below: Below, sockets: Path) -> None:
    rank = new_rank(below, sockets)
    for number, (place, tokens) in enumerate(PROMPTS.items(), 1):
        rank.compute(tokens, SLOTS)
        rank.store(place, tokens, SLOTS)
        # One after the other, since pages are dropped when too many wait for a slow tier.
        eventually(lambda expected=3 * number: count_written(rank) == expected, f"{place}: it is in the tier")
    keys = {place: rank.keys(tokens)[16:32] for place, tokens in PROMPTS.items()}
    rank.cache.close()
    eventually(lambda: not list(sockets.iterdir()), "the owner has ended")
    for place, offset in FLIPS.items():
        below.flip(keys[place], offset)
    rank = new_rank(below, sockets)
    for place in PROMPTS:
        fetch(rank, place, PAGE_TOKENS)
        # A damaged header is seen by the owner, or by the tier; a payload by the rank that loads it.
        assert (place in rank.seen.failed) == (place in PAYLOAD), place
    rank.drain()
    report = rank.cache.audit()
    assert report.tiers[0].pages_bad == len(HEADER_FIELDS)
    assert report.pages_bad == len(PAYLOAD)
    rank.check_conserved()
    # What was bad has left the tier, and does not keep the right bytes from coming there.
    for number, (place, tokens) in enumerate(PROMPTS.items(), 1):
        rank.compute(tokens, SLOTS)
        rank.store(place, tokens, SLOTS)
        eventually(lambda expected=number: count_written(rank) >= expected, f"{place}: it is in the tier again")
    rank.cache.close()
    eventually(lambda: not list(sockets.iterdir()), "the owner has ended")
    rank = new_rank(below, sockets)
    for place in PROMPTS:
        fetch(rank, place, 3 * PAGE_TOKENS)
    assert rank.cache.counters.loaded_pages_by_tier == {rank.cache.audit().tiers[0].name: 3 * len(PROMPTS)}
    rank.cache.close()
