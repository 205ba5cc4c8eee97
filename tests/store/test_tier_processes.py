"""The real owner process above real tiers: a disk, and servers that never answer."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from pydantic import SecretStr
from remote_servers import RedisServer
from store_helpers import chain, eventually, is_running
from tier_cases import PAGE_BYTES, make_page

from mlkv.errors import ConfigError, StoreError
from mlkv.page import verify_own_header
from mlkv.store import StoreClient, wire
from mlkv.store.pool import HostPool, create_pool_file
from mlkv.store.settings import OwnerSettings
from mlkv.store.tiers.disk import DiskTier
from mlkv.store.tiers.disk_folder import FolderInUse
from mlkv.store.tiers.open import open_tiers
from mlkv.store_config import DiskConfig, RemoteConfig

NewClient = Callable[..., StoreClient]
NUM_PAGES = 64


class DeafServer:
    """Takes every connection and whatever comes in on it, and never says a word."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.connections: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                self.connections.append(self._listener.accept()[0])
            except OSError:
                return

    def close(self) -> None:
        self._listener.close()
        for connection in self.connections:
            connection.close()


@pytest.fixture
def deaf_server() -> Iterator[DeafServer]:
    server = DeafServer()
    yield server
    server.close()


@pytest.fixture
def new_owner(new_client: NewClient) -> NewClient:
    def connect(**settings: object) -> StoreClient:
        return new_client(host_bytes=NUM_PAGES * PAGE_BYTES, page_bytes=PAGE_BYTES, **settings)

    return connect


def store(client: StoreClient, text: str) -> None:
    reserved = client.call(wire.Reserve(chain(text)), 20.0)
    pages, generations = reserved.page_ids.tolist(), reserved.page_generations.tolist()
    for position, (page, generation) in enumerate(zip(pages, generations, strict=True), reserved.first):
        client.pool[page * PAGE_BYTES : (page + 1) * PAGE_BYTES] = make_page(text[: position + 1], generation)
    if reserved.reservation:
        client.call(wire.Commit(reserved.reservation, len(pages)), 20.0)


def find(client: StoreClient, text: str, wait_s: float = 10.0) -> str:
    matched = client.call(wire.Match(chain(text), len(text), wait_s), 20.0)
    for page, generation in zip(matched.page_ids.tolist(), matched.page_generations.tolist(), strict=True):
        header = verify_own_header(np.frombuffer(client.pool, np.uint8, PAGE_BYTES, page * PAGE_BYTES))
        assert header is not None
        assert header.identity.generation == generation
    if matched.lease:
        client.call(wire.Release([matched.lease]), 20.0)
    return text[: len(matched.page_ids)]


def end(client: StoreClient) -> None:
    """Close it and wait for its owner to end."""
    pid = client.owner_pid
    client.close()
    eventually(lambda: not is_running(pid), "the owner has ended")


def test_new_owner_finds_on_disk_what_the_last_one_stored(new_owner: NewClient, tmp_path: Path):
    disk = DiskConfig(directory=tmp_path / "kv", limit_bytes=16 << 20)
    client = new_owner(disk=disk)
    assert client.tiers == ("disk",)
    store(client, "abcdef")
    generations = client.call(wire.Match(chain("abcdef"), 6), 20.0).generations
    end(client)
    client = new_owner(disk=disk)
    store(client, "xyz")
    new = client.call(wire.Match(chain("xyz"), 3), 20.0).page_generations
    assert find(client, "abcdefg") == "abcdef"
    assert client.call(wire.Match(chain("abcdef"), 6), 20.0).generations == generations
    assert new.min() > np.frombuffer(generations, "<u8").max(), "a new owner repeats generations of the last one"


def test_clear_is_found_cleared_by_the_next_owner(new_owner: NewClient, tmp_path: Path):
    disk = DiskConfig(directory=tmp_path, limit_bytes=16 << 20)
    client = new_owner(disk=disk)
    store(client, "abc")
    client.call(wire.Clear(), 20.0)
    end(client)
    assert find(new_owner(disk=disk), "abc") == ""


@pytest.mark.parametrize("wrong", ["file in the way", "limit below a page"])
def test_disk_that_cannot_be_is_told_at_the_start(new_owner: NewClient, tmp_path: Path, wrong: str):
    if wrong == "file in the way":
        (tmp_path / "kv").write_text("not a folder")
        with pytest.raises(StoreError, match="cannot use the disk folder"):
            new_owner(disk=DiskConfig(directory=tmp_path / "kv"))
    else:
        with pytest.raises(ConfigError, match="limit_bytes=4095"):
            new_owner(disk=DiskConfig(directory=tmp_path / "kv", limit_bytes=4095))


def test_start_waits_for_a_folder_whose_owner_is_about_to_end(
    tmp_path: Path, socket_path: Path, monkeypatch: pytest.MonkeyPatch
):
    pool_fd = create_pool_file(NUM_PAGES, PAGE_BYTES)
    pool = HostPool(pool_fd, NUM_PAGES, PAGE_BYTES)
    os.close(pool_fd)
    first = DiskTier(tmp_path, PAGE_BYTES, 16 << 20)
    first.connect(pool.buffer)
    was_refused = threading.Event()
    connect = DiskTier.connect

    def connect_and_tell(tier: DiskTier, buffer: memoryview) -> None:
        try:
            connect(tier, buffer)
        except FolderInUse:
            was_refused.set()
            raise

    monkeypatch.setattr(DiskTier, "connect", connect_and_tell)

    def end_first() -> None:
        assert was_refused.wait(10.0)
        first.close()

    ending = threading.Thread(target=end_first)
    ending.start()
    settings = OwnerSettings(
        socket_path=socket_path,
        host_bytes=NUM_PAGES * PAGE_BYTES,
        page_bytes=PAGE_BYTES,
        disk=DiskConfig(directory=tmp_path, limit_bytes=16 << 20),
    )
    (runner,) = open_tiers(settings, pool)
    ending.join()
    assert was_refused.is_set()
    assert runner.is_usable
    assert runner.close(10.0)


@pytest.mark.parametrize("url", ["redis://127.0.0.1:1", "redis://nobody.invalid:6379"])
def test_owner_starts_above_a_server_that_is_down(new_owner: NewClient, url: str):
    client = new_owner(remote=RemoteConfig(url=url))
    store(client, "abc")
    assert find(client, "abcd") == "abc"

    def is_open() -> bool:
        report = client.call(wire.Stats(), 20.0).tiers[0]
        return report.breaker == "open" and bool(report.failures)

    eventually(is_open, "the breaker opened")


def test_server_that_hangs_for_ever_costs_misses_only(new_owner: NewClient, deaf_server: DeafServer):
    client = new_owner(remote=RemoteConfig(url=f"redis://127.0.0.1:{deaf_server.port}", deadline_s=1.0))
    eventually(lambda: deaf_server.connections, "the owner has connected")
    store(client, "abc")
    slowest_s = 0.0
    for number in range(300):
        start = time.monotonic()
        prompt = "abc" + chr(0x4E00 + number)
        assert find(client, prompt, wait_s=20.0) == "abc"
        slowest_s = max(slowest_s, time.monotonic() - start)
    assert slowest_s < 10.0, "a lookup waited for a server that was never connected"
    report = client.call(wire.Stats(audit=True), 20.0)
    assert (report.problem, report.reserved, report.leases) == ("", 0, 0)
    eventually(lambda: client.call(wire.Stats(), 20.0).tiers[0].failures, "the silence was counted")
    start = time.monotonic()
    end(client)
    assert time.monotonic() - start < 8.0


@pytest.mark.skipif(bool(RedisServer.missing()), reason=RedisServer.missing())
def test_server_that_stops_answering_is_left_alone_and_is_used_again_when_it_goes_on(
    new_owner: NewClient, tmp_path: Path
):
    server = RedisServer(tmp_path / "redis")
    server.start()
    try:
        client = new_owner(remote=RemoteConfig(url=server.url, deadline_s=0.5))

        def tier() -> wire.TierReport:
            return client.call(wire.Stats(), 20.0).tiers[0]

        eventually(lambda: tier().connected, "the owner is connected")
        store(client, "abc")
        eventually(lambda: tier().bytes_written == 3 * PAGE_BYTES, "the pages are in the server")
        server.hold()
        for number in range(8):
            start = time.monotonic()
            assert find(client, "abc" + chr(0x4E00 + number), wait_s=0.3) == "abc"
            assert time.monotonic() - start < 2.0
        eventually(lambda: tier().breaker == "open", "the breaker opened")
        assert tier().failures
        server.resume()
        eventually(lambda: tier().connected, "the owner is connected again")
        store(client, "xyz")
        eventually(lambda: tier().bytes_written == 6 * PAGE_BYTES, "the server is used again")
        end(client)
        client = new_owner(remote=RemoteConfig(url=server.url))
        eventually(lambda: tier().connected, "the next owner is connected")
        assert find(client, "xyz") == "xyz"
        report = client.call(wire.Stats(audit=True), 20.0)
        assert (report.problem, report.reserved, report.leases, report.tiers[0].pages_hit) == ("", 0, 0, 3)
    finally:
        server.resume()
        server.kill()


@pytest.mark.skipif(bool(RedisServer.missing()), reason=RedisServer.missing())
def test_owner_that_ends_writes_what_still_waits(new_owner: NewClient, tmp_path: Path):
    server = RedisServer(tmp_path / "redis")
    server.start()
    try:
        remote = RemoteConfig(url=server.url)
        client = new_owner(remote=remote)
        pid = client.owner_pid
        eventually(lambda: client.call(wire.Stats(), 20.0).tiers[0].connected, "the owner is connected")
        server.hold()
        prompts = [chr(0x4E00 + number) for number in range(NUM_PAGES // 8)]
        for prompt in prompts:
            store(client, prompt)
        assert client.call(wire.Stats(), 20.0).tiers[0].queued_pages > 0
        client.close()
        server.resume()
        eventually(lambda: not is_running(pid), "the owner has ended")
        client = new_owner(remote=remote)
        eventually(lambda: client.call(wire.Stats(), 20.0).tiers[0].connected, "the next owner is connected")
        assert [find(client, prompt) for prompt in prompts] == prompts
    finally:
        server.resume()
        server.kill()


def test_secrets_are_neither_in_arguments_nor_in_messages(new_owner: NewClient, socket_path: Path, tmp_path: Path):
    log = tmp_path / "log"
    remote = RemoteConfig(url="redis://127.0.0.1:1", username="me", password=SecretStr("sesame"))
    client = new_owner(remote=remote, log_file=log)
    eventually(lambda: client.call(wire.Stats(), 20.0).tiers[0].failures, "a connect has failed")
    arguments = Path(f"/proc/{client.owner_pid}/cmdline").read_bytes()
    assert b"sesame" not in arguments
    assert str(socket_path).encode() in arguments, "one cannot see which store a process serves"
    assert "tier redis" in log.read_text()
    assert "sesame" not in log.read_text()
    assert "sesame" not in f"{remote!r}{remote}{remote.model_dump_json()}"
