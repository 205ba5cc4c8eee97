"""Settings: where they come from, which wins, and how wrong ones are refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from mlkv import ConfigError, MLKVConfig, StoreConfig


def write(path: Path, data: dict[str, Any]) -> Path:
    path.write_text(json.dumps(data))  # JSON is YAML as well
    return path


@pytest.mark.parametrize("suffix", [".json", ".yaml", ".yml"])
def test_files_are_read(tmp_path: Path, suffix: str) -> None:
    file = write(tmp_path / f"mlkv{suffix}", {"model": "m", "store": {"host_bytes": "2GiB"}})
    config = MLKVConfig.load(file)
    assert (config.model, int(config.store.host_bytes)) == ("m", 2 << 30)


def test_keywords_beat_environment_beats_file_field_by_field(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = {"host_bytes": "1GiB", "linger_s": 1, "answer_deadline_s": 0.5}
    file = write(tmp_path / "mlkv.yaml", {"model": "file", "page_tokens": 8, "store": store})
    monkeypatch.setenv("MLKV_STORE__HOST_BYTES", "2GiB")
    monkeypatch.setenv("MLKV_STORE__LINGER_S", "2")
    config = MLKVConfig.load(file, model="keyword", store={"linger_s": 3})
    assert (config.model, config.page_tokens) == ("keyword", 8)
    assert int(config.store.host_bytes) == 2 << 30
    assert (config.store.linger_s, config.store.answer_deadline_s) == (3, 0.5)


def test_environment_alone_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLKV_MODEL", "env")
    assert MLKVConfig().model == "env"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "model must be given"),
        ({"model": "m", "pagetokens": 4}, "pagetokens is not a setting"),
        ({"model": "m", "store": {"hostbytes": 4}}, "store.hostbytes is not a setting"),
        ({"model": "m", "store": {"host_bytes": "many"}}, "store.host_bytes: .*many"),
        ({"model": "m", "page_tokens": 0}, "page_tokens: .*greater than or equal to 1.*given: 0"),
        ({"model": "m", "faults": "slow=rank1"}, "faults: .*slow=rank1"),
        ({"model": "m", "agree": {"deadline_s": 1}}, "answer_deadline_s=2.0 must be below .*deadline_s=1.0"),
        ({"model": "m", "agree": {"channel": "pigeon"}}, "agree.channel: .*pigeon"),
    ],
)
def test_wrong_settings_are_refused_by_name(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        MLKVConfig(**values)


@pytest.mark.parametrize(
    ("variable", "message"),
    [
        ("MLKV_PAGETOKENS", "MLKV_PAGETOKENS is not a setting"),
        ("MLKV_STORE__HOSTBYTES", "MLKV_STORE__HOSTBYTES is not a setting; .*host_bytes"),
    ],
)
def test_unknown_environment_is_refused_by_name(
    variable: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "1")
    with pytest.raises(ConfigError, match=message):
        MLKVConfig(model="m")


def test_every_wrong_field_is_named_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        MLKVConfig(model="m", page_tokens=-1, store={"linger_s": -1})
    assert "page_tokens" in str(caught.value)
    assert "store.linger_s" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("mlkv.yaml", "- a\n- b\n", "must hold a mapping"),
        ("mlkv.yaml", "model: [", "is malformed"),
        ("mlkv.json", "{", "is malformed"),
        ("mlkv.toml", "model = 1", "must end in"),
    ],
)
def test_wrong_files_are_refused(tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=message):
        MLKVConfig.load(tmp_path / name)


def test_an_absent_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.yaml: No such file"):
        MLKVConfig.load(tmp_path / "absent.yaml")


def test_settings_are_frozen() -> None:
    config = MLKVConfig(model="m", store=StoreConfig(linger_s=1))
    with pytest.raises(ValidationError, match="frozen"):
        config.model = "other"


def test_lower_tiers_are_named_by_the_environment_too(monkeypatch: pytest.MonkeyPatch) -> None:
    assert MLKVConfig(model="m").store.tier_wait_s == 0.0, "lookups wait for tiers that are not there"
    monkeypatch.setenv("MLKV_STORE__DISK__DIRECTORY", "/kv")
    monkeypatch.setenv("MLKV_STORE__REMOTE__PASSWORD", "sesame")
    config = MLKVConfig(model="m", store={"remote": {"url": "redis://host"}, "disk": {"limit_bytes": "1GiB"}})
    assert config.store.disk is not None
    assert (str(config.store.disk.directory), config.store.disk.limit_bytes) == ("/kv", 1 << 30)
    assert config.store.remote is not None
    assert config.store.remote.password is not None
    assert config.store.remote.password.get_secret_value() == "sesame"
    assert "sesame" not in f"{config!r} {config.model_dump_json()}"
    assert config.store.tier_wait_s == config.store.answer_deadline_s / 2
    monkeypatch.setenv("MLKV_STORE__DISK__LIMIT", "1")
    with pytest.raises(ConfigError, match=r"MLKV_STORE__DISK__LIMIT is not a setting; .*limit_bytes"):
        MLKVConfig(model="m")


@pytest.mark.parametrize(
    ("store", "message"),
    [
        ({"remote": {"url": "ftp://host"}}, "store.remote.url: must begin with one of mooncake://"),
        ({"remote": {}}, "store.remote.url must be given"),
        ({"disk": {"directory": "/kv", "limit_bytes": 0}}, "store.disk.limit_bytes"),
        ({"lookup_wait_s": 3.0}, "store.lookup_wait_s=3.0 must be below store.answer_deadline_s=2.0"),
        ({"admission": "never"}, "store.admission"),
    ],
)
def test_wrong_tiers_are_refused(store: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        MLKVConfig(model="m", store=store)


def test_what_was_given_for_a_remote_store_is_not_repeated() -> None:
    with pytest.raises(ConfigError) as caught:
        MLKVConfig(model="m", store={"remote": {"url": "http://me:sesame@host", "password": ["sesame"]}})
    assert "sesame" not in str(caught.value)
