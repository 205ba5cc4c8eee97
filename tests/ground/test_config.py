"""Settings: where they come from, which wins, and how wrong ones are refused."""

from __future__ import annotations

import json
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
