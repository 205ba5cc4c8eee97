"""`mlkv bench disk` measures what it says, and says what it compares with."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from mlkv import cli
from mlkv.bench import disk, raw_disk
from mlkv.errors import MLKVError

SIZE_BYTES = 8 << 20


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "_PAGE_BYTES", (256 << 10, 1 << 20))
    monkeypatch.setattr(disk, "_RECOVERED_PAGES", 3000)


@pytest.mark.parametrize("reference", ["fio", "plain threads"])
def test_both_sides_move_every_byte_and_leave_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reference: str
) -> None:
    if reference == "plain threads":
        monkeypatch.setattr(shutil, "which", lambda name: None)
    elif not shutil.which("fio"):
        pytest.skip("fio is not installed")
    result = disk.run(tmp_path, size_bytes=SIZE_BYTES, num_rounds=2)
    assert [(row["page_bytes"], row["direction"]) for row in result["rows"]] == [
        (256 << 10, "write"),
        (256 << 10, "read"),
        (1 << 20, "write"),
        (1 << 20, "read"),
    ]
    for row in result["rows"]:
        assert row["raw_reference"].startswith(reference)
        assert len(row["rounds"]) == 2
        for side in ("tier", "raw", "raw_large"):
            assert row[side]["gib_per_s"] > 0
        for ratio, raw in (("tier_over_raw", "raw"), ("tier_over_raw_large", "raw_large")):
            found = [one["tier"]["gib_per_s"] / one[raw]["gib_per_s"] for one in row["rounds"]]
            assert row[ratio] == pytest.approx(sum(found) / 2, abs=0.001)
        assert 0 <= row["large_page_share"] <= 1
    assert result["recovered_pages"] == 3000
    assert 0 < result["recovery_cpu_s"] <= result["recovery_s"] + 0.05 < 60
    assert list(tmp_path.iterdir()) == []
    text = disk.report(result)
    assert ("fio is not installed" in text) == (reference == "plain threads")


def test_a_pool_in_small_pages_is_said_because_it_is_slower(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "_PAGE_BYTES", (1 << 20,))
    monkeypatch.setattr(shutil, "which", lambda name: None)
    for large_bytes, is_said in ((SIZE_BYTES // 2, True), (SIZE_BYTES, False)):
        monkeypatch.setattr(disk, "large_page_bytes", lambda memory, found=large_bytes: found)
        text = disk.report(disk.run(tmp_path, size_bytes=SIZE_BYTES, num_rounds=1))
        assert ("has 50% in large pages" in text) == is_said
        assert ("docs/operations.md" in text) == is_said


@pytest.mark.parametrize("large_pages", [True, False])
def test_fio_is_told_to_take_large_pages_only_where_that_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, large_pages: bool
) -> None:
    noting = tmp_path / "fio"
    noting.write_text(f'#!/bin/sh\necho "$GLIBC_TUNABLES" "$@" > {tmp_path}/told\nexit 1\n')
    noting.chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    with pytest.raises(MLKVError, match="fio with"):
        raw_disk.Fio(tmp_path / "raw", 1 << 20, 1 << 18, 2, large_pages=large_pages).measure("read")
    told = (tmp_path / "told").read_text()
    assert ("hugetlb=1" in told) == ("iomem_align" in told) == large_pages


def test_the_command_prints_a_table_and_writes_the_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(disk.run, "__kwdefaults__", {"size_bytes": SIZE_BYTES, "num_rounds": 1})
    assert (
        cli.main(["bench", "disk", "--directory", str(tmp_path / "new"), "--json", str(tmp_path / "f.json")]) == 0
    )
    assert "tier / raw" in capsys.readouterr().out
    assert json.loads((tmp_path / "f.json").read_text())["size_bytes"] == SIZE_BYTES


def test_a_disk_without_room_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(MLKVError, match="bytes free"):
        disk.run(tmp_path, size_bytes=1 << 60)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_used_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert cli.main(["bench", "disk", "--directory", str(tmp_path / "file" / "x")]) == 1
    assert str(tmp_path / "file") in capsys.readouterr().err


def test_a_reference_that_is_cut_short_is_no_measurement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = raw_disk.PlainThreads(tmp_path / "raw", 1 << 20, 1 << 18, 2)
    raw.measure("write")
    monkeypatch.setattr(os, "preadv", lambda fd, views, offset: 512)
    with pytest.raises(MLKVError, match="cut short"):
        raw.measure("read")
