"""Fault plans: their grammar, and that equal seeds give equal faults."""

from __future__ import annotations

import pytest

from mlkv import ConfigError, FaultPlan
from mlkv.faults import NO_FAULT


def test_the_empty_plan_does_nothing() -> None:
    plan = FaultPlan.parse("")
    assert all(plan.fault(rank, "load", n) == NO_FAULT for rank in range(3) for n in range(50))


def test_delays_hit_the_named_rank_within_their_span() -> None:
    plan = FaultPlan.parse("delay=rank1:10-20ms,seed=3")
    assert plan.fault(0, "load", 1) == NO_FAULT
    delays = [plan.fault(1, "offload", n).delay_s for n in range(200)]
    assert 0.010 <= min(delays) < 0.012
    assert 0.018 < max(delays) <= 0.020


def test_kinds_are_told_apart() -> None:
    plan = FaultPlan.parse("delay=all/load:5-5ms")
    assert plan.fault(0, "load", 1).delay_s == 0.005
    assert plan.fault(0, "offload", 1) == NO_FAULT


def test_failures_come_about_as_often_as_asked_and_are_repeatable() -> None:
    plan = FaultPlan.parse("fail=rank1:0.25,seed=7")
    failed = [n for n in range(2000) if plan.fault(1, "load", n).good_fraction is not None]
    assert 400 < len(failed) < 600
    again = FaultPlan.parse("fail=rank1:0.25,seed=7")
    assert failed == [n for n in range(2000) if again.fault(1, "load", n).good_fraction is not None]
    other = FaultPlan.parse("fail=rank1:0.25,seed=8")
    assert failed != [n for n in range(2000) if other.fault(1, "load", n).good_fraction is not None]


@pytest.mark.parametrize(
    "spec",
    [
        "slow=rank1:1",
        "delay=rank:1-2ms",
        "delay=rank1:2-1ms",
        "delay=rank1:5",
        "fail=rank1:2",
        "fail=x:0.1",
        "seed=x",
    ],
)
def test_wrong_plans_name_the_item_and_show_the_grammar(spec: str) -> None:
    with pytest.raises(ConfigError) as caught:
        FaultPlan.parse(f"delay=all:0-1ms,{spec}")
    assert spec in str(caught.value)
    assert "expected items such as" in str(caught.value)
