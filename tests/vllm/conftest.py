"""The tests here need real vLLM; scripts/test_vllm.sh makes an environment that has it."""

from __future__ import annotations

import importlib.util
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.harness import Ended, run_job
from tests.vllm.tiny_model import make_model

_HAS_VLLM = importlib.util.find_spec("vllm") is not None
_rows: list[tuple[str, str, str, str, str, str]] = []

Run = Callable[..., Ended]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.timeout(1200))
            if not _HAS_VLLM:
                item.add_marker(pytest.mark.skip(reason="needs vllm: run scripts/test_vllm.sh"))


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder that vLLM loads: `VLLM_TEST_MODEL`, else the seeded random one."""
    given = os.environ.get("VLLM_TEST_MODEL")
    return given or str(make_model(tmp_path_factory.mktemp("model")))


@pytest.fixture
def run(model: str, tmp_path: Path) -> Run:
    """Run a job of the given shape on the model: `run(tp=2, backend="mp", connector="MLKVConnector")`."""

    def run_it(*, stall_s: float = 400.0, **task: Any) -> Ended:
        folder = Path(tempfile.mkdtemp(prefix="job", dir=tmp_path))
        return run_job(folder, {"model": model, **task}, stall_s=stall_s)

    return run_it


@pytest.fixture(scope="session")
def truth(model: str, tmp_path_factory: pytest.TempPathFactory) -> list[list[list[int]]]:
    """What vLLM answers without mlkv: tokens of each prompt of each round."""
    ended = run_job(tmp_path_factory.mktemp("truth"), {"model": model, "tp": 1, "backend": None})
    assert ended.kind == "done", ended.log
    add_row("without mlkv", ended, "the reference")
    return ended.ranks[0]["rounds"]


def add_row(mode: str, ended: Ended, outcome: str) -> None:
    """A line of the table that ends the run."""
    rank = ended.ranks[0] if ended.ranks else {}
    numbers = [str(rank.get(name, "")) for name in ("hit_tokens", "failed_loads", "preemptions")]
    _rows.append((mode, outcome, *numbers, f"{ended.seconds:.0f} s"))  # type: ignore[arg-type]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not _rows:
        return
    heads = ("mode", "answers", "tokens from mlkv", "failed loads", "preemptions", "wall")
    widths = [max(len(row[column]) for row in (heads, *_rows)) for column in range(len(heads))]
    terminalreporter.section("vLLM with mlkv")
    for row in (heads, *_rows):
        terminalreporter.write_line("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)))
