"""Remote tiers whose server is down, goes away, comes back empty, or never answers."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from remote_engines import ENGINES, Engine, Pool, key, keys, stored
from remote_servers import free_port, silent_server
from store_helpers import eventually

from mlkv.errors import TierUnavailable
from mlkv.store.tiers import Tier

SLACK_S = 1.5  # for a busy machine

CALLS: dict[str, Callable[[Tier, Pool], object]] = {
    "connect": lambda tier, pool: tier.connect(pool.memory),
    "contains": lambda tier, pool: tier.contains(keys(0, 8)),
    "read": lambda tier, pool: tier.read(keys(0, 8), pool.pages(0, 8)),
    "write": lambda tier, pool: tier.write(stored(keys(0, 8)), pool.pages(0, 8)),
    "delete": lambda tier, pool: tier.delete(keys(0, 8)),
    "clear": lambda tier, pool: tier.clear(),
    "scan": lambda tier, pool: tier.scan(b"", 10),
    "load_note": lambda tier, pool: tier.load_note("note"),
    "store_note": lambda tier, pool: tier.store_note("note", b"value"),
}


PROMPT = [kind for kind in ENGINES if kind.keeps_deadlines]


@pytest.fixture(scope="module", params=PROMPT, ids=lambda kind: kind.name)
def one_engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    kind = request.param
    if kind.missing():
        pytest.skip(kind.missing())
    engine: Engine = kind(Path(tmp_path_factory.mktemp(kind.name)))
    yield engine
    engine.close()


@pytest.fixture
def engine(one_engine: Engine) -> Engine:
    """Its server runs, whatever the test before did to it."""
    one_engine.server.ensure_running()
    return one_engine


@pytest.fixture
def pool() -> Pool:
    pool = Pool(num_pages=16)
    pool.fill(0, 16, seed=1)
    return pool


@pytest.fixture
def tier(engine: Engine, pool: Pool) -> Iterator[Tier]:
    tier = engine.tier(deadline_s=engine.short_deadline_s)
    tier.connect(pool.memory)
    yield tier
    tier.close()


@pytest.fixture
def filled(engine: Engine, pool: Pool) -> None:
    """Pages 0..8 are there. Written without a deadline that a busy machine would miss."""
    tier = engine.tier(deadline_s=60.0)
    tier.connect(pool.memory)
    assert tier.write(stored(keys(0, 8)), pool.pages(0, 8)).all()
    tier.close()


def comes_back(tier: Tier, pool: Pool) -> bool:
    """Whether it connects and reads pages 0..8, into 8..16."""
    try:
        tier.connect(pool.memory)
        return bool(tier.read(keys(0, 8), pool.pages(8, 16)).all())
    except TierUnavailable:
        return False


def assert_unavailable(call: Callable[[Tier, Pool], object], tier: Tier, pool: Pool) -> str:
    """It ends in time with an error that says where to look. Returns the error's text."""
    started = time.monotonic()
    with pytest.raises(TierUnavailable) as caught:
        call(tier, pool)
    assert time.monotonic() - started < tier.deadline_s + SLACK_S
    return str(caught.value)


def test_a_server_that_is_down_is_an_error_that_names_it(engine: Engine, pool: Pool) -> None:
    port = free_port()
    tier = engine.tier(port=port, deadline_s=engine.short_deadline_s)
    assert f"127.0.0.1:{port}" in assert_unavailable(CALLS["connect"], tier, pool)
    tier.close()


def test_every_call_to_a_killed_server_fails_in_time(engine: Engine, tier: Tier, pool: Pool) -> None:
    engine.server.kill()
    for call in CALLS.values():
        assert_unavailable(call, tier, pool)


def test_connecting_to_what_never_answers_ends_by_its_deadline(engine: Engine, pool: Pool) -> None:
    with silent_server() as server:
        tier = engine.tier(port=server.port, deadline_s=engine.short_deadline_s)
        assert f"127.0.0.1:{server.port}" in assert_unavailable(CALLS["connect"], tier, pool)
        tier.close()


def test_every_call_to_a_server_that_hangs_ends_by_its_deadline(engine: Engine, tier: Tier, pool: Pool) -> None:
    engine.server.hold()
    try:
        for call in CALLS.values():
            assert_unavailable(call, tier, pool)
    finally:
        engine.server.resume()


@pytest.mark.parametrize("name", ["read", "write", "contains"])
def test_a_server_that_stops_answering_is_found_out_and_its_return_too(
    engine: Engine, filled: None, tier: Tier, pool: Pool, name: str
) -> None:
    engine.server.hold()
    try:
        assert_unavailable(CALLS[name], tier, pool)
    finally:
        engine.server.resume()
    pool.poison(8, 16)
    eventually(lambda: comes_back(tier, pool), "it has come back")
    assert [bytes(page) for page in pool.pages(8, 16)] == [bytes(page) for page in pool.pages(0, 8)]


def test_nothing_is_written_to_a_page_after_the_call_has_ended(
    engine: Engine, filled: None, tier: Tier, pool: Pool
) -> None:
    engine.server.hold()
    try:
        assert_unavailable(CALLS["read"], tier, pool)
        pool.poison(0, 8)
    finally:
        engine.server.resume()
    # By then the server has worked off what it was sent.
    eventually(lambda: comes_back(tier, pool), "it has come back")
    gc.collect()
    assert all(bytes(page) == b"\xee" * len(page) for page in pool.pages(0, 8))


def test_after_a_restart_without_memory_everything_is_absent(engine: Engine, filled: None, pool: Pool) -> None:
    tier = engine.tier(deadline_s=60.0)
    tier.connect(pool.memory)
    assert tier.contains(keys(0, 8)) == 8
    engine.restart_empty()
    tier.connect(pool.memory)
    assert tier.contains(keys(0, 8)) == 0
    assert not tier.read(keys(0, 8), pool.pages(8, 16)).any()
    assert tier.write(stored([key(3)]), [pool.page(3)]).all()
    assert tier.read([key(3)], [pool.page(9)]).all()
    tier.close()


def test_a_server_killed_while_it_works_never_gives_wrong_success(
    engine: Engine, filled: None, tier: Tier, pool: Pool
) -> None:
    whole = [bytes(page) for page in pool.pages(0, 8)]
    killer = threading.Timer(0.1, engine.server.kill)
    killer.start()

    def read_until_it_fails() -> None:
        give_up_at = time.monotonic() + 20
        while time.monotonic() < give_up_at:
            pool.poison(8, 16)
            read = tier.read(keys(0, 8), pool.pages(8, 16))
            assert all(bytes(pool.page(8 + at)) == whole[at] for at in range(8) if read[at])

    with pytest.raises(TierUnavailable):
        read_until_it_fails()
    killer.join()
