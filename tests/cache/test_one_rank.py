"""The facade with one rank: what engines may expect of each call."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
import torch

from mlkv import CacheUsageError, ConfigError, Hit, MLKVConfig, MultiLevelCache, Replica
from tests.cache.bench import PAGE_TOKENS, POISON, Rank, slots_of, tokens_of


@pytest.fixture
def rank() -> Iterator[Rank]:
    made = Rank(Replica.single())
    yield made
    made.cache.close()


def stored(rank: Rank, length: int, seed: int = 0) -> list[int]:
    tokens = tokens_of(length, seed)
    slots = slots_of(0, length)
    rank.compute(tokens, slots)
    rank.store(f"stored{seed}", tokens, slots)
    rank.poison()
    return tokens


def test_what_was_offloaded_comes_back_bit_for_bit(rank: Rank) -> None:
    tokens = stored(rank, 19)
    slots = slots_of(100, 19)
    assert rank.fetch("b", tokens, slots) == 16
    assert rank.wrong_tokens(tokens[:16], slots[:16]) == []
    rank.drain()
    rank.check_conserved()


@pytest.mark.parametrize("num_pages", [1, 2, 5])
@pytest.mark.parametrize("extra", [-1, 0, 1])
def test_hit_leaves_a_token_to_compute_and_writes_only_what_it_reports(
    rank: Rank, num_pages: int, extra: int
) -> None:
    tokens = stored(rank, num_pages * PAGE_TOKENS)
    length = num_pages * PAGE_TOKENS + extra
    prompt = ([*tokens, 7])[:length]
    whole = (length - 1) // PAGE_TOKENS * PAGE_TOKENS
    hit = rank.ask("b", prompt)
    assert hit.num_tokens == whole
    if not whole:
        return
    slots = slots_of(50, length)
    rank.cache.load("b", slots[:whole])
    rank.step_until(lambda: "b" in rank.seen.loaded, "load")
    assert rank.seen.loaded["b"] == whole
    assert rank.wrong_tokens(prompt[:whole], slots[:whole]) == []
    for tensor in (*rank.k, *rank.v):
        untouched = torch.cat([tensor[:50], tensor[50 + whole :]])
        assert bool((untouched == POISON).all())


def test_one_token_and_shorter_than_a_page_are_no_hits(rank: Rank) -> None:
    tokens = stored(rank, 8)
    assert rank.ask("one", tokens[:1]) == Hit(0)
    assert rank.ask("short", tokens[: PAGE_TOKENS - 1]) == Hit(0)
    assert rank.ask("empty", []) == Hit(0)


def test_pages_the_device_has_are_not_loaded(rank: Rank) -> None:
    tokens = stored(rank, 20)
    hit = rank.ask("b", tokens, device_tokens=9)
    assert hit == Hit(num_tokens=16, start=8)
    # Token 8 lies in a page shared with another request: it is valid and must not be written.
    slots = slots_of(60, 8)
    slots[0] = -1
    rank.cache.load("b", slots)
    rank.step_until(lambda: "b" in rank.seen.loaded, "load")
    assert rank.cache.stats().loaded_pages == 2
    # Of tokens 0..15 in slots 52..67, those from 9 on were written, and nothing before them.
    assert rank.wrong_tokens(tokens[:16], slots_of(52, 16)) == list(range(9))
    assert bool((rank.k[0][:61] == POISON).all())


def test_a_hit_that_the_device_covers_is_no_hit_and_leaves_no_lease(rank: Rank) -> None:
    tokens = stored(rank, 20)
    assert rank.ask("b", tokens, device_tokens=16) == Hit(0)
    rank.drain()
    rank.check_conserved()


def test_gains_below_the_setting_are_not_loaded() -> None:
    rank = Rank(Replica.single(), min_load_tokens=9)
    tokens = stored(rank, 17)
    assert rank.ask("small", tokens, device_tokens=8) == Hit(0)
    assert rank.ask("large", tokens, device_tokens=7).num_tokens == 16
    rank.cache.abort("large")
    rank.drain()
    rank.check_conserved()
    rank.cache.close()


def test_declining_returns_the_lease_whether_answered_or_not(rank: Rank) -> None:
    tokens = stored(rank, 20)
    rank.ask("answered", tokens)
    rank.cache.decline("answered")
    rank.cache.lookup("unanswered", tokens)
    rank.cache.decline("unanswered")
    for _ in range(5):
        rank.step()
    rank.drain()
    assert "unanswered" not in rank.seen.hits
    rank.check_conserved()


def test_generated_tokens_are_cached_with_the_prompt(rank: Rank) -> None:
    prompt, answer = tokens_of(10), tokens_of(7, seed=3)
    turn = prompt + answer
    slots = slots_of(0, len(turn))
    rank.compute(turn, slots)
    rank.store("turn1", turn, slots)
    rank.poison()
    follow_up = turn + tokens_of(5, seed=4)
    assert rank.fetch("turn2", follow_up, slots_of(100, len(follow_up))) == 16
    assert rank.wrong_tokens(turn[:16], slots_of(100, 16)) == []


def test_pages_already_stored_are_not_written_again(rank: Rank) -> None:
    tokens = stored(rank, 16)
    longer = tokens + tokens_of(8, seed=9)
    slots = slots_of(0, len(longer))
    rank.compute(longer, slots)
    rank.store("longer", longer, slots)
    assert rank.cache.stats().offloaded_pages == 4 + 2
    assert rank.seen.offloaded["longer"] == 24


def test_duplicate_prefixes_in_one_step_are_written_once_and_end_readable(rank: Rank) -> None:
    tokens = tokens_of(16)
    for number in range(3):
        slots = slots_of(20 * number, 16)
        rank.compute(tokens, slots)
        rank.cache.offload(f"r{number}", tokens, slots)
    rank.drain()
    assert sorted(rank.seen.released) == ["r0", "r1", "r2"]
    assert rank.cache.stats().offloaded_pages == 4
    assert rank.cache.audit().ready == 4
    rank.check_conserved()


def test_an_offload_without_a_whole_page_is_released_at_once(rank: Rank) -> None:
    rank.cache.offload("tiny", tokens_of(3), slots_of(0, 3))
    result = rank.step()
    assert result.released == ["tiny"]
    assert result.offloaded == {"tiny": 0}


def test_adapters_media_and_salts_share_nothing(rank: Rank) -> None:
    tokens = stored(rank, 12)
    for name, options in {
        "adapter": {"adapter": "lora-1"},
        "media": {"media": ("sha256:1",)},
        "salt": {"salt": "tenant"},
    }.items():
        assert rank.ask(name, tokens, **options) == Hit(0)
    assert rank.ask("plain", tokens).num_tokens == 8


def test_a_full_pool_evicts_suffixes_first_and_keeps_serving() -> None:
    rank = Rank(Replica.single(), host_pages=8)
    first = stored(rank, 6 * PAGE_TOKENS, seed=1)
    stored(rank, 5 * PAGE_TOKENS, seed=2)
    hit = rank.ask("first", [*first, 1])
    assert hit.num_tokens == 3 * PAGE_TOKENS  # its front survived, its end made room
    rank.cache.abort("first")
    rank.drain()
    rank.check_conserved()
    rank.cache.close()


def test_an_answered_hit_cannot_be_evicted_before_it_is_loaded() -> None:
    rank = Rank(Replica.single(), host_pages=8)
    tokens = stored(rank, 4 * PAGE_TOKENS, seed=1)
    hit = rank.ask("held", [*tokens, 1])
    other = tokens_of(8 * PAGE_TOKENS, seed=2)
    slots = slots_of(100, len(other))
    rank.compute(other, slots)
    rank.store("pressure", other, slots)  # more than what is left: it stores what fits
    assert rank.seen.offloaded["pressure"] == 4 * PAGE_TOKENS
    rank.cache.load("held", slots_of(0, hit.num_tokens))
    rank.step_until(lambda: "held" in rank.seen.loaded, "load")
    assert rank.wrong_tokens(tokens, slots_of(0, len(tokens))) == []
    rank.drain()
    rank.check_conserved()
    rank.cache.close()


@pytest.mark.parametrize("state", ["asked", "hit", "loading", "loaded"])
def test_aborting_a_load_in_any_state_returns_everything(rank: Rank, state: str) -> None:
    tokens = stored(rank, 20)
    rank.cache.lookup("r", tokens)
    if state != "asked":
        rank.step_until(lambda: "r" in rank.seen.hits, "hit")
    if state in ("loading", "loaded"):
        rank.cache.load("r", slots_of(0, 16))
    if state == "loaded":
        rank.step_until(lambda: "r" in rank.seen.loaded, "load")
    rank.seen.released.clear()
    rank.cache.abort("r")
    rank.step_until(lambda: "r" in rank.seen.released, "release")
    rank.drain()
    assert rank.seen.released == ["r"]
    rank.check_conserved()


@pytest.mark.parametrize("steps", range(8))
def test_aborting_an_offload_after_any_number_of_steps_returns_everything(rank: Rank, steps: int) -> None:
    tokens, slots = tokens_of(20), slots_of(0, 20)
    rank.compute(tokens, slots)
    rank.cache.offload("r", tokens, slots)
    for _ in range(steps):
        rank.step()
    rank.seen.released.clear()
    rank.cache.abort("r")
    rank.step_until(lambda: "r" in rank.seen.released, "release")
    rank.poison()  # the engine reuses the slots; whatever the store has must not be of this
    rank.drain()
    assert rank.seen.released == ["r"]
    rank.check_conserved()
    num_tokens = rank.fetch("again", tokens, slots_of(50, 20))
    assert rank.wrong_tokens(tokens[:num_tokens], slots_of(50, num_tokens)) == []


def test_an_aborted_request_lives_again_while_its_old_load_drains() -> None:
    rank = Rank(Replica.single(), faults="delay=all/load:30-30ms")
    tokens = stored(rank, 20)
    hit = rank.ask("r", tokens)
    rank.cache.load("r", slots_of(0, hit.num_tokens))
    rank.cache.abort("r")
    rank.seen.hits.clear()
    rank.cache.lookup("r", tokens)  # readmitted in the same step
    order = []
    while "r" not in rank.seen.hits:
        result = rank.step()
        order += ["released"] * ("r" in result.released) + ["hit"] * ("r" in result.hits)
    assert order == ["released", "hit"]
    rank.cache.load("r", slots_of(100, 16))
    rank.step_until(lambda: "r" in rank.seen.loaded, "load")
    assert rank.wrong_tokens(tokens[:16], slots_of(100, 16)) == []
    rank.cache.close()


def test_clear_forgets_pages_but_finishes_what_is_being_loaded(rank: Rank) -> None:
    tokens = stored(rank, 20)
    hit = rank.ask("r", tokens)
    rank.cache.clear()
    rank.cache.load("r", slots_of(0, hit.num_tokens))
    rank.step_until(lambda: "r" in rank.seen.loaded, "load")
    assert rank.wrong_tokens(tokens[:16], slots_of(0, 16)) == []
    assert rank.ask("later", tokens) == Hit(0)
    rank.drain()
    assert rank.cache.audit().ready == 0
    rank.check_conserved()


def test_clear_while_an_offload_is_in_flight_does_not_publish_it() -> None:
    rank = Rank(Replica.single(), faults="delay=all/offload:20-20ms")
    tokens, slots = tokens_of(20), slots_of(0, 20)
    rank.compute(tokens, slots)
    rank.cache.offload("r", tokens, slots)
    rank.step_until(lambda: rank.cache.transferring == 1, "copy")
    rank.cache.clear()
    rank.step_until(lambda: "r" in rank.seen.offloaded, "end of offload")
    assert rank.seen.offloaded["r"] == 0
    assert rank.ask("later", tokens) == Hit(0)
    rank.check_conserved()
    rank.cache.close()


def test_a_lost_store_is_a_miss_and_never_an_error(rank: Rank, caplog: pytest.LogCaptureFixture) -> None:
    tokens = stored(rank, 20)
    rank.ask("held", tokens)
    kill_owner(rank)
    rank.cache.load("held", slots_of(0, 16))  # the mapped pages are still there
    rank.step_until(lambda: "held" in rank.seen.loaded, "load")
    assert rank.wrong_tokens(tokens[:16], slots_of(0, 16)) == []
    assert rank.ask("later", tokens) == Hit(0)
    rank.cache.offload("more", tokens, slots_of(0, 20))
    rank.step_until(lambda: "more" in rank.seen.unstored, "offload")
    assert "more" in rank.seen.released
    rank.drain()
    assert "from now on every lookup is a miss" in caplog.text


def kill_owner(rank: Rank) -> None:
    os.kill(rank.cache._client.owner_pid, signal.SIGKILL)


def test_a_rotten_page_shortens_the_hit_and_its_key_is_forgotten() -> None:
    rank = Rank(Replica.single(), faults="corrupt=all/load:1.0")
    tokens = stored(rank, 20)
    num_tokens = rank.fetch("r", tokens, slots_of(0, 20))
    assert num_tokens < 16
    assert "verified" in rank.seen.failed["r"].reason
    assert rank.wrong_tokens(tokens[:num_tokens], slots_of(0, num_tokens)) == []
    rank.drain()
    # The bad page and what hangs below it are gone: the same bytes are never matched again.
    assert rank.ask("again", tokens).num_tokens == num_tokens
    rank.cache.abort("again")
    rank.drain()
    rank.check_conserved()
    assert rank.cache.audit().pages_bad == 1
    # What is computed again is stored again.
    rank.compute(tokens, slots_of(0, 20))
    rank.store("repair", tokens, slots_of(0, 20))
    assert rank.seen.offloaded["repair"] == 20
    rank.cache.close()


def test_a_failed_offload_is_released_and_shows_only_its_good_front() -> None:
    rank = Rank(Replica.single(), faults="fail=all/offload:1.0,seed=3")
    tokens, slots = tokens_of(20), slots_of(0, 20)
    rank.compute(tokens, slots)
    rank.store("r", tokens, slots)
    assert "r" in rank.seen.released
    assert "rank 0 stored" in rank.seen.unstored["r"].reason
    num_tokens = rank.seen.unstored["r"].num_tokens
    assert rank.fetch("again", [*tokens, 1], slots_of(50, 21)) == num_tokens
    assert rank.wrong_tokens(tokens[:num_tokens], slots_of(50, num_tokens)) == []
    rank.check_conserved()
    rank.cache.close()


def test_more_tasks_than_the_bound_are_misses_not_errors() -> None:
    rank = Rank(Replica.single(), move={"max_tasks": 3})
    tokens = stored(rank, 20)
    for number in range(6):
        rank.cache.lookup(f"r{number}", tokens)
    rank.step_until(lambda: len(rank.seen.hits) == 6, "answers")
    found = [rank.seen.hits[f"r{number}"].num_tokens for number in range(6)]
    assert found == [16, 16, 16, 0, 0, 0]
    for number in range(6):
        rank.cache.abort(f"r{number}")
    rank.drain()
    rank.check_conserved()
    rank.cache.close()


def test_wrong_calls_are_named_and_change_nothing(rank: Rank) -> None:
    tokens = stored(rank, 20)
    with pytest.raises(CacheUsageError, match="'r' has no answered hit"):
        rank.cache.load("r", slots_of(0, 16))
    with pytest.raises(CacheUsageError, match="'r' has no lookup"):
        rank.cache.decline("r")
    with pytest.raises(CacheUsageError, match="20 tokens but 19 slots"):
        rank.cache.offload("r", tokens, slots_of(0, 19))
    with pytest.raises(CacheUsageError, match=r"slots 250\.\.269 leave \[0, 256\)"):
        rank.cache.offload("r", tokens, slots_of(250, 20))
    with pytest.raises(ConfigError, match="token ids"):
        rank.cache.lookup("r", [-1, 2, 3])
    hit = rank.ask("r", tokens)
    with pytest.raises(CacheUsageError, match="already"):
        rank.cache.lookup("r", tokens)
    with pytest.raises(CacheUsageError, match=r"int64 \[16\]"):
        rank.cache.load("r", slots_of(0, 15))
    rank.cache.load("r", slots_of(0, hit.num_tokens))
    rank.step_until(lambda: "r" in rank.seen.loaded, "load")
    rank.drain()
    rank.check_conserved()


def test_settings_and_layout_must_fit_each_other() -> None:
    rank = Rank(Replica.single())
    other = MLKVConfig(model="test", page_tokens=8)
    with pytest.raises(ConfigError, match="page_tokens=8"):
        MultiLevelCache(other, rank.layout, rank.pool, Replica.single())
    rank.cache.close()


def test_a_pool_smaller_than_a_page_is_refused() -> None:
    with pytest.raises(ConfigError, match="host_bytes"):
        Rank(Replica.single(), store={"host_bytes": 1000})


def test_stepping_a_closed_cache_is_refused(rank: Rank) -> None:
    rank.cache.close()
    rank.cache.close()
    with pytest.raises(CacheUsageError, match="closed"):
        rank.cache.step()
