"""Quotas: what a namespace may take of the pool, and whose pages make room for it."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from store_helpers import DEADLINE_S, chain, eventually, key
from tier_cases import NAMESPACE, PAGE_BYTES, LatchTier, make_page

from mlkv.errors import ConfigError
from mlkv.store import StoreClient, wire, wire_tools
from mlkv.store.index import Index
from mlkv.store.lower import LowerTiers
from mlkv.store.policy import LRU, POLICIES
from mlkv.store.pool import HostPool, create_pool_file
from mlkv.store.quotas import Quotas
from mlkv.store.service import StoreService
from mlkv.store.tiers.runner import TierRunner

PAGE = 4096


class Shared:
    """A store with quotas, and a group in each of several namespaces, named by a letter."""

    def __init__(self, num_pages: int, limits: dict[str, int], policy: str = "lru") -> None:
        """`limits`: pages by model."""
        limits_bytes = {model: pages * PAGE for model, pages in limits.items()}
        self.quotas = Quotas(limits_bytes, PAGE, num_pages, POLICIES[policy](num_pages))  # type: ignore[index]
        self.index = Index(num_pages, self.quotas.policy, free=self.quotas.free)
        self.service = StoreService(self.index, quotas=self.quotas)

    def join(self, model: str) -> None:
        self.service.join(model.encode(), 1)
        opened: list[wire.Reply] = []
        request = wire_tools.Open(key(model), model, 4)
        self.service.handle_later(model.encode(), 1, request, opened.append)
        assert opened == [wire_tools.Opened(0, True)]

    def ask(self, model: str, request: wire.Request) -> wire.Reply:
        reply = self.service.handle(model.encode(), request)
        assert self.service.check() == ""
        return reply

    def reserve(self, model: str, text: str) -> wire.Reserved:
        reserved = self.ask(model, wire.Reserve(chain(model + text)))
        assert isinstance(reserved, wire.Reserved)
        return reserved

    def store(self, model: str, text: str) -> int:
        """Store a chain; its pages are the letters of `text` below one page for the model. Returns what it got."""
        reserved = self.reserve(model, text)
        if reserved.reservation:
            self.ask(model, wire.Commit(reserved.reservation, len(reserved.page_ids)))
        return len(reserved.page_ids)

    def here(self, model: str, text: str) -> int:
        lease = self.index.match(chain(model + text), 1 + len(text), is_use=False)
        if lease.id:
            self.index.release([lease.id])
        return len(lease.pages)

    def usage(self) -> dict[str, tuple[int, int]]:
        listed = self.service.handle(b"a", wire_tools.Namespaces())
        assert isinstance(listed, wire_tools.NamespaceList)
        return {entry.model: (entry.num_pages, entry.limit_pages) for entry in listed.entries}


@pytest.fixture
def new_shared() -> Callable[..., Shared]:
    def make(num_pages: int, limits: dict[str, int], *models: str, policy: str = "lru") -> Shared:
        made = Shared(num_pages, limits, policy)
        for model in models:
            made.join(model)
        return made

    return make


NewShared = Callable[..., Shared]


@pytest.mark.parametrize("policy", list(POLICIES))
def test_namespace_above_its_quota_evicts_its_own_pages_oldest_first(new_shared: NewShared, policy: str) -> None:
    shared = new_shared(16, {"a": 6}, "a", "b", policy=policy)
    assert shared.store("b", "other") == 6
    assert shared.store("a", "xy") == 3
    assert shared.store("a", "xz") == 1
    assert shared.store("a", "pqr") == 3
    assert shared.usage() == {"a": (6, 6), "b": (6, 16)}
    assert shared.here("b", "other") == 6, "what others have is not touched"
    assert shared.here("a", "xy") == 2, "the leaf used longest ago went"
    assert (shared.here("a", "xz"), shared.here("a", "pqr")) == (3, 4)


def test_a_use_of_its_page_keeps_it(new_shared: NewShared) -> None:
    shared = new_shared(16, {"a": 4}, "a")
    shared.store("a", "x")
    shared.store("a", "y")
    shared.store("a", "z")
    matched = shared.ask("a", wire.Match(chain("ax"), 2))
    assert isinstance(matched, wire.Matched)
    shared.ask("a", wire.Release([matched.lease]))
    shared.store("a", "w")
    assert (shared.here("a", "x"), shared.here("a", "y"), shared.here("a", "w")) == (2, 1, 2)


def test_namespace_whose_pages_are_all_held_gets_no_more_at_once(new_shared: NewShared) -> None:
    shared = new_shared(16, {"a": 3}, "a", "b")
    first = shared.reserve("a", "xy")
    assert len(first.page_ids) == 3
    assert shared.store("a", "pq") == 0
    assert len(shared.reserve("b", "pq").page_ids) == 3
    shared.ask("a", wire.Cancel(first.reservation))
    assert shared.usage()["a"] == (0, 3)
    assert shared.store("a", "pq") == 3


def test_a_chain_longer_than_the_quota_is_cut(new_shared: NewShared) -> None:
    shared = new_shared(16, {"a": 3}, "a")
    assert shared.store("a", "vwxyz") == 3
    assert shared.here("a", "vwxyz") == 3


def test_every_other_model_has_the_quota_of_the_star(new_shared: NewShared) -> None:
    shared = new_shared(16, {"a": 8, "*": 2}, "a", "b", "c")
    assert [shared.store(model, "vwxyz") for model in "abc"] == [6, 2, 2]


def test_pages_that_leave_any_way_are_not_counted_any_more(new_shared: NewShared) -> None:
    shared = new_shared(8, {"a": 8, "b": 8}, "a", "b")
    shared.store("a", "xyz")
    shared.store("b", "vwxyz")  # evicts of a's
    assert shared.usage() == {"a": (2, 8), "b": (6, 8)}
    reserved = shared.reserve("a", "pq")
    shared.ask("a", wire.Clear())
    assert shared.usage()["b"] == (0, 8)
    shared.ask("a", wire.Cancel(reserved.reservation))
    assert shared.usage()["a"] == (0, 8)


def test_quota_below_a_page_is_refused() -> None:
    with pytest.raises(ConfigError, match="'tiny' are less than a page"):
        Quotas({"tiny": 100}, PAGE, 8, LRU(8))


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("policy", list(POLICIES))
def test_counts_are_right_and_limits_hold_after_anything(new_shared: NewShared, policy: str, seed: int) -> None:
    chance = random.Random(seed)
    shared = new_shared(24, {"a": 9, "b": 5}, "a", "b", "c", policy=policy)
    open_: dict[str, list[tuple[int, int]]] = {model: [] for model in "abc"}
    leases: dict[str, list[int]] = {model: [] for model in "abc"}
    for _ in range(150):
        model = chance.choice("abc")
        text = "".join(chance.choice("xyz") for _ in range(chance.randrange(1, 6)))
        what = chance.random()
        if what < 0.4:
            reserved = shared.reserve(model, text)
            if reserved.reservation:
                open_[model].append((reserved.reservation, len(reserved.page_ids)))
        elif what < 0.7 and open_[model]:
            reservation, length = open_[model].pop(chance.randrange(len(open_[model])))
            shared.ask(model, wire.Commit(reservation, chance.randint(0, length)))
        elif what < 0.85:
            matched = shared.ask(model, wire.Match(chain(model + text), 1 + len(text)))
            assert isinstance(matched, wire.Matched)
            leases[model] += [matched.lease] if matched.lease else []
        elif leases[model]:
            shared.ask(model, wire.Release([leases[model].pop()]))
        usage = shared.usage()
        assert usage["a"][0] <= 9
        assert usage["b"][0] <= 5
        report = shared.ask("a", wire.Stats())
        assert isinstance(report, wire.Report)
        assert sum(pages for pages, _ in usage.values()) == report.num_pages - report.free


def test_pages_that_a_tier_brings_count_and_the_excess_goes() -> None:
    num_pages = 16
    pool = HostPool(create_pool_file(num_pages, PAGE_BYTES), num_pages, PAGE_BYTES)
    quotas = Quotas({"m": 4 * PAGE_BYTES}, PAGE_BYTES, num_pages, LRU(num_pages))
    index = Index(num_pages, quotas.policy, first_generation=1 << 40, free=quotas.free)
    tier = LatchTier()
    tier.put("abcdefgh")
    tier.put("xyz")
    runner = TierRunner(tier, pool.buffer, PAGE_BYTES, num_pages)
    lower = LowerTiers(index, pool, [runner])
    service = StoreService(index, lower, pool, quotas)
    service.join(b"g", 1)

    def until(done: Callable[[], bool]) -> None:
        def turned() -> bool:
            lower.poll()
            service.poll()
            return done()

        eventually(turned, "the store does it")

    try:
        until(lambda: runner.is_usable)
        answers: list[wire.Reply] = []
        service.handle_later(b"g", 1, wire_tools.Open(NAMESPACE, "m", 4), answers.append)
        until(lambda: bool(answers))
        for text, length in (("xyz", 3), ("abcdefgh", 8)):
            found: list[wire.Reply] = []
            service.handle_later(b"g", 1, wire.Match(chain(text), length, DEADLINE_S), found.append)
            until(lambda found=found: bool(found))  # type: ignore[misc]
            assert isinstance(found[0], wire.Matched)
            if found[0].lease:
                service.handle(b"g", wire.Release([found[0].lease]))
        share = quotas.share_of(service._epochs.find(NAMESPACE))
        assert share.num_pages == num_pages - index.num_free
        assert len(index.match(chain("xyz"), 3, is_use=False).pages) == 0, "the older ones went"
    finally:
        assert lower.close(DEADLINE_S)


@pytest.fixture
def clients(new_client: Callable[..., StoreClient]) -> tuple[StoreClient, StoreClient]:
    options = {"host_bytes": 16 * PAGE_BYTES, "page_bytes": PAGE_BYTES, "quotas": {"*": 4 * PAGE_BYTES}}
    return new_client(group=b"one", **options), new_client(group=b"two", **options)


def test_owner_keeps_the_quotas_that_it_was_started_with(
    clients: tuple[StoreClient, StoreClient], socket_path: Path
) -> None:
    for client, name in zip(clients, ("one", "two"), strict=True):
        client.call(wire_tools.Open(key(name), name, 4), DEADLINE_S)
        reserved = client.call(wire.Reserve(chain(name + "abcdef")), DEADLINE_S)
        assert len(reserved.page_ids) == 4
        for position, (page, generation) in enumerate(
            zip(reserved.page_ids.tolist(), reserved.page_generations.tolist(), strict=True)
        ):
            data = make_page((name + "abcdef")[: position + 1], generation)
            np.frombuffer(client.pool, np.uint8)[page * PAGE_BYTES :][:PAGE_BYTES] = np.frombuffer(data, np.uint8)
        client.call(wire.Commit(reserved.reservation, 4), DEADLINE_S)
    entries = clients[0].call(wire_tools.Namespaces(), DEADLINE_S).entries
    assert [(entry.model, entry.num_pages, entry.limit_pages) for entry in entries] == [
        ("one", 4, 4),
        ("two", 4, 4),
    ]
