"""`mlkv store` as a process, an engine on it, and the commands of an operator."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlkv import Hit, Replica
from mlkv.cli import main
from mlkv.store import Match, Release
from mlkv.store.rendezvous import is_listening
from tests.cache.bench import PAGE_TOKENS, Rank, layout_of, slots_of, tokens_of

PAGE_BYTES = layout_of(2).page_bytes
NUM_PAGES = 64


class Host:
    """A folder with settings, an owner that was started by hand, and engines on it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.socket = folder / "hand.sock"
        self.disk = folder / "disk"
        self.store = {
            "name": "hand",
            "directory": str(folder),
            "host_bytes": NUM_PAGES * PAGE_BYTES,
            "disk": {"directory": str(self.disk), "limit_bytes": 8 << 20},
        }
        self.settings = folder / "settings.json"
        self.settings.write_text(json.dumps({"model": "test", "page_tokens": PAGE_TOKENS, "store": self.store}))
        self.engines: list[Rank] = []
        self.owner: subprocess.Popen[str] | None = None

    def start(self, *options: str) -> subprocess.Popen[str]:
        self.owner = subprocess.Popen(
            [sys.executable, "-m", "mlkv", "store", "--config", str(self.settings), *options],
            stderr=subprocess.PIPE,
            text=True,
        )
        end = time.monotonic() + 60.0
        while not is_listening(self.socket):
            assert self.owner.poll() is None, self.owner.communicate()[1]
            assert time.monotonic() < end, "the store does not listen"
            time.sleep(0.02)
        return self.owner

    def engine(self) -> Rank:
        self.engines.append(Rank(Replica.single(), store=dict(self.store)))
        return self.engines[-1]

    def stop(self, how: signal.Signals = signal.SIGTERM) -> tuple[int, str]:
        assert self.owner is not None
        self.owner.send_signal(how)
        _, errors = self.owner.communicate(timeout=60.0)
        return self.owner.returncode, errors

    def close(self) -> None:
        for engine in self.engines:
            engine.cache.close()
        if self.owner is not None and self.owner.poll() is None:
            self.owner.kill()
            self.owner.communicate()


@pytest.fixture
def host() -> Iterator[Host]:
    with tempfile.TemporaryDirectory(prefix="mlkv-") as folder:
        made = Host(Path(folder))
        yield made
        made.close()


@pytest.fixture
def ask(host: Host, capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """Run a command about the host's store with --json: what it printed, parsed."""

    def run(*words: str, status: int = 0) -> Any:
        assert main([*words, "--socket", str(host.socket), "--json"]) == status
        return json.loads(capsys.readouterr().out)

    return run


def stored(rank: Rank, length: int = 19, seed: int = 0) -> list[int]:
    tokens = tokens_of(length, seed)
    rank.compute(tokens, slots_of(0, length))
    rank.store(f"stored{seed}-{len(rank.seen.offloaded)}", tokens, slots_of(0, length))
    rank.poison()
    return tokens


def written(host: Host, ask: Callable[..., Any], num_pages: int) -> None:
    """Until the disk has so many pages."""
    end = time.monotonic() + 30.0
    while ask("stats")["tiers"][0]["num_pages"] != num_pages:
        assert time.monotonic() < end, "the disk does not get its pages"
        time.sleep(0.02)


def test_store_outlives_its_engines_and_ends_cleanly(host: Host) -> None:
    host.start("--page-bytes", str(PAGE_BYTES))
    first = host.engine()
    tokens = stored(first)
    first.cache.close()
    second = host.engine()
    slots = slots_of(50, 19)
    assert second.fetch("b", tokens, slots) == 16
    assert second.wrong_tokens(tokens[:16], slots[:16]) == []
    second.drain()
    second.check_conserved()
    status, log = host.stop()
    assert status == 0
    assert str(host.socket) in log
    assert f"{NUM_PAGES} pages of {PAGE_BYTES} bytes" in log
    assert not [path for path in host.folder.iterdir() if path.name.startswith("hand")]
    # The engine goes on without it.
    assert second.ask("c", tokens) == Hit(0)


def test_store_started_again_finds_its_disk(host: Host, ask: Callable[..., Any]) -> None:
    host.start("--page-bytes", str(PAGE_BYTES))
    engine = host.engine()
    tokens = stored(engine)
    engine.cache.close()
    assert host.stop(signal.SIGINT)[0] == 0
    host.start("--page-bytes", str(PAGE_BYTES))
    engine = host.engine()
    assert engine.fetch("b", tokens, slots_of(50, 19)) == 16
    assert ask("stats")["tiers"][0]["pages_hit"] == 4


@pytest.mark.parametrize(
    ("settings", "options", "message"),
    [
        ({"store": {"name": "hand"}}, [], "size of a page is not known"),
        ({}, ["--page-bytes", "4096"], "set store.name"),
        ({"store": {"name": "hand"}}, ["--page-bytes", "1000"], "multiple of 4096"),
        ({"stor": {}}, ["--page-bytes", "4096"], "stor is not a setting"),
    ],
)
def test_store_says_what_is_wrong_with_its_settings(
    tmp_path: Path, settings: dict[str, Any], options: list[str], message: str
) -> None:
    file = tmp_path / "settings.json"
    tmp_path.chmod(0o700)
    if "store" in settings:
        settings["store"]["directory"] = str(tmp_path)
    file.write_text(json.dumps({"model": "test", **settings}))
    command = [sys.executable, "-m", "mlkv", "store", "--config", str(file), *options]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60.0, check=False)
    assert result.returncode != 0
    assert message in result.stderr


def test_commands_say_that_no_store_runs(host: Host, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["stats", "--socket", str(host.socket)]) == 1
    assert "no store runs at" in capsys.readouterr().err
    assert main(["stats", "--directory", str(host.folder)]) == 1
    assert "no store runs with a socket in" in capsys.readouterr().err


@pytest.mark.parametrize("by", ["socket", "name", "directory", "config"])
def test_a_store_is_found_by_each_of_its_names(host: Host, by: str, capsys: pytest.CaptureFixture[str]) -> None:
    host.start("--page-bytes", str(PAGE_BYTES))
    options = {
        "socket": ["--socket", str(host.socket)],
        "name": ["--name", "hand", "--directory", str(host.folder)],
        "directory": ["--directory", str(host.folder)],
        "config": ["--config", str(host.settings)],
    }[by]
    assert main(["stats", "--json", *options]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["owner_pid"] == host.owner.pid  # type: ignore[union-attr]
    assert told["num_pages"] == told["free"] == NUM_PAGES


def test_stats_and_ls_tell_what_is_there(host: Host, ask: Callable[..., Any]) -> None:
    host.start("--page-bytes", str(PAGE_BYTES))
    engine = host.engine()
    tokens = stored(engine)
    assert engine.ask("a", tokens) == Hit(16)
    engine.cache.decline("a")
    engine.drain()
    engine.check_conserved()
    stats = ask("stats", "--audit")
    assert (stats["ready"], stats["pages_written"], stats["pages_hit"], stats["problem"]) == (4, 4, 4, "")
    namespace = engine.cache.namespace
    assert ask("ls") == [
        {
            "namespace": namespace.fingerprint.hex(),
            "model": "test",
            "page_tokens": PAGE_TOKENS,
            "epoch": 0,
            "pages": 4,
            "limit": None,
        }
    ]
    pages = ask("ls", "--pages")
    keys = engine.keys(tokens)
    assert {page["key"] for page in pages} == {keys[at : at + 16].hex() for at in range(0, 64, 16)}
    assert {(page["state"], page["namespace"]) for page in pages} == {("ready", namespace.fingerprint.hex())}
    assert len(ask("ls", "--pages", "--limit", "3")) == 3
    written(host, ask, 4)
    assert [row["key"] for row in ask("ls", "--tier", "disk")] == sorted(page["key"] for page in pages)
    assert len(ask("ls", "--tier", "disk", "--limit", "2")) == 2


def test_keys_are_printed_whole_however_narrow_the_terminal(
    host: Host, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    host.start("--page-bytes", str(PAGE_BYTES))
    engine = host.engine()
    keys = engine.keys(stored(engine))
    monkeypatch.setenv("COLUMNS", "40")
    assert main(["ls", "--pages", "--socket", str(host.socket)]) == 0
    out = capsys.readouterr().out
    assert all(keys[at : at + 16].hex() in out for at in range(0, len(keys), 16))


def test_clear_forgets_everything_in_every_tier(host: Host, ask: Callable[..., Any]) -> None:
    host.start("--page-bytes", str(PAGE_BYTES))
    engine = host.engine()
    tokens = stored(engine)
    written(host, ask, 4)
    ask("clear")
    assert engine.ask("a", tokens) == Hit(0)
    written(host, ask, 0)
    engine.check_conserved()


def test_clear_of_a_namespace_leaves_the_others_alone(host: Host, ask: Callable[..., Any]) -> None:
    host.start("--page-bytes", str(PAGE_BYTES))
    one = host.engine()
    other = Rank(Replica.single(), model="other", store=dict(host.store))
    host.engines.append(other)
    tokens = stored(one)
    stored(other)
    told = ask("clear", "--namespace", "test")
    assert (told["epoch"], told["is_saved"]) == (1, True)
    assert one.ask("a", tokens) == Hit(0)
    assert other.ask("a", tokens) == Hit(16)
    other.cache.decline("a")
    # Engines follow by themselves.
    stored(one)
    assert one.ask("b", tokens) == Hit(16)
    one.cache.decline("b")
    one.drain()
    other.drain()
    one.check_conserved()
    assert [(row["model"], row["epoch"], row["pages"]) for row in ask("ls")] == [("test", 1, 4), ("other", 0, 4)]


def test_pinned_prefix_is_never_evicted_until_it_is_unpinned(
    host: Host, ask: Callable[..., Any], tmp_path: Path
) -> None:
    del host.store["disk"]
    host.settings.write_text(json.dumps({"model": "test", "page_tokens": PAGE_TOKENS, "store": host.store}))
    host.start("--page-bytes", str(PAGE_BYTES))
    engine = host.engine()
    tokens = stored(engine)
    file = tmp_path / "tokens.json"
    file.write_text(json.dumps(tokens))
    told = ask("pin", str(file))
    assert told["pages"] == 4
    assert told["pins"] == [{"key": engine.keys(tokens)[48:64].hex(), "pages": 4}]
    assert ask("ls", "--pins") == told["pins"]
    for seed in range(1, 2 + NUM_PAGES // 8):
        stored(engine, 8 * PAGE_TOKENS, seed)
    assert ask("stats")["pages_evicted"] > 0
    assert engine.ask("a", tokens) == Hit(16)
    engine.cache.decline("a")
    engine.drain()
    assert ask("stats", "--audit")["leases"] == 1
    assert ask("unpin", ",".join(map(str, tokens))) == {"pages": 0, "pins": []}
    for seed in range(100, 102 + NUM_PAGES // 8):
        stored(engine, 8 * PAGE_TOKENS, seed)
    assert engine.ask("b", tokens) == Hit(0)
    engine.drain()
    engine.check_conserved()


def test_pins_by_key_are_bounded_and_go_with_their_pages(
    host: Host, ask: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    host.start("--page-bytes", str(PAGE_BYTES))
    engine = host.engine()
    tokens = stored(engine, (NUM_PAGES // 4 + 1) * PAGE_TOKENS)
    keys = engine.keys(tokens)
    assert ask("pin", keys[16:32].hex())["pages"] == 2
    assert ask("pin", keys[32:48].hex())["pages"] == 3, "pages that pins share count once"
    assert main(["pin", keys[-16:].hex(), "--socket", str(host.socket)]) == 1
    assert f"{NUM_PAGES // 4} pages can be pinned" in capsys.readouterr().err
    assert main(["pin", "00" * 16, "--socket", str(host.socket)]) == 1
    assert "no page in host memory" in capsys.readouterr().err
    assert len(ask("ls", "--pins")) == 2
    engine.cache.invalidate()
    engine.drain()
    assert ask("ls", "--pins") == []
    engine.check_conserved()


def test_verify_finds_a_damaged_page_of_host_memory_and_removes_it(host: Host, ask: Callable[..., Any]) -> None:
    del host.store["disk"]
    host.settings.write_text(json.dumps({"model": "test", "page_tokens": PAGE_TOKENS, "store": host.store}))
    host.start("--page-bytes", str(PAGE_BYTES))
    engine = host.engine()
    tokens = stored(engine)
    assert ask("verify") == [{"where": "host", "pages": 4, "bad": [], "removed": 0}]
    client, keys = engine.cache._client, engine.keys(tokens)
    matched = client.call(Match(keys, 4), 10.0)
    client.call(Release([matched.lease]), 10.0)
    page = np.frombuffer(client.pool, np.uint8, PAGE_BYTES, int(matched.page_ids[2]) * PAGE_BYTES)
    page[700] ^= 1
    found = ask("verify", status=1)
    assert [bad["key"] for bad in found[0]["bad"]] == [keys[32:48].hex()]
    assert "damaged" in found[0]["bad"][0]["problem"]
    assert engine.ask("a", tokens) == Hit(16), "looking changes nothing"
    engine.cache.decline("a")
    assert ask("verify", "--remove", status=1)[0]["removed"] == 1
    assert engine.ask("b", tokens) == Hit(8)
    engine.cache.decline("b")
    engine.drain()
    engine.check_conserved()
    assert ask("verify")[0]["bad"] == []


def flip_on_disk(disk: Path, key: bytes) -> None:
    """Flip a byte of the payload of this page in the slab."""
    slab = next(disk.glob("pages-*/slab"))
    with slab.open("r+b") as file:
        for slot in range(os.path.getsize(slab) // PAGE_BYTES):
            file.seek(slot * PAGE_BYTES)
            page = bytearray(file.read(PAGE_BYTES))
            if page[40:56] == key:
                page[900] ^= 1
                file.seek(slot * PAGE_BYTES)
                file.write(page)
                return
    raise AssertionError("the page is not on the disk")


def test_verify_tells_of_a_tier_that_it_cannot_check_and_checks_the_others(
    host: Host, ask: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    host.store["remote"] = {"url": "redis://127.0.0.1:1"}  # nobody listens there
    host.settings.write_text(json.dumps({"model": "test", "page_tokens": PAGE_TOKENS, "store": host.store}))
    host.start("--page-bytes", str(PAGE_BYTES))
    engine = host.engine()
    stored(engine)
    written(host, ask, 4)
    in_host, on_disk, remote = ask("verify", status=2)
    assert (in_host["pages"], on_disk["pages"]) == (4, 4)
    assert "unchecked" not in in_host
    assert remote["where"] == "redis"
    assert remote["unchecked"]
    ask("verify", "--tier", "disk")
    assert main(["verify", "--socket", str(host.socket)]) == 2
    assert "redis was not checked: " in capsys.readouterr().out


def test_verify_finds_a_damaged_page_of_the_disk_with_the_store_and_without(
    host: Host, ask: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    host.start("--page-bytes", str(PAGE_BYTES))
    engine = host.engine()
    keys = engine.keys(stored(engine))
    written(host, ask, 4)
    flip_on_disk(host.disk, keys[16:32])
    host_result, disk_result = ask("verify", status=1)
    assert host_result == {"where": "host", "pages": 4, "bad": [], "removed": 0}
    assert disk_result["pages"] == 4
    assert [bad["key"] for bad in disk_result["bad"]] == [keys[16:32].hex()]
    engine.check_conserved()
    assert main(["verify", "--disk", str(host.disk)]) == 1
    assert f"is in use by process {host.owner.pid}" in capsys.readouterr().err  # type: ignore[union-attr]
    engine.cache.close()
    host.stop()
    assert main(["verify", "--disk", str(host.disk), "--json", "--remove"]) == 1
    (found,) = json.loads(capsys.readouterr().out)
    assert (found["pages"], found["removed"]) == (4, 1)
    assert main(["verify", "--disk", str(host.disk), "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert (found["pages"], found["bad"]) == (3, [])
    assert main(["clear", "--disk", str(host.disk)]) == 0
    capsys.readouterr()
    assert main(["verify", "--disk", str(host.disk), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["pages"] == 0


def test_verify_removes_from_a_tier_of_a_store_that_runs(host: Host, ask: Callable[..., Any]) -> None:
    host.start("--page-bytes", str(PAGE_BYTES))
    engine = host.engine()
    keys = engine.keys(stored(engine))
    written(host, ask, 4)
    flip_on_disk(host.disk, keys[48:64])
    assert ask("verify", "--tier", "disk", "--remove", status=1)[0]["removed"] == 1
    written(host, ask, 3)
    assert ask("verify", "--tier", "disk")[0]["bad"] == []
    engine.check_conserved()


def test_top_shows_a_frame(host: Host, ask: Callable[..., Any], capsys: pytest.CaptureFixture[str]) -> None:
    host.start("--page-bytes", str(PAGE_BYTES))
    stored(host.engine())
    assert main(["top", "--once", "--interval", "0.1", "--socket", str(host.socket)]) == 0
    out = capsys.readouterr().out
    for words in ("host memory", "ready 4", "free 60", "disk", "test"):
        assert words in out
