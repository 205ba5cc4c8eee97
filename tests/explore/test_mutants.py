"""The teeth of the explorer: planted faults are found within the default budget, and told in few actions."""

from __future__ import annotations

from functools import partial

import pytest

from mlkv.dist.explore import explore_random, run
from mlkv.explore.chance import make_world
from mlkv.explore.mutants import MUTANTS

BUDGET_ACTIONS = 60_000  # the default of `python -m mlkv.explore`

REUSED = "no page is reused while somebody may touch it"
FOREIGN = "no byte is served under a key it was not written for"
UNEQUAL = "every rank has the same results"
WAITS = "nobody waits for ever"
NOT_LOADED = "what is loaded is on the device of every rank"
SLOT_REUSED = "no device slot is reused while a transfer touches it"

EXPECTED = {
    "master-polls-itself": {REUSED, FOREIGN, NOT_LOADED, SLOT_REUSED},
    "follower-pops-by-own-event": {UNEQUAL},
    "free-on-submit": {REUSED},
    "skip-when-idle": {WAITS},
    "count-without-digest": {"a rank that diverged is named"},
    "retry-without-quarantine": {"a bad page is never matched again"},
    "applied-in-different-steps": {UNEQUAL},
    "publish-on-release": {FOREIGN, REUSED},
    "reclaim-on-first-loss": {REUSED},
    "failure-of-one-rank-ignored": {FOREIGN, NOT_LOADED},
    "abort-forgets-copies": {SLOT_REUSED},
    "dropped-lookup-keeps-lease": {"nothing is held when nothing is in flight"},
    "whole-prompt-is-a-hit": {"at least one token is computed"},
}


def test_every_mutant_has_an_expectation() -> None:
    assert EXPECTED.keys() == MUTANTS.keys()


@pytest.mark.parametrize("name", sorted(MUTANTS))
def test_planted_fault_is_found_and_its_story_is_minimal(name: str) -> None:
    make = partial(make_world, parts=MUTANTS[name])
    outcome = explore_random(make, seed=1, num_actions=BUDGET_ACTIONS)
    finding = outcome.finding
    assert finding is not None, f"not found in {outcome.num_actions} actions"
    assert finding.rule in EXPECTED[name], str(finding)
    assert len(finding.actions) <= 30, str(finding)
    assert finding.story[-1].lstrip().startswith(f"X {finding.rule}: ")


@pytest.mark.parametrize("name", ["free-on-submit", "count-without-digest"])
def test_the_story_of_a_planted_fault_is_harmless_without_it(name: str) -> None:
    import random

    from mlkv.explore.chance import RandomWorld
    from mlkv.explore.parts import Parts, Shape

    with_fault = partial(make_world, parts=MUTANTS[name])
    finding = explore_random(with_fault, seed=1, num_actions=BUDGET_ACTIONS).finding
    assert finding is not None
    episode = int(finding.origin.split("episode ")[1].split(",")[0])

    def sound() -> RandomWorld:
        return RandomWorld(Shape.by_chance(random.Random(f"1/{episode}"), Parts()))

    assert run(sound, finding.actions) is None
