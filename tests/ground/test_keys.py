"""Page keys: equal everywhere for equal prefixes, different for anything that KV depends on."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from itertools import pairwise

import numpy as np
import pytest
import torch

from mlkv import ConfigError, KVLayout, Namespace, Plane, page_keys

LAYOUT = {"num_layers": 2, "num_kv_heads": 2, "head_dim": 8, "dtype": torch.bfloat16, "page_tokens": 4}


def namespace(model: str = "m", version: int = 0, **changes: object) -> Namespace:
    return Namespace(model, KVLayout.gqa(**{**LAYOUT, **changes}), version)  # type: ignore[arg-type]


PRINT_KEYS = """
import torch
from mlkv import KVLayout, Namespace, page_keys
layout = KVLayout.gqa(num_layers=2, num_kv_heads=2, head_dim=8, dtype=torch.bfloat16, page_tokens=4)
root = Namespace("m", layout).root(adapter="a", media=("x", "y"), salt="s")
print([page_keys(range(n, n + 9), 4, root).hex() for n in (0, 1, 1 << 31)])
"""


def test_keys_are_equal_in_every_interpreter() -> None:
    outputs = set()
    for seed in (None, "0", "1", "random"):
        env = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
        if seed is not None:
            env["PYTHONHASHSEED"] = seed
        done = subprocess.run(
            [sys.executable, "-c", PRINT_KEYS], env=env, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
        outputs.add(done.stdout)
    assert len(outputs) == 1


def test_known_keys_never_change() -> None:
    """Pages on disks and in remote stores are found by these; a change needs a new key scheme name."""
    layout = KVLayout.gqa(num_layers=2, num_kv_heads=2, head_dim=8, dtype=torch.bfloat16, page_tokens=4)
    root = Namespace("m", layout).root()
    assert root.hex() == "35f66d10ed951f2da37d470d86dcccab"
    assert page_keys(range(8), 4, root).hex() == "4163b87f9d3b397c2ea5c31444b681b186df81c868d2a6bd07d1c99df7235e47"


@pytest.mark.parametrize(
    "tokens",
    [
        tuple(range(9)),
        np.arange(9),
        np.arange(9, dtype=np.int32),
        np.arange(9, dtype=np.uint32),
        np.arange(18, dtype=np.int64)[::2] // 2,
        range(9),
    ],
)
def test_every_kind_of_integers_gives_equal_keys(tokens: object) -> None:
    root = namespace().root()
    assert page_keys(tokens, 4, root) == page_keys(list(range(9)), 4, root)  # type: ignore[arg-type]


def test_a_key_names_its_whole_prefix() -> None:
    root = namespace().root()
    keys = page_keys(range(16), 4, root)
    assert len(keys) == 4 * 16
    assert page_keys(range(13), 4, root) == keys[:48]  # a partial tail has no key
    changed = page_keys([99, *range(1, 16)], 4, root)
    for page in range(4):
        assert changed[16 * page : 16 * page + 16] != keys[16 * page : 16 * page + 16]
    swapped = page_keys([4, 5, 6, 7, 0, 1, 2, 3], 4, root)
    assert swapped[:16] not in (keys[:16], keys[16:32])


def test_a_moved_page_boundary_changes_every_key() -> None:
    root = namespace().root()
    small, large = page_keys(range(16), 4, root), page_keys(range(16), 8, root)
    pages = [blob[at : at + 16] for blob in (small, large) for at in range(0, len(blob), 16)]
    assert len(set(pages)) == len(pages)


def test_nothing_that_kv_depends_on_is_shared() -> None:
    fp8 = Namespace(
        "m", KVLayout(2, 2, 4, (Plane("k", torch.float8_e4m3fn, 8), Plane("v", torch.float8_e4m3fn, 8)))
    )
    scaled = Namespace("m", KVLayout(2, 2, 4, (*fp8.layout.planes, Plane("k_scale", torch.float32, 1))))
    base = namespace()
    roots = [
        base.root(),
        namespace(model="m2").root(),
        namespace(version=1).root(),
        namespace(dtype=torch.float16).root(),
        namespace(page_tokens=8).root(),
        namespace(num_layers=3).root(),
        namespace(num_kv_heads=4).root(),
        namespace(head_dim=16).root(),
        fp8.root(),
        scaled.root(),
        base.root(adapter="a"),
        base.root(media=("a",)),
        base.root(media=("a", "b")),
        base.root(media=("b", "a")),
        base.root(salt="a"),
    ]
    assert len(set(roots)) == len(roots)


def test_wrong_tokens_are_refused() -> None:
    root = namespace().root()
    for tokens in ([-1, 2], [1 << 32], [0.5], [[1, 2]], ["a"]):
        with pytest.raises(ConfigError, match="token"):
            page_keys(tokens, 4, root)  # type: ignore[arg-type]
    assert page_keys([], 4, root) == b""
    with pytest.raises(ConfigError, match="model"):
        Namespace("", namespace().layout)


def test_a_long_prompt_has_as_many_keys_as_pages_and_all_differ() -> None:
    keys = page_keys(np.zeros(10_000, np.int64), 1, namespace().root())
    pages = {keys[at : at + 16] for at in range(0, len(keys), 16)}
    assert len(pages) == 10_000
    assert all(left != right for left, right in pairwise(sorted(pages)))


def test_every_epoch_has_keys_of_its_own_and_the_first_those_of_a_namespace_that_never_had_another() -> None:
    roots = set()
    for epoch in range(3):
        made = dataclasses.replace(namespace(), epoch=epoch)
        assert made.fingerprint == namespace().fingerprint
        roots |= {made.root(), made.root(salt="s"), made.root(adapter="a"), made.root(media=["m"])}
    assert len(roots) == 12
    assert namespace().root() == namespace().fingerprint
    assert {namespace().root(salt="s")} < roots
