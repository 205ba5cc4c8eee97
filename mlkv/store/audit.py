"""Checks every rule of the index over the whole pool."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from mlkv.store.key_table import KeyTable
from mlkv.store.page_arrays import Pages, Rows
from mlkv.store.policy import Policy
from mlkv.store.states import FREE, QUARANTINED, READY, RESERVED, STATE_NAMES
from mlkv.store.tree import PageTree


def find_problems(
    *,
    tree: PageTree,
    table: KeyTable,
    policy: Policy,
    states: NDArray[np.uint8],
    free: Pages,
    counts: Sequence[int],
    leases: Iterable[int],
    writers: Iterable[Rows],
) -> Iterator[str]:
    """What is wrong, in words. `leases`: the deepest page of each; `writers`: the pages of each reservation.

    Takes O(num_pages) steps of the interpreter: for tests and for people who ask.
    """
    num_pages = tree.root
    expected_pins = np.bincount(np.fromiter(leases, np.int64), minlength=num_pages)
    num_writers = np.zeros(num_pages, np.int64)
    for pages in writers:
        np.add.at(num_writers, pages, 1)
    is_free = np.zeros(num_pages, np.bool_)
    is_free[free] = True
    if len(free) != np.count_nonzero(is_free):
        yield "a page is twice in the free list"
    tally = np.bincount(states, minlength=len(STATE_NAMES)).tolist()
    if tally != list(counts) or sum(tally) != num_pages:
        yield f"pages by state are {tally}, counted as {list(counts)}"
    num_candidates = 0
    for page in range(num_pages):
        state, known = int(states[page]), table.has_key(page)
        who = f"page {page} ({STATE_NAMES[state]})"
        num_children = sum(1 for _ in tree.children(page)) if tree.is_linked(page) else 0
        held = tree.holders[page]
        num_candidates += page in policy
        if (state == FREE) != is_free[page] or (state == FREE) == tree.is_linked(page):
            yield f"{who} disagrees with the free list or the tree"
        if held != expected_pins[page] + num_children:
            yield f"{who} counts {held} holders but has {num_children} children and {expected_pins[page]} leases"
        if num_writers[page] != (state == RESERVED):
            yield f"{who} has {num_writers[page]} writers"
        key = table.key_of(page)
        if key is not None and table.find(key) != page:
            yield f"{who} is not found by its key"
        if (page in policy) != (state == READY and not held):
            yield f"{who} is wrongly offered for, or kept from, eviction"
        if state == FREE:
            if known or held:
                yield f"{who} still has a key, or counts a holder"
            continue
        parent = tree.parent[page]
        if parent != tree.root and states[parent] == FREE:
            yield f"{who} hangs below the free page {parent}"
        if page not in tree.children(parent) or tree.depth[page] != tree.depth[parent] + 1:
            yield f"{who} is not below its parent {parent}"
        if known and parent != tree.root and not table.has_key(parent):
            yield f"{who} can be found although its parent {parent} cannot"
        if (state == READY and not known) or (state == QUARANTINED and known):
            yield f"{who} has a key that does not go with its state"
        if state == QUARANTINED and not held:
            yield f"{who} is held by nobody and was not freed"
    if num_candidates != len(policy):
        yield f"the policy counts {len(policy)} candidates and has {num_candidates}"
