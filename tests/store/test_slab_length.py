"""A slab that another call makes longer or shorter is in place all the while."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mlkv.store.tiers.slab import Slab

PAGE_BYTES = 4096


@pytest.fixture
def slab(tmp_path: Path) -> Iterator[Slab]:
    made = Slab(tmp_path / "slab", PAGE_BYTES, num_threads=1)
    made.grow(4)
    yield made
    made.close()


@pytest.mark.parametrize("look", ["fstat", "stat"])
@pytest.mark.parametrize(
    "change", [lambda slab: slab.grow(8), lambda slab: slab.shrink(2)], ids=["grows", "shrinks"]
)
@pytest.mark.parametrize("is_before", [True, False], ids=["before the look", "after it"])
def test_it_is_in_place_while_another_call_changes_its_length(
    slab: Slab, monkeypatch: pytest.MonkeyPatch, look: str, change: Callable[[Slab], None], is_before: bool
) -> None:
    real = getattr(os, look)

    def look_beside_a_change(*args: object, **options: object) -> os.stat_result:
        monkeypatch.undo()
        if is_before:
            change(slab)
        found: os.stat_result = real(*args, **options)
        if not is_before:
            change(slab)
        return found

    monkeypatch.setattr(os, look, look_beside_a_change)
    assert slab.is_in_place()
    assert slab.num_slots != 4, "the change came during the look"


@pytest.mark.parametrize("change", ["grows", "shrinks"])
def test_slots_are_there_before_they_are_counted_and_not_counted_before_they_go(
    slab: Slab, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    counted_and_there = []

    def note(name: str) -> None:
        real = getattr(os, name)

        def noting(*args: object) -> None:
            before = slab.num_slots
            real(*args)
            counted_and_there.append((before, os.stat(slab.path).st_size // PAGE_BYTES))

        monkeypatch.setattr(os, name, noting)

    note("posix_fallocate")
    note("ftruncate")
    if change == "grows":
        slab.grow(8)
        assert counted_and_there == [(4, 8)]
    else:
        slab.shrink(2)
        assert counted_and_there == [(2, 2)]


def test_a_file_that_became_shorter_by_itself_is_not_in_place(slab: Slab) -> None:
    os.truncate(slab.path, 3 * PAGE_BYTES)
    assert not slab.is_in_place()
