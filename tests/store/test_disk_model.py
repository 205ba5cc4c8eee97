"""The disk tier against a model that is obviously right: a dictionary, and a scan for what goes next."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

import hypothesis.strategies as st
from disk_pages import MEMORY, check_slots, keys_of, opened, page_of, verifies, write
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

CAPACITY = 5
TEXTS = st.text("ab", min_size=1, max_size=4)
GENERATIONS = st.integers(1, 2)
SELDOM = st.integers(0, 3).map(lambda number: number == 3)
"""What empties the tier must be rare, or it is never full long enough for the order of eviction to matter."""


@dataclass
class Kept:
    """A page that the tier should have."""

    generation: int
    used: int


class ModelOfDisk(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp(prefix="mlkv-disk-model-"))
        self.tier = opened(self.directory, CAPACITY)
        self.kept: dict[str, Kept] = {}
        self.notes: dict[str, bytes] = {}
        self.clock = 0

    def teardown(self) -> None:
        self.tier.close()
        shutil.rmtree(self.directory)

    # The model

    def use(self, text: str) -> None:
        self.clock += 1
        if text in self.kept:
            self.kept[text].used = self.clock

    def leave(self, text: str) -> None:
        """A page that leaves hands its use up to the one before it."""
        used = self.kept.pop(text).used
        if text[:-1] in self.kept:
            self.kept[text[:-1]].used = max(used, self.kept[text[:-1]].used)

    def evict(self, coming: list[str]) -> bool:
        """Make one page leave that nothing continues, neither here nor among what is coming."""
        leaves = [
            text for text in self.kept if not any(other[:-1] == text for other in [*self.kept, *coming] if other)
        ]
        if not leaves:
            return False
        self.leave(min(leaves, key=lambda text: self.kept[text].used))
        return True

    def accept(self, texts: list[str], generation: int) -> list[bool]:
        coming = [text for text in texts if text not in self.kept or self.kept[text].generation != generation]
        free = CAPACITY - len(self.kept)
        while free < len(coming) and self.evict(coming):
            free += 1
        for text in coming[:free]:
            if text in self.kept:
                self.leave(text)
            self.clock += 1
            self.kept[text] = Kept(generation, self.clock)
        return [text in self.kept and self.kept[text].generation == generation for text in texts]

    # What callers do

    @rule(text=TEXTS, start=st.integers(0, 2), generation=GENERATIONS)
    def write(self, text: str, start: int, generation: int) -> None:
        texts = [text[:end] for end in range(1, len(text) + 1)][start:]
        pages = [page_of(one, generation) for one in texts]
        assert write(self.tier, pages) == self.accept(texts, generation)

    @rule(text=TEXTS)
    def contains(self, text: str) -> None:
        texts = [text[:end] for end in range(1, len(text) + 1)]
        found = next((number for number, one in enumerate(texts) if one not in self.kept), len(texts))
        if found:
            self.use(texts[found - 1])
        assert self.tier.contains(keys_of([page_of(one) for one in texts])) == found

    @rule(texts=st.lists(TEXTS, max_size=4))
    def read(self, texts: list[str]) -> None:
        pages = [page_of(text, self.kept[text].generation if text in self.kept else 1) for text in texts]
        views = MEMORY.blank(len(pages))
        good = self.tier.read(keys_of(pages), views).tolist()
        assert good == [text in self.kept for text in texts]
        for page, view, is_good in zip(pages, views, good, strict=True):
            assert verifies(view, page) == is_good
        present = [text for text in texts if text in self.kept]
        if present:
            self.use(present[-1])

    @rule(texts=st.lists(TEXTS, max_size=2))
    def delete(self, texts: list[str]) -> None:
        self.tier.delete(keys_of([page_of(text) for text in texts]))
        for text in texts:
            if text in self.kept:
                self.leave(text)

    @precondition(lambda self: len(self.kept) > 2)
    @rule(really=SELDOM)
    def clear(self, really: bool) -> None:
        if really:
            self.tier.clear()
            self.kept.clear()

    @rule(name=st.sampled_from(["era", "other"]), value=st.binary(max_size=8))
    def store_note(self, name: str, value: bytes) -> None:
        self.tier.store_note(name, value)
        self.notes[name] = value

    @rule()
    def restart(self) -> None:
        self.tier.close()
        self.tier = opened(self.directory, CAPACITY)

    # What always holds

    @invariant()
    def the_same_pages_are_there(self) -> None:
        check_slots(self.tier)
        assert self.tier.scan(b"", 100) == sorted(page_of(text).key for text in self.kept)
        assert self.tier.stats().num_pages == len(self.kept)
        for name in ("era", "other"):
            assert self.tier.load_note(name) == self.notes.get(name)


TestDiskAgainstItsModel = ModelOfDisk.TestCase
TestDiskAgainstItsModel.settings = settings(
    max_examples=40, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)
