"""Starting `torch.distributed` so that a job restarted by torchrun does not meet its former self."""

from __future__ import annotations

import datetime
import logging
import os

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

log = logging.getLogger(__name__)

_STORE_TIMEOUT = datetime.timedelta(minutes=5)  # to reach the agent's store, as torch's own default
_safe = False


def init_process_group(
    backend: str, *, timeout: datetime.timedelta | None = None, device_id: torch.device | None = None
) -> None:
    """`torch.distributed.init_process_group` for ranks started by torchrun, also with `--max-restarts`.

    The agent's key-value store outlives a generation of ranks (torch 2.5 to 2.13 at least), and Gloo leaves the
    addresses of its groups in it. A rank of the next generation that is quicker than its peer then connects to
    the address of the dead one and fails with "Connection refused". Here each generation has keys of its own.
    """
    global _safe
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != str(True):
        dist.init_process_group(backend, timeout=timeout, device_id=device_id)
        return
    agent = dist.TCPStore(  # type: ignore[attr-defined]  # public all the same
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=False,
        timeout=timeout or _STORE_TIMEOUT,
    )
    store = PrefixStore(f"generation{_generation()}", agent)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout, device_id=device_id)
    _safe = True


def warn_of_stale_addresses() -> None:
    """Say what is wrong before a restarted job fails in making a Gloo group."""
    if _generation() and not _safe and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True):
        log.warning(
            "this job was restarted and torch.distributed shares the store of its former ranks: making groups may "
            "fail with 'Connection refused'. Use mlkv.dist.init_process_group, or start torchrun with "
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
        )


def _generation() -> int:
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
