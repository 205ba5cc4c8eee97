"""What happens next in a random run: mostly what is likely, often what is nasty, now and then what is rare."""

from __future__ import annotations

import random
from itertools import accumulate

from mlkv.dist.explore import Action
from mlkv.dist.protocol import MAX_FAILURES
from mlkv.explore.engine import SECOND_TURN, WISHES
from mlkv.explore.parts import Parts, Shape
from mlkv.explore.replica import VirtualReplica
from mlkv.explore.world import VirtualWorld

_WEIGHTS = {
    "step": 8,
    "post": 26,
    "decide": 12,
    "apply": 24,
    "transfer": 34,
    "serve": 14,
    "answer": 14,
    "request": 11,
    "press": 3,
    "abort": 1.2,
    "preempt": 1.2,
    "fail": 1.5,
    "break": 0.2,
    "rot": 2.5,
    "tick": 0.4,
    "clear": 0.25,
    "end": 4,
    "kill": 0.4,
    "die": 0.03,
    "diverge": 0.06,
    "trip": 0.03,
}
_VERBS = tuple(_WEIGHTS)
_CUMULATIVE = tuple(accumulate(_WEIGHTS.values()))

_STEMS = ("the cat sat on the mat and", "the dog ran home to eat", "the cat sat by the door")
_TAILS = ("", "", "today", "now then", "red green blue", SECOND_TURN.strip())
_NAMES = "abcdefghijklmnop"


def choose(world: VirtualWorld, rng: random.Random) -> Action:
    """An action that is possible, most of the time."""
    verb = rng.choices(_VERBS, cum_weights=_CUMULATIVE)[0]
    replica = world.replicas[rng.randrange(len(world.replicas))]
    rank = rng.randrange(len(replica.ranks))
    number = replica.ranks[rank].number
    match verb:
        case "decide" if not replica.can_decide:
            return _some_rank("post", replica, rank)
        case "step" | "decide" | "serve" | "answer" | "clear" | "trip":
            return (verb, replica.index)
        case "post" | "apply":
            return _some_rank(verb, replica, rank)
        case "transfer" if world.shape.slow_copies and rng.random() < 0.95:
            return _crowd(replica, rank, rng)
        case "transfer" | "fail":
            return _transfer(verb, replica, rng)
        case "request":
            return _request(replica, rng)
        case "abort" | "preempt":
            names = list(replica.engine.requests) or ["a"]
            return (verb, replica.index, rng.choice(names))
        case "press":
            return (verb, rng.choice(list(world.stores)), rng.randint(1, 4))
        case "rot":
            words = rng.choice(_STEMS).split()[: 2 * rng.randint(1, 3)]
            return (verb, rng.choice(list(world.stores)), " ".join(words), rank)
        case "tick":
            return (verb, 1)
        case "end":
            return _end(replica, rank, rng)
        case "die":
            return (verb, rng.choice(list(world.stores)))
        case "kill" if not any(here.transfers for here in replica.ranks) and rng.random() < 0.9:
            return ("serve", replica.index)  # a loss is most interesting while copies are in flight
        case "diverge":
            return (verb, number, rng.choice(("other", "more")))
        case _:
            return (verb, number)


def _some_rank(verb: str, replica: VirtualReplica, start: int) -> Action:
    """The first rank from a random one on that can do it."""
    can = replica.can_post if verb == "post" else replica.can_apply
    size = len(replica.ranks)
    for offset in range(size):
        rank = (start + offset) % size
        if can(rank):
            return (verb, replica.ranks[rank].number)
    return ("decide", replica.index)


def _crowd(replica: VirtualReplica, rank: int, rng: random.Random) -> Action:
    """More and more copies in flight, until ranks fail more of them than one report can tell."""
    number = replica.ranks[rank].number
    if len(replica.ranks[rank].transfers) > MAX_FAILURES and rng.random() < 0.8:
        return ("break", number)
    return _request(replica, rng) if rng.random() < 0.4 else ("step", replica.index)


def _transfer(verb: str, replica: VirtualReplica, rng: random.Random) -> Action:
    size = len(replica.ranks)
    start = rng.randrange(size)
    for offset in range(size):
        rank = replica.ranks[(start + offset) % size]
        if rank.transfers:
            (kind, _), transfer = rng.choice(list(rank.transfers.items()))
            name = transfer.touch.request_id
            if verb == "fail":
                return ("fail", rank.number, kind, name, rng.randrange(len(transfer.pages)))
            if kind == "offload" and transfer.gathered is None and rng.random() < 0.6:
                return ("gather", rank.number, name)
            return ("finish", rank.number, kind, name)
    return ("serve", replica.index)


def _request(replica: VirtualReplica, rng: random.Random) -> Action:
    words = rng.choice(_STEMS).split()[: rng.randint(1, 7)] + rng.choice(_TAILS).split()
    wishes = " ".join(wish for wish in WISHES if rng.random() < (0.25 if wish == "again" else 0.1))
    return ("request", replica.index, rng.choice(_NAMES), " ".join(words), wishes)


def _end(replica: VirtualReplica, rank: int, rng: random.Random) -> Action:
    """A step in the end of a replica that lost a rank, if it has."""
    if replica.is_gone:
        return ("restart", replica.index)
    size = len(replica.ranks)
    for offset in range(size):
        here = replica.ranks[(rank + offset) % size]
        if here.ended is not None and not here.ended.gone:
            if rng.random() < 0.5:
                return ("lose", replica.index)
            return ("reap" if here.ended.killed else "leave", here.number)
    return ("step", replica.index)


class RandomWorld(VirtualWorld):
    """A world for `explore_random`."""

    def choose(self, rng: random.Random) -> Action:
        return choose(self, rng)


def make_world(rng: random.Random, parts: Parts = Parts()) -> RandomWorld:  # noqa: B008 - frozen
    """A world of a random small shape."""
    return RandomWorld(Shape.by_chance(rng, parts))
