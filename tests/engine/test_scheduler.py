"""The scheduler against a facade stepped by hand: who computes, who waits, and when slots may be used again."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlkv.engine.pages import DevicePages
from mlkv.engine.request import Request, SamplingParams, State
from mlkv.engine.scheduler import Scheduler
from tests.engine.hand_cache import HandCache, slots_of

PAGE = 4


class Bench:
    """A scheduler, its pages and a hand-stepped cache; "computing" records which slot holds which token."""

    def __init__(self, num_pages: int, *, cache: bool = True, **limits: int) -> None:
        self.pages = DevicePages(num_pages, PAGE)
        self.cache = HandCache(PAGE) if cache else None
        self.scheduler = Scheduler(self.pages, self.cache, **limits)  # type: ignore[arg-type]
        self.ended: dict[str, str] = {}
        self.added = 0

    @property
    def hand(self) -> HandCache:
        assert self.cache is not None
        return self.cache

    def add(self, name: str, prompt: list[int], new: int = 4, **options: bool) -> Request:
        params = SamplingParams(max_new_tokens=new, **options)  # type: ignore[arg-type]
        request = Request.create(
            name, prompt, params, order=self.added, max_tokens=len(prompt) + new, arrival_s=0.0
        )
        self.added += 1
        self.scheduler.add(request)
        return request

    def step(self) -> dict[str, int]:
        """One engine step; request -> tokens computed."""
        if self.cache is not None:
            self.scheduler.apply(self.cache.step())
        batch = self.scheduler.schedule()
        for request, count in batch:
            written = request.slots(request.num_computed + count, PAGE)[request.num_computed :]
            busy = self.hand.busy_slots if self.cache is not None else set()
            assert not busy.intersection(written.tolist()), "computes into slots that a transfer still touches"
        for request, reason in self.scheduler.advance(batch, [7] * len(batch)):
            self.ended[request.request_id] = reason
        self.pages.check()
        return {request.request_id: count for request, count in batch}


def test_a_request_asks_then_loads_then_computes_the_rest_then_stores() -> None:
    bench = Bench(8)
    request = bench.add("a", list(range(10)), new=3)
    assert bench.step() == {}
    assert bench.hand.lookups["a#0"].tokens == list(range(10))
    bench.hand.answer("a#0", 8)
    assert bench.step() == {}
    assert request.state is State.LOADING
    slots = bench.hand.loads["a#0"]
    assert slots == request.slots(8, PAGE).tolist()
    bench.hand.end_load("a#0", 8)
    assert bench.step() == {"a": 2}  # the ninth and tenth token of the prompt
    assert bench.step() == {"a": 1}
    assert bench.step() == {"a": 1}
    assert bench.ended == {"a": "length"}
    assert (request.device_tokens, request.host_tokens) == (0, 8)
    # 10 of the prompt and 2 generated have KV: three whole pages.
    assert len(bench.hand.offloads["a#0"]) == 12
    assert bench.pages.num_available == 5
    bench.hand.release("a#0")
    bench.step()
    assert bench.pages.num_available == 8


def test_a_load_in_flight_holds_up_nobody() -> None:
    bench = Bench(16)
    bench.add("slow", list(range(12)))
    bench.add("quick", list(range(100, 106)))
    bench.step()
    bench.hand.answer("slow#0", 8)
    bench.hand.answer("quick#0", 0)
    assert bench.step() == {"quick": 6}
    for _ in range(3):
        assert bench.step() == {"quick": 1}
    assert "quick" in bench.ended
    bench.hand.end_load("slow#0", 8)
    assert bench.step() == {"slow": 4}


def test_an_unanswered_lookup_holds_up_nobody() -> None:
    bench = Bench(16)
    bench.add("unanswered", list(range(12)))
    bench.add("quick", list(range(100, 106)))
    bench.step()
    bench.hand.answer("quick#0", 0)
    assert bench.step() == {"quick": 6}


def test_pages_being_loaded_are_not_found_before_they_are_loaded() -> None:
    bench = Bench(16)
    prompt = list(range(12))
    first, second = bench.add("first", prompt), bench.add("second", prompt)
    bench.step()
    assert bench.hand.lookups["second#0"].device_tokens == 0
    bench.hand.answer("first#0", 8)
    bench.step()
    bench.hand.answer("second#0", 8)
    bench.step()
    own, others = set(bench.hand.loads["first#0"]), set(bench.hand.loads["second#0"])
    assert not own & others
    bench.hand.end_load("first#0", 8)
    bench.step()
    bench.hand.end_load("second#0", 8)
    bench.step()
    assert first.table[:2] == second.table[:2]  # the same prefix is kept once from here on
    third = bench.add("third", prompt)
    bench.step()
    assert bench.hand.lookups["third#0"].device_tokens == 8
    assert third.table == first.table[:2]


def test_slots_that_became_valid_since_the_lookup_are_not_rewritten() -> None:
    bench = Bench(16)
    prompt = list(range(12))
    first = bench.add("first", prompt)
    bench.step()
    late = bench.add("late", [*prompt, 50, 51, 52, 53, 54])
    bench.hand.answer("first#0", 0)
    bench.step()
    assert first.num_computed == 12
    bench.hand.answer("late#0", 16)
    bench.step()
    assert late.table[:3] == first.table[:3]
    assert bench.hand.loads["late#0"] == [-1] * 12 + late.slots(16, PAGE)[12:].tolist()
    bench.hand.end_load("late#0", 16)
    bench.step()
    assert (late.device_tokens, late.host_tokens) == (12, 4)


def test_a_hit_that_the_device_has_caught_up_with_is_declined() -> None:
    bench = Bench(16)
    prompt = list(range(12))
    bench.add("first", prompt)
    bench.step()
    bench.add("late", prompt)
    bench.hand.answer("first#0", 0)
    bench.step()
    bench.hand.answer("late#0", 8)
    assert bench.step() == {"first": 1, "late": 4}
    assert bench.hand.declined == ["late#0"]


@pytest.mark.parametrize(("good", "computed"), [(0, 10), (4, 6), (6, 6)])
def test_a_failed_load_keeps_its_good_whole_pages_and_the_rest_is_computed(good: int, computed: int) -> None:
    bench = Bench(8)
    request = bench.add("a", list(range(10)))
    bench.step()
    bench.hand.answer("a#0", 8)
    bench.step()
    bench.hand.end_load("a#0", good, failed=True)
    assert bench.step() == {"a": computed}
    assert request.host_tokens == 10 - computed


def test_a_failed_load_does_not_lose_what_the_device_had() -> None:
    bench = Bench(16)
    prompt = list(range(12))
    bench.add("first", prompt)
    bench.step()
    late = bench.add("late", [*prompt, 50, 51, 52, 53, 54])
    bench.hand.answer("first#0", 0)
    bench.step()
    bench.hand.answer("late#0", 16)
    bench.step()
    bench.hand.end_load("late#0", 0, failed=True)
    assert bench.step()["late"] == 5
    assert (late.device_tokens, late.host_tokens) == (12, 0)


def test_no_load_computes_the_whole_prompt_even_when_the_device_has_it() -> None:
    bench = Bench(16)
    prompt = list(range(12))
    bench.add("first", prompt)
    bench.step()
    bench.hand.answer("first#0", 0)
    bench.step()
    bench.add("logprobs", prompt, no_load=True)
    assert bench.step() == {"first": 1, "logprobs": 12}
    assert "logprobs#0" not in bench.hand.lookups


def test_no_offload_gives_its_pages_back_at_once() -> None:
    bench = Bench(8)
    bench.add("a", list(range(10)), new=1, no_offload=True)
    bench.step()
    bench.hand.answer("a#0", 0)
    bench.step()
    assert bench.ended == {"a": "length"}
    assert bench.hand.offloads == {}
    assert bench.pages.num_available == 8


def test_a_prompt_shorter_than_a_page_is_not_offloaded() -> None:
    bench = Bench(8)
    bench.add("a", [1, 2], new=2)
    bench.step()
    bench.hand.answer("a#0", 0)
    bench.step()
    bench.step()
    assert bench.ended == {"a": "length"}
    assert bench.hand.offloads == {}
    assert bench.pages.num_available == 8


@pytest.mark.parametrize("chunk", [1, 3, 4, 7, 100])
def test_a_prompt_is_computed_in_chunks_of_the_budget_beside_decoding(chunk: int) -> None:
    bench = Bench(16, cache=False, max_batch_tokens=chunk + 1, max_running=2)
    bench.add("decoding", [1], new=30)
    bench.step()
    bench.add("long", list(range(20)), new=1)
    counts = []
    while "long" not in bench.ended:
        computed = bench.step()
        assert computed["decoding"] == 1
        counts.append(computed.get("long", 0))
    assert sum(counts) == 20
    assert max(counts) == min(chunk, 20)


def test_nobody_overtakes_for_pages() -> None:
    bench = Bench(6, cache=False)
    bench.add("running", list(range(12)), new=8)
    bench.step()
    bench.add("large", list(range(100, 120)), new=1)
    bench.add("small", [1], new=1)
    assert bench.step() == {"running": 1}


def test_the_youngest_gives_up_its_pages_and_starts_again() -> None:
    bench = Bench(5, cache=False)
    old = bench.add("old", list(range(8)), new=8)
    young = bench.add("young", list(range(50, 58)), new=8)
    for _ in range(60):
        bench.step()
        if len(bench.ended) == 2:
            break
    assert bench.ended == {"old": "length", "young": "length"}
    assert old.num_preemptions == 0
    assert young.num_preemptions > 0
    assert list(bench.ended) == ["old", "young"]


def test_preempting_a_load_waits_for_its_slots() -> None:
    bench = Bench(5)
    bench.add("old", list(range(8)), new=8)
    young = bench.add("young", list(range(50, 62)), new=1)
    bench.step()
    bench.hand.answer("old#0", 0)
    bench.hand.answer("young#0", 8)
    assert bench.step() == {"old": 8}
    assert young.state is State.LOADING
    assert bench.step() == {}  # "old" needs a third page and takes it from "young", whose load still writes
    assert young.state in (State.WAITING, State.ASKED)
    assert set(bench.hand.aborted) == {"young#0"}
    assert bench.step() == {}
    bench.hand.release("young#0")
    assert bench.step() == {"old": 1}
    assert set(bench.hand.lookups) == {"young#1"}


def test_an_offload_keeps_its_slots_until_released() -> None:
    bench = Bench(3)
    bench.add("a", list(range(8)), new=1)
    bench.step()
    bench.hand.answer("a#0", 0)
    bench.step()
    assert "a" in bench.ended
    bench.add("b", list(range(50, 58)), new=1)
    bench.step()
    bench.hand.answer("b#0", 0)
    for _ in range(3):
        assert bench.step() == {}  # two of three pages are still being read
    bench.hand.release("a#0")
    assert bench.step() == {"b": 8}


def test_a_running_request_that_needs_a_page_waits_for_an_offload_instead_of_preempting() -> None:
    bench = Bench(4)
    bench.add("a", list(range(4)), new=1)
    bench.add("b", list(range(50, 54)), new=9)
    bench.step()
    for name in ("a#0", "b#0"):
        bench.hand.answer(name, 0)
    bench.step()
    assert set(bench.hand.offloads) == {"a#0"}
    c = bench.add("c", list(range(80, 84)), new=3)
    bench.step()
    bench.hand.answer("c#0", 0)
    bench.step()
    while bench.step():
        pass
    assert c.num_preemptions == 0
    bench.hand.release("a#0")
    assert bench.step()


def test_waiting_lookups_give_up_device_pages_before_anybody_is_preempted() -> None:
    bench = Bench(5)
    first = bench.add("first", list(range(8)), new=1)
    bench.step()
    bench.hand.answer("first#0", 0)
    bench.step()
    bench.hand.release("first#0")
    bench.add("running", list(range(50, 58)), new=6)
    bench.step()
    bench.hand.answer("running#0", 0)
    assert bench.step() == {"running": 8}
    waiting = bench.add("waiting", [*range(8), 99], new=1)
    bench.step()
    assert len(waiting.table) == 2
    while "running" not in bench.ended:
        assert bench.step() == {"running": 1}
    assert first.num_preemptions == waiting.num_preemptions == 0
    assert bench.hand.declined
    assert set(bench.hand.declined) == {"waiting#0"}


def test_lookups_that_hold_each_others_pages_do_not_block_the_queue() -> None:
    bench = Bench(6)
    for name, start in (("x", 0), ("y", 50)):
        bench.add(name, list(range(start, start + 12)), new=1)
        bench.step()
        bench.hand.answer(f"{name}#0", 0)
        bench.step()
        bench.hand.release(f"{name}#0")
    bench.step()
    # Each continues a prefix of three pages that lies on the device, and needs one more: eight in a pool of six.
    bench.add("x2", [*range(12), 99], new=3)
    bench.add("y2", [*range(50, 62), 99], new=3)
    bench.step()
    assert bench.pages.num_available == 0
    for _ in range(20):
        for cache_id in list(bench.hand.lookups):
            bench.hand.answer(cache_id, 0)
        bench.step()
        for cache_id in list(bench.hand.offloads):
            bench.hand.release(cache_id)
    assert {"x2", "y2"} <= set(bench.ended)


@pytest.mark.parametrize("when", ["waiting", "asked", "answered", "loading", "running", "finished"])
def test_abort_in_each_state_gives_everything_back(when: str) -> None:
    bench = Bench(6)
    blocker = bench.add("blocker", list(range(80, 100)), new=1) if when == "answered" else None
    request = bench.add("a", list(range(10)), new=1 if when == "finished" else 4)
    if when != "waiting":
        bench.step()
    if blocker:
        bench.hand.answer("blocker#0", 16)
    if when in ("answered", "loading"):
        bench.hand.answer("a#0", 8)
        bench.step()
    if when in ("running", "finished"):
        bench.hand.answer("a#0", 0)
        bench.step()
    assert request.state.value == when
    assert (bench.scheduler.abort("a") is request) == (when != "finished")
    bench.step()
    assert bench.hand.declined == (["a#0"] if when in ("asked", "answered") else [])
    busy = bench.hand.busy_slots
    if when == "loading":
        assert slots_of([s // PAGE for s in bench.hand.aborted["a#0"]], PAGE) <= busy
        assert bench.pages.num_available == 3
        bench.hand.release("a#0")
    if when == "finished":
        bench.hand.release("a#0")
    if blocker:
        bench.scheduler.abort("blocker")
        bench.hand.release("blocker#0")
    bench.step()
    assert bench.pages.num_available == 6
    assert bench.scheduler.num_unfinished == bench.scheduler.num_draining == 0


def test_abort_of_an_unknown_request_is_nothing() -> None:
    assert Bench(2).scheduler.abort("nobody") is None


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_under_any_schedule_no_slot_is_reused_early_and_all_requests_end(seed: int) -> None:
    rng = np.random.default_rng(seed)
    bench = Bench(int(rng.integers(8, 14)), max_batch_tokens=int(rng.integers(2, 20)), max_running=2)
    hand = bench.hand
    names: list[str] = []
    aborted: set[str] = set()
    for turn in range(400):
        if len(names) < 12 and rng.random() < 0.3:
            prompt = [int(t) for t in rng.integers(0, 2, int(rng.integers(1, 20)))]
            names.append(f"r{len(names)}")
            bench.add(names[-1], prompt, int(rng.integers(1, 10)), no_offload=bool(rng.random() < 0.2))
        if rng.random() < 0.05 and names:
            victim = names[int(rng.integers(0, len(names)))]
            if bench.scheduler.abort(victim) is not None:
                aborted.add(victim)
        eager = turn > 200  # from here on every transfer ends, so that all requests can
        for cache_id, lookup in list(hand.lookups.items()):
            if lookup.hit_tokens is None and (eager or rng.random() < 0.5):
                hand.answer(cache_id, int(rng.integers(0, (len(lookup.tokens) - 1) // PAGE + 1)) * PAGE)
        for cache_id, slots in list(hand.loads.items()):
            if eager or rng.random() < 0.3:
                request = next(r for r in bench.scheduler.active if r.cache_id == cache_id)
                failed = bool(rng.random() < 0.3)
                good = request.asked_device_tokens + len(slots)
                hand.end_load(cache_id, int(rng.integers(0, good + 1)) if failed else good, failed=failed)
        for cache_id in [*hand.offloads, *hand.aborted]:
            if eager or rng.random() < 0.3:
                hand.release(cache_id)
        bench.step()
        assert not hand.busy_slots & {
            slot for page in bench.pages._free for slot in range(page * PAGE, page * PAGE + PAGE)
        }
    assert set(bench.ended) | aborted == set(names)
    assert bench.scheduler.num_unfinished == bench.scheduler.num_draining == 0
    assert bench.pages.num_available == bench.pages.num_pages
    assert not hand.lookups
