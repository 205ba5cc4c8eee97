"""Replays of traces: the figures they give, the bound beside them, and the script."""

from __future__ import annotations

import importlib.util
import json
import random
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from mlkv.bench.replay import Comparison, clairvoyant, compare, infinite, replay
from mlkv.bench.traces import Trace, generate_sessions, load_trace, make_trace
from mlkv.errors import MLKVError
from mlkv.store.policy import DEFAULT_POLICY, POLICIES

REPOSITORY = Path(__file__).resolve().parents[2]
PROMPTS = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=3), min_size=1, max_size=7)


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("replay_script", REPOSITORY / "scripts" / "replay.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def best_by_trying_everything(trace: Trace, capacity: int) -> int:
    """Most hits over all ways to choose, after each request, which whole prefixes are kept."""
    parent: dict[int, int] = {}
    for request in trace.requests:
        parent.update(zip(request.blocks, (-1, *request.blocks[:-1]), strict=True))
    best = {frozenset[int](): 0}  # what is in the pool -> most hits so far
    for request in trace.requests:
        after: dict[frozenset[int], int] = {}
        for pool, hits in best.items():
            found = next((i for i, block in enumerate(request.blocks) if block not in pool), len(request.blocks))
            for kept in _closed_subsets(sorted(pool | set(request.blocks)), parent, capacity):
                after[kept] = max(after.get(kept, 0), hits + found)
        best = after
    return max(best.values())


def _closed_subsets(blocks: Sequence[int], parent: dict[int, int], capacity: int) -> set[frozenset[int]]:
    subsets = {frozenset[int]()}
    for block in blocks:  # numbers grow along a chain, so a parent comes before its children
        grown = {kept | {block} for kept in subsets if parent[block] in kept or parent[block] == -1}
        subsets |= {kept for kept in grown if len(kept) <= capacity}
    return subsets


@settings(max_examples=60, deadline=None)
@given(PROMPTS, st.integers(1, 5))
def test_clairvoyant_bound_is_the_best_that_any_choice_reaches(prompts: list[list[int]], capacity: int):
    trace = make_trace("tiny", prompts)
    assert clairvoyant(trace, capacity) * trace.num_blocks == pytest.approx(
        best_by_trying_everything(trace, capacity)
    )


@settings(max_examples=30, deadline=None)
@given(PROMPTS, st.integers(1, 8), st.sampled_from(sorted(POLICIES)))
def test_no_policy_beats_the_bound_and_none_needs_more_than_everything(
    prompts: list[list[int]], capacity: int, policy: str
):
    trace = make_trace("tiny", prompts)
    assert replay(trace, policy, capacity) <= clairvoyant(trace, capacity) + 1e-12
    assert replay(trace, policy, 100) == pytest.approx(infinite(trace)) == pytest.approx(clairvoyant(trace, 100))


def test_lru_replay_is_what_a_list_in_order_of_use_gives():
    trace = generate_sessions(300, seed=3)
    capacity, order, num_hits = 100, [], 0
    for request in trace.requests:
        found = next((i for i, block in enumerate(request.blocks) if block not in order), len(request.blocks))
        num_hits += found
        order = [block for block in order if block not in request.blocks] + list(request.blocks[::-1])
        order = order[-capacity:]
    assert replay(trace, "lru", capacity) == num_hits / trace.num_blocks


def test_default_policy_wins_on_sessions_and_never_loses():
    """Seeds that no constant was chosen by; the smaller pool forgets a user before the next turn."""
    gains = []
    for seed in (11, 12):
        comparison = compare(generate_sessions(1500, seed), [300, 1500], [DEFAULT_POLICY, "lru"])
        gains += comparison.gain(DEFAULT_POLICY)
    assert min(gains) > 0.97
    assert sum(gains) / len(gains) > 1.08


def test_equal_hashes_after_different_beginnings_are_different_blocks():
    trace = make_trace("t", [[1, 2], [3, 2], [1, 2]])
    assert trace.requests[0].blocks == trace.requests[2].blocks
    assert set(trace.requests[0].blocks).isdisjoint(trace.requests[1].blocks)
    assert infinite(trace) == pytest.approx(2 / 6)


def test_generated_sessions_are_the_same_for_the_same_seed():
    assert generate_sessions(50, 1) == generate_sessions(50, 1)
    assert generate_sessions(50, 1) != generate_sessions(50, 2)
    assert 0.2 < infinite(generate_sessions(2000)) < 0.8


def test_trace_is_read_in_order_of_time(tmp_path: Path):
    path = tmp_path / "t.jsonl"
    path.write_text('{"timestamp": 5, "hash_ids": [1, 2]}\n\n{"timestamp": 1, "hash_ids": [1]}\n')
    trace = load_trace(path)
    assert [len(request.blocks) for request in trace.requests] == [1, 2]
    assert trace.num_blocks == 3
    assert trace.name == "t"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("{", "line 1"),
        ("[]", "line 1"),
        ('{"hash_ids": [1]}\n{"hash_ids": "x"}', "line 2.*no list"),
        ('{"hash_ids": [true]}', "no list of integers"),
        ('{"hash_ids": [1], "timestamp": "now"}', "timestamp"),
        ('{"hash_ids": []}', "no block"),
        ("", "no block"),
    ],
)
def test_malformed_trace_is_refused_by_name_and_line(tmp_path: Path, text: str, complaint: str):
    path = tmp_path / "bad.jsonl"
    path.write_text(text)
    with pytest.raises(MLKVError, match=rf"bad\.jsonl.*{complaint}"):
        load_trace(path)


def test_comparison_says_how_much_of_the_gap_is_closed():
    comparison = Comparison(
        "t", (1, 2), {"lru": (0.2, 0.5), "hit-density": (0.3, 0.5)}, clairvoyant=(0.4, 0.5), infinite=0.5
    )
    assert comparison.gain("hit-density") == pytest.approx([1.5, 1.0])
    assert comparison.closed("hit-density") == [pytest.approx(0.5), None]
    assert "+50.0%" in comparison.table()
    assert "50%" in comparison.table()


def test_script_prints_a_table_and_writes_numbers_and_a_picture(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    pytest.importorskip("matplotlib")
    chance = random.Random(0)
    trace = tmp_path / "mine.jsonl"
    rows = [{"timestamp": n, "hash_ids": [chance.randrange(3), chance.randrange(3)]} for n in range(50)]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = ["--json", str(tmp_path / "out.json"), "--plot", str(tmp_path / "out.png")]
    assert script.main([str(trace), "--capacities", "3,6", "--policies", "lru,hit-density", *files]) == 0
    out = capsys.readouterr().out
    assert "mine" in out
    assert "clairvoyant bound" in out
    written = json.loads((tmp_path / "out.json").read_text())[0]
    assert written["rates"]["lru"] == list(compare(load_trace(trace), [3, 6], ["lru"]).rates["lru"])
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


def test_script_says_in_one_line_what_is_wrong(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert script.main([str(tmp_path / "none.jsonl")]) == 1
    error = capsys.readouterr().err
    assert "none.jsonl" in error
    assert "Traceback" not in error
    for wrong in (["--policies", "fifo"], ["--capacities", "0"], ["--capacities", "many"]):
        with pytest.raises(SystemExit):
            script.main(wrong)
