"""What tools ask of the owner: its answers are bounded, and pages of tiers are looked at without being served."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from store_helpers import DEADLINE_S, chain, eventually, key
from tier_cases import GROUP, LatchTier, TieredStore

from mlkv.errors import StoreError, TierUnavailable
from mlkv.page import verify_own_header
from mlkv.store import wire, wire_tools
from mlkv.store.service import StoreService
from mlkv.store.states import READY, RESERVED


class Tools(TieredStore):
    """A store above one tier, with its pool known to the service."""

    def __init__(self, tier: LatchTier, num_pages: int = 32) -> None:
        super().__init__(num_pages, [tier])
        self.service = StoreService(self.index, self.lower, self.pool)
        self.service.join(GROUP, 1)
        self.wait_until_connected()

    def later(self, request: wire.SlowRequest) -> list[wire.Reply]:
        answers: list[wire.Reply] = []
        self.service.handle_later(GROUP, 1, request, answers.append)
        return answers

    def answered(self, request: wire.SlowRequest) -> wire.Reply:
        answers = self.later(request)
        self.until(lambda: bool(answers), f"{request} is answered")
        return answers[0]


@pytest.fixture
def tier() -> LatchTier:
    made = LatchTier(deadline_s=0.2)
    made.put("abcd")
    return made


@pytest.fixture
def tools(tier: LatchTier) -> Iterator[Tools]:
    made = Tools(tier)
    yield made
    made.close()


def test_fetched_pages_are_those_of_the_tier_and_nobody_finds_them(tools: Tools) -> None:
    keys = [key("ab"), key("nowhere"), key("abc")]
    fetched = tools.answered(wire_tools.Fetch("latch", b"".join(keys)))
    assert isinstance(fetched, wire_tools.Fetched)
    assert list(fetched.good) == [1, 0, 1]
    for at in (0, 2):
        header = verify_own_header(np.frombuffer(tools.pool.page(int(fetched.page_ids[at])), np.uint8))
        assert header is not None
        assert header.identity.key == keys[at]
    assert tools.here("abcd") == ""
    assert tools.report().reserved == 3
    tools.ask(wire.Cancel(fetched.reservation))
    tools.check_conservation()


def test_pages_of_a_fetch_that_hangs_stay_out_of_use_until_it_returns(tools: Tools, tier: LatchTier) -> None:
    with tier.held("read") as let_go:
        reply = tools.answered(wire_tools.Fetch("latch", chain("ab")))
        assert isinstance(reply, wire.Failed)
        assert "timeout" in reply.message
        assert tools.report().reserved == 2
        let_go()
        tools.until(lambda: tools.report().reserved == 0, "its pages are free")
    tools.check_conservation()


def test_pages_of_a_fetch_whose_asker_left_are_free_again(tools: Tools, tier: LatchTier) -> None:
    with tier.held("read"):
        answers = tools.later(wire_tools.Fetch("latch", chain("ab")))
        tools.until(lambda: bool(tier.in_call), "the tier is read")
        tools.service.leave(GROUP, 1)
    tools.service.join(GROUP, 1)
    tools.service.leave(GROUP, 1)
    tools.until(lambda: tools.index.num_free == tools.index.num_pages, "its pages are free")
    assert answers == []
    tools.service.join(GROUP, 1)


def test_a_fetch_takes_at_most_an_eighth_of_the_pool(tools: Tools) -> None:
    with pytest.raises(StoreError, match="between 1 and 4 pages"):
        tools.later(wire_tools.Fetch("latch", chain("abcde")))


def test_tier_that_is_out_of_order_or_unknown_is_said_so(tools: Tools, tier: LatchTier) -> None:
    with pytest.raises(StoreError, match="no tier 'disk'; it has: latch"):
        tools.later(wire_tools.ListTier("disk", b"", 10))
    tools.answered(wire_tools.ListTier("latch", b"", 1))  # it works, so one failure is not the end yet
    tier.fail("read", TierUnavailable("down"))
    tier.fail("connect", TierUnavailable("down"))
    for _ in range(3):
        assert isinstance(tools.answered(wire_tools.Fetch("latch", chain("a"))), wire.Failed)
    with pytest.raises(StoreError, match="out of order"):
        tools.later(wire_tools.Fetch("latch", chain("a")))
    assert tools.report().reserved == 0


def test_keys_of_a_tier_are_listed_in_pieces(tools: Tools) -> None:
    first = tools.answered(wire_tools.ListTier("latch", b"", 3))
    assert isinstance(first, wire_tools.TierKeys)
    second = tools.answered(wire_tools.ListTier("latch", first.keys[-16:], 3))
    assert isinstance(second, wire_tools.TierKeys)
    keys = first.keys + second.keys
    assert len(first.keys) == 48
    assert sorted(chain("abcd")[at : at + 16] for at in range(0, 64, 16)) == [
        keys[at : at + 16] for at in range(0, 64, 16)
    ]


def test_pages_are_listed_in_pieces_with_their_states(tools: Tools) -> None:
    tools.store("abc")
    reserved = tools.reserve("xy")
    listed: list[tuple[bytes, int]] = []
    start = 0
    while start >= 0:
        found = tools.ask(wire_tools.ListPages(start, 2))
        assert isinstance(found, wire_tools.PageList)
        assert len(found.page_ids) <= 2
        listed += [(found.keys[16 * at : 16 * at + 16], state) for at, state in enumerate(found.states)]
        start = found.next
    assert dict(listed) == {
        **{key("abc"[:end]): READY for end in (1, 2, 3)},
        **{key("xy"[:end]): RESERVED for end in (1, 2)},
    }
    tools.ask(wire.Cancel(reserved.reservation))


def test_forgetting_in_a_tier_leaves_host_memory_alone(tools: Tools, tier: LatchTier) -> None:
    assert tools.find("abcd") == "abcd"
    tools.ask(wire_tools.Forget("latch", key("abc")))
    eventually(lambda: tools.lower.poll() or key("abc") not in tier.pages, "the tier forgets it", DEADLINE_S)
    assert tools.here("abcd") == "abcd"


def test_negative_and_enormous_limits_are_bounded(tools: Tools) -> None:
    tools.store("abc")
    for limit in (-5, 0, 1):
        found = tools.ask(wire_tools.ListPages(-3, limit))
        assert isinstance(found, wire_tools.PageList)
        assert len(found.page_ids) == 1
    found = tools.ask(wire_tools.ListPages(0, 1 << 60))
    assert isinstance(found, wire_tools.PageList)
    assert len(found.page_ids) == 3
    beyond = tools.ask(wire_tools.ListPages(1 << 40, 10))
    assert isinstance(beyond, wire_tools.PageList)
    assert (len(beyond.page_ids), beyond.next) == (0, -1)
