"""One scheduler that plans, several workers that copy: the cache of engines whose executor aggregates."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch

from mlkv import (
    CacheUsageError,
    Completion,
    KVPool,
    MLKVConfig,
    MultiLevelCache,
    RankSlice,
    RemoteMover,
    TransferReport,
    TransferWorker,
)
from tests.cache.bench import (
    HEAD_DIM,
    NUM_LAYERS,
    PAGE_TOKENS,
    POISON,
    Seen,
    kv_of,
    layout_of,
    slots_of,
    tokens_of,
)

HEADS = 3
NUM_SLOTS = 128


class Worker:
    """A worker's KV tensors and its half of the copying."""

    def __init__(self, config: MLKVConfig, rank: int, size: int) -> None:
        layout = layout_of(HEADS)
        self.slice = RankSlice.of_rank(HEADS, size, rank)
        shape = (NUM_SLOTS, RankSlice.local_kv_heads(HEADS, size), HEAD_DIM)
        self.k = [torch.full(shape, POISON) for _ in range(NUM_LAYERS)]
        self.v = [torch.full(shape, POISON) for _ in range(NUM_LAYERS)]
        pool = KVPool.from_layers(layout, k=self.k, v=self.v)
        self.half = TransferWorker(config, layout, pool, engine="bench", rank=rank, size=size)

    def _cells(self) -> Iterator[tuple[int, int, torch.Tensor]]:
        for layer in range(NUM_LAYERS):
            yield layer, 0, self.k[layer]
            yield layer, 1, self.v[layer]

    def compute(self, tokens: Sequence[int], slots: torch.Tensor) -> None:
        kv = kv_of(tokens, HEADS)
        heads = slice(self.slice.head_start, self.slice.head_start + self.slice.num_heads)
        for layer, plane, tensor in self._cells():
            tensor[slots, : self.slice.num_heads] = kv[:, layer, plane, heads]

    def right_tokens(self, tokens: Sequence[int], slots: torch.Tensor) -> int:
        kv = kv_of(tokens, HEADS)
        heads = slice(self.slice.head_start, self.slice.head_start + self.slice.num_heads)
        right = torch.ones(len(tokens), dtype=torch.bool)
        for layer, plane, tensor in self._cells():
            right &= (tensor[slots, : self.slice.num_heads] == kv[:, layer, plane, heads]).flatten(1).all(1)
        return int(right.sum())


class Engine:
    """Carries orders to the workers and their reports back, pickled as an executor would."""

    def __init__(self, size: int, faults: str = "") -> None:
        layout = layout_of(HEADS)
        self.config = MLKVConfig(
            model="test", page_tokens=PAGE_TOKENS, faults=faults, store={"host_bytes": 64 * layout.page_bytes}
        )
        self.mover = RemoteMover(size)
        self.cache = MultiLevelCache.central(self.config, layout, self.mover, engine="bench", num_slots=NUM_SLOTS)
        self.workers = [Worker(self.config, rank, size) for rank in range(size)]
        self.silent: set[int] = set()  # workers whose reports are held back
        self.held = [TransferReport() for _ in range(size)]
        self.seen = Seen()

    def step(self) -> None:
        self.seen.add(self.cache.step())
        orders = pickle.dumps(self.mover.take_orders())
        for rank, worker in enumerate(self.workers):
            for order in pickle.loads(orders):
                worker.half.execute(order)
            self.held[rank] = self.held[rank].merge(TransferReport.of(worker.half.poll()))
        merged = TransferReport()
        for rank in set(range(len(self.workers))) - self.silent:
            merged = merged.merge(pickle.loads(pickle.dumps(self.held[rank])))
            self.held[rank] = TransferReport()
        self.mover.hear(merged)

    def step_until(self, done: Callable[[], bool], deadline_s: float = 15.0) -> None:
        end = time.monotonic() + deadline_s
        while not done():
            assert time.monotonic() < end, self.seen
            self.step()
            time.sleep(0.0002)

    def store(self, tokens: Sequence[int], slots: torch.Tensor) -> None:
        for worker in self.workers:
            worker.compute(tokens, slots)
        self.cache.offload("store", tokens, slots)
        self.step_until(lambda: "store" in self.seen.offloaded)

    def ask(self, tokens: Sequence[int]) -> int:
        self.seen.hits.pop("ask", None)
        self.cache.lookup("ask", tokens)
        self.step_until(lambda: "ask" in self.seen.hits)
        return self.seen.hits["ask"].num_tokens

    def close(self) -> None:
        for worker in self.workers:
            worker.half.close()
        self.cache.close()


@pytest.fixture
def make_engine() -> Iterator[Callable[..., Engine]]:
    made: list[Engine] = []

    def make(size: int, faults: str = "") -> Engine:
        made.append(Engine(size, faults))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def test_what_workers_stored_they_load_elsewhere(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine(2)
    tokens, there = tokens_of(18), slots_of(40, 16)
    engine.store(tokens, slots_of(0, 18))
    assert engine.ask(tokens) == 16
    engine.cache.load("ask", there)
    engine.step_until(lambda: "ask" in engine.seen.loaded)
    assert [worker.right_tokens(tokens[:16], there) for worker in engine.workers] == [16, 16]
    engine.step_until(lambda: not engine.cache.pending)
    report = engine.cache.audit()
    assert (report.problem, report.leases, report.reservations) == ("", 0, 0)


def test_a_load_is_over_when_the_slowest_worker_reports(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine(3)
    tokens = tokens_of(9)
    engine.store(tokens, slots_of(0, 9))
    engine.ask(tokens)
    engine.silent = {1}
    engine.cache.load("ask", slots_of(40, 8))
    engine.step_until(lambda: not any(worker.half.in_flight for worker in engine.workers))
    for _ in range(20):
        engine.step()
    assert "ask" not in engine.seen.loaded
    assert engine.mover.in_flight == 1
    engine.silent = set()
    engine.step_until(lambda: "ask" in engine.seen.loaded)


def test_slots_are_released_when_the_slowest_worker_has_read_them(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine(2)
    tokens = tokens_of(9)
    for worker in engine.workers:
        worker.compute(tokens, slots_of(0, 9))
    engine.silent = {0}
    engine.cache.offload("store", tokens, slots_of(0, 9))
    engine.step_until(lambda: engine.mover.in_flight > 0)
    for _ in range(20):
        engine.step()
    assert engine.seen.released == []
    engine.silent = set()
    engine.step_until(lambda: "store" in engine.seen.offloaded)
    assert engine.seen.released == ["store"]


def test_a_load_that_fails_on_one_worker_keeps_the_prefix_good_on_all(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine(2, faults="fail=rank1/load:1,seed=3")
    tokens, there = tokens_of(33), slots_of(60, 32)
    engine.store(tokens, slots_of(0, 33))
    assert engine.ask(tokens) == 32
    engine.cache.load("ask", there)
    engine.step_until(lambda: "ask" in engine.seen.failed)
    good = engine.seen.failed["ask"].num_tokens
    assert good < 32
    assert all(worker.right_tokens(tokens[:good], there[:good]) == good for worker in engine.workers)
    assert engine.ask(tokens) == good  # the page that failed is remembered as bad


def test_reports_merge_to_the_fewest_good_pages_and_the_number_of_workers() -> None:
    one = TransferReport.of([Completion("loaded", 4, 3, "late"), Completion("released", 1)])
    two = TransferReport.of([Completion("loaded", 4, 1, "rotten"), Completion("released", 1)])
    merged = one.merge(two)
    assert merged.workers == {("loaded", 4): 2, ("released", 1): 2}
    assert merged.failures == {("loaded", 4): (1, "rotten")}


def test_a_report_of_a_copy_that_was_never_ordered_is_refused() -> None:
    with pytest.raises(CacheUsageError, match="loaded 7"):
        RemoteMover(2).hear(TransferReport.of([Completion("loaded", 7)]))
