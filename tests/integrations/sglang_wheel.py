"""SGLang's own interface from its wheel, without installing SGLang, which needs a GPU's libraries.

Set SGLANG_WHEEL to a wheel (`pip download --no-deps sglang`); only the modules that are imported are run.
"""

from __future__ import annotations

import os
import sys
import types
import zipfile
from pathlib import Path

NEEDED = ("sglang/srt/mem_cache/hicache_storage.py", "sglang/srt/mem_cache/storage/", "sglang/srt/environ.py")
"""What of the wheel is unpacked."""


def find_wheel() -> Path | None:
    given = os.environ.get("SGLANG_WHEEL")
    return Path(given) if given and Path(given).is_file() else None


def unpack(wheel: Path, folder: Path) -> None:
    """Make `sglang.srt.mem_cache.hicache_storage` importable from the wheel."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder, [name for name in archive.namelist() if name.startswith(NEEDED)])
    for name in ("sglang", "sglang.srt", "sglang.srt.mem_cache", "sglang.srt.mem_cache.storage"):
        # Packages without their own __init__, which would import the whole engine.
        package = types.ModuleType(name)
        package.__path__ = [str(folder / name.replace(".", "/"))]
        sys.modules[name] = package
