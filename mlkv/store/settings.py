"""What an owner process is told when it starts."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field, SecretStr, ValidationError

from mlkv.errors import ConfigError
from mlkv.metrics_config import MetricsConfig
from mlkv.section import Section
from mlkv.store.policy import DEFAULT_POLICY, PolicyName
from mlkv.store_config import Admission, DiskConfig, RemoteConfig


class OwnerSettings(Section):
    """How an owner is started."""

    socket_path: Path = Field(
        description="absolute path of its Unix socket, in a folder that only this user can enter"
    )
    host_bytes: int = Field(description="size of the pool; whole pages of it are used")
    page_bytes: int = Field(description="size of a page, a multiple of 4096")
    linger_s: float = Field(default=0.0, description="how long it stays after its last client is gone")
    keep: bool = Field(default=False, description="stay until SIGTERM, whatever the clients do")
    log_file: Path | None = Field(default=None, description="where it logs; default: its standard error")
    disk: DiskConfig | None = None
    remote: RemoteConfig | None = None
    admission: Admission = "write"
    policy: PolicyName = DEFAULT_POLICY
    interleave: bool = Field(default=True, description="spread the pool over the memory nodes of the host")
    quotas: dict[str, int] = Field(default={})
    """Bytes by model, see StoreConfig."""
    metrics: MetricsConfig = MetricsConfig()

    def to_fd(self) -> int:
        """A descriptor from which an heir of it reads these settings.

        It is memory without a name: what lets us into a remote store is seen neither in the arguments of a process
        nor in a file.
        """
        text = json.dumps(_plain(self.model_dump()))
        fd = os.memfd_create("mlkv-settings", os.MFD_CLOEXEC)
        with os.fdopen(os.dup(fd), "w") as file:
            file.write(text)
        os.lseek(fd, 0, os.SEEK_SET)
        return fd

    @classmethod
    def from_fd(cls, fd: int) -> OwnerSettings:
        """Settings from a descriptor of `to_fd`, which is closed. Raises ConfigError when they are malformed."""
        with os.fdopen(fd) as file:
            text = file.read()
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            # Without what was given, which may be secret.
            fields = ", ".join(".".join(map(str, item["loc"])) for item in error.errors(include_input=False))
            raise ConfigError(f"the owner of the store was started with wrong settings: {fields}") from None


def _plain(value: Any) -> Any:
    """`value` as JSON can have it, with its secrets."""
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, BaseModel):
        return _plain(value.model_dump())
    if isinstance(value, SecretStr):
        return value.get_secret_value()
    return os.fspath(value) if isinstance(value, Path) else value
