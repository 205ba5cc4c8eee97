"""Fixtures that all tests share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

torch.set_num_threads(1)

# Triton decides when it is imported whether its kernels run in its interpreter, and other tests import it too.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(autouse=True)
def _own_runtime_folder(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Owners that a test starts get a socket folder of the test's own, and no setting leaks in from outside."""
    # Short, because the path of a Unix socket holds at most 107 bytes.
    folder = Path(tmp_path_factory.mktemp("r"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    for name in list(os.environ):
        if name.startswith("MLKV_") and name != "MLKV_HOME":
            monkeypatch.delenv(name)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
