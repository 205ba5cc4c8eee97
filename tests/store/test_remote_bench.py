"""`mlkv bench remote` on a small scale."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from remote_engines import S3Engine
from remote_servers import MooncakeMaster, RedisServer, S3Server, free_port, running
from store_helpers import environment

from mlkv.bench import remote
from mlkv.cli import main
from mlkv.errors import ConfigError


@pytest.fixture
def redis_server(tmp_path: Path) -> Iterator[RedisServer]:
    if RedisServer.missing():
        pytest.skip(RedisServer.missing())
    server = RedisServer(tmp_path)
    with running(server):
        yield server


def test_it_compares_tier_and_client_and_leaves_nothing_behind(redis_server: RedisServer) -> None:
    import valkey

    result = remote.run(redis_server.url, page_bytes=64 << 10, total_bytes=4 << 20, rounds=3)
    for kind in ("write", "read"):
        assert result[kind]["tier_gb_s"] > 0
        assert result[kind]["ratio"] == pytest.approx(
            result[kind]["tier_gb_s"] / result[kind]["client_gb_s"], rel=0.1, abs=0.02
        )
    assert "ratio" in remote.report(result)
    assert valkey.Valkey(port=redis_server.port).dbsize() == 0


def test_the_command_prints_a_table_and_writes_json(
    redis_server: RedisServer,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(remote, "run", partial(remote.run, total_bytes=4 << 20, rounds=1))
    file = tmp_path / "result.json"
    assert main(["bench", "remote", "--url", redis_server.url, "--page-bytes", "262144", "--json", str(file)]) == 0
    assert "client GB/s" in capsys.readouterr().out
    assert json.loads(file.read_text())["page_bytes"] == 262144


def test_s3_is_compared_with_requests_of_its_own_client(tmp_path: Path) -> None:
    if S3Server.missing():
        pytest.skip(S3Server.missing())
    engine = S3Engine(tmp_path)
    settings = {
        "endpoint": engine.server.endpoint,
        "access_key_id": S3Server.ACCESS_KEY,
        "secret_access_key": S3Server.SECRET_KEY,
    }
    result = remote.run(
        f"s3://{S3Server.BUCKET}/bench", page_bytes=64 << 10, total_bytes=1 << 20, rounds=1, settings=settings
    )
    engine.close()
    assert result["read"]["ratio"] > 0


def test_a_store_that_is_down_is_one_line_on_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    port = free_port()
    assert main(["bench", "remote", "--url", f"redis://127.0.0.1:{port}"]) == 1
    assert f"127.0.0.1:{port}" in capsys.readouterr().err


@pytest.mark.parametrize("url", ["", "http://somewhere", "redis://user:secret@host"])
def test_a_wrong_url_is_refused_without_repeating_secrets(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        remote.run(url)
    assert "secret" not in str(caught.value)


def test_mooncake_is_compared_and_the_command_ends(tmp_path: Path) -> None:
    if MooncakeMaster.missing():
        pytest.skip(MooncakeMaster.missing())
    server = MooncakeMaster(tmp_path)
    file = tmp_path / "result.json"
    with running(server):
        # In a process of its own, since Mooncake's client leaves threads and logs behind.
        subprocess.run(
            [sys.executable, "-m", "mlkv", "bench", "remote", "--url", server.url, "--json", str(file)],
            check=True,
            capture_output=True,
            env=environment(),
            timeout=120,
        )
    assert json.loads(file.read_text())["write"]["ratio"] > 0
