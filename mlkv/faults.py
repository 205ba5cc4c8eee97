"""A seeded plan of faults, for trying how a deployment behaves when transfers are slow or fail.

Grammar: comma-separated `key=value` items.

=====================================  =========================================================================
`delay=WHO:LOW-HIGHms`                 each transfer of these ranks is reported between LOW and HIGH ms late
`fail=WHO:PROBABILITY`                 each transfer of these ranks fails with this probability
`corrupt=WHO:PROBABILITY`              each load of these ranks finds one flipped byte in its pages with this
                                       probability (the byte really is flipped, in host memory)
`kill=rankN@STEP`                      the rank's process ends by SIGKILL at the start of this step (1, 2, ...)
`raise=rankN@STEP`                     `step` raises InjectedFault on this rank, as a failing engine would
`stall=rankN@STEP:SECONDS`             the rank sleeps before it takes part in this step
`seed=N`                               seeds all of it; equal seeds give equal faults for equal task numbers
=====================================  =========================================================================

WHO is `rankN` (group rank within its replica) or `all`, optionally with `/load` or `/offload` behind it:
`delay=rank1/load:0-200ms`. An item may be given several times. The default is no fault. Faults at a step strike
only in the first start of a job: a restart by torchrun (`--max-restarts`) is to succeed.
"""

from __future__ import annotations

import os
import random
import re
import signal
import time
from dataclasses import dataclass
from typing import Literal

from mlkv.errors import ConfigError, MLKVError

Kind = Literal["load", "offload"]

_WHO = re.compile(r"^(?:rank(\d+)|all)(?:/(load|offload))?$")
_DELAY = re.compile(r"^(\d+(?:\.\d+)?)-(\d+(?:\.\d+)?)ms$")
_STEP = re.compile(r"^rank(\d+)@(\d+)(?::(\d+(?:\.\d+)?))?$")
_HELP = (
    "expected items such as delay=rank1:0-200ms, fail=rank1:0.05, corrupt=all/load:0.01, kill=rank1@300, "
    "raise=rank1@300, stall=rank1@300:5, seed=7"
)


class InjectedFault(MLKVError):
    """The fault plan asked for an error here."""


@dataclass(frozen=True)
class _Rule:
    effect: Literal["delay", "fail", "corrupt"]
    rank: int | None
    kind: str | None
    low: float
    high: float

    def covers(self, rank: int, kind: Kind) -> bool:
        return self.rank in (None, rank) and self.kind in (None, kind)


@dataclass(frozen=True)
class Fault:
    """What happens to one transfer.

    Attributes:
        delay_s: report its completion this much later.
        good_fraction: None, or: fail, having verified this fraction of the pages.
        corrupt: flip one byte of one of the pages before reading them.
        pick: uniform in [0, 1), to choose which byte.
    """

    delay_s: float = 0.0
    good_fraction: float | None = None
    corrupt: bool = False
    pick: float = 0.0


NO_FAULT = Fault()


@dataclass(frozen=True)
class _Strike:
    """What happens to a rank at a step."""

    effect: Literal["kill", "raise", "stall"]
    rank: int
    step: int
    seconds: float = 0.0

    def __call__(self) -> None:
        if self.effect == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.effect == "raise":
            raise InjectedFault(f"rank {self.rank} fails at step {self.step}, as the fault plan says")
        time.sleep(self.seconds)


@dataclass(frozen=True)
class FaultPlan:
    """A parsed plan. `FaultPlan.parse("")` is the plan without faults."""

    rules: tuple[_Rule, ...] = ()
    seed: int = 0
    strikes: tuple[_Strike, ...] = ()

    @classmethod
    def parse(cls, spec: str) -> FaultPlan:
        """Raises ConfigError that names the wrong item."""
        rules: list[_Rule] = []
        strikes: list[_Strike] = []
        seed = 0
        for item in filter(None, (part.strip() for part in spec.split(","))):
            key, _, value = item.partition("=")
            if key == "seed":
                if not value.isdigit():
                    raise ConfigError(f"faults: {item!r}: seed must be a whole number; {_HELP}")
                seed = int(value)
            elif key in ("delay", "fail", "corrupt"):
                rules.append(_parse_rule(key, value, item))
            elif key in ("kill", "raise", "stall"):
                strikes.append(_parse_strike(key, value, item))
            else:
                raise ConfigError(f"faults: {item!r} is not a fault; {_HELP}")
        return cls(tuple(rules), seed, tuple(strikes))

    def of_steps(self, rank: int) -> dict[int, list[_Strike]]:
        """What to call at the start of which step on this rank; nothing in a job that was restarted."""
        if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
            return {}
        found: dict[int, list[_Strike]] = {}
        for strike in self.strikes:
            if strike.rank == rank:
                found.setdefault(strike.step, []).append(strike)
        return found

    def fault(self, rank: int, kind: Kind, number: int) -> Fault:
        """The fault of task `number` of one queue on one rank; the same whenever it is asked for."""
        rules = [rule for rule in self.rules if rule.covers(rank, kind)]
        if not rules:
            return NO_FAULT
        chance = random.Random(f"{self.seed}/{rank}/{kind}/{number}")
        delay_s, good_fraction, corrupt = 0.0, None, False
        for rule in rules:
            if rule.effect == "delay":
                delay_s += chance.uniform(rule.low, rule.high) / 1e3
            elif rule.effect == "fail" and chance.random() < rule.low:
                good_fraction = chance.random()
            elif rule.effect == "corrupt" and kind == "load" and chance.random() < rule.low:
                corrupt = True
        return Fault(delay_s, good_fraction, corrupt, chance.random())


def _parse_strike(effect: str, value: str, item: str) -> _Strike:
    match = _STEP.match(value)
    if match is None or int(match[2]) < 1 or (match[3] is None) != (effect != "stall"):
        raise ConfigError(f"faults: {item!r}: {value!r} is not a rank and a step; {_HELP}")
    rank, step = int(match[1]), int(match[2])
    if effect == "stall":
        return _Strike("stall", rank, step, float(match[3]))
    return _Strike("kill" if effect == "kill" else "raise", rank, step)


def _parse_rule(effect: str, value: str, item: str) -> _Rule:
    who, _, amount = value.partition(":")
    match = _WHO.match(who)
    if match is None:
        raise ConfigError(f"faults: {item!r}: {who!r} is not a rank (rankN or all); {_HELP}")
    rank = None if match[1] is None else int(match[1])
    if effect == "delay":
        span = _DELAY.match(amount)
        if span is None or float(span[1]) > float(span[2]):
            raise ConfigError(f"faults: {item!r}: {amount!r} is not a span such as 0-200ms; {_HELP}")
        return _Rule("delay", rank, match[2], float(span[1]), float(span[2]))
    try:
        probability = float(amount)
    except ValueError:
        probability = -1.0
    if not 0.0 <= probability <= 1.0:
        raise ConfigError(f"faults: {item!r}: {amount!r} is not a probability in [0, 1]; {_HELP}")
    if effect == "fail":
        return _Rule("fail", rank, match[2], probability, probability)
    return _Rule("corrupt", rank, match[2], probability, probability)
