"""Small worlds, tried in every order of events.

A *scene* is a few things that will happen, each once, at any time: requests, an abort, a failure, pressure on the
pool. Everything else (who enters a step when, which copy ends when, when the store answers) happens in every order
that can make a difference. What cannot is tried in one order only:

- An event of a copy is seen by its rank when that enters its next step, and until then the copy holds its pages.
  So copies end right before their rank enters a step, in every combination: the longest time that they can touch
  their pages, with every outcome that the rank can report.
- Ranks enter a step in the order of their numbers, and leave it together: until a step is decided they touch
  nothing in common but the pages, and for those an entry that comes late is the harder case. What a decision lets
  one rank do with pages, no other rank can forbid by applying the same decision.
- An answer of the store is seen when the master decides, so it arrives right before that or not yet.
- A request or an abort is seen by the ranks when they enter a step, so it comes right before one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from mlkv.dist.explore import Action
from mlkv.explore.parts import Shape
from mlkv.explore.replica import VirtualReplica
from mlkv.explore.world import VirtualWorld

_MASTERS = -1
_CALLS = ("request", "abort", "preempt", "clear")


@dataclass(frozen=True)
class Scene:
    """What will happen in a small world, besides everything running its course.

    Attributes:
        cards: actions that happen once each, whenever they are possible.
        num_failures: how many copies may fail, anywhere, with any number of good pages.
    """

    name: str
    shape: Shape
    cards: tuple[Action, ...]
    num_failures: int = 0


class SmallWorld(VirtualWorld):
    """A world for `explore_all`: one scene, with every order of its events."""

    def __init__(self, scene: Scene) -> None:
        super().__init__(scene.shape)
        self._cards = list(scene.cards)
        self._failures_left = scene.num_failures
        self._focus: int | None = (
            None  # a rank whose copies end before its step, or the masters before they decide
        )

    def apply(self, action: Action) -> bool:
        if not super().apply(action):
            return False
        verb = action[0]
        if verb in ("finish", "gather", "fail"):
            self._failures_left -= verb == "fail"
        elif action in self._cards:
            self._cards.remove(action)
        self._focus = self._focus_after(action)
        return True

    def _focus_after(self, action: Action) -> int | None:
        """What has begun that nothing else may come between."""
        if action[0] == "answer":
            return _MASTERS
        if action[0] in ("finish", "gather", "fail") and self.rank(int(action[1])).is_running:
            return int(action[1])
        return None

    def state(self) -> list[object]:
        return [*super().state(), self._cards, self._failures_left, self._focus]

    def enabled(self) -> Sequence[Action]:
        actions: list[Action] = []
        for replica in self.replicas:
            self._add_steps(replica, actions)
        if self._focus is None and not any(replica.is_leaving for replica in self.replicas):
            for replica in self.replicas:
                self._add_store(replica, actions)
                self._add_end(replica, actions)
            actions += [card for card in self._cards if card[0] not in _CALLS]
        return actions

    def _add_steps(self, replica: VirtualReplica, actions: list[Action]) -> None:
        focus = self._focus
        if replica.can_decide and focus in (None, _MASTERS):
            actions.append(("decide", replica.index))
            if replica.client.num_answered:
                actions.append(("answer", replica.index))
        if focus == _MASTERS:
            return
        if replica.is_between_steps and focus is None:
            actions += [c for c in self._cards if c[0] in _CALLS and c[1] == replica.index]
        appliers = [rank for rank in range(len(replica.ranks)) if replica.can_apply(rank)]
        if appliers and focus is None:
            actions.append(("apply", replica.ranks[appliers[0]].number))
        if replica.is_leaving:
            return
        posters = [rank for rank in range(len(replica.ranks)) if replica.can_post(rank)]
        if posters:
            number = replica.ranks[posters[0]].number
            if focus in (None, number):
                self._add_copies(replica, posters[0], actions)
                actions.append(("post", number))

    def _add_copies(self, replica: VirtualReplica, rank: int, actions: list[Action]) -> None:
        here = replica.ranks[rank]
        for (kind, _), transfer in here.transfers.items():
            name = transfer.touch.request_id
            if kind == "offload" and transfer.gathered is None:
                actions.append(("gather", here.number, name))
            actions.append(("finish", here.number, kind, name))
            if self._failures_left:
                actions += [("fail", here.number, kind, name, good) for good in range(len(transfer.pages))]

    def _add_store(self, replica: VirtualReplica, actions: list[Action]) -> None:
        if replica.client.num_asked and replica.can_ask:
            actions.append(("serve", replica.index))

    def _add_end(self, replica: VirtualReplica, actions: list[Action]) -> None:
        for rank in replica.ranks:
            if rank.ended is None or rank.ended.gone:
                continue
            if rank.ended.killed:
                actions.append(("reap", rank.number))
            elif rank.transfers:
                self._add_copies(replica, rank.group_rank, actions)
            else:
                actions.append(("leave", rank.number))
        if replica.can_lose:
            actions.append(("lose", replica.index))
        if replica.is_gone:
            actions.append(("restart", replica.index))


def _shape(**sizes: object) -> Shape:
    return replace(Shape(num_ranks=2, num_pages=3, num_blocks=8), **sizes)  # type: ignore[arg-type]


_CAT = ("the cat",)  # one page

SCENES: tuple[Scene, ...] = (
    Scene(
        "a prompt is stored while one that begins like it comes, and is aborted",
        _shape(),
        (
            ("request", 0, "a", "the cat now", "nolookup"),
            ("request", 0, "b", "the cat then", "nooffload"),
            ("abort", 0, "b"),
        ),
    ),
    Scene(
        "three ranks load two pages, and it fails on any of them",
        _shape(num_ranks=3, stored=("the cat sat on",)),
        (("request", 0, "a", "the cat sat on mats", "nooffload"),),
        num_failures=1,
    ),
    Scene(
        "two loads of the same page",
        _shape(stored=_CAT),
        (("request", 0, "a", "the cat sat", "nooffload"), ("request", 0, "b", "the cat too", "nooffload")),
    ),
    Scene(
        "a load under pressure is preempted",
        _shape(stored=_CAT),
        (("request", 0, "a", "the cat sat", "nooffload"), ("preempt", 0, "a"), ("press", 0, 3)),
    ),
    Scene(
        "the store is cleared while a prompt is loaded, continued and stored",
        _shape(stored=_CAT),
        (("request", 0, "a", "the cat sat on"), ("clear", 0)),
    ),
    Scene(
        "an offload fails, decisions come one step late",
        _shape(is_late=True),
        (("request", 0, "a", "the cat now", "nolookup"),),
        num_failures=1,
    ),
    Scene(
        "an offload is aborted, decisions come one step late",
        _shape(is_late=True),
        (("request", 0, "a", "the cat now", "nolookup"), ("abort", 0, "a")),
    ),
    Scene(
        "a load under pressure fails, decisions come one step late",
        _shape(is_late=True, stored=_CAT),
        (("request", 0, "a", "the cat now", "nooffload"), ("press", 0, 3)),
        num_failures=1,
    ),
    Scene(
        "any rank dies at any moment of a load, and the launcher starts them again",
        _shape(stored=_CAT),
        (("request", 0, "a", "the cat sat", "nooffload"), ("kill", 0), ("kill", 1), ("press", 0, 3)),
    ),
    Scene(
        "two replicas store the same prompt, and one of them may fail",
        _shape(num_replicas=2, num_ranks=1),
        (("request", 0, "a", "the cat now", "nolookup"), ("request", 1, "b", "the cat sat", "nolookup")),
        num_failures=1,
    ),
)
