"""Actions as lines that people read and write: in stories, in transcripts, in files to be replayed.

A line names who it is about, unless there is only one: `rank 1: finish load a`, `replica 0: step`, `store 2: die`.
"""

from __future__ import annotations

import shlex

from mlkv.dist.explore import Action

_OF_RANKS = ("post", "apply", "gather", "finish", "fail", "kill", "reap", "leave", "diverge", "break")
_OF_REPLICAS = (
    *("request", "abort", "preempt", "clear", "step", "decide", "serve", "answer", "talk", "land"),
    *("lose", "restart", "trip"),
)
_OF_STORES = ("press", "rot", "die")


def describe_action(action: Action, *, one_replica: bool = False) -> str:
    """The line of an action; with one replica neither it nor its store needs naming."""
    verb = str(action[0])
    words = [verb, *(f'"{part}"' if " " in str(part) else str(part) for part in action[2:] if part != "")]
    if verb in _OF_RANKS:
        return f"rank {action[1]}: {' '.join(words)}"
    if verb in _OF_REPLICAS:
        return " ".join(words) if one_replica else f"replica {action[1]}: {' '.join(words)}"
    if verb in _OF_STORES:
        return f"store: {' '.join(words)}" if one_replica else f"store {action[1]}: {' '.join(words)}"
    return " ".join(map(str, action))


def parse_action(line: str, *, store: int = 0) -> Action:
    """The action of a line. Raises ValueError that says what is wrong with it.

    Args:
        store: which one is meant by a line about "store".
    """
    who, colon, rest = line.partition(":")
    if not colon or '"' in who:
        who, rest = "", line
    words = shlex.split(rest)
    if not words:
        raise ValueError(f"{line!r} says nothing")
    verb, details = words[0], [int(word) if word.isdigit() else word for word in words[1:]]
    if verb in _OF_RANKS:
        return (verb, _number(who, "rank", line), *details)
    if verb in _OF_REPLICAS:
        return (verb, _number(who, "replica", line) if who else 0, *details)
    if verb in _OF_STORES:
        return (verb, store if who.strip() == "store" else _number(who, "store", line), *details)
    if who:
        raise ValueError(f"{line!r}: {verb!r} is nothing that anybody does; see mlkv.explore.world")
    return (verb, *details)


def _number(who: str, kind: str, line: str) -> int:
    words = who.split()
    if len(words) != 2 or words[0] != kind or not words[1].isdigit():
        raise ValueError(f"{line!r} must begin with who does it, such as `{kind} 1:`")
    return int(words[1])
