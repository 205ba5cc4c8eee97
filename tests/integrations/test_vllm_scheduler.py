"""The scheduler's half of the vLLM connector against vLLM's bookkeeping in miniature: no block is lost.

Needs no vLLM. The cache, its store and the copies are real; requests and the block pool are stand-ins that count.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mlkv import KVLayout, KVPool, MLKVConfig, MultiLevelCache, Plane, Replica
from mlkv.integrations.vllm.scheduler import Outcome, SchedulerSide
from mlkv.integrations.vllm.settings import Settings

BLOCK, PAGE, NUM_BLOCKS = 4, 8, 32
LAYOUT = KVLayout(1, 1, PAGE, (Plane("kv", torch.float32, 4),))


@dataclass
class Request:
    """What the connector reads of vLLM's request."""

    request_id: str
    all_token_ids: list[int]
    num_prompt_tokens: int
    num_computed_tokens: int = 0
    skip_reading_prefix_cache: bool = False
    prompt_embeds: Any = None
    cache_salt: str | None = None
    lora_request: Any = None
    mm_features: list[Any] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)


class BlockPool:
    """vLLM's pool, as far as the connector touches it, and its tables of blocks."""

    def __init__(self) -> None:
        self.blocks = [SimpleNamespace(block_id=number, ref_cnt=0) for number in range(NUM_BLOCKS)]
        self.tables: dict[str, list[int]] = {}
        self.block_pool = self

    def touch(self, blocks: list[Any]) -> None:
        for block in blocks:
            block.ref_cnt += 1

    def free_blocks(self, blocks: Any) -> None:
        for block in blocks:
            block.ref_cnt -= 1
            assert block.ref_cnt >= 0

    def get_block_ids(self, request_id: str) -> tuple[list[int]]:
        return (self.tables[request_id],)

    def give(self, request_id: str, count: int) -> list[int]:
        free = [block for block in self.blocks if not block.ref_cnt][:count]
        self.touch(free)
        self.tables[request_id] = [block.block_id for block in free]
        return self.tables[request_id]

    def take_back(self, request_id: str) -> None:
        self.free_blocks([self.blocks[block] for block in self.tables.pop(request_id)])

    @property
    def num_used(self) -> int:
        return sum(block.ref_cnt > 0 for block in self.blocks)


class Bench:
    """A scheduler's half, a cache over real memory, and the steps of an engine."""

    def __init__(self, faults: str = "") -> None:
        self.kv = torch.zeros(NUM_BLOCKS, BLOCK, 1, 4)
        config = MLKVConfig(
            model="test", page_tokens=PAGE, faults=faults, store={"host_bytes": 64 * LAYOUT.page_bytes}
        )
        self.cache = MultiLevelCache(config, LAYOUT, KVPool(LAYOUT, [[self.kv]]), Replica.single())
        settings = Settings(config, LAYOUT, BLOCK, NUM_BLOCKS, ("layer",), 1, "bench", True, True, True)
        self.side = SchedulerSide(settings)
        self.side.cache = self.cache
        self.pool = BlockPool()
        self.side.bind(self.pool)  # type: ignore[arg-type]
        self.received: set[str] = set()
        self.bad_blocks: set[int] = set()
        self.good_tokens: list[int] = []  # of failed loads

    def new(self, name: str, tokens: list[int], **more: Any) -> Request:
        request = Request(name, list(tokens), len(tokens), **more)
        self.side.on_new_request(request)  # type: ignore[arg-type]
        return request

    def step(self, *computed: Request) -> Outcome:
        """One step of the engine, which computes all that the given requests lack."""
        counts = {r.request_id: r.num_tokens - r.num_computed_tokens for r in computed}
        self.side.scheduled(SimpleNamespace(num_scheduled_tokens=counts))  # type: ignore[arg-type]
        self.side.start_loads()
        for request in computed:
            request.num_computed_tokens = request.num_tokens
            for at, token in enumerate(request.all_token_ids):
                block = self.pool.tables[request.request_id][at // BLOCK]
                self.kv[block, at % BLOCK] = sum(request.all_token_ids[: at + 1]) + token / 1024
        self.side.start_stores()
        agreed = self.cache.step()
        self.good_tokens += [failure.num_tokens for failure in agreed.failed.values()]
        outcome = self.side.on_step(agreed)
        self.received |= outcome.received
        self.bad_blocks |= outcome.bad_blocks
        return outcome

    def settle(self) -> None:
        self.until(lambda: not self.side.busy)

    def until(self, done: Any) -> None:
        give_up_at = time.monotonic() + 20
        while not done():
            assert time.monotonic() < give_up_at
            self.step()
            time.sleep(0.0002)

    def admit(self, request: Request) -> int:
        """Look up, allocate, and load what is found. Returns how many tokens that is."""
        found: list[int | None] = [None]

        def matched() -> bool:
            found[0] = self.side.matched_tokens(request, 0)  # type: ignore[arg-type]
            return found[0] is not None

        self.until(matched)
        blocks = self.pool.give(request.request_id, -(-request.num_tokens // BLOCK) + 6)
        self.allocated(request, blocks, found[0] or 0)
        return found[0] or 0

    def allocated(self, request: Request, blocks: list[int], external: int) -> None:
        given = SimpleNamespace(get_block_ids=lambda: (blocks,))
        self.side.allocated(request, given, external)  # type: ignore[arg-type]

    def loaded(self, request: Request, num_tokens: int) -> None:
        """vLLM goes on with a request whose load is over."""
        self.received.discard(request.request_id)
        request.num_computed_tokens = num_tokens
        self.allocated(request, self.pool.tables[request.request_id], 0)

    def finish(self, request: Request, *, blocks_stay: bool = False) -> None:
        self.side.finished(request, self.pool.tables[request.request_id])  # type: ignore[arg-type]
        if not blocks_stay:
            self.pool.take_back(request.request_id)

    def preempt(self, request: Request) -> None:
        self.pool.take_back(request.request_id)
        request.num_computed_tokens = 0

    def store(self, tokens: list[int]) -> None:
        request = self.new("store", tokens)
        self.admit(request)
        self.step(request)
        request.all_token_ids.append(0)
        self.finish(request)
        self.settle()


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.cache.close()


TOKENS = list(range(100, 133))  # four pages and a token


def test_a_stored_prompt_is_found_and_loaded(bench: Bench) -> None:
    bench.store(TOKENS)
    wanted = bench.kv.clone()
    bench.kv.zero_()
    request = bench.new("again", TOKENS)
    assert bench.admit(request) == 32
    bench.until(lambda: "again" in bench.received)
    assert bench.bad_blocks == set()
    blocks = bench.pool.tables["again"][:8]
    # The first request had the same blocks, as nothing else was in the pool.
    assert bench.kv[blocks].equal(wanted[blocks])
    bench.loaded(request, 32)
    bench.step(request)
    bench.finish(request)
    bench.settle()
    assert bench.pool.num_used == 0


def test_blocks_of_a_preempted_request_stay_until_they_are_stored(bench: Bench) -> None:
    request = bench.new("one", TOKENS)
    bench.admit(request)
    bench.step(request)
    blocks = bench.pool.tables["one"][:8]
    bench.preempt(request)
    assert bench.side.holds_blocks
    assert all(bench.pool.blocks[block].ref_cnt == 1 for block in blocks)
    bench.settle()
    assert not bench.side.holds_blocks
    assert bench.pool.num_used == 0
    assert bench.admit(request) == 32  # what it had computed is found again


def test_abort_in_every_state_returns_blocks_and_leases() -> None:
    bench = Bench(faults="delay=all/load:80-80ms")  # so that the load is in flight when its request goes
    bench.store(TOKENS)
    waiting = bench.new("asked", TOKENS)
    assert bench.side.matched_tokens(waiting, 0) is None  # type: ignore[arg-type]
    bench.pool.give("asked", 0)
    bench.finish(waiting)
    hit = bench.new("hit", TOKENS)
    bench.until(lambda: bench.side.matched_tokens(hit, 0))  # type: ignore[arg-type]
    bench.pool.give("hit", 0)
    bench.finish(hit)
    loading = bench.new("loading", TOKENS)
    bench.admit(loading)
    bench.step()
    bench.finish(loading, blocks_stay=True)
    assert "loading" not in bench.received
    bench.until(lambda: "loading" in bench.received)
    bench.pool.take_back("loading")
    storing = bench.new("storing", TOKENS[::-1])
    bench.admit(storing)
    bench.step(storing)
    bench.finish(storing)
    bench.settle()
    report = bench.cache.audit()
    assert (report.leases, report.reservations, report.problem) == (0, 0, "")
    assert bench.side.num_live == 0
    assert bench.pool.num_used == 0
    bench.cache.close()


def test_a_hit_that_begins_after_what_the_device_still_has_is_asked_again(bench: Bench) -> None:
    bench.store(TOKENS)
    request = bench.new("again", TOKENS)
    bench.until(lambda: bench.side.matched_tokens(request, 16) is not None)  # type: ignore[arg-type]
    assert bench.side.matched_tokens(request, 16) == 16  # type: ignore[arg-type]
    # The device has lost its blocks meanwhile.
    assert bench.side.matched_tokens(request, 0) is None  # type: ignore[arg-type]
    bench.until(lambda: bench.side.matched_tokens(request, 0) is not None)  # type: ignore[arg-type]
    assert bench.side.matched_tokens(request, 0) == 32  # type: ignore[arg-type]


def test_a_failed_load_names_the_blocks_beyond_the_good_prefix_and_is_not_stored() -> None:
    bench = Bench(faults="fail=all/load:1,seed=6")
    bench.store(TOKENS)
    request = bench.new("again", TOKENS)
    assert bench.admit(request) == 32
    bench.until(lambda: "again" in bench.received)
    blocks = bench.pool.tables["again"]
    (good_tokens,) = bench.good_tokens
    assert good_tokens < 32
    good = good_tokens // BLOCK
    assert bench.bad_blocks == set(blocks[good:8])
    # It is aborted before vLLM has taken notice; what its blocks hold must not be stored as its prefix.
    stored = bench.cache.counters.offloaded_pages
    request.num_computed_tokens = 32
    bench.kv[blocks[good:8]] = -1.0
    bench.finish(request)
    bench.settle()
    assert bench.cache.counters.offloaded_pages == stored
    bench.cache.close()


def test_what_was_computed_before_a_clear_is_not_stored_after_it(bench: Bench) -> None:
    old, waiting = bench.new("old", TOKENS), bench.new("waiting", TOKENS)
    bench.admit(old)
    bench.step(old)
    bench.side.matched_tokens(waiting, 0)  # type: ignore[arg-type]
    bench.side.clear()
    old.all_token_ids += range(20)  # two pages and more
    bench.step(old)
    bench.finish(old)
    bench.settle()
    assert bench.pool.num_used == 0
    assert bench.admit(waiting) == 0
    # A request that starts over after the clear is stored again.
    bench.step(waiting)
    bench.finish(waiting)
    bench.settle()
    assert bench.admit(bench.new("third", TOKENS)) == 32


def test_requests_that_must_not_read_the_cache_go_without_it(bench: Bench) -> None:
    fresh = bench.new("fresh", TOKENS, skip_reading_prefix_cache=True)
    assert bench.admit(fresh) == 0
    bench.step(fresh)
    bench.finish(fresh)
    bench.settle()
    assert bench.cache.counters.offloaded_pages == 0
    bench.store(TOKENS)
    again = bench.new("again", TOKENS, skip_reading_prefix_cache=True)
    assert bench.side.matched_tokens(again, 0) == 0  # type: ignore[arg-type]
    assert bench.admit(bench.new("salted", TOKENS, cache_salt="tenant")) == 0


def test_only_requests_in_flight_are_remembered(bench: Bench) -> None:
    for number in range(5):
        bench.store([number, *TOKENS])
    kept = [value for value in vars(bench.side).values() if isinstance(value, (dict, list))]
    assert not any(kept[1:])
    assert len(bench.side.take_load_ids()) == 0


def test_an_engine_that_waits_for_a_load_sleeps_between_steps() -> None:
    bench = Bench(faults="delay=all/load:200-200ms")
    bench.store(TOKENS)
    bench.admit(bench.new("again", TOKENS))
    steps, begin = 0, time.monotonic()
    while "again" not in bench.received:
        bench.step()
        bench.side.rest()
        steps += 1
    waited_s = time.monotonic() - begin
    bench.cache.close()
    assert waited_s > 0.19
    # From the fourth nap on each takes a millisecond; without them there would be thousands.
    assert steps <= 10 + waited_s / 0.001


def test_an_engine_that_waits_for_nothing_does_not_sleep(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    naps: list[float] = []
    monkeypatch.setattr("mlkv.integrations.vllm.scheduler.time.sleep", naps.append)
    bench.step()
    bench.side.rest()
    assert naps == []


def test_a_step_that_computes_is_told_from_one_that_does_not(bench: Bench) -> None:
    request = bench.new("a", list(range(PAGE)))
    bench.admit(request)
    bench.step(request)
    assert bench.side.computes
    bench.step()
    assert not bench.side.computes
