"""The device page pool: conservation, exact prefix matches, suffix-first eviction."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mlkv.engine.pages import DevicePages

PAGE = 2


def tokens(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def test_a_registered_prefix_is_found_in_whole_pages_and_never_to_the_last_token() -> None:
    pages = DevicePages(8, PAGE)
    row = tokens(1, 2, 3, 4, 5)
    table = pages.allocate(3)
    assert table is not None
    pages.register(row, table, 0, 2)
    assert pages.match(row, 5) == table[:2]
    assert pages.match(row[:4], 3) == table[:1]
    assert pages.match(tokens(1, 2, 9, 4), 4) == table[:1]
    assert pages.match(tokens(3, 4), 2) == []  # the same tokens under another prefix are another page


def test_what_is_not_registered_is_not_found() -> None:
    pages = DevicePages(4, PAGE)
    table = pages.allocate(2)
    assert table is not None
    pages.register(tokens(1, 2, 3, 4), table, 0, 1)
    assert pages.match(tokens(1, 2, 3, 4, 5), 4) == table[:1]


def test_eviction_takes_the_least_recent_suffix_before_its_prefix() -> None:
    pages = DevicePages(4, PAGE)
    old, new = tokens(1, 2, 3, 4), tokens(7, 8, 9, 9)
    for row in (old, new):
        table = pages.allocate(2)
        assert table is not None
        pages.register(row, table, 0, 2)
        pages.release(table)
    assert pages.allocate(1) is not None
    assert len(pages.match(old, 4)) == 1
    assert len(pages.match(new, 4)) == 2
    assert pages.allocate(1) is not None
    assert pages.match(old, 4) == []


def test_the_same_prefix_computed_twice_is_kept_once() -> None:
    pages = DevicePages(4, PAGE)
    row = tokens(1, 2, 3, 4)
    first, second = pages.allocate(2), pages.allocate(2)
    assert first is not None
    assert second is not None
    pages.register(row, first, 0, 2)
    pages.register(row, second, 0, 2)
    assert second == first
    assert pages.num_available == 2
    pages.check()


def test_a_page_released_twice_is_an_error() -> None:
    pages = DevicePages(2, PAGE)
    table = pages.allocate(1)
    assert table is not None
    pages.release(table)
    with pytest.raises(RuntimeError, match="released more often"):
        pages.release(table)


def test_without_reuse_nothing_is_found() -> None:
    pages = DevicePages(2, PAGE, reuse=False)
    table = pages.allocate(1)
    assert table is not None
    pages.register(tokens(1, 2), table, 0, 1)
    pages.release(table)
    assert pages.match(tokens(1, 2, 3), 3) == []
    pages.check()


class Requests(RuleBasedStateMachine):
    """Requests over few tokens, so that prefixes are shared, forked, computed twice and evicted."""

    def __init__(self) -> None:
        super().__init__()
        self.pages = DevicePages(7, PAGE)
        self.requests: list[tuple[np.ndarray, list[int], int]] = []

    @rule(row=st.lists(st.integers(0, 1), min_size=1, max_size=9))
    def begin(self, row: list[int]) -> None:
        array = tokens(*row)
        table = self.pages.match(array, len(array) - 1)
        self.pages.hold(table)
        known = len(table)
        fresh = self.pages.allocate(-(-len(row) // PAGE) - known)
        if fresh is None:
            self.pages.release(table)
        else:
            self.requests.append((array, table + fresh, known))

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def compute(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.requests) - 1))
        array, table, known = self.requests[index]
        stop = data.draw(st.integers(known, len(array) // PAGE))
        self.pages.register(array, table, known, stop)
        self.requests[index] = (array, table, stop)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        _, table, _ = self.requests.pop(data.draw(st.integers(0, len(self.requests) - 1)))
        self.pages.release(table)

    @invariant()
    def conserved(self) -> None:
        self.pages.check()
        used = {page for _, table, _ in self.requests for page in table}
        assert self.pages.num_available == self.pages.num_pages - len(used)

    @invariant()
    def pages_that_are_not_shared_have_one_owner(self) -> None:
        private = [page for _, table, known in self.requests for page in table[known:]]
        shared = {page for _, table, known in self.requests for page in table[:known]}
        assert len(private) == len(set(private))
        assert not shared.intersection(private)


TestRequests = Requests.TestCase
TestRequests.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
