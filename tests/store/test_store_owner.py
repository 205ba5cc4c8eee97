"""The owner against clients that misbehave, and started by hand."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from store_helpers import DEADLINE_S, chain, environment, eventually

from mlkv.errors import StoreError
from mlkv.store import Commit, Match, Reserve, Stats, StoreClient, wire
from mlkv.store.rendezvous import is_listening

NewClient = Callable[..., StoreClient]


class RawClient:
    """Speaks bytes."""

    def __init__(self, socket_path: Path) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(DEADLINE_S)
        self.sock.connect(os.fspath(socket_path))

    def send(self, *messages: wire.Request) -> None:
        self.sock.sendall(b"".join(wire.encode_frame(1, message) for message in messages))

    def reply(self) -> wire.Reply:
        reader = wire.FrameReader()
        while True:
            data = self.sock.recv(1 << 16)
            assert data, "closed without a reply"
            for _, body in reader.feed(data):
                return wire.decode_reply(body)

    def hello(self, **changes: object) -> wire.Reply:
        fields: dict[str, object] = {"protocol": wire.PROTOCOL, "page_bytes": 4096, "group": b"raw"}
        self.send(wire.Hello(**(fields | changes)))  # type: ignore[arg-type]
        return self.reply()

    def is_closed(self) -> bool:
        """Whether the owner has closed the connection; waits for it."""
        try:
            while self.sock.recv(1 << 16):
                pass
        except ConnectionResetError:
            pass
        except TimeoutError:
            return False
        return True


@pytest.fixture
def raw(new_client: NewClient, socket_path: Path) -> Iterator[Callable[[], RawClient]]:
    """Raw connections to an owner that has one proper client; that one must be served as before at the end."""
    proper = new_client(host_bytes=8192 * 4096)
    opened: list[RawClient] = []

    def connect() -> RawClient:
        opened.append(RawClient(socket_path))
        return opened[-1]

    yield connect
    report = proper.call(Stats(audit=True), 10.0)
    assert report.problem == ""
    for client in opened:
        client.sock.close()


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"\xff" * 64,
        b"\x05\x00\x00\x00" + bytes(8) + b"\xc1\xc1\xc1\xc1\xc1",
        wire.encode_frame(1, wire.Done()),
    ],
)
def test_garbage_closes_only_its_own_connection(raw: Callable[[], RawClient], garbage: bytes):
    client = raw()
    client.sock.sendall(garbage)
    assert client.is_closed()


def test_garbage_after_hello_closes_the_connection_too(raw: Callable[[], RawClient]):
    client = raw()
    assert isinstance(client.hello(), wire.Welcome)
    client.sock.sendall(b"\xff" * 64)
    assert client.is_closed()


def test_other_protocol_is_refused_with_both_versions(raw: Callable[[], RawClient]):
    client = raw()
    refusal = client.hello(protocol=wire.PROTOCOL + 1)
    assert isinstance(refusal, wire.Failed)
    assert f"speaks protocol {wire.PROTOCOL}, this client {wire.PROTOCOL + 1}" in refusal.message
    assert client.is_closed()


def test_request_before_hello_is_not_served(raw: Callable[[], RawClient]):
    client = raw()
    client.send(wire.Stats())
    assert client.is_closed()


def test_request_after_bye_is_not_served(raw: Callable[[], RawClient]):
    client = raw()
    client.hello()
    client.send(wire.Bye(), wire.Stats())
    assert isinstance(client.reply(), wire.Done)
    assert client.is_closed()


def test_client_that_does_not_read_is_dropped(raw: Callable[[], RawClient]):
    client = raw()
    client.hello()
    keys = os.urandom(16 * 8000)
    client.send(wire.Reserve(keys))
    reserved = client.reply()
    assert isinstance(reserved, wire.Reserved)
    client.send(wire.Commit(reserved.reservation, 8000))
    requests = [wire.Match(keys, 8000)] * 600  # for 58 MB of replies, far beyond what the owner keeps
    with pytest.raises((BrokenPipeError, ConnectionResetError)):
        client.send(*requests)


class Standalone:
    """An owner started as a person would, in a process that the test can prepare."""

    def __init__(self, socket_path: Path, *arguments: str, prepare: str = "") -> None:
        program = f"{prepare}\nimport sys\nfrom mlkv.store.owner import main\nsys.exit(main())"
        argv = [f"--socket={socket_path}", "--host-bytes=65536", "--page-bytes=4096", *arguments]
        self.process = subprocess.Popen(
            [sys.executable, "-c", program, *argv], env=environment(), stderr=subprocess.PIPE, text=True
        )
        self.log = ""

    def wait_for(self, text: str) -> None:
        """Read the log until it says `text`."""
        assert self.process.stderr is not None
        while text not in self.log:
            assert select.select([self.process.stderr], [], [], DEADLINE_S)[0], f"no {text!r} in {self.log}"
            piece = os.read(self.process.stderr.fileno(), 4096).decode()
            assert piece, f"no {text!r} in {self.log}"
            self.log += piece

    def end(self) -> int:
        self.process.terminate()
        status = self.process.wait(DEADLINE_S)
        assert self.process.stderr is not None
        self.process.stderr.close()
        return status


@pytest.fixture
def standalone(socket_path: Path) -> Iterator[Callable[..., Standalone]]:
    started: list[Standalone] = []

    def start(*arguments: str, prepare: str = "") -> Standalone:
        started.append(Standalone(socket_path, *arguments, prepare=prepare))
        return started[-1]

    yield start
    for owner in started:
        owner.end()


def test_kept_owner_outlives_its_clients(
    standalone: Callable[..., Standalone], new_client: NewClient, socket_path: Path
):
    owner = standalone("--keep")
    owner.wait_for("serves 16 pages")
    first = new_client()
    assert first.owner_pid == owner.process.pid
    reserved = first.call(Reserve(chain("ab")), 10.0)
    first.call(Commit(reserved.reservation, 2), 10.0)
    first.close()
    second = new_client(group=b"later")
    assert second.call(Match(chain("ab"), 2), 10.0).lease
    second.close()
    assert owner.end() == 0
    assert os.listdir(socket_path.parent) == []


def test_look_at_the_socket_does_not_end_an_owner_that_waits_for_its_first_client(
    standalone: Callable[..., Standalone], new_client: NewClient, socket_path: Path
):
    owner = standalone()
    eventually(lambda: is_listening(socket_path), "the owner listens")
    probe = RawClient(socket_path)
    probe.sock.shutdown(socket.SHUT_WR)
    assert probe.is_closed()
    assert new_client().owner_pid == owner.process.pid


def test_second_owner_of_a_socket_is_refused(standalone: Callable[..., Standalone]):
    first = standalone("--keep")
    first.wait_for("serves")
    second = standalone("--keep")
    second.wait_for("another owner serves")
    assert second.process.wait(DEADLINE_S) == 1
    assert first.process.poll() is None


def test_kept_owner_ends_on_ctrl_c(standalone: Callable[..., Standalone], socket_path: Path):
    owner = standalone("--keep")
    owner.wait_for("serves")
    eventually(lambda: has_handler(owner.process.pid, signal.SIGINT), "the owner handles Ctrl-C")
    owner.process.send_signal(signal.SIGINT)
    assert owner.process.wait(DEADLINE_S) == 0
    assert os.listdir(socket_path.parent) == []


def has_handler(pid: int, number: int) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    caught = next(line for line in status.splitlines() if line.startswith("SigCgt"))
    # Python itself catches SIGINT; the owner is ready when it catches SIGTERM as well.
    return all(int(caught.split()[1], 16) >> (signum - 1) & 1 for signum in (number, signal.SIGTERM))


RAISE_IN_MATCH = """
import mlkv.store.service as service
def fail(*_):
    raise RuntimeError("a bug in the owner")
service.StoreService._match = fail
"""

BREAK_INDEX_IN_MATCH = """
import mlkv.store.service as service
def fail(self, *_):
    self._index._free.take(1)
    raise RuntimeError("a bug in the owner")
service.StoreService._match = fail
"""


def test_bug_in_a_request_is_that_request_s_error(standalone: Callable[..., Standalone], new_client: NewClient):
    owner = standalone("--keep", prepare=RAISE_IN_MATCH)
    owner.wait_for("serves")
    client = new_client()
    with pytest.raises(StoreError, match="a bug in the owner"):
        client.call(Match(chain("a"), 1), 10.0)
    assert client.call(Stats(audit=True), 10.0).problem == ""
    owner.wait_for("Traceback")


def test_bug_that_breaks_the_index_ends_the_owner(standalone: Callable[..., Standalone], new_client: NewClient):
    owner = standalone("--keep", prepare=BREAK_INDEX_IN_MATCH)
    owner.wait_for("serves")
    client = new_client()
    with pytest.raises(StoreError, match="a bug in the owner"):
        client.call(Match(chain("a"), 1), 10.0)
    owner.wait_for("the index is broken")
    assert owner.process.wait(DEADLINE_S) == 0


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--host-bytes=100"], "smaller than one page"),
        (["--page-bytes=100"], "multiple of 4096"),
        (["--host-bytes=1152921504606846976"], "available"),
    ],
)
def test_wrong_settings_are_one_line_and_a_status(
    standalone: Callable[..., Standalone], arguments: list[str], complaint: str
):
    owner = standalone(*arguments)
    owner.wait_for(complaint)
    assert owner.process.wait(DEADLINE_S) == 2
    assert "Traceback" not in owner.log
