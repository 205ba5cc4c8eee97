"""A turn of the owner's loop is short, however much the tiers have to do: engines wait for it."""

from __future__ import annotations

import threading
import time

from store_helpers import eventually
from tier_cases import LatchTier, NewStore

from mlkv.store.tiers.calls import Call
from mlkv.store.tiers.workers import Workers


def test_a_turn_hands_a_tier_one_batch_and_asks_for_the_next_turn_at_once(new_store: NewStore) -> None:
    tier = LatchTier(concurrency=4, batch_pages=2)
    store = new_store(64, tier)
    store.store("z")
    store.settle()  # the first call after a connection is alone
    with tier.held("write"):
        store.store("abcdefghij")
        handed = [10 - store.lower.reports()[0].queued_pages]
        while store.lower.due_at is not None and store.lower.due_at <= time.monotonic():
            store.lower.poll()
            tier.wait_for("write", min(len(handed) + 1, tier.concurrency))
            handed.append(10 - store.lower.reports()[0].queued_pages)
        assert handed == [2, 4, 6, 8, 8], "a batch for each thread, and one that waits for the first of them"
    store.settle()
    assert len(tier.pages) == 11


def test_answers_that_take_long_to_take_in_are_left_for_the_next_turn() -> None:
    tier = LatchTier(concurrency=1)
    workers = Workers(tier, memoryview(b""), time.monotonic)
    workers.add()
    for _ in range(3):
        workers.start(Call("clear"))
    eventually(lambda: tier.num_calls.get("clear") == 3, "all calls were made")
    assert workers.join(5.0)
    taken = []
    while True:
        number = 0
        for _ in workers.take_ended(0.01):
            number += 1
            threading.Event().wait(0.02)  # whoever asked does much with it
        if not number:
            break
        taken.append(number)
    assert taken == [1, 1, 1]
    workers.dispose()
