from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from mlkv.errors import ConfigError, StoreError
from mlkv.store import pool, shared_memory


def test_pages_are_whole_and_at_least_one():
    assert pool.pool_pages(10 * 4096 + 5, 4096) == 10
    with pytest.raises(ConfigError, match=r"store\.host_bytes"):
        pool.pool_pages(4095, 4096)
    for page_bytes in (0, -4096, 100, 4097):
        with pytest.raises(ConfigError, match="page_bytes"):
            pool.pool_pages(1 << 20, page_bytes)


def test_mappings_of_one_pool_share_bytes():
    fd = pool.create_pool_file(4, 4096)
    first, second = pool.HostPool(fd, 4, 4096), pool.HostPool(fd, 4, 4096)
    os.close(fd)
    first.page(2)[:] = b"x" * 4096
    assert bytes(second.buffer[2 * 4096 : 3 * 4096]) == b"x" * 4096
    assert not any(second.page(1))
    assert not any(second.page(3))
    first.close()
    second.close()


def test_nobody_can_change_the_size_of_a_pool_that_is_a_memfd(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(shared_memory, "_setting", lambda: "advise")
    fd = pool.create_pool_file(4, 4096)
    for size in (0, 5 * 4096):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, size)
    os.close(fd)


def test_something_else_than_a_pool_is_not_mapped(tmp_path: Path):
    unsealed = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, 4 * 4096)
    too_small = pool.create_pool_file(3, 4096)
    plain_file = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    for fd in (unsealed, too_small, plain_file):
        with pytest.raises(StoreError, match="pool"):
            pool.HostPool(fd, 4, 4096)
        os.close(fd)


def test_views_outlive_the_close_of_a_pool():
    fd = pool.create_pool_file(2, 4096)
    mapped = pool.HostPool(fd, 2, 4096)
    os.close(fd)
    view = np.frombuffer(mapped.buffer, np.uint8)
    view[5] = 7
    mapped.close()
    assert view[5] == 7


def test_pool_larger_than_memory_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"store\.host_bytes .* available"):
        pool.create_pool_file(1 << 40, 1 << 20)


@pytest.mark.parametrize(
    ("limit_name", "usage_name", "cache_name"),
    [
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ],
)
def test_limits_of_control_groups_count(tmp_path: Path, limit_name: str, usage_name: str, cache_name: str):
    (tmp_path / limit_name).write_text("1000\n")
    (tmp_path / usage_name).write_text("700\n")
    (tmp_path / "memory.stat").write_text(f"anon 5\n{cache_name} 50\n")
    assert pool._cgroup_available_bytes(tmp_path) == [(350, str(tmp_path / limit_name))]
    (tmp_path / usage_name).write_text("2000\n")
    assert pool._cgroup_available_bytes(tmp_path)[0][0] == 0


def test_control_group_without_a_limit_says_nothing(tmp_path: Path):
    assert pool._cgroup_available_bytes(tmp_path) == []
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("700\n")
    (tmp_path / "memory.stat").write_text("")
    assert pool._cgroup_available_bytes(tmp_path) == []
