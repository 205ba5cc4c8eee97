"""Settings: keyword arguments, then environment `MLKV_*`, then a YAML or JSON file, then defaults.

Nested sections use a double underscore in the environment: `MLKV_STORE__HOST_BYTES=8GiB`.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Literal, get_args

import yaml
from pydantic import BaseModel, ByteSize, Field, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from mlkv.errors import ConfigError
from mlkv.faults import FaultPlan
from mlkv.metrics_config import MetricsConfig
from mlkv.section import Section
from mlkv.store_config import DiskConfig, RemoteConfig, StoreConfig

__all__ = ["AgreeConfig", "DiskConfig", "MLKVConfig", "MetricsConfig", "MoveConfig", "RemoteConfig", "StoreConfig"]

_ENV_PREFIX = "MLKV_"
_ENV_OF_OTHERS = frozenset({"MLKV_HOME", "MLKV_TRACE", "MLKV_TRANSFER"})
"""Names with our prefix that are not settings: the folder in which launch.sh keeps environment and models,
the file of a trace, and a switch for one run that overrides `move.transfer`."""


class AgreeConfig(Section):
    """How the ranks of a replica agree."""

    channel: Literal["auto", "object", "ledger", "tensor", "hierarchical"] = Field(
        default="auto", description="how ranks exchange; auto chooses by where they run, see docs/protocol.md"
    )
    late: Literal["auto", "on", "off"] = Field(
        default="auto",
        description="apply the exchange of a step in the next one, so that no step waits for the network; auto: "
        "where a replica spans hosts",
    )
    deadline_s: float = Field(default=60.0, gt=0, description="no rank waits longer than this for another")
    dump_stacks: bool = Field(
        default=False,
        description="when a rank is lost, write Python stacks to stderr, its own too if it still runs (SIGUSR2)",
    )


class MoveConfig(Section):
    """Transfers between device and host."""

    staging_bytes: ByteSize = Field(
        default=ByteSize(256 << 20), gt=0, description="device memory for staging, in each direction"
    )
    max_tasks: int = Field(
        default=1024, ge=1, description="loads, and offloads, in flight at once; more are refused"
    )
    cooperative: Literal["auto", "on", "off"] = Field(
        default="auto",
        description="loads that ranks of a host need alike come in parts over all their links, see "
        "docs/transfers.md; auto: large ones on CUDA, where measured faster at the start",
    )
    transfer: Literal["auto", "staged", "direct"] = Field(
        default="auto",
        description="how bytes cross between host and a CUDA device: through the copy engine and staging, by a "
        "kernel that reaches into host memory, or as suits each transfer; MLKV_TRANSFER overrides it",
    )


class MLKVConfig(BaseSettings):
    """All settings of one engine's cache.

    Raises:
        ConfigError: for unknown, malformed or contradictory fields; the message names each of them.
    """

    model_config = SettingsConfigDict(
        env_prefix=_ENV_PREFIX, env_nested_delimiter="__", extra="forbid", frozen=True
    )

    model: str = Field(min_length=1, description="identity of the weights: digest, or name@revision")
    version: int = Field(default=0, ge=0, description="raised by an update of the weights")
    page_tokens: int = Field(default=64, ge=1, le=4096, description="tokens in one page")
    min_load_tokens: int = Field(
        default=1, ge=1, description="a hit that saves fewer tokens than this is not loaded"
    )
    faults: str = Field(default="", description="fault plan for trying a deployment, see mlkv.faults")
    store: StoreConfig = StoreConfig()
    agree: AgreeConfig = AgreeConfig()
    move: MoveConfig = MoveConfig()
    metrics: MetricsConfig = MetricsConfig()

    def __init__(self, **values: Any) -> None:
        _refuse_unknown_environment()
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise ConfigError(_describe(error)) from None

    @field_validator("faults")
    @classmethod
    def _faults_parse(cls, value: str) -> str:
        FaultPlan.parse(value)
        return value

    @model_validator(mode="after")
    def _consistent(self) -> MLKVConfig:
        if self.store.answer_deadline_s >= self.agree.deadline_s:
            raise ValueError(
                f"store.answer_deadline_s={self.store.answer_deadline_s} must be below "
                f"agree.deadline_s={self.agree.deadline_s}: a slow store is a miss, a slow rank ends the job"
            )
        if (self.store.lookup_wait_s or 0.0) >= self.store.answer_deadline_s:
            raise ValueError(
                f"store.lookup_wait_s={self.store.lookup_wait_s} must be below "
                f"store.answer_deadline_s={self.store.answer_deadline_s}, or what the tiers bring comes too late"
            )
        return self

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return init_settings, env_settings

    @classmethod
    def load(cls, path: str | os.PathLike[str] | None = None, **overrides: Any) -> MLKVConfig:
        """Settings from a `.yaml`, `.yml` or `.json` file, below the environment and `overrides`.

        Raises ConfigError when the file is missing, malformed or says something that is not a setting.
        """
        if path is None:
            return cls(**overrides)
        from_file = _read_file(Path(path))
        _refuse_unknown_environment()
        # The file ranks below the environment, constructor arguments above it; so what the environment
        # says is merged in here, section by section.
        merged = _merge(_merge(from_file, _environment(cls)), overrides)
        return cls(**merged)


def _environment(settings: type[MLKVConfig]) -> dict[str, Any]:
    """What the environment sets, nested."""
    found: dict[str, Any] = {}
    for name, value in os.environ.items():
        if not name.upper().startswith(_ENV_PREFIX) or name in _ENV_OF_OTHERS:
            continue
        path = name[len(_ENV_PREFIX) :].lower().split("__")
        node = found
        for part in path[:-1]:
            node = node.setdefault(part, {})
        node[path[-1]] = value
    return found


def _refuse_unknown_environment() -> None:
    for name in os.environ:
        if not name.upper().startswith(_ENV_PREFIX) or name in _ENV_OF_OTHERS:
            continue
        section: type[BaseModel] | None = MLKVConfig
        for part in name[len(_ENV_PREFIX) :].lower().split("__"):
            fields = section.model_fields if section is not None else {}
            if part not in fields:
                raise ConfigError(
                    f"environment variable {name} is not a setting; settings here: {', '.join(sorted(fields))}"
                )
            section = _section_of(fields[part].annotation)


def _section_of(annotation: object) -> type[BaseModel] | None:
    """The section that a field holds, or may hold; None for a plain value."""
    for kind in (annotation, *get_args(annotation)):
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return kind
    return None


def _read_file(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text()
    except OSError as error:
        raise ConfigError(f"cannot read settings file {path}: {error.strerror}") from None
    try:
        if path.suffix == ".json":
            data = json.loads(text)
        elif path.suffix in (".yaml", ".yml"):
            data = yaml.safe_load(text)
        else:
            raise ConfigError(f"settings file {path} must end in .yaml, .yml or .json")
    except (json.JSONDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"settings file {path} is malformed: {error}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"settings file {path} must hold a mapping of settings")
    return data


def _merge(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for key, value in above.items():
        if isinstance(value, BaseModel):
            value = value.model_dump(exclude_unset=True)
        old = merged.get(key)
        merged[key] = _merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged


def _describe(error: ValidationError) -> str:
    lines = []
    for item in error.errors():
        where = ".".join(str(part) for part in item["loc"]) or "settings"
        if item["type"] == "extra_forbidden":
            lines.append(f"{where} is not a setting")
        elif item["type"] == "missing":
            lines.append(f"{where} must be given")
        else:
            given = item.get("input")
            # What is given for a remote store may have a password in it.
            secret = "remote" in item["loc"] or isinstance(given, (dict, BaseModel))
            shown = "" if secret else f" (given: {given!r})"
            lines.append(f"{where}: {item['msg'].removeprefix('Value error, ')}{shown}")
    return "wrong settings: " + "; ".join(lines)
