from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from store_helpers import RankProcess, eventually
from tier_cases import NewStore, TieredStore

from mlkv.store import StoreClient
from mlkv.store.tiers.base import Tier


@pytest.fixture
def socket_path() -> Iterator[Path]:
    """In a folder of its own, and short: the path of a Unix socket has at most 107 bytes."""
    folder = Path(tempfile.mkdtemp(prefix="mlkv-"))
    yield folder / "store.sock"

    def removed() -> bool:
        # An owner on its way out may still be making its lock in there.
        shutil.rmtree(folder, ignore_errors=True)
        return not folder.exists()

    eventually(removed, "the socket's folder can be removed")


@pytest.fixture
def new_rank(socket_path: Path) -> Iterator[Callable[..., RankProcess]]:
    """Starts ranks; those that are left at the end are killed, and the owner follows them."""
    ranks: list[RankProcess] = []

    def start(**connect: Any) -> RankProcess:
        ranks.append(RankProcess(socket_path, **connect))
        return ranks[-1]

    yield start
    for rank in ranks:
        rank.kill()


@pytest.fixture
def new_client(socket_path: Path) -> Iterator[Callable[..., StoreClient]]:
    """Connects from this process."""
    clients: list[StoreClient] = []

    def connect(**settings: Any) -> StoreClient:
        defaults = {"host_bytes": 16 * 4096, "page_bytes": 4096, "group": b"here", "rank": 0, "deadline_s": 20.0}
        clients.append(StoreClient.connect(socket_path, **{**defaults, **settings}))
        return clients[-1]

    yield connect
    for client in clients:
        client.close()


@pytest.fixture
def new_store() -> Iterator[NewStore]:
    stores: list[TieredStore] = []

    def make(num_pages: int, *tiers: Tier, **options: object) -> TieredStore:
        store = TieredStore(num_pages, tiers, **options)  # type: ignore[arg-type]
        stores.append(store)
        store.wait_until_connected()
        return store

    yield make
    for store in stores:
        store.close()
