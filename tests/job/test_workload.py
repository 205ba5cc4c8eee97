"""The workload: its order does not depend on speed, and it cannot fit the device pool."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlkv.engine.tokenizer import ByteTokenizer
from mlkv.engine.workload import DOCUMENT_TOKENS, Ask, Demand, Feed, default_workload
from mlkv.errors import ConfigError

TOKENIZER = ByteTokenizer()
PAGE = 16


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


@pytest.mark.parametrize("dp", [1, 2, 3])
def test_no_replica_can_hold_its_default_requests_on_the_device(dp: int) -> None:
    for asks in default_workload(TOKENIZER, dp, 4096, "cpu"):
        assert len(asks) >= 12
        demand = Demand.of(asks, TOKENIZER, 24, PAGE)
        pool = demand.pool_pages(24, PAGE, 2, 4096)
        # Between two rounds about a document come the others, each with pages of its own.
        others = demand.num_pages * (len(asks) // 4 - 1) // (len(asks) // 4)
        assert pool < others + DOCUMENT_TOKENS["cpu"] // PAGE
        assert pool >= 2 * -(-(max(demand.longest_tokens.values()) + 24) // PAGE)


def test_replicas_get_different_documents_and_each_one_several_questions() -> None:
    by_replica = default_workload(TOKENIZER, 2, 4096, "cpu")
    documents = [{ask.request_id.split("/")[0] for ask in asks} for asks in by_replica]
    assert not documents[0] & documents[1]
    for asks, names in zip(by_replica, documents, strict=True):
        assert len(names) >= 3
        for name in names:
            assert sum(ask.request_id.startswith(f"{name}/") for ask in asks) == 4


def test_a_context_too_short_for_documents_is_refused() -> None:
    with pytest.raises(ConfigError, match="too short"):
        default_workload(TOKENIZER, 1, 200, "cpu")


@given(st.data(), st.integers(1, 4))
def test_order_and_prompts_do_not_depend_on_which_request_is_faster(data: st.DataObject, concurrency: int) -> None:
    asks = [Ask(f"{name}/{turn}", user(f"{name} {turn}"), after=f"{name}/{turn - 1}" if turn else None)
            for turn, name in itertools.product(range(3), "abc")]  # fmt: skip

    def run(in_any_order: bool) -> list[tuple[str, list[int]]]:
        feed, order, unanswered = Feed(asks, TOKENIZER, concurrency), [], []
        while not feed.done:
            for ask, tokens in feed.due():
                order.append((ask.request_id, tokens))
                unanswered.append(ask.request_id)
            assert 0 < len(unanswered) <= concurrency
            index = data.draw(st.integers(0, len(unanswered) - 1)) if in_any_order else 0
            request_id = unanswered.pop(index)
            feed.answered(request_id, TOKENIZER.encode(f"answer to {request_id}"))
        return order

    assert run(True) == run(False)


def test_a_later_turn_contains_the_answer_and_waits_for_it() -> None:
    feed = Feed([Ask("a", user("one")), Ask("b", user("two"), after="a")], TOKENIZER, concurrency=2)
    ((first, prompt),) = feed.due()
    assert first.request_id == "a"
    assert feed.due() == []
    assert feed.answered("a", TOKENIZER.encode("indeed")) == "indeed"
    ((second, longer),) = feed.due()
    assert second.request_id == "b"
    assert longer[: len(prompt)] == prompt
    assert "indeed" in TOKENIZER.decode(longer[len(prompt) :])


def test_demand_counts_a_shared_prefix_once_and_bounds_later_turns() -> None:
    text = "x" * 20 * PAGE
    asks = [Ask("a", user(text)), Ask("b", user(text + "?")), Ask("c", user("more"), after="a")]
    demand = Demand.of(asks, TOKENIZER, 8, PAGE)
    assert 20 <= demand.num_pages <= 25
    assert demand.host_pages(8, PAGE) >= demand.num_pages + 3
    feed = Feed(asks, TOKENIZER, 3)
    lengths = {}
    while not feed.done:
        for ask, tokens in feed.due():
            lengths[ask.request_id] = len(tokens)
            feed.answered(ask.request_id, [65] * 8)
    assert all(lengths[name] <= demand.longest_tokens[name] for name in "abc")
