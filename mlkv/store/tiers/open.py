"""Makes the tiers that the settings name."""

from __future__ import annotations

import time
from typing import Final

from mlkv.errors import ConfigError
from mlkv.store.pool import HostPool
from mlkv.store.settings import OwnerSettings
from mlkv.store.tiers.base import Tier
from mlkv.store.tiers.runner import TierRunner
from mlkv.store_config import DiskConfig, RemoteConfig

_FOLDER_WAIT_S: Final = 15.0
"""An owner that ends still writes for a while; the next one on its folder waits for that."""

_RETRY_S: Final = 0.1


def open_tiers(settings: OwnerSettings, pool: HostPool) -> list[TierRunner]:
    """The runners of the tiers, the nearest one first.

    A disk is opened here: a folder that cannot be used is a mistake to be told. A remote store is connected in the
    background: it may be down now and come later.

    Raises ConfigError for settings that cannot be, TierUnavailable for a folder that cannot be used.
    """
    runners: list[TierRunner] = []
    if settings.disk is not None:
        disk = _disk(settings.disk, settings.page_bytes)
        _connect(disk, pool)
        runners.append(TierRunner(disk, pool.buffer, settings.page_bytes, pool.num_pages, is_connected=True))
    if settings.remote is not None:
        remote = open_remote(settings.remote, settings.page_bytes)
        runners.append(TierRunner(remote, pool.buffer, settings.page_bytes, pool.num_pages))
    return runners


def open_remote(config: RemoteConfig, page_bytes: int) -> Tier:
    """The tier of a remote store, not connected. Raises ConfigError."""
    scheme = config.url.partition("://")[0]
    if scheme in ("redis", "rediss"):
        from mlkv.store.tiers.redis import RedisTier

        return RedisTier.from_url(
            config.url,
            page_bytes,
            username=config.username,
            password=config.password,
            deadline_s=config.deadline_s,
        )
    if scheme == "s3":
        from mlkv.store.tiers.s3 import S3Tier

        return S3Tier.from_url(
            config.url,
            page_bytes,
            endpoint=config.endpoint,
            region=config.region,
            access_key_id=config.access_key_id,
            secret_access_key=config.secret_access_key,
            session_token=config.session_token,
            deadline_s=config.deadline_s,
        )
    if scheme == "mooncake":
        from mlkv.store.tiers.mooncake import MooncakeTier

        return MooncakeTier.from_url(
            config.url,
            page_bytes,
            metadata=config.metadata,
            segment_bytes=int(config.segment_bytes),
            protocol=config.protocol,
            devices=config.devices,
            local_host=config.local_host,
            deadline_s=config.deadline_s,
        )
    raise ConfigError(f"store.remote.url: there is no tier for {scheme}://")


def _disk(config: DiskConfig, page_bytes: int) -> Tier:
    from mlkv.store.tiers.disk import DiskTier

    return DiskTier(
        config.directory.absolute(),
        page_bytes,
        int(config.limit_bytes),
        threads=config.threads,
        deadline_s=config.deadline_s,
    )


def _connect(disk: Tier, pool: HostPool) -> None:
    from mlkv.store.tiers.disk_folder import FolderInUse

    give_up_at = time.monotonic() + _FOLDER_WAIT_S
    while True:
        try:
            disk.connect(pool.buffer)
        except FolderInUse:
            if time.monotonic() >= give_up_at:
                raise
            time.sleep(_RETRY_S)
        else:
            return
