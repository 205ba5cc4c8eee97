"""Step results in words."""

from __future__ import annotations

from collections.abc import Sequence

from mlkv.explore.words import PAGE_TOKENS
from mlkv.tasks import StepResult

NOTHING = "nothing new"


def describe_result(result: StepResult) -> list[str]:
    """What a step brought, one line for each event; the same on all ranks, so told once."""
    return _events(result) or [NOTHING]


def describe_calls(calls: Sequence[Sequence[object]]) -> str:
    """What the engine of every rank does before a step."""
    return ", ".join(f"{call[0]}({call[1] if len(call) > 1 else ''})" for call in calls)


def in_short(result: StepResult) -> str:
    return "; ".join(_events(result)) or "nothing"


def _events(result: StepResult) -> list[str]:
    events = []
    for name, hit in result.hits.items():
        events.append(f"{name} has a hit of {_pages(hit.num_tokens)}" if hit.num_tokens else f"{name} has no hit")
    events += [f"{name} is loaded, {_pages(tokens)}" for name, tokens in result.loaded.items()]
    events += [
        f"the load of {name} failed, {_pages(failure.num_tokens)} good: {failure.reason}"
        for name, failure in result.failed.items()
    ]
    events += [f"{name} is released" for name in result.released]
    events += [f"{name} is stored, {_pages(tokens)}" for name, tokens in result.offloaded.items()]
    events += [
        f"{name} is not stored whole, {_pages(failure.num_tokens)} readable: {failure.reason}"
        for name, failure in result.unstored.items()
    ]
    return events


def _pages(num_tokens: int) -> str:
    number = num_tokens // PAGE_TOKENS
    return f"{number} page" if number == 1 else f"{number} pages"
