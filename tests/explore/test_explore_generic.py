"""The generic explorer on worlds of a few lines: what it finds, how short it tells it, what it calls clean."""

from __future__ import annotations

import random
from collections.abc import Hashable, Sequence

import pytest

from mlkv.dist.explore import (
    SETTLE,
    Action,
    Violation,
    VirtualClock,
    World,
    explore_all,
    explore_random,
    run,
    shrink,
    tell,
)


class Counter(World):
    """Two clerks add one to a shared number: each reads it, and writes back what it read plus one."""

    def __init__(self, *, locked: bool) -> None:
        self.number = 0
        self.read: dict[int, int] = {}
        self.done: set[int] = set()
        self.locked = locked

    def enabled(self) -> Sequence[Action]:
        clerks = [clerk for clerk in (0, 1) if clerk not in self.done]
        return [("write" if clerk in self.read else "read", clerk) for clerk in clerks if self._may(clerk)]

    def _may(self, clerk: int) -> bool:
        return not self.locked or clerk in self.read or not self.read

    def apply(self, action: Action) -> bool:
        verb, clerk = str(action[0]), int(action[1])
        if action not in self.enabled():
            return False
        if verb == "read":
            self.read[clerk] = self.number
        else:
            self.number = self.read.pop(clerk) + 1
            self.done.add(clerk)
            if self.lines is not None:
                self.lines.append(f"the number is {self.number}")
        return True

    def check(self) -> None:
        if self.number < len(self.done):
            raise Violation("nothing is lost", f"{len(self.done)} clerks have added, the number is {self.number}")

    def is_settled(self) -> bool:
        return len(self.done) == 2

    def fingerprint(self) -> Hashable:
        return (self.number, tuple(sorted(self.read.items())), tuple(sorted(self.done)))


def _racing() -> Counter:
    return Counter(locked=False)


def test_every_order_finds_a_lost_update_and_tells_it_in_four_actions() -> None:
    finding = explore_all(_racing).finding
    assert finding is not None
    assert finding.rule == "nothing is lost"
    assert len(finding.actions) == 4
    assert [action[0] for action in finding.actions] == ["read", "read", "write", "write"]
    assert finding.story[-1].endswith("nothing is lost: 2 clerks have added, the number is 1")


def test_every_order_of_the_locked_counter_is_clean_and_each_state_is_seen_once() -> None:
    outcome = explore_all(lambda: Counter(locked=True))
    assert outcome.finding is None
    # Nothing; one of the two has read; is done; the other has read as well; both are done, in the same state.
    assert outcome.num_states == 1 + 2 + 2 + 2 + 1
    assert outcome.happened == {"read": 4, "write": 4}


def test_equal_seeds_find_equal_stories() -> None:
    first, second = (explore_random(lambda _: _racing(), seed=3, num_actions=500) for _ in range(2))
    assert first.finding is not None
    assert str(first.finding) == str(second.finding)
    assert "seed 3, episode" in first.finding.origin


def test_shrinking_leaves_out_whatever_is_not_needed() -> None:
    noise: list[Action] = [("read", 7), ("write", 1), SETTLE] * 40
    actions = [*noise, ("read", 0), *noise[:5], ("read", 1), ("write", 0), *noise, ("write", 1), *noise]
    assert shrink(_racing, actions, "nothing is lost") == [("read", 0), ("read", 1), ("write", 0), ("write", 1)]


def test_shrinking_does_not_slip_to_another_rule() -> None:
    class Odd(Counter):
        def apply(self, action: Action) -> bool:
            if action == ("shout",):
                raise Violation("silence", "somebody shouts")
            return super().apply(action)

    def make() -> Odd:
        return Odd(locked=False)

    actions: list[Action] = [("read", 0), ("read", 1), ("write", 0), ("write", 1), ("shout",)]
    assert shrink(make, actions, "nothing is lost") == actions[:4]


class Trap(World):
    """A walk on a line; whoever has stepped into the hole can only walk around in it."""

    def __init__(self) -> None:
        self.place = 0

    def enabled(self) -> Sequence[Action]:
        return [("walk", {0: 1, 1: 0, 5: 6, 6: 5}[self.place])] + ([("fall", 5)] if self.place == 1 else [])

    def apply(self, action: Action) -> bool:
        self.place = int(action[1])
        return True

    def is_settled(self) -> bool:
        return self.place == 0

    def fingerprint(self) -> Hashable:
        return self.place


class Stop(Trap):
    def enabled(self) -> Sequence[Action]:
        return [] if self.place == 5 else [("walk", 1 - self.place), ("fall", 5)]


class Endless(Trap):
    def enabled(self) -> Sequence[Action]:
        return [("walk", self.place + 1), ("walk", self.place + 2)]


def test_a_part_of_the_graph_without_a_way_out_is_found_though_something_can_always_happen() -> None:
    finding = explore_all(Trap).finding
    assert finding is not None
    assert finding.rule == "nobody waits for ever"
    assert finding.actions[-1] == ("fall", 5)


def test_a_state_in_which_nothing_can_happen_is_a_deadlock_unless_it_is_settled() -> None:
    finding = explore_all(Stop).finding
    assert finding is not None
    assert "nothing can happen any more" in finding.what


def test_an_exploration_that_does_not_end_is_an_error_and_not_a_success() -> None:
    with pytest.raises(ValueError, match="more than 50 states"):
        explore_all(Endless, max_states=50)


def test_an_exception_of_the_explored_code_is_a_finding_with_its_place() -> None:
    class Broken(Trap):
        def choose(self, rng: random.Random) -> Action:
            return ("walk", rng.randrange(3))

        def apply(self, action: Action) -> bool:
            return bool([1, 2][int(action[1])])

    finding = explore_random(lambda _: Broken(), seed=1, num_actions=100).finding
    assert finding is not None
    assert finding.what.startswith("IndexError at test_explore_generic.py:")
    assert finding.actions == [("walk", 2)]


def test_a_world_in_which_nothing_happens_ends() -> None:
    class Still(Trap):
        def choose(self, rng: random.Random) -> Action:
            return ("nothing",)

        def apply(self, action: Action) -> bool:
            return False

    outcome = explore_random(lambda _: Still(), seed=1, num_actions=20, episode_actions=10)
    assert outcome.finding is None
    assert outcome.num_episodes == 20
    assert not outcome.happened


def test_a_story_stops_where_it_breaks_and_leaves_out_what_could_not_happen() -> None:
    actions: list[Action] = [("read", 0), ("write", 1), ("read", 1), ("write", 0), ("write", 1), ("read", 0)]
    story = tell(_racing, actions)
    assert story == [
        "   1. read 0",
        "   2. read 1",
        "   3. write 0",
        "        the number is 1",
        "   4. write 1",
        "        the number is 1",
        "      X nothing is lost: 2 clerks have added, the number is 1",
    ]
    broken = run(_racing, actions)
    assert broken is not None
    assert broken.rule == "nothing is lost"


def test_virtual_seconds_pass_only_when_told() -> None:
    clock = VirtualClock()
    assert clock() == 0.0
    clock.advance(2.5)
    assert clock() == clock() == 2.5
