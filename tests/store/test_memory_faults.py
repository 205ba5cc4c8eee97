"""An owner for which the k-th allocation of a turn fails, for every k: it answers, or it ends and is replaced."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from store_helpers import DEADLINE_S, chain, environment, eventually

from mlkv.errors import StoreError, StoreLost
from mlkv.store import Commit, Match, Release, Reserve, Stats, StoreClient, wire
from mlkv.store.rendezvous import is_listening

pytest.importorskip("_testcapi", reason="this Python cannot make its own allocations fail")

HOST_BYTES = 2048 * 4096
"""Many pages: what a client that was cut off had reserved stays so as long as its process, this one, lives."""

STEP = 3
"""Every third allocation: a failure takes a tenth of a second, and a second where it takes a new owner."""

PAST_THE_LAST = 15
"""Failures in a row that hurt nobody, after which their number is beyond what a turn allocates."""

ORDERED_ENDS = ("there is no memory left, the store ends", "the index is broken, the store ends")

OWNER = """
import os, selectors, sys
import _testcapi
from mlkv.store import owner

armed, select, turn = sys.argv.pop(1), selectors.DefaultSelector.select, owner.Owner._turn

def arming_select(self, timeout=None):
    ready = select(self, timeout)
    if ready and os.path.exists(armed):
        with open(armed) as file:
            number = int(file.read())
        os.unlink(armed)
        _testcapi.set_nomemory(number, number + 1)
    return ready

def disarmed_turn(self, timeout_s):
    try:
        turn(self, timeout_s)
    finally:
        _testcapi.remove_mem_hooks()

selectors.DefaultSelector.select, owner.Owner._turn = arming_select, disarmed_turn
sys.exit(owner.main())
"""


class FaultyOwner:
    """Owners of one socket, one after the other. The next turn that has something to do can be made to fail."""

    def __init__(self, socket_path: Path, new_client: Callable[..., StoreClient]) -> None:
        self.socket_path = socket_path
        self._new_client = new_client
        self._armed = socket_path.parent / "armed"
        self._log = socket_path.parent / "log"
        self._process: subprocess.Popen[str] | None = None

    def client(self) -> StoreClient:
        """Of an owner that serves; it is started if there is none."""
        if self._process is None:
            with open(self._log, "w") as log:
                command = [sys.executable, "-c", OWNER, str(self._armed), f"--socket={self.socket_path}"]
                command += [f"--host-bytes={HOST_BYTES}", "--page-bytes=4096", "--keep"]
                self._process = subprocess.Popen(command, env=environment(), stderr=log, text=True)
            eventually(lambda: is_listening(self.socket_path), "the owner listens")
        return self._new_client(host_bytes=HOST_BYTES)

    def fail_at(self, number: int) -> None:
        part = self._armed.with_suffix(".part")
        part.write_text(str(number))
        part.rename(self._armed)

    def has_ended(self) -> bool:
        """Whether it has; if so, it must have said why and left nothing, unless a library has crashed."""
        self._armed.unlink(missing_ok=True)
        assert self._process is not None
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(0.0 if is_listening(self.socket_path) else DEADLINE_S)
        if self._process.returncode is None:
            return False
        log, status = self._log.read_text(), self._process.returncode
        self._process = None
        if status == -signal.SIGSEGV:
            return True  # numpy 2 does not look whether it got the memory of some iterators: as good as a kill -9
        assert status == 0, log
        assert any(words in log for words in ORDERED_ENDS), log
        assert not self.socket_path.exists()
        return True

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()


@pytest.fixture
def faulty(socket_path: Path, new_client: Callable[..., StoreClient]) -> Iterator[FaultyOwner]:
    owner = FaultyOwner(socket_path, new_client)
    yield owner
    owner.close()


def reserve(client: StoreClient, name: str) -> wire.Request:
    return Reserve(chain(name))


def commit(client: StoreClient, name: str) -> wire.Request:
    found = client.call(Reserve(chain(name)), DEADLINE_S)
    return Commit(found.reservation, len(found.page_ids))


def store(client: StoreClient, name: str) -> None:
    client.call(commit(client, name), DEADLINE_S)


def match(client: StoreClient, name: str) -> wire.Request:
    store(client, name)
    return Match(chain(name), len(name))


def release(client: StoreClient, name: str) -> wire.Request:
    return Release([client.call(match(client, name), DEADLINE_S).lease])


REQUESTS = {"reserve": reserve, "commit": commit, "match": match, "release": release}
"""What is asked while memory fails; each does what has to be there before, and makes the message."""


@pytest.mark.parametrize("kind", REQUESTS)
def test_a_failed_allocation_costs_an_answer_or_an_owner_and_no_more(kind: str, faulty: FaultyOwner) -> None:
    outcomes: Counter[str] = Counter()
    client = faulty.client()
    number = answered_in_a_row = 0
    while answered_in_a_row < PAST_THE_LAST:
        request = REQUESTS[kind](client, f"{number:04}"[::-1])
        faulty.fail_at(number)
        try:
            client.call(request, DEADLINE_S)
            outcome = "answered"
        except StoreLost:
            outcome = "lost"
        except StoreError:
            outcome = "failed"
        answered_in_a_row = answered_in_a_row + 1 if outcome == "answered" else 0
        outcomes[outcome] += 1
        try:
            if outcome == "lost":
                outcomes["ended"] += faulty.has_ended()
                client = faulty.client()
            assert client.call(Stats(audit=True), DEADLINE_S).problem == ""
        except StoreLost:
            outcomes["ended"] += faulty.has_ended()
            client = faulty.client()
        store(client, f"fine{number:04}"[::-1])
        number += STEP
    assert number > 60, "too few allocations to be those of a turn"
    assert outcomes["failed"] + outcomes["lost"] > 10, "hardly anything was made to fail"
