"""Jobs that find what earlier ones left in lower tiers."""

from __future__ import annotations

import json
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mlkv.engine import plan as files
from tests.job.jobs import TINY, assert_nothing_left, eventually, finish, processes_of, start
from tests.store.remote_servers import MooncakeMaster, RedisServer, lending, running

SENTENCE = "What does it take to keep the pages of a prompt, and to find them again on another day? "


@pytest.fixture
def folder() -> Iterator[Path]:
    """For the jobs' sockets: its path must be short."""
    with tempfile.TemporaryDirectory(prefix="mlkv-test-", ignore_cleanup_errors=True) as path:
        (Path(path) / "home").mkdir()
        yield Path(path)


def run(folder: Path, *arguments: str) -> dict[str, Any]:
    path = folder / "home" / "report.json"
    status, out, err = finish(start(folder, *TINY, "--max-new-tokens", "8", "--json", str(path), *arguments))
    assert status == 0, err + out
    assert_nothing_left(folder)
    report: dict[str, Any] = json.loads(path.read_text())
    assert all(report["audits"].values())
    return report


def found_below(report: dict[str, Any], tier: str) -> float:
    """Share of the prompts' tokens that came from this tier. The parts must add up to the whole."""
    tokens = report["tokens"]
    assert sum(tokens.values()) == sum(request["prompt_tokens"] for request in report["requests"])
    assert min(tokens.values()) >= 0
    return float(tokens[tier]) / sum(tokens.values())


@pytest.mark.timeout(400)
def test_second_job_serves_its_prompts_from_disk(folder: Path, tmp_path: Path) -> None:
    disk = ("--disk", str(tmp_path / "kv"), "--disk-bytes", "1GiB")
    first = run(folder, *disk)
    assert found_below(first, "disk") == 0
    second = run(folder, *disk)
    assert found_below(second, "disk") > 0.2
    assert second["tokens"]["computed"] < 0.3 * first["tokens"]["computed"]
    assert [r["answer"] for r in second["requests"]] == [r["answer"] for r in first["requests"]]


@pytest.fixture(params=["redis", "mooncake"])
def remote(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """URL of a store that outlives the jobs."""
    kind = {"redis": RedisServer, "mooncake": MooncakeMaster}[request.param]
    if kind.missing():
        pytest.skip(kind.missing())
    with running(kind(tmp_path / request.param)) as server:
        if isinstance(server, RedisServer):
            yield server.url
            return
        assert isinstance(server, MooncakeMaster)
        # What a job lends to Mooncake goes with it, so that another host has to lend: this process does.
        monkeypatch.setenv("MLKV_STORE__REMOTE__SEGMENT_BYTES", "0")
        with lending(server):
            yield server.url


@pytest.mark.timeout(400)
def test_deployment_with_another_tp_size_reads_what_the_first_one_wrote(folder: Path, remote: str) -> None:
    # Fewer and shorter prompts than the default ones, so that every store can have its turn.
    prompts = folder / "home" / "prompts.txt"
    prompts.write_text("".join(f"{number} {SENTENCE * 12}\n" for number in range(6)))
    few = ("--prompts", str(prompts))
    first = run(folder, "--tp", "2", "--remote", remote, *few)
    second = run(folder, "--tp", "1", "--remote", remote, *few)
    assert found_below(first, "remote") == 0
    assert found_below(second, "remote") > 0.2
    assert second["tokens"]["computed"] < 0.3 * first["tokens"]["computed"]


def owner_of(folder: Path) -> int | None:
    owners = [pid for pid, line in processes_of(folder).items() if "mlkv.store.owner" in line]
    return owners[0] if owners else None


def requests_served(folder: Path, phase: str) -> int:
    """Of the job's first replica, in this phase."""
    for path in folder.glob("mlkv-job-*/start*/progress0.json"):
        progress = files.read(path, files.Progress)
        return progress.done if progress.phase == phase else 0
    return 0


@pytest.mark.timeout(400)
def test_outputs_stay_equal_when_the_owner_is_killed_and_the_next_job_finds_its_pages(
    folder: Path, tmp_path: Path
) -> None:
    path = folder / "home" / "report.json"
    disk = ("--disk", str(tmp_path / "kv"), "--disk-bytes", "1GiB")
    job = start(folder, *TINY, "--max-new-tokens", "8", "--json", str(path), *disk)
    eventually(lambda: requests_served(folder, "on") >= 3, "some requests were served with the cache", 150.0)
    owner = owner_of(folder)
    assert owner is not None
    os.kill(owner, signal.SIGKILL)
    status, out, err = finish(job)
    assert_nothing_left(folder)
    assert path.exists(), err + out
    report = json.loads(path.read_text())
    assert report["audits"]["outputs_equal"], err + out
    assert report["audits"]["ranks_equal"]
    # The books went with the owner.
    assert status == 1
    assert not report["audits"]["pages_conserved"]
    after = run(folder, *disk)
    assert found_below(after, "disk") > 0
    assert [r["answer"] for r in after["requests"]] == [r["answer"] for r in report["requests"]]


def test_disk_folder_that_cannot_be_is_told(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    status, _out, err = finish(start(folder, *TINY, "--disk", str(tmp_path / "file")))
    assert status == 1
    assert f"cannot use the disk folder {tmp_path / 'file'}" in err
    assert_nothing_left(folder)
