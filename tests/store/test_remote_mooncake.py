"""What is special about Mooncake: a client in a process of its own, which hangs, dies and is replaced."""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from remote_engines import PAGE_BYTES, MooncakeEngine, Pool, key, keys, stored
from remote_servers import MooncakeMaster, free_port, silent_server
from store_helpers import environment, eventually, is_running

from mlkv.errors import ConfigError, TierUnavailable
from mlkv.store.tiers.mooncake import MooncakeTier

if MooncakeMaster.missing():
    pytest.skip(MooncakeMaster.missing(), allow_module_level=True)

SLACK_S = 2.0  # for a busy machine


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[MooncakeEngine]:
    """With a master of the test's own, that offers nobody the memory of clients which an earlier one killed."""
    engine = MooncakeEngine(tmp_path)
    yield engine
    engine.close()


@pytest.fixture
def pool() -> Pool:
    pool = Pool(num_pages=32)
    pool.fill(0, 16, seed=1)
    return pool


@pytest.fixture
def new_tier(engine: MooncakeEngine, pool: Pool) -> Iterator[Callable[..., MooncakeTier]]:
    """Makes tiers, which are gone at the end without a farewell."""
    tiers: list[MooncakeTier] = []

    def make(**options: object) -> MooncakeTier:
        tiers.append(engine.tier(**options))  # type: ignore[arg-type]
        return tiers[-1]

    yield make
    for tier in tiers:
        if tier._process is not None:
            tier._process.kill()


@contextmanager
def beating(longest_pause_s: float = 0.5) -> Iterator[None]:
    """Fails if the threads of this process stand still meanwhile."""
    pauses: list[float] = []
    stop = threading.Event()

    def beat() -> None:
        last = time.monotonic()
        while not stop.wait(0.01):
            now = time.monotonic()
            pauses.append(now - last)
            last = now

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
    assert max(pauses, default=0.0) < longest_pause_s


def writes(tier: MooncakeTier, pool: Pool) -> bool:
    """Whether it can be connected to and keeps pages."""
    try:
        tier.connect(pool.memory)
        return bool(tier.write(stored(keys(0, 8)), pool.pages(0, 8)).all())
    except TierUnavailable:
        return False


def client_pid(tier: MooncakeTier) -> int:
    assert tier._process is not None
    return tier._process._process.pid


@pytest.mark.parametrize("url", ["mooncake://master:50051", "mooncake://10.0.0.1:1/", "mooncake://[::1]:50051"])
def test_urls_name_the_master(url: str) -> None:
    assert url.rstrip("/") in repr(MooncakeTier.from_url(url, PAGE_BYTES))


@pytest.mark.parametrize(
    "url",
    ["", "master:50051", "mooncake://", "mooncake://master", "mooncake://m:x", "mooncake://m:1/db", "http://m:1"],
)
def test_malformed_urls_are_refused_with_the_right_form(url: str) -> None:
    with pytest.raises(ConfigError, match="mooncake://HOST:PORT"):
        MooncakeTier.from_url(url, PAGE_BYTES)


@pytest.mark.parametrize(
    ("setting", "value"), [("protocol", "udp"), ("segment_bytes", -1), ("metadata", "nowhere")]
)
def test_malformed_settings_are_refused(setting: str, value: object) -> None:
    with pytest.raises(ConfigError, match=setting):
        MooncakeTier.from_url("mooncake://m:1", PAGE_BYTES, **{setting: value})  # type: ignore[arg-type]


def test_memory_that_no_other_process_can_map_is_refused(new_tier: Callable[..., MooncakeTier]) -> None:
    private = memoryview(mmap.mmap(-1, PAGE_BYTES, flags=mmap.MAP_PRIVATE))
    with pytest.raises(ConfigError, match="mapping of a file"):
        new_tier().connect(private)


def test_a_page_outside_of_the_pool_is_refused(new_tier: Callable[..., MooncakeTier], pool: Pool) -> None:
    tier = new_tier()
    tier.connect(pool.memory)
    with pytest.raises(ValueError, match="none of the pool"):
        tier.read(keys(0, 1), [Pool(num_pages=1).page(0)])


def test_a_pool_that_is_part_of_a_file_is_found_in_it(new_tier: Callable[..., MooncakeTier]) -> None:
    whole = Pool(num_pages=8)
    whole.fill(2, 4, seed=5)
    tier = new_tier()
    tier.connect(whole.memory[2 * PAGE_BYTES :])
    assert tier.write(stored(keys(100, 102)), whole.pages(2, 4)).all()
    assert tier.read(keys(100, 102), whole.pages(6, 8)).all()
    assert [bytes(page) for page in whole.pages(6, 8)] == [bytes(page) for page in whole.pages(2, 4)]


@pytest.mark.parametrize("what", ["down", "silent"])
def test_a_master_that_does_not_answer_stops_no_thread_of_ours(
    new_tier: Callable[..., MooncakeTier], pool: Pool, what: str
) -> None:
    with silent_server() as server:
        port = server.port if what == "silent" else free_port()
        tier = new_tier(port=port, deadline_s=2.0)
        started = time.monotonic()
        with beating(), pytest.raises(TierUnavailable, match=f"127.0.0.1:{port}"):
            tier.connect(pool.memory)
        assert time.monotonic() - started < 2.0 + SLACK_S
    with pytest.raises(TierUnavailable, match="not connected"):
        tier.contains(keys(0, 1))


def test_a_killed_master_is_an_outage_and_its_return_is_found(
    engine: MooncakeEngine, new_tier: Callable[..., MooncakeTier], pool: Pool
) -> None:
    tier = new_tier(deadline_s=8.0)
    tier.connect(pool.memory)
    assert tier.write(stored(keys(0, 8)), pool.pages(0, 8)).all()
    pid = client_pid(tier)
    engine.server.kill()
    calls: list[Callable[[], object]] = [
        lambda: tier.contains(keys(0, 8)),
        lambda: tier.load_note("note"),
        lambda: tier.connect(pool.memory),
    ]
    with beating():
        for call in calls:
            with pytest.raises(TierUnavailable):
                call()
    engine.server.start()
    eventually(lambda: writes(tier, pool), "the client has found back")
    pool.poison(16, 24)
    assert tier.read(keys(0, 8), pool.pages(16, 24)).all()
    assert [bytes(page) for page in pool.pages(16, 24)] == [bytes(page) for page in pool.pages(0, 8)]
    assert client_pid(tier) == pid  # what this host lends to the store was not thrown away


def test_a_call_that_hangs_ends_with_its_client_and_touches_no_page_after(
    engine: MooncakeEngine, new_tier: Callable[..., MooncakeTier], pool: Pool
) -> None:
    tier = new_tier(deadline_s=5.0)
    tier.connect(pool.memory)
    assert tier.write(stored(keys(0, 8)), pool.pages(0, 8)).all()
    tier.deadline_s = 0.5
    pid = client_pid(tier)
    os.kill(pid, signal.SIGSTOP)
    started = time.monotonic()
    with beating(), pytest.raises(TierUnavailable, match="did not come back"):
        tier.read(keys(0, 8), pool.pages(16, 24))
    assert time.monotonic() - started < 3 * 0.5 + SLACK_S
    assert not is_running(pid)
    with pytest.raises(TierUnavailable, match="not connected"):
        tier.contains(keys(0, 8))
    pool.poison(16, 24)
    tier.deadline_s = 5.0
    tier.connect(pool.memory)
    eventually(lambda: writes(tier, pool), "the store has noticed that the former client is gone")
    assert all(bytes(page) == b"\xee" * PAGE_BYTES for page in pool.pages(16, 24))


def test_a_client_that_crashes_fails_its_calls_and_is_replaced(
    new_tier: Callable[..., MooncakeTier], pool: Pool
) -> None:
    tier = new_tier()
    tier.connect(pool.memory)
    os.kill(client_pid(tier), signal.SIGSEGV)
    with pytest.raises(TierUnavailable):
        tier.write(stored(keys(0, 8)), pool.pages(0, 8))
    tier.connect(pool.memory)
    eventually(lambda: writes(tier, pool), "the store has noticed that the former client is gone")
    assert tier.read([key(0)], [pool.page(20)]).all()
    assert bytes(pool.page(20)) == bytes(pool.page(0))


@pytest.mark.parametrize("master", ["up", "silent"])
def test_the_client_does_not_outlive_a_killed_owner(engine: MooncakeEngine, master: str) -> None:
    script = """
        import mmap, os, sys
        from mlkv.store.tiers.mooncake import MooncakeTier
        fd = os.memfd_create("pool"); os.ftruncate(fd, 1 << 20)
        tier = MooncakeTier.from_url(sys.argv[1], 1 << 16, segment_bytes=0, deadline_s=float(sys.argv[2]))
        tier.connect(memoryview(mmap.mmap(fd, 1 << 20)))
        print("connected", flush=True)
        input()
    """
    with silent_server() as silent:
        # While the client joins a store, it is its own deadline that ends it.
        port, deadline_s = (engine.server.port, "30") if master == "up" else (silent.port, "3")
        owner = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(script), f"mooncake://127.0.0.1:{port}", deadline_s],
            env=environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert owner.stdout is not None
        if master == "up":
            assert owner.stdout.readline() == b"connected\n"
        pid = eventually(lambda: child_of(owner.pid), "the client process runs")
        if master == "silent":
            eventually(lambda: silent.num_connections, "it is on its way into the store")
        owner.kill()
        owner.wait()
        eventually(lambda: not is_running(pid), "the client has ended as well", 3.0 + SLACK_S)
    owner.stdout.close()


def child_of(parent: int) -> int:
    """A process that another has started; 0 if there is none."""
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    return int(children[0]) if children else 0


def test_a_full_store_refuses_or_evicts_and_is_no_outage(
    new_tier: Callable[..., MooncakeTier], pool: Pool
) -> None:
    tier = new_tier()
    tier.connect(pool.memory)
    tier.store_note("floor", b"41")
    for at in range(0, 2 * (256 << 20) // PAGE_BYTES, 32):
        good = tier.write(stored(keys(at, at + 32)), pool.pages(0, 32))
        assert len(good) == 32
    assert tier.contains(keys(0, 32)) < 32
    assert tier.load_note("floor") == b"41"  # notes are not evicted
    tier.clear()
    assert tier.write(stored(keys(0, 8)), pool.pages(0, 8)).all()
    assert tier.read(keys(0, 8), pool.pages(16, 24)).all()


def test_pages_of_a_host_that_left_are_gone_and_those_of_others_stay(
    engine: MooncakeEngine, new_tier: Callable[..., MooncakeTier], pool: Pool
) -> None:
    leaving = new_tier()
    leaving.connect(pool.memory)
    leaving.clear()
    assert leaving.write(stored(keys(0, 4)), pool.pages(0, 4)).all()
    staying = new_tier()
    staying.connect(pool.memory)
    leaving.close()
    assert staying.contains(keys(0, 4)) < 4 or not staying.read(keys(0, 4), pool.pages(16, 20)).any()
    assert staying.write(stored(keys(10, 14)), pool.pages(0, 4)).all()
    assert staying.read(keys(10, 14), pool.pages(16, 20)).all()
