"""Settings of the store: the owner process, its host pool, and what lies below it."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, TypeAlias

from pydantic import ByteSize, Field, SecretStr, field_validator

from mlkv.section import Section

Admission: TypeAlias = Literal["write", "second_use", "evict"]
"""When pages go to the lower tiers."""

REMOTE_SCHEMES = ("mooncake", "s3", "redis", "rediss")


class DiskConfig(Section):
    """A folder of this host. One owner uses it at a time."""

    directory: Path = Field(description="the folder; made if absent. Better on a file system with O_DIRECT")
    limit_bytes: ByteSize = Field(
        default=ByteSize(64 << 30),
        gt=0,
        description="the most that the store may occupy there, with what earlier runs left",
    )
    threads: int = Field(default=8, ge=1, le=256, description="requests that are with the disk at once")
    deadline_s: float = Field(default=10.0, gt=0, description="a call that takes longer has failed")


class RemoteConfig(Section):
    """A store on other machines. What it needs to let us in is never logged and never an argument of a process."""

    url: str = Field(
        description="mooncake://HOST:PORT (of its master), s3://BUCKET[/PREFIX], redis://HOST[:PORT][/DATABASE] "
        "or rediss://"
    )
    deadline_s: float = Field(default=10.0, gt=0, description="a call that takes longer has failed")
    username: str = Field(default="", description="Redis: of an access control list")
    password: SecretStr | None = Field(
        default=None, description="Redis; default: REDISCLI_AUTH or VALKEYCLI_AUTH of the environment"
    )
    endpoint: str = Field(
        default="",
        description="S3: http(s)://HOST[:PORT] of a store that is not Amazon's; default: AWS_ENDPOINT_URL",
    )
    region: str = Field(default="", description="S3; default: AWS_REGION")
    access_key_id: SecretStr | None = Field(
        default=None, description="S3; default: AWS_ACCESS_KEY_ID, or whatever else the machine is given"
    )
    secret_access_key: SecretStr | None = Field(default=None, description="S3; default: AWS_SECRET_ACCESS_KEY")
    session_token: SecretStr | None = Field(default=None, description="S3; default: AWS_SESSION_TOKEN")
    segment_bytes: ByteSize = Field(
        default=ByteSize(4 << 30), description="Mooncake: memory that this host lends to the store; may be 0"
    )
    protocol: Literal["tcp", "rdma"] = Field(default="tcp", description="Mooncake: how pages travel")
    devices: str = Field(default="", description="Mooncake: RDMA devices, comma-separated")
    local_host: str = Field(
        default="",
        description="Mooncake: the address at which other hosts reach this one; default: that towards the master",
    )
    metadata: str = Field(
        default="P2PHANDSHAKE", description="Mooncake: how hosts find each other's memory, or a server's URL"
    )

    @field_validator("url")
    @classmethod
    def _known_scheme(cls, value: str) -> str:
        scheme, separator, rest = value.partition("://")
        if not separator or scheme not in REMOTE_SCHEMES or not rest:
            # The URL is not repeated: somebody may have put a password into it.
            raise ValueError(f"must begin with one of {', '.join(f'{name}://' for name in REMOTE_SCHEMES)}")
        return value


class StoreConfig(Section):
    """The owner process of this host, its host-memory pool, and the tiers below it."""

    host_bytes: ByteSize = Field(default=ByteSize(4 << 30), gt=0, description="size of the host pool")
    directory: Path | None = Field(
        default=None, description="folder of the owner's socket; default: a private one of this user"
    )
    name: str = Field(
        default="",
        max_length=64,
        pattern=r"^[A-Za-z0-9._-]*$",
        description="name of the owner to share; default: one owner for each job on this host",
    )
    linger_s: float = Field(default=0.0, ge=0, description="how long the owner outlives its last client")
    connect_deadline_s: float = Field(default=60.0, gt=0, description="spawn or find the owner within this")
    answer_deadline_s: float = Field(
        default=2.0, gt=0, description="a lookup the owner has not answered by then is a miss"
    )
    lookup_wait_s: float | None = Field(
        default=None,
        ge=0,
        description="how long the answer of a lookup may wait for lower tiers; then it is what host memory has. "
        "Below answer_deadline_s; default: half of it",
    )
    disk: DiskConfig | None = Field(default=None, description="the tier below host memory; default: none")
    remote: RemoteConfig | None = Field(default=None, description="the lowest tier; default: none")
    policy: Literal["hit-density", "lru", "sieve"] = Field(
        default="hit-density", description="which page leaves a full pool, see docs/policies.md"
    )
    quotas: dict[str, ByteSize] = Field(
        default={},
        description="the most of the host pool that pages of a model (as the setting `model` names it) may take; "
        '"*": each model that is not named. Default: no limit',
    )
    interleave: bool = Field(
        default=True,
        description="take the pool's memory from all memory nodes of the host in turn, and not from the node of "
        "whoever touches it first",
    )
    admission: Admission = Field(
        default="write",
        description="when pages go to the lower tiers: once they are complete, when they are found for the second "
        "time, or shortly before they would be evicted from host memory",
    )

    @property
    def tier_wait_s(self) -> float:
        """How long a lookup waits for lower tiers: 0.0 if there are none."""
        if self.disk is None and self.remote is None:
            return 0.0
        return self.answer_deadline_s / 2 if self.lookup_wait_s is None else self.lookup_wait_s
