"""What every remote tier promises, tried on the real servers."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from remote_engines import ENGINES, PAGE_BYTES, Engine, Pool, key, keys, stored

from mlkv.store.tiers import Tier


@pytest.fixture(scope="module", params=ENGINES, ids=lambda kind: kind.name)
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    kind = request.param
    if kind.missing():
        pytest.skip(kind.missing())
    engine: Engine = kind(Path(tmp_path_factory.mktemp(kind.name)))
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def pool() -> Pool:
    return Pool()


@pytest.fixture(scope="module")
def one_tier(engine: Engine, pool: Pool) -> Iterator[Tier]:
    tier = engine.tier(deadline_s=60.0)  # what it does counts here, not how fast
    tier.connect(pool.memory)
    yield tier
    tier.close()


@pytest.fixture
def tier(one_tier: Tier) -> Tier:
    """Connected and empty."""
    one_tier.clear()
    return one_tier


def test_pages_come_back_as_they_were_written(tier: Tier, pool: Pool) -> None:
    pool.fill(0, 20, seed=1)
    pool.poison(20, 40)
    assert tier.write(stored(keys(0, 20)), pool.pages(0, 20)).tolist() == [True] * 20
    assert tier.read(keys(0, 20), pool.pages(20, 40)).tolist() == [True] * 20
    assert [bytes(page) for page in pool.pages(20, 40)] == [bytes(page) for page in pool.pages(0, 20)]


def test_pages_may_be_read_in_any_order_into_any_place(tier: Tier, pool: Pool) -> None:
    pool.fill(0, 8, seed=2)
    tier.write(stored(keys(0, 8)), pool.pages(0, 8))
    order = [5, 2, 7, 0]
    places = [30, 11, 12, 29]
    assert tier.read([key(at) for at in order], [pool.page(at) for at in places]).all()
    assert [bytes(pool.page(at)) for at in places] == [bytes(pool.page(at)) for at in order]


def test_reading_what_is_not_there_gives_the_rest(tier: Tier, pool: Pool) -> None:
    pool.fill(0, 6, seed=3)
    tier.write(stored([key(0), key(2), key(5)]), [pool.page(0), pool.page(2), pool.page(5)])
    assert tier.read(keys(0, 7), pool.pages(10, 17)).tolist() == [True, False, True, False, False, True, False]
    assert [bytes(pool.page(10 + at)) for at in (0, 2, 5)] == [bytes(pool.page(at)) for at in (0, 2, 5)]


def test_contains_counts_up_to_the_first_absent_key(tier: Tier, pool: Pool) -> None:
    present = [*keys(0, 5), *keys(6, 9)]
    tier.write(stored(present), pool.pages(0, 8))
    assert tier.contains(keys(0, 9)) == 5
    assert tier.contains(keys(6, 9)) == 3
    assert tier.contains(keys(5, 9)) == 0
    assert tier.contains([]) == 0


def test_contains_finds_the_end_of_a_long_chain(tier: Tier, pool: Pool) -> None:
    for at in range(0, 1200, 60):
        tier.write(stored(keys(at, at + 60)), pool.pages(0, 60))
    assert tier.contains(keys(0, 1500)) == 1200
    tier.delete([key(1023)])
    assert tier.contains(keys(0, 1500)) == 1023
    tier.delete([key(0)])
    assert tier.contains(keys(0, 1500)) == 0


def test_empty_batches_do_nothing(tier: Tier) -> None:
    assert tier.read([], []).tolist() == []
    assert tier.write([], []).tolist() == []
    tier.delete([])


def test_deleted_pages_are_absent_at_once_and_can_be_written_again(tier: Tier, pool: Pool) -> None:
    pool.fill(0, 4, seed=4)
    tier.write(stored(keys(0, 4)), pool.pages(0, 4))
    assert tier.contains(keys(0, 4)) == 4
    assert tier.read(keys(0, 4), pool.pages(10, 14)).all()
    tier.delete([key(1), key(3), key(99)])
    assert tier.contains([key(1)]) == 0
    assert tier.read(keys(0, 4), pool.pages(10, 14)).tolist() == [True, False, True, False]
    pool.fill(20, 21, seed=5)
    assert tier.write(stored([key(1)]), [pool.page(20)]).all()
    assert tier.read([key(1)], [pool.page(10)]).all()
    assert bytes(pool.page(10)) == bytes(pool.page(20))


def test_a_page_written_again_is_replaced(tier: Tier, pool: Pool) -> None:
    """What is there may be of before an invalidation, and would otherwise be useless for ever."""
    pool.fill(0, 2, seed=6)
    for at in (0, 1):
        assert tier.write(stored([key(0)]), [pool.page(at)]).all()
        assert tier.read([key(0)], [pool.page(5)]).all()
        assert bytes(pool.page(5)) == bytes(pool.page(at))


def test_another_instance_finds_what_was_written(engine: Engine, tier: Tier, pool: Pool) -> None:
    pool.fill(0, 3, seed=7)
    tier.write(stored(keys(0, 3)), pool.pages(0, 3))
    other_pool = Pool()
    other = engine.tier()
    other.connect(other_pool.memory)
    assert other.contains(keys(0, 4)) == 3
    assert other.read(keys(0, 3), other_pool.pages(0, 3)).all()
    assert [bytes(page) for page in other_pool.pages(0, 3)] == [bytes(page) for page in pool.pages(0, 3)]
    other.close()


def test_connecting_again_loses_nothing(tier: Tier, pool: Pool) -> None:
    tier.write(stored(keys(0, 3)), pool.pages(0, 3))
    tier.connect(pool.memory)
    assert tier.contains(keys(0, 3)) == 3


def test_clear_removes_pages_and_leaves_notes(tier: Tier, pool: Pool) -> None:
    tier.store_note("era-7", b"\x00\xff value")
    tier.write(stored(keys(0, 30)), pool.pages(0, 30))
    tier.clear()
    assert tier.contains(keys(0, 1)) == 0
    assert not tier.read(keys(0, 30), pool.pages(0, 30)).any()
    assert tier.load_note("era-7") == b"\x00\xff value"


def test_clear_leaves_what_belongs_to_others(engine: Engine, tier: Tier, pool: Pool) -> None:
    other_pool = Pool(2 * PAGE_BYTES, 8)
    other = engine.tier(2 * PAGE_BYTES)
    other.connect(other_pool.memory)
    other.write(stored(keys(0, 3)), other_pool.pages(0, 3))
    engine.put("somebody-else", b"precious")
    tier.write(stored(keys(0, 3)), pool.pages(0, 3))
    tier.clear()
    assert tier.contains(keys(0, 3)) == 0
    assert other.contains(keys(0, 3)) == 3
    assert engine.get("somebody-else") == b"precious"
    other.clear()
    assert other.contains(keys(0, 3)) == 0
    other.close()


def test_deployments_with_other_page_sizes_do_not_meet(engine: Engine, tier: Tier, pool: Pool) -> None:
    other_pool = Pool(PAGE_BYTES // 2)
    other = engine.tier(PAGE_BYTES // 2)
    other.connect(other_pool.memory)
    other.clear()
    tier.write(stored(keys(0, 3)), pool.pages(0, 3))
    tier.store_note("where", b"here")
    assert other.contains(keys(0, 3)) == 0
    assert not other.read(keys(0, 3), other_pool.pages(0, 3)).any()
    assert other.load_note("where") is None
    other.close()


def test_scan_lists_ascending_pages_of_this_deployment_only(engine: Engine, tier: Tier, pool: Pool) -> None:
    if not engine.lists:
        with pytest.raises(NotImplementedError):
            tier.scan(b"", 1)
        return
    for at in (20, 0, 10):
        tier.write(stored(keys(at, at + 10)), pool.pages(0, 10))
    engine.put("mlkv/1/1/p/" + "0" * 32, b"of another deployment")
    engine.put(engine.page_name(key(5)) + "x", b"of nobody")
    tier.store_note("note", b"")
    assert tier.scan(b"", 100) == keys(0, 30)
    assert tier.scan(b"", 7) == keys(0, 7)
    assert tier.scan(key(6), 7) == keys(7, 14)
    assert tier.scan(key(29), 7) == []


def test_notes_are_kept_replaced_and_bounded(engine: Engine, tier: Tier) -> None:
    assert tier.load_note("never-stored") is None
    for value in (b"first", b"", b"x" * 1024):
        tier.store_note("note", value)
        assert tier.load_note("note") == value
    with pytest.raises(ValueError, match="1024"):
        tier.store_note("note", b"x" * 1025)
    with pytest.raises(ValueError, match="letters"):
        tier.store_note("no/path", b"")
    with pytest.raises(ValueError, match="letters"):
        tier.load_note("")


@pytest.mark.parametrize("size", [1, PAGE_BYTES - 1, PAGE_BYTES + 1, 3 * PAGE_BYTES])
def test_an_object_of_another_size_is_not_a_page(engine: Engine, tier: Tier, pool: Pool, size: int) -> None:
    pool.fill(0, 3, seed=8)
    tier.write(stored(keys(0, 3)), pool.pages(0, 3))
    engine.put(engine.page_name(key(1)), b"z" * size)
    assert tier.read(keys(0, 3), pool.pages(10, 13)).tolist() == [True, False, True]
    assert bytes(pool.page(10)) == bytes(pool.page(0))
    assert bytes(pool.page(12)) == bytes(pool.page(2))


def test_a_page_of_another_size_is_not_written(tier: Tier, pool: Pool) -> None:
    with pytest.raises(ValueError, match="bytes"):
        tier.write(stored([key(0)]), [pool.page(0)[:-1]])
    assert tier.contains([key(0)]) == 0


def test_a_damaged_page_can_be_replaced(engine: Engine, tier: Tier, pool: Pool) -> None:
    pool.fill(0, 1, seed=9)
    tier.write(stored([key(0)]), [pool.page(0)])
    whole = engine.get(engine.page_name(key(0)))
    assert whole == bytes(pool.page(0))
    engine.put(engine.page_name(key(0)), bytes([whole[0] ^ 1]) + whole[1:])
    tier.read([key(0)], [pool.page(5)])  # whoever verifies it finds out
    assert bytes(pool.page(5)) != bytes(pool.page(0))
    tier.delete([key(0)])
    assert tier.write(stored([key(0)]), [pool.page(0)]).all()
    assert tier.read([key(0)], [pool.page(5)]).all()
    assert bytes(pool.page(5)) == bytes(pool.page(0))


def test_many_threads_do_not_mix_their_pages(tier: Tier, pool: Pool) -> None:
    pool.fill(0, 32, seed=10)
    wrong: list[str] = []

    def work(number: int) -> None:
        mine, place = keys(8 * number, 8 * number + 8), 32 + 8 * number
        for _ in range(5):
            if not tier.write(stored(mine), pool.pages(8 * number, 8 * number + 8)).all():
                wrong.append("not written")
            pool.poison(place, place + 8)
            if not tier.read(mine, pool.pages(place, place + 8)).all():
                wrong.append("not read")
            if any(pool.page(8 * number + at) != pool.page(place + at) for at in range(8)):
                wrong.append("other bytes")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(tier.concurrency)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert wrong == []


def test_stats_ask_nobody(tier: Tier) -> None:
    started = time.monotonic()
    for _ in range(100):
        tier.stats()
    assert time.monotonic() - started < 0.1
