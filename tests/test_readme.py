"""The README's example is code that runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

README = Path(__file__).parents[1] / "README.md"


def test_the_embedding_example_stores_and_serves_a_request() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(code, str(README), "exec"), names)
    cache, tokens = names["cache"], list(range(40))
    names["serve"]("first", tokens, torch.arange(40))
    while cache.pending:
        cache.step()
    names["serve"]("second", tokens, torch.arange(100, 140))
    assert cache.stats().hits == 1
    assert cache.stats().loaded_pages == 2
    cache.close()


def test_the_example_fits_on_a_page() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert len([line for line in code.splitlines() if line.strip()]) <= 25
