"""tests/transcripts: each story comes out as it is written; see transcript.py for how to renew them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.explore.transcript import FOLDER, replay

_STORIES = sorted(FOLDER.glob("*.txt"))


def test_the_stories_that_people_need_are_there() -> None:
    names = {path.stem for path in _STORIES}
    assert names >= {
        "all_well",
        "slow_rank",
        "salvage",
        "abort_in_flight",
        "divergence",
        "rank_lost",
        "two_hosts",
        "store_dies",
    }


@pytest.mark.parametrize("path", _STORIES, ids=lambda path: path.stem)
def test_story_comes_out_as_it_is_written(path: Path) -> None:
    written = path.read_text()
    assert replay(written) == written
    assert "BROKEN" not in written
    assert "nothing is left" in written  # each story comes to rest


def test_a_changed_outcome_is_seen() -> None:
    written = _STORIES[0].read_text()
    assert replay(written.replace("    step 1: nothing new", "    step 1: all is new")) == written
