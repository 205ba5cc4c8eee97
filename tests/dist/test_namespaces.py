"""The whole cache over two network namespaces of this machine, which only a veth pair joins."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=20)


@pytest.fixture(name="namespaces")
def make_namespaces() -> Iterator[tuple[str, str]]:
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("needs root and iproute2")
    names = f"mlkvt{os.getpid()}a", f"mlkvt{os.getpid()}b"
    try:
        try:
            for name in names:
                ip("netns", "add", name)
            ip(
                "link",
                "add",
                "veth0",
                "netns",
                names[0],
                "type",
                "veth",
                "peer",
                "name",
                "veth0",
                "netns",
                names[1],
            )
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces here: {error.stderr.decode().strip()}")
        for at, name in enumerate(names, start=1):
            ip("-n", name, "addr", "add", f"10.78.0.{at}/24", "dev", "veth0")
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "set", "veth0", "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True, timeout=20)


def test_a_replica_over_two_network_namespaces_stores_and_loads(namespaces: tuple[str, str]) -> None:
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "veth0", "OMP_NUM_THREADS": "1"}
    # As a launcher would name the job, so that ranks of one host find one owner.
    environ.update(RANK="0", MASTER_ADDR="10.78.0.1", MASTER_PORT="29611")
    processes = []
    for rank in range(2):
        command = ["ip", "netns", "exec", namespaces[rank], sys.executable, "-m", "tests.dist.namespace_job"]
        command += [str(rank), "2", "10.78.0.1:29611"]
        processes.append(subprocess.Popen(command, env=environ, cwd=ROOT, stdout=-1, stderr=-1, text=True))
    try:
        outputs = [process.communicate(timeout=90) for process in processes]
    finally:
        for process in processes:
            process.kill()
    lines = [out.strip() for out, _ in outputs]
    assert [process.returncode for process in processes] == [0] * 2, outputs
    assert len(set(lines)) == 1
    assert lines[0].startswith("32 0 tensor ")
