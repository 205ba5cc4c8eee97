"""Where the owner of the store listens: one socket for each job (or name) of one user on one host."""

from __future__ import annotations

import os
import tempfile
from hashlib import blake2b
from pathlib import Path

from mlkv.config import StoreConfig

_JOB_VARIABLES = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT")


def owner_socket(config: StoreConfig) -> Path:
    """Path of the socket at which the ranks of this job find their owner.

    Ranks of one torchrun job on one host share an owner, whichever replica they belong to: they agree on the
    name without talking, from what the launcher has told each of them. A process outside of torchrun has an
    owner for itself. With `store.name`, everybody of this user who gives that name shares one.
    """
    return socket_folder(config.directory) / f"{config.name or _job_name()}.sock"


def socket_folder(directory: Path | None) -> Path:
    """Where this user's sockets lie, if not in `directory`."""
    if directory is None:
        runtime = os.environ.get("XDG_RUNTIME_DIR")
        base = Path(runtime) if runtime and os.path.isdir(runtime) else Path(tempfile.gettempdir())
        directory = base / f"mlkv-{os.getuid()}"
    return directory.absolute()


def _job_name() -> str:
    if all(variable in os.environ for variable in ("MASTER_ADDR", "MASTER_PORT", "RANK")):
        # A port belongs to one rendezvous at a time, so two jobs of one host differ here.
        job = "|".join(os.environ.get(variable, "") for variable in _JOB_VARIABLES)
    else:
        job = f"pid {os.getpid()}"
    return "job-" + blake2b(job.encode(), digest_size=8).hexdigest()
