"""A fault at every k-th call of every kind, in a traffic that makes all of them: nothing is lost, nothing lies."""

from __future__ import annotations

import pytest
from tier_cases import LatchTier, TieredStore, make_page

from mlkv.store import wire
from mlkv.store.writeback import Admission

PROMPTS = ["abcdef", "abcxyz", "uvwxyz", "abcdefgh", "mnopq"]


def traffic(store: TieredStore) -> None:
    """Stores, finds and loses pages in a pool that is too small for all of them; now and then one is bad."""
    for turn in range(3):
        for number, prompt in enumerate(PROMPTS):
            found = store.find(prompt)
            assert prompt.startswith(found)
            store.store(prompt)
            store.lower.poll()
            if (turn + number) % 4 == 3:
                matched = store.match_later(prompt, wait_s=0.0)[0]
                if matched.lease:
                    store.ask(wire.Quarantine(matched.pages[-4:], matched.generations[-8:]))
                store.take(matched, prompt)
        store.settle()
        if turn == 1:
            store.ask(wire.Clear())


def calls_of(admission: Admission) -> dict[str, int]:
    near, far = LatchTier(batch_pages=2), LatchTier(batch_pages=3)
    store = TieredStore(16, [near, far], admission=admission)
    store.wait_until_connected()
    traffic(store)
    store.check_conservation()
    store.close()
    return {kind: max(near.num_calls.get(kind, 0), far.num_calls.get(kind, 0)) for kind in near.num_calls}


def test_the_traffic_makes_calls_of_every_kind():
    counts = calls_of("write")
    assert set(counts) == {"connect", "contains", "read", "write", "delete", "clear"}
    assert min(counts[kind] for kind in ("contains", "read", "write")) >= 5


RAISED = [OSError("broken"), SystemExit("the client gives up")]
FAULTS = [(kind, what) for kind in ("connect", "contains", "read", "write", "delete", "clear") for what in RAISED]
FAULTS += [(kind, what) for kind in ("contains", "read", "write") for what in ("short", "lie")]


@pytest.mark.parametrize(("kind", "what"), FAULTS, ids=str)
def test_fault_at_any_call_costs_misses_and_nothing_else(kind: str, what: BaseException | str):
    for number in range(1, 7):
        for broken in (0, 1):
            tiers = LatchTier(batch_pages=2), LatchTier(batch_pages=3)
            tiers[broken].fail(kind, what, number)
            store = TieredStore(16, tiers)
            store.wait_until_connected()
            traffic(store)
            store.wait_until_connected()
            store.check_conservation()
            for tier in tiers:
                for data in tier.pages.values():
                    assert len(data) == len(make_page("a", 1))
            store.find("fine")
            store.store("fine")
            store.settle()
            assert len(tiers[broken].pages) >= 4, "the tier is not used any more"
            store.close()


@pytest.mark.parametrize("admission", ["second_use", "evict"])
def test_every_call_that_fails_leaves_a_store_that_works_without_tiers(admission: Admission):
    tier = LatchTier(batch_pages=2)
    for kind in ("contains", "read", "write", "delete", "clear"):
        tier.fail(kind, OSError("broken for good"))
    store = TieredStore(16, [tier], admission=admission)
    store.wait_until_connected()
    traffic(store)
    store.store("abc")
    assert store.here("abc") == "abc"
    report = store.report()
    assert (report.reserved, report.quarantined, report.reservations) == (0, 0, 0)
    assert report.tiers[0].openings >= 1
    tier.faults.clear()
    store.until(lambda: store.report().tiers[0].erasures == 0, "the clear has reached the tier")
    store.check_conservation()
    store.close()
