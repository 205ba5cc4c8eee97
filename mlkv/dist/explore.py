"""Exploration of interleavings: find the order of events that breaks an invariant, and tell it as a short story.

Anything whose outcome depends on the order of events can be explored: wrap the real code into a `World` that has
no threads, sockets or clocks of its own, so that whoever drives it decides what happens next. Then

- `explore_random` drives many worlds by chance, from a seed, and lets each come to rest at its end;
- `explore_all` tries every order from one start, remembering the states it has seen;
- what breaks is shrunk to the fewest actions that still break it (`shrink`) and told in words (`tell`).

An action is a tuple of plain values that means the same in every run of the same world, so that a list of actions
can be replayed, and shortened: an action that is not possible at its turn is left out.
"""

from __future__ import annotations

import pickle
import random
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Union

Action = tuple[Union[str, int], ...]  # noqa: UP007 - an alias evaluated on Python 3.10

SETTLE: Action = ("settle",)
"""Calls `World.settle`. The last action of every episode."""

_ATTEMPTS = 20  # for each action of an episode: a world in which nothing can happen must not be asked for ever

_MAX_SHRINK_RUNS = 3000  # a story that is not minimal after so many replays is told as it is
_DEADLOCK = "nothing can happen any more, but not all is done"
_MAX_RETELLINGS = 600


class Violation(Exception):
    """An invariant is broken.

    Attributes:
        rule: short name of the invariant; shrinking keeps only what breaks the same one.
        what: what happened, to whom, for people.
    """

    def __init__(self, rule: str, what: str) -> None:
        self.rule = rule
        self.what = what
        super().__init__(f"{rule}: {what}")


class VirtualClock:
    """Seconds that pass only when an action says so. Call it like `time.monotonic`."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def advance(self, seconds: float) -> None:
        self.now_s += seconds


class World(ABC):
    """Real code with everything around it virtual.

    Attributes:
        lines: None, or a list to which the world appends, in plain words, what happens. `tell` sets it.
    """

    lines: list[str] | None = None

    @abstractmethod
    def enabled(self) -> Sequence[Action]:
        """Everything that could happen next. Must be the same for equal fingerprints."""

    @abstractmethod
    def apply(self, action: Action) -> bool:
        """Let it happen; False, with nothing changed, if it cannot happen now. May raise Violation."""

    def check(self) -> None:  # noqa: B027 - `apply` may have checked everything
        """Raise Violation if an invariant is broken. Called after every action."""

    def settle(self) -> None:  # noqa: B027 - a world may have nothing in flight
        """Let everything in flight complete, and raise Violation if something still waits after bounded time."""

    def choose(self, rng: random.Random) -> Action:
        """What happens next in a random run. Override it to prefer what is likely or interesting."""
        actions = self.enabled()
        if not actions:
            return SETTLE
        return actions[rng.randrange(len(actions))]

    def is_settled(self) -> bool:
        """Whether nothing is in flight. For `explore_all`: from every state one like this must be reachable."""
        return True

    def fingerprint(self) -> Hashable:
        """For `explore_all`: equal for two states only if everything that can follow is equal.

        Counters that only count (steps done, statistics) should be left out, or no state is ever seen twice.
        """
        raise NotImplementedError(f"{type(self).__name__} does not say when two of its states are the same")

    def snapshot(self) -> bytes:
        """The whole state, for `explore_all`; `restore` makes a world of it."""
        return pickle.dumps(self, pickle.HIGHEST_PROTOCOL)

    @staticmethod
    def restore(snapshot: bytes) -> World:
        world = pickle.loads(snapshot)
        assert isinstance(world, World)
        return world

    def describe(self, action: Action) -> str:
        """The action in plain words, for stories."""
        return " ".join(map(str, action))

    def simpler(self, actions: Sequence[Action]) -> Iterable[list[Action]]:
        """Other ways to say the same in fewer or simpler actions, for `shrink` to try; never in longer ones."""
        return ()


@dataclass
class Finding:
    """A broken invariant, and the shortest way to it that was found."""

    rule: str
    what: str
    actions: list[Action]
    story: list[str]
    origin: str = ""

    def __str__(self) -> str:
        head = f"BROKEN: {self.rule}\n  {self.what}\n"
        origin = f"found by: {self.origin}\n" if self.origin else ""
        return f"{head}{origin}the story, in {len(self.actions)} actions:\n" + "\n".join(self.story)


@dataclass
class Outcome:
    """What an exploration did."""

    num_actions: int = 0
    num_episodes: int = 0
    num_states: int = 0
    finding: Finding | None = None
    happened: dict[str, int] = field(default_factory=dict)
    """How often each kind of action happened, by its first word: what never happens is not tested."""


def episode_rng(seed: int, episode: int) -> random.Random:
    """The chance that rules one episode, the same in every process and on every machine."""
    return random.Random(f"{seed}/{episode}")


def explore_random(
    make: Callable[[random.Random], World],
    *,
    seed: int,
    num_actions: int,
    episode_actions: int = 500,
    first_episode: int = 0,
    shrinks: bool = True,
) -> Outcome:
    """Run episodes, each in a world of its own, until something breaks or the actions are used up.

    Args:
        make: a new world; may draw its size from the given generator.
        seed, first_episode: equal numbers give equal runs.
        num_actions: budget over all episodes.
        episode_actions: after so many a world has to settle and is left.
        shrinks: whether to shorten what is found.
    """
    outcome = Outcome()
    episode = first_episode
    while outcome.num_actions < num_actions:
        rng = episode_rng(seed, episode)
        world = make(rng)
        done: list[Action] = []
        try:
            for _ in range(_ATTEMPTS * episode_actions):
                if len(done) >= min(episode_actions, num_actions - outcome.num_actions):
                    break
                action = world.choose(rng)
                done.append(action)
                if perform(world, action):
                    outcome.happened[str(action[0])] = outcome.happened.get(str(action[0]), 0) + 1
                else:
                    done.pop()
            done.append(SETTLE)
            perform(world, SETTLE)
        except Violation as broken:
            fresh = partial(_make_episode, make, seed, episode)
            origin = f"seed {seed}, episode {episode}, action {len(done)}"
            outcome.finding = make_finding(fresh, done, broken, origin, shrinks=shrinks)
            outcome.num_actions += len(done)
            return outcome
        outcome.num_actions += len(done)
        outcome.num_episodes += 1
        episode += 1
    return outcome


def _make_episode(make: Callable[[random.Random], World], seed: int, episode: int) -> World:
    return make(episode_rng(seed, episode))


def explore_all(make: Callable[[], World], *, max_states: int = 200_000) -> Outcome:
    """Try every order of actions from one start, and see that everything can come to rest from everywhere.

    States with equal fingerprints are explored once. Raises ValueError when there are more than `max_states`:
    an exploration that was cut short has shown nothing.
    """
    outcome = Outcome()
    world = make()
    graph = _Graph()
    state = graph.add(world.fingerprint(), world.is_settled(), -1, SETTLE)
    action = SETTLE
    stack = [(state, world.snapshot(), world.enabled())]
    try:
        while stack:
            branching, snapshot, choices = stack.pop()
            for choice in choices:
                world, state, action = world.restore(snapshot), branching, choice
                while True:
                    if not perform(world, action):
                        break
                    outcome.num_actions += 1
                    outcome.happened[str(action[0])] = outcome.happened.get(str(action[0]), 0) + 1
                    key = world.fingerprint()
                    if graph.find(key, state) is not None:
                        break
                    state = graph.add(key, world.is_settled(), state, action)
                    actions = world.enabled()
                    if not actions and not graph.settled[state]:
                        raise Violation("nobody waits for ever", _DEADLOCK)
                    if len(actions) != 1:
                        stack.append((state, world.snapshot(), actions))
                        break
                    action = actions[0]  # no choice: go on in this very world
                if len(graph.settled) > max_states:
                    raise ValueError(f"more than {max_states} states: explore something smaller")
    except Violation as broken:
        origin = "every order of events was tried"
        outcome.finding = make_finding(make, [*graph.path(state), action], broken, origin)
    outcome.num_states = len(graph.settled)
    stuck = None if outcome.finding else graph.find_stuck()
    if stuck is not None:
        what = "from here on nothing that may happen lets everything complete"
        path = graph.path(stuck)
        outcome.finding = Finding("nobody waits for ever", what, path, tell(make, path))
    return outcome


class _Graph:
    """States seen, how each was reached first, and what leads to what."""

    def __init__(self) -> None:
        self._number: dict[Hashable, int] = {}
        self._came_from: list[tuple[int, Action]] = []
        self._before: list[list[int]] = []
        self.settled: list[bool] = []

    def add(self, key: Hashable, is_settled: bool, before: int, action: Action) -> int:
        number = len(self.settled)
        self._number[key] = number
        self._came_from.append((before, action))
        self._before.append([before] if before >= 0 else [])
        self.settled.append(is_settled)
        return number

    def find(self, key: Hashable, before: int) -> int | None:
        """The known state of this fingerprint, now also reached from `before`."""
        number = self._number.get(key)
        if number is not None:
            self._before[number].append(before)
        return number

    def path(self, state: int) -> list[Action]:
        actions = []
        while self._came_from[state][0] >= 0:
            state, action = self._came_from[state]
            actions.append(action)
        return actions[::-1]

    def find_stuck(self) -> int | None:
        """The first state from which no settled one can be reached."""
        reaches = list(self.settled)
        todo = [number for number, yes in enumerate(reaches) if yes]
        while todo:
            for before in self._before[todo.pop()]:
                if not reaches[before]:
                    reaches[before] = True
                    todo.append(before)
        return reaches.index(False) if False in reaches else None


def perform(world: World, action: Action) -> bool:
    """One action and all checks. An exception of the explored code is a broken invariant as well."""
    try:
        if action == SETTLE:
            world.settle()
            happened = True
        else:
            happened = world.apply(action)
        if happened:
            world.check()
    except Violation:
        raise
    except Exception as error:
        # Whatever the code under exploration raises is the finding; it is told with its place.
        where = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{Path(where.filename).name}:{where.lineno}"
        raise Violation("no surprise", f"{type(error).__name__} at {place}: {error}") from error
    return happened


def run(make: Callable[[], World], actions: Iterable[Action]) -> Violation | None:
    """Replay actions in a new world, leaving out what is not possible. The invariant that broke, if any."""
    world = make()
    try:
        for action in actions:
            perform(world, action)
    except Violation as broken:
        return broken
    return None


def make_finding(
    make: Callable[[], World], actions: list[Action], broken: Violation, origin: str, *, shrinks: bool = True
) -> Finding:
    """Shrink what broke, and tell it."""
    shortest = shrink(make, actions, broken.rule) if shrinks else actions
    again = run(make, shortest)
    what = again.what if again is not None else broken.what
    return Finding(broken.rule, what, shortest, tell(make, shortest), origin)


def shrink(make: Callable[[], World], actions: Sequence[Action], rule: str) -> list[Action]:
    """The fewest of these actions, in their order, that still break this rule: none of them can be left out.

    Delta debugging (Zeller and Hildebrandt, 2002): leave out large pieces first, then ever smaller ones.
    """
    runs = 0

    def breaks(candidate: Sequence[Action]) -> bool:
        nonlocal runs
        runs += 1
        broken = run(make, candidate)
        return broken is not None and broken.rule == rule

    best = _retell(make, list(actions), breaks, num_tries=1)
    piece = max(1, len(best) // 2)
    while runs < _MAX_SHRINK_RUNS:
        at, before = len(best), best
        while at > 0 and runs < _MAX_SHRINK_RUNS:
            # From the end: what came last is most often not needed for what broke before it.
            candidate = best[: max(0, at - piece)] + best[at:]
            if breaks(candidate):
                best = candidate
            at -= piece
        if piece > 1:
            piece = max(1, piece // 2)
            continue
        best = _retell(make, best, breaks)
        if best == before:
            break
    return best


def _retell(
    make: Callable[[], World],
    actions: list[Action],
    breaks: Callable[[Sequence[Action]], bool],
    num_tries: int = _MAX_RETELLINGS,
) -> list[Action]:
    """The first simpler way to say the same that still breaks, and so on from there."""
    again = True
    while again and num_tries:
        again = False
        for candidate in islice(make().simpler(actions), num_tries):
            num_tries -= 1
            if candidate != actions and breaks(candidate):
                actions, again = candidate, True
                break
    return actions


def tell(make: Callable[[], World], actions: Iterable[Action]) -> list[str]:
    """The story of a run: each action that happened, and below it what it brought about."""
    world = make()
    world.lines = []
    story: list[str] = []
    number = 0
    for action in actions:
        world.lines.clear()
        broken = None
        described = world.describe(action)
        try:
            if not perform(world, action):
                continue
        except Violation as violation:
            broken = violation
        number += 1
        story.append(f"{number:4}. {described}")
        story += [f"        {line}" for line in world.lines]
        if broken is not None:
            story.append(f"      X {broken.rule}: {broken.what}")
            break
    return story
