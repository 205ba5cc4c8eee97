"""`mlkv bench hang` on a small scale, and the statistics it rests on."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from mlkv.bench import hang
from mlkv.bench.paired import paired_ratio
from mlkv.cli import main


def test_every_mode_takes_as_many_turns_and_the_servers_really_hang(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hang, "run", partial(hang.run, max_s=0.1))
    assert main(["bench", "hang", "--json", str(tmp_path / "out.json")]) == 0
    assert "of no remote" in capsys.readouterr().out
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert [row["remote"] for row in rows] == list(hang.MODES)
    assert {row["steps"] for row in rows} == {60 * 8}
    assert rows[0]["ratio"] == rows[0]["ratio_low"] == rows[0]["ratio_high"] == 1.0
    assert rows[0]["failed_calls"] == 0
    for row in rows[1:]:
        assert row["failed_calls"] > 0
        assert row["ratio_low"] <= row["ratio"] <= row["ratio_high"]
        assert row["ratio"] < 1.5, "an engine waits for a store that hangs"


@pytest.mark.parametrize("true_ratio", [1.0, 1.02, 1.5])
def test_a_ratio_is_found_below_noise_that_is_larger_than_it(true_ratio: float) -> None:
    """Others take a tenth of the machine for tens of turns, and now and then a whole turn."""
    chance = np.random.default_rng(1)
    num_turns = 600
    load = 1.0 + 0.3 * np.repeat(chance.random(num_turns // 20), 20)
    reference = load * (1.0 + 0.02 * chance.standard_normal(num_turns))
    seconds = true_ratio * load * (1.0 + 0.02 * chance.standard_normal(num_turns))
    for values in (reference, seconds):
        values[chance.integers(0, num_turns, 60)] *= 5.0
    found = paired_ratio(seconds, reference)
    assert found.low <= true_ratio <= found.high
    assert found.half_width < 0.01


def test_intervals_of_neighbours_that_agree_are_as_wide_as_what_they_know() -> None:
    """Each ten turns in a row say the same, so that a hundred of them are ten measurements."""
    chance = np.random.default_rng(2)
    few = 1.0 + 0.1 * chance.standard_normal(40)
    alike = paired_ratio(np.repeat(few, 10), np.ones(400))
    independent = paired_ratio(1.0 + 0.1 * chance.standard_normal(400), np.ones(400))
    assert alike.half_width > 2 * independent.half_width
