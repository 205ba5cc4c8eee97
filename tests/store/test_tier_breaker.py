"""When a failing server is left alone, and when it is tried again."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mlkv.store.tiers.breaker import Breaker


def fail(breaker: Breaker, now: float, times: int = 1) -> None:
    for _ in range(times):
        breaker.fail(breaker.begin(now), now)


def test_failures_in_a_row_open_it_and_a_success_in_between_does_not():
    breaker = Breaker(threshold=3)
    fail(breaker, 0.0, 2)
    breaker.succeed(breaker.begin(0.0))
    fail(breaker, 0.0, 2)
    assert breaker.state == "closed"
    fail(breaker, 0.0)
    assert breaker.state == "open"
    assert not breaker.allows(0.4)
    with pytest.raises(RuntimeError):
        breaker.begin(0.4)


def test_pauses_double_up_to_their_bound_and_begin_anew_after_a_success():
    breaker = Breaker(threshold=1, first_pause_s=1.0, max_pause_s=5.0)
    now, pauses = 0.0, []
    for _ in range(5):
        fail(breaker, now)
        assert breaker.due_at is not None
        pauses.append(breaker.due_at - now)
        now = breaker.due_at
    assert pauses == [1.0, 2.0, 4.0, 5.0, 5.0]
    breaker.succeed(breaker.begin(now))
    assert breaker.state == "closed"
    fail(breaker, now)
    assert breaker.due_at == now + 1.0


def test_half_open_makes_one_call_at_a_time():
    breaker = Breaker(threshold=1, first_pause_s=1.0)
    fail(breaker, 0.0)
    trial = breaker.begin(1.0)
    assert breaker.state == "half-open"
    assert not breaker.allows(1.0)
    breaker.withdraw(trial)
    trial = breaker.begin(1.0)
    breaker.succeed(trial)
    assert breaker.allows(1.0)


def test_outcome_of_a_call_from_before_an_opening_changes_nothing():
    breaker = Breaker(threshold=1, first_pause_s=1.0)
    slow, quick = breaker.begin(0.0), breaker.begin(0.0)
    breaker.fail(quick, 0.0)
    breaker.succeed(slow)
    assert breaker.state == "open"
    trial = breaker.begin(1.0)
    breaker.fail(slow, 1.0)
    assert breaker.state == "half-open"
    breaker.succeed(trial)
    breaker.fail(slow, 1.0)
    assert breaker.state == "closed"


class BreakerMachine(RuleBasedStateMachine):
    """Overlapping calls with any outcomes in any order, and time that passes."""

    def __init__(self) -> None:
        super().__init__()
        self.breaker = Breaker(threshold=2, first_pause_s=1.0, max_pause_s=4.0)
        self.now = 0.0
        self.running: list[tuple[int, str]] = []
        self.opened_at: float | None = None

    def note(self) -> None:
        if self.breaker.state != "open":
            self.opened_at = None
        elif self.opened_at is None:
            self.opened_at = self.now

    @rule(seconds=st.floats(0.0, 3.0))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def begin(self) -> None:
        if self.breaker.allows(self.now):
            self.running.append((self.breaker.begin(self.now), self.breaker.state))
        self.note()

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 100), outcome=st.sampled_from(["succeed", "fail", "withdraw"]))
    def end(self, which: int, outcome: str) -> None:
        round_, state = self.running.pop(which % len(self.running))
        is_current = round_ == self.breaker.round
        before = self.breaker.state
        if outcome == "fail":
            self.breaker.fail(round_, self.now)
        elif outcome == "succeed":
            self.breaker.succeed(round_)
        else:
            self.breaker.withdraw(round_)
        if not is_current:
            assert self.breaker.state == before, "an outcome of another round changed the state"
        elif outcome == "succeed":
            assert self.breaker.state == "closed"
        elif outcome == "fail" and state == "half-open":
            assert self.breaker.state == "open"
        self.note()

    @invariant()
    def pause_is_bounded(self) -> None:
        if self.breaker.state == "open":
            assert self.opened_at is not None
            assert self.breaker.due_at is not None
            # Sums as the breaker makes them: a difference of such sums can be a rounding error below the pause.
            assert self.opened_at + 1.0 <= self.breaker.due_at <= self.opened_at + 4.0

    @invariant()
    def half_open_has_one_trial(self) -> None:
        if self.breaker.state == "half-open":
            assert sum(round_ == self.breaker.round for round_, _ in self.running) <= 1

    @invariant()
    def it_is_always_tried_again(self) -> None:
        if self.breaker.due_at is not None:
            assert not self.running or self.breaker.due_at <= self.now + 4.0


BreakerMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
test_breaker_follows_its_rules_under_any_order_of_outcomes = BreakerMachine.TestCase
