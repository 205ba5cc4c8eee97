"""What the launcher must know of vLLM to run the main job in it, without importing it, which takes long."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from mlkv.engine.model import Geometry
from mlkv.errors import ConfigError

_SHARED_MEMORY = Path("/dev/shm")


@contextmanager
def no_shared_memory_left() -> Iterator[None]:
    """Removes at its end what vLLM's ranks on CPU have left in shared memory, as they do when they are killed."""
    before = _segments()
    try:
        yield
    finally:
        for path in _segments() - before:
            if not _is_mapped(path):  # else it is another job's
                path.unlink(missing_ok=True)


def _segments() -> set[Path]:
    return set(_SHARED_MEMORY.glob("*cpushm*"))


def _is_mapped(path: Path) -> bool:
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):  # of another user, or has just ended
            if str(path) in maps.read_text(errors="replace"):
                return True
    return False


def device() -> str:
    """What the vLLM of this Python computes on, "cpu" or "cuda". Raises ConfigError where there is no vLLM."""
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError(
            f"engine: {sys.executable} has no vLLM; ./launch.sh makes an environment that has it, or takes the "
            "one of PYTHON=..."
        )
    try:  # a build is for one kind of device: that for CPUs is a package of its own, or says so in its version
        cpu_only = "cpu" in importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        cpu_only = True
    return "cpu" if cpu_only else "cuda"


def check_split(geometry: Geometry, tp: int) -> None:
    """Raises ConfigError for numbers of ranks among which vLLM cannot share the heads of a model."""
    works = [count for count in range(1, geometry.num_q_heads + 1) if _splits(geometry, count)]
    if tp not in works:
        raise ConfigError(
            f"tp: in vLLM every rank has as many heads; {tp} ranks cannot share {geometry.num_q_heads} query and "
            f"{geometry.num_kv_heads} KV heads so; tp values that work: {', '.join(map(str, works))}"
        )


def _splits(geometry: Geometry, tp: int) -> bool:
    """KV heads that are fewer than the ranks are held by several of them."""
    return geometry.num_q_heads % tp == 0 and (geometry.num_kv_heads % tp == 0 or tp % geometry.num_kv_heads == 0)
