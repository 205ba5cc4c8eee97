"""`mlkv bench store`: what it says, and that the index is as fast and as small as it must be."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mlkv.bench.store import BATCH, LONG_CHAIN
from mlkv.cli import main


def test_bench_compares_the_index_with_a_dict(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Bounds are loose by a factor of several, for machines that are busy with other tests."""
    assert main(["bench", "store", "--pages", "100000", "--json", str(tmp_path / "out.json")]) == 0
    assert f"match {LONG_CHAIN} keys" in capsys.readouterr().out
    result = json.loads((tmp_path / "out.json").read_text())
    index, plain = result["index"], result["plain"]
    assert result["bytes_per_page"] < 100
    assert index["match_long_s"] < 4e-3
    assert index["match_long_s"] < plain["match_long_s"] / 3
    for operation in ("reserve", "commit", "match", "release"):
        assert index["pages_per_s"][f"{operation}_{BATCH}"] > 0.2e6
    assert index["longest_call_s"] < 25e-3


def test_pool_too_small_to_measure_is_refused(capsys: pytest.CaptureFixture[str]):
    assert main(["bench", "store", "--pages", "1000"]) == 1
    assert "65536 pages or more" in capsys.readouterr().err
