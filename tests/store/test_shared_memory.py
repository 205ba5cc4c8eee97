"""Memory for the pool has large pages where the system gives any, and is no worse where it does not."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from mlkv.store import shared_memory
from mlkv.store.shared_memory import create_shared_memory, is_shared_memory, large_page_bytes, map_shared_memory

SMALL = 4096
SIZE_BYTES = (8 << 20) + SMALL  # the last large page is not full


def can_mount() -> bool:
    try:
        os.close(shared_memory._mount_tmpfs({"huge": "advise"}))
    except OSError:
        return False
    return True


needs_mount = pytest.mark.skipif(not can_mount(), reason="this process may not mount, or has no large pages")


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Sets what the system says about large pages."""

    def say(chosen: str) -> None:
        words = ("always", "within_size", "advise", "never", "deny", "force")
        text = " ".join(f"[{word}]" if word == chosen else word for word in words)
        (tmp_path / "shmem_enabled").write_text(text + "\n")
        (tmp_path / "hpage_pmd_size").write_text(f"{2 << 20}\n")

    monkeypatch.setattr(shared_memory, "_THP", tmp_path)
    return say


def is_memfd(fd: int) -> bool:
    return os.readlink(f"/proc/self/fd/{fd}").startswith("/memfd:mlkv-test")


@needs_mount
def test_it_is_in_large_pages_for_all_who_map_it_although_memfds_get_none(system: Callable[[str], None]) -> None:
    system("never")
    fd = create_shared_memory("mlkv-test", SIZE_BYTES)
    assert not is_memfd(fd)
    first, second = map_shared_memory(fd, SIZE_BYTES), map_shared_memory(fd, SIZE_BYTES)
    os.close(fd)
    assert first[:] == bytes(SIZE_BYTES)
    first[:] = b"\xee" * SIZE_BYTES  # to its last byte: the limit of the mount leaves room for it
    assert second[:] == first[:]
    for mapping in (first, second):
        view = memoryview(mapping)
        assert large_page_bytes(view) > 0
        view.release()
        mapping.close()


@needs_mount
def test_its_mount_is_seen_by_nobody_and_its_file_has_no_name(system: Callable[[str], None]) -> None:
    system("never")
    before = Path("/proc/self/mountinfo").read_text()
    fd = create_shared_memory("mlkv-test", SIZE_BYTES)
    assert Path("/proc/self/mountinfo").read_text() == before
    assert os.fstat(fd).st_nlink == 0
    assert os.fstat(fd).st_size == SIZE_BYTES
    assert not os.get_inheritable(fd)
    assert os.readlink(f"/proc/self/fd/{fd}") == "/mlkv-test (deleted)", "people can see whose it is"
    os.close(fd)


@pytest.mark.parametrize("chosen", ["always", "within_size", "advise", "deny", "force"])
def test_where_the_system_has_decided_about_memfds_it_is_a_memfd(
    chosen: str, system: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    system(chosen)
    monkeypatch.setattr(shared_memory, "_mount_tmpfs", None)  # which is not called
    fd = create_shared_memory("mlkv-test", SIZE_BYTES)
    assert is_memfd(fd)
    os.close(fd)


def test_a_kernel_without_large_pages_gives_a_memfd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "_THP", tmp_path / "absent")
    fd = create_shared_memory("mlkv-test", SIZE_BYTES)
    assert is_memfd(fd)
    os.close(fd)


@needs_mount
def test_whatever_step_of_mounting_is_refused_it_is_a_sealed_memfd_and_nothing_stays_open(
    system: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    system("never")
    steps = [(shared_memory, "_call"), (os, "open"), (os, "unlink"), (os, "ftruncate")]
    num_refusals = 0
    for owner, name in steps:
        for number in range(10):
            opened = len(os.listdir("/proc/self/fd"))
            with monkeypatch.context() as patch:
                refuse = RefuseOne(getattr(owner, name), number)
                patch.setattr(owner, name, refuse)
                fd = create_shared_memory("mlkv-test", SIZE_BYTES)
            if refuse.left >= 0:
                assert not is_memfd(fd)
                os.close(fd)
                break
            num_refusals += 1
            assert is_memfd(fd)
            with pytest.raises(PermissionError):
                os.ftruncate(fd, 0)
            os.close(fd)
            assert len(os.listdir("/proc/self/fd")) == opened, f"{name} {number}"
    assert num_refusals == 6 + 3, "fsopen, three options, create and fsmount; then the file"


class RefuseOne:
    def __init__(self, real: Callable[..., int], number: int) -> None:
        self._real, self.left = real, number

    def __call__(self, *arguments: object, **options: object) -> int:
        self.left -= 1
        if self.left == -1:
            raise OSError(errno.EPERM, "Operation not permitted")
        return self._real(*arguments, **options)


def test_a_memfd_that_cannot_be_had_is_an_error_and_nothing_stays_open(
    system: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    system("deny")
    opened = len(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patch:
        patch.setattr(os, "ftruncate", RefuseOne(os.ftruncate, 0))
        with pytest.raises(PermissionError):
            create_shared_memory("mlkv-test", SIZE_BYTES)
    assert len(os.listdir("/proc/self/fd")) == opened


def test_only_memory_whose_size_cannot_change_unnoticed_is_taken_for_it(tmp_path: Path) -> None:
    unsealed = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    assert not is_shared_memory(unsealed)
    os.close(unsealed)
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    named = os.open(f"/dev/shm/mlkv-test-{os.getpid()}", os.O_RDWR | os.O_CREAT | os.O_EXCL)
    try:
        assert not is_shared_memory(named)
        with pytest.raises(OSError, match="Invalid argument"):
            is_shared_memory(fd)
    finally:
        os.unlink(f"/dev/shm/mlkv-test-{os.getpid()}")
        os.close(named)
        os.close(fd)


def test_small_pages_are_not_counted_as_large_ones() -> None:
    with mmap.mmap(-1, SIZE_BYTES) as mapping:
        mapping.madvise(mmap.MADV_NOHUGEPAGE)
        mapping[:] = b"\xee" * SIZE_BYTES
        view = memoryview(mapping)
        assert large_page_bytes(view) == 0
        view.release()
