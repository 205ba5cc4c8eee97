"""The real protocol, tasks and store under random orders of events, and small scenes under all of them."""

from __future__ import annotations

import random
from functools import partial

import pytest

from mlkv.dist.explore import SETTLE, Action, explore_all, explore_random, perform, run
from mlkv.dist.protocol import MAX_FAILURES
from mlkv.explore.chance import RandomWorld, make_world
from mlkv.explore.footprint import footprint, freeze
from mlkv.explore.mutants import MUTANTS
from mlkv.explore.parts import Shape
from mlkv.explore.script import describe_action, parse_action
from mlkv.explore.small import SCENES, Scene, SmallWorld
from mlkv.explore.world import VirtualWorld

_QUICK_SCENES = (
    "three ranks load two pages, and it fails on any of them",
    "the store is cleared while a prompt is loaded, continued and stored",
    "an offload fails, decisions come one step late",
    "a load under pressure fails, decisions come one step late",
)


def test_random_orders_break_nothing_and_everything_that_can_happen_does() -> None:
    outcome = explore_random(make_world, seed=20, num_actions=50_000)
    assert outcome.finding is None, str(outcome.finding)
    happens = {name[len("_do_") :] for name in dir(VirtualWorld) if name.startswith("_do_")}
    # Shrinking puts these two in the place of what happened one by one.
    assert set(outcome.happened) == happens - {"talk", "land"}


@pytest.mark.parametrize(
    ("num_replicas", "is_late"), [(1, False), (1, True), (16, False)], ids=["one", "one late", "sixteen"]
)
def test_sixty_four_ranks_on_sixteen_hosts_break_nothing(num_replicas: int, is_late: bool) -> None:
    shape = Shape(
        num_replicas=num_replicas, num_ranks=64 // num_replicas, num_hosts=16, num_pages=12, is_late=is_late
    )
    outcome = explore_random(lambda _: RandomWorld(shape), seed=4, num_actions=1_500)
    assert outcome.finding is None, str(outcome.finding)


@pytest.mark.parametrize("scene", [s for s in SCENES if s.name in _QUICK_SCENES], ids=lambda scene: scene.name)
def test_every_order_of_a_small_scene_breaks_nothing(scene: Scene) -> None:
    outcome = explore_all(partial(SmallWorld, scene))
    assert outcome.finding is None, str(outcome.finding)
    assert outcome.num_states > 1_000
    # Each card is played somewhere, and from everywhere all comes to rest (explore_all sees to that).
    assert {str(card[0]) for card in scene.cards} <= set(outcome.happened)


def test_every_order_finds_the_one_in_which_a_page_is_reused_too_early() -> None:
    scene = next(scene for scene in SCENES if scene.name.startswith("a load under pressure is preempted"))
    shape = Shape(num_ranks=2, num_pages=3, num_blocks=8, stored=("the cat",), parts=MUTANTS["free-on-submit"])
    finding = explore_all(partial(SmallWorld, Scene(scene.name, shape, scene.cards))).finding
    assert finding is not None
    assert finding.rule == "no page is reused while somebody may touch it"


def test_ten_times_the_tasks_leave_the_same_state_behind() -> None:
    held: list[int] = []
    for num_requests in (20, 200):
        world = VirtualWorld(Shape(num_ranks=3, num_pages=8))
        for number in range(num_requests):
            request: Action = ("request", 0, "abcd"[number % 4], f"the cat sat on {number % 7} mats", "")
            for action in (request, SETTLE):
                assert perform(world, action)
        replica = world.replicas[0]
        parts = [rank.member for rank in replica.ranks] + [rank.lifecycle for rank in replica.ranks]
        held.append(footprint([parts, replica._leaders]))
    assert held[0] == held[1]


def test_a_line_of_a_story_is_the_action_it_tells() -> None:
    world = make_world(random.Random(5))
    rng = random.Random(6)
    seen: set[str] = set()
    for _ in range(3_000):
        action = world.choose(rng)
        seen.add(str(action[0]))
        told = tuple(part for part in action if part != "")
        assert parse_action(describe_action(action)) == told
        perform(world, action)
    assert len(seen) > 15


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("finish load a", "must begin with who does it, such as `rank 1:`"),
        ("replica 1: finish load a", "must begin with who does it, such as `rank 1:`"),
        ("rank x: post", "must begin with who does it"),
        ("rank 1: fly", "'fly' is nothing that anybody does"),
        ("   ", "says nothing"),
    ],
)
def test_a_line_that_is_no_action_says_why(line: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        parse_action(line)


def test_a_wish_that_does_not_exist_is_named() -> None:
    with pytest.raises(ValueError, match=r"wishes are nolookup.*not 'fly'"):
        VirtualWorld(Shape()).apply(("request", 0, "a", "the cat", "fly"))


def test_fingerprints_ignore_how_many_steps_were_done_and_see_what_differs() -> None:
    world = SmallWorld(SCENES[0])
    seen = set()
    for _ in range(30):
        assert world.apply(("step", 0))
        seen.add(world.fingerprint())
    assert len(seen) == 1
    assert world.apply(("request", 0, "a", "the cat now", "nolookup"))
    assert world.fingerprint() not in seen


def test_a_restored_world_goes_on_like_the_one_it_was_taken_from() -> None:
    world = make_world(random.Random(8))
    rng = random.Random(9)
    for _ in range(400):
        perform(world, world.choose(rng))
    copy = world.restore(world.snapshot())
    assert copy.fingerprint() == world.fingerprint()
    for _ in range(200):
        action = world.choose(rng)
        assert perform(world, action) == perform(copy, action)
    assert copy.fingerprint() == world.fingerprint()


def test_freezing_tells_sharing_from_equality() -> None:
    shared: dict[str, int] = {"a": 1}
    class_left_out = frozenset({"left"})
    assert freeze([{1, 2}, (3, "x")], class_left_out) == freeze([{2, 1}, (3, "x")], class_left_out)
    assert freeze(Shape(num_pages=3), frozenset()) != freeze(Shape(num_pages=4), frozenset())
    assert freeze(Shape(num_pages=3), frozenset({"num_pages"})) == freeze(
        Shape(num_pages=4), frozenset({"num_pages"})
    )
    assert freeze([shared, shared], frozenset()) == freeze([{"a": 1}, {"a": 1}], frozenset())


def test_the_same_episode_is_the_same_run() -> None:
    def digest() -> tuple[object, ...]:
        rng = random.Random("12/3")
        world = make_world(rng)
        actions = []
        for _ in range(500):
            action = world.choose(rng)
            perform(world, action)
            actions.append(action)
        return (tuple(actions), repr([store.contents for store in world.stores.values()]))

    assert digest() == digest()
    assert run(lambda: make_world(random.Random("12/3")), []) is None


def test_more_failures_than_one_report_can_tell_are_all_failures() -> None:
    world = VirtualWorld(Shape(num_ranks=2, num_pages=16, num_blocks=16, max_requests=16))
    names = "abcdefghijkl"
    for name in names:
        assert perform(world, ("request", 0, name, f"{name} prompt", "nolookup"))
    world.lines = []
    for action in ("step", "talk", "step"):
        assert perform(world, (action, 0))
    assert all(len(rank.transfers) == len(names) > MAX_FAILURES for rank in world.replicas[0].ranks)
    for rank in (0, 1):
        assert perform(world, ("break", rank))
    world.settle()
    failed = [
        line for line in world.lines if "is not stored whole, 0 pages readable: rank 0 stored 0 of 1" in line
    ]
    assert len(failed) == len(names)
    counts = world.stores[0].index.counts()
    assert counts.free == counts.num_pages
