"""Host pages that cannot be had, at any allocation: for what engines write, and for what tiers bring."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from test_tier_faults import traffic
from tier_cases import LatchTier, TieredStore


class Stingy:
    """The stack of free pages of an index, which gives less than it has at its `number`-th call, from 0 on."""

    def __init__(self, stack: Any, number: int, share: float) -> None:
        self.stack = stack
        self._left = number
        self._share = share
        self.has_failed = False

    def take(self, num_pages: int) -> NDArray[np.int32]:
        self._left -= 1
        if self._left != -1:
            return self.stack.take(num_pages)
        self.has_failed = True
        return self.stack.take(int(num_pages * self._share))

    def __len__(self) -> int:
        return len(self.stack)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stack, name)


@pytest.mark.parametrize("share", [0.0, 0.5], ids=["none", "half"])
def test_pages_that_cannot_be_had_cost_misses_and_nothing_else(share: float) -> None:
    number = 0
    while True:
        tiers = LatchTier(batch_pages=2), LatchTier(batch_pages=3)
        store = TieredStore(16, tiers)
        store.wait_until_connected()
        stingy = Stingy(store.index._free, number, share)
        store.index._free = stingy  # type: ignore[assignment]
        traffic(store)
        store.settle()
        store.index._free = stingy.stack
        store.check_conservation()
        store.store("fine")
        store.settle()
        assert store.find("fine!") == "fine"
        store.close()
        if not stingy.has_failed:
            break
        number += 1
    assert number >= 10, "nothing was made to fail"


def test_promotion_without_a_page_is_answered_at_once_with_what_there_is() -> None:
    tier = LatchTier(batch_pages=2)
    store = TieredStore(16, [tier])
    store.wait_until_connected()
    tier.put("abcdef")
    # The first batch comes, the second one finds no page.
    stingy = Stingy(store.index._free, 1, 0.0)
    store.index._free = stingy  # type: ignore[assignment]
    assert store.find("abcdef", wait_s=60.0) == "ab"
    assert stingy.has_failed
    store.check_conservation()
    assert store.find("abcdef") == "abcdef", "the next lookup finds the rest"
    store.close()
