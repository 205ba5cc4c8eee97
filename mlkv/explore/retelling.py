"""The same story in fewer and simpler words: what shrinking may put in the place of actions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mlkv.dist.explore import SETTLE, Action

_OF_A_RANK = ("post", "apply")
_FLOW = ("post", "apply", "decide", "step", "serve", "answer", "talk", "gather", "finish", "land", "settle")


def simpler(actions: Sequence[Action], num_ranks: int) -> Iterator[list[Action]]:
    """Ways to tell the same in fewer or shorter words; never in longer ones."""
    whole = _whole_steps(actions)
    if whole != list(actions):
        yield whole
    yield from _settled_first(actions)
    for name in sorted({str(action[2]) for action in actions if action[0] == "request"}):
        yield [action for action in actions if name not in action[2:]]
    for at, action in enumerate(actions):
        if action[0] == "decide":
            yield _one_step(actions, at, num_ranks)
    for at, action in enumerate(actions):
        for other in _shorter(action, num_ranks):
            yield [*actions[:at], other, *actions[at + 1 :]]


def _whole_steps(actions: Sequence[Action]) -> list[Action]:
    """Every step at once where it was decided, instead of rank by rank."""
    return [
        ("step", action[1]) if action[0] == "decide" else action
        for action in actions
        if action[0] not in _OF_A_RANK
    ]


def _settled_first(actions: Sequence[Action]) -> Iterator[list[Action]]:
    """A first part of which only matters what it asked for, not how it went."""
    for end in range(len(actions) - 1, 2, -max(1, len(actions) // 24)):
        asked = [action for action in actions[:end] if action[0] not in _FLOW]
        if len(asked) + 1 < end:
            yield [*asked, SETTLE, *actions[end:]]


def _one_step(actions: Sequence[Action], decided: int, num_ranks: int) -> list[Action]:
    """One `decide` with its posts before and its applies after it as one `step`."""
    replica = int(actions[decided][1])
    mine = range(replica * num_ranks, (replica + 1) * num_ranks)
    kept: list[Action] = []
    for verb, part in (("post", reversed(actions[:decided])), ("apply", iter(actions[decided + 1 :]))):
        ended = False
        rest: list[Action] = []
        for action in part:
            ended = ended or (action[0] in ("decide", "step") and action[1] == replica)
            if ended or action[0] != verb or action[1] not in mine:
                rest.append(action)
        kept = rest[::-1] if verb == "post" else [*kept, ("step", replica), *rest]
    return kept


def _shorter(action: Action, num_ranks: int) -> Iterator[Action]:
    match action:
        case ("request", replica, name, str(text), *wishes):
            if wishes and wishes[0]:
                yield ("request", replica, name, text)
            words = text.split()
            if len(words) > 1:
                yield ("request", replica, name, " ".join(words[:-1]), *wishes)
        case ("press", store, int(pages)) if pages > 1:
            yield ("press", store, pages - 1)
        case ("fail", rank, kind, name, int(pages)) if pages > 0:
            yield ("fail", rank, kind, name, pages - 1)
        case ("preempt", replica, name):
            yield ("abort", replica, name)
        case ("serve", replica):
            yield ("talk", replica)
        case ("finish", int(rank), *_):
            yield ("land", rank // num_ranks)
        case _:
            return
