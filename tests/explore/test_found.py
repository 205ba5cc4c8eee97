"""What the explorer found in the library, as the stories in which it found it."""

from __future__ import annotations

import pickle

import pytest

from mlkv.dist.explore import perform
from mlkv.errors import AgreementError, RankLost, RanksDiverged
from mlkv.explore.parts import Shape
from mlkv.explore.script import parse_action
from mlkv.explore.world import VirtualWorld


def _play(shape: Shape, story: str) -> VirtualWorld:
    world = VirtualWorld(shape)
    world.lines = []
    for line in filter(None, map(str.strip, story.splitlines())):
        assert perform(world, parse_action(line)), line
    return world


def test_answers_that_arrive_together_with_the_loss_of_the_store_end_as_misses() -> None:
    # The first answer reserves pages for a request that was aborted meanwhile. Giving them back meets a dead
    # owner, which settles everything that is open; the second answer then belonged to no question any more.
    world = _play(
        Shape(num_replicas=1, num_ranks=2),
        """
        request a "the cat sat by" nolookup
        step
        request b "the dog ran home"
        abort a
        serve
        rank 0: post
        serve
        answer
        answer
        store 0: die
        step
        """,
    )
    assert world.lines is not None
    assert "step 2: b has no hit" in world.lines
    world.settle()


@pytest.mark.parametrize("kind", [RankLost, RanksDiverged])
def test_errors_that_name_a_rank_survive_the_way_to_another_process(
    kind: type[RankLost] | type[RanksDiverged],
) -> None:
    error = kind(3, 17, "it was slow")
    copy: AgreementError = pickle.loads(pickle.dumps(error))
    assert isinstance(copy, kind)
    assert (copy.rank, copy.step, copy.why, str(copy)) == (3, 17, "it was slow", str(error))
