"""The pool's memory may be spread over the memory nodes of a host."""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlkv.store import pool
from mlkv.store.numa import interleave, memory_nodes


@pytest.fixture
def file() -> Iterator[int]:
    fd = os.memfd_create("numa-test")
    os.ftruncate(fd, 1 << 20)
    yield fd
    os.close(fd)


@pytest.mark.parametrize(
    ("text", "nodes"), [("0\n", [0]), ("0-1\n", [0, 1]), ("0,2-3\n", [0, 2, 3]), ("0-1,8\n", [0, 1, 8])]
)
def test_nodes_with_memory_are_read_from_the_system(tmp_path: Path, text: str, nodes: list[int]) -> None:
    (tmp_path / "has_memory").write_text(text)
    assert memory_nodes(tmp_path) == nodes


def test_a_system_that_names_no_nodes_has_none(tmp_path: Path) -> None:
    assert memory_nodes(tmp_path) == []


def test_the_policy_belongs_to_the_file_and_holds_for_later_mappings(file: int) -> None:
    nodes = memory_nodes()
    if not nodes or not interleave(file, 1 << 20, nodes) or not Path("/proc/self/numa_maps").exists():
        pytest.skip("this system has no memory nodes to show, or does not let us set a policy")
    with mmap.mmap(file, 1 << 20) as mapping:
        start = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
        lines = Path("/proc/self/numa_maps").read_text().splitlines()
        (line,) = [line for line in lines if int(line.split()[0], 16) == start]
        assert line.split()[1].startswith("interleave:")


def test_a_refusal_is_one_warning_and_nothing_else(file: int, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "mlkv.store"):
        assert not interleave(file, 1 << 20, [1023])  # no such node
    assert len(caplog.records) == 1
    assert "not interleaved" in caplog.text


@pytest.mark.parametrize(
    ("nodes", "wanted", "asked"), [([0, 1], True, True), ([0], True, False), ([0, 1], False, False)]
)
def test_a_pool_is_interleaved_where_that_is_wanted_and_there_are_nodes(
    nodes: list[int], wanted: bool, asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[list[int]] = []
    monkeypatch.setattr(pool, "memory_nodes", lambda: nodes)
    monkeypatch.setattr(pool, "interleave", lambda fd, num_bytes, which: calls.append(which))
    os.close(pool.create_pool_file(2, 4096, interleaved=wanted))
    assert calls == ([nodes] if asked else [])
