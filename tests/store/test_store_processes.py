"""Owner and ranks as real processes: shared bytes, deaths, races, residue."""

from __future__ import annotations

import os
import shutil
import signal
import stat
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from store_helpers import RankProcess, chain, eventually, is_running

from mlkv.errors import ConfigError, DeadlineExceeded, StoreError, StoreLost
from mlkv.store import Match, Matched, Release, Reserve, Stats, StoreClient

NewRank = Callable[..., RankProcess]
NewClient = Callable[..., StoreClient]


def files_beside(socket_path: Path) -> list[str]:
    return sorted(os.listdir(socket_path.parent))


def owner_ends(pid: int) -> None:
    eventually(lambda: not is_running(pid), "the owner ends")


# Working together


def test_two_processes_share_pages(new_rank: NewRank):
    writer, reader = new_rank(rank=0), new_rank(rank=1)
    assert writer.answer() == reader.answer()
    written = writer.do("store", text="abc")
    matched = reader.do("match", text="abcd")
    assert matched["pages"] == written
    assert matched["letters"] == ["aa", "bb", "cc"]


def test_socket_and_folder_are_private(new_client: NewClient, socket_path: Path):
    new_client()
    assert stat.S_IMODE(socket_path.stat().st_mode) == 0o600
    assert stat.S_IMODE(socket_path.parent.stat().st_mode) == 0o700


def test_folder_that_others_can_enter_is_refused(new_client: NewClient, socket_path: Path):
    socket_path.parent.chmod(0o755)
    with pytest.raises(ConfigError, match="mode 0700"):
        new_client()
    assert files_beside(socket_path) == []


def test_folder_is_made_private(socket_path: Path):
    deeper = socket_path.parent / "user" / "store.sock"
    with StoreClient.connect(deeper, host_bytes=4096, page_bytes=4096, group=b"g", rank=0, deadline_s=20.0):
        assert stat.S_IMODE(deeper.parent.stat().st_mode) == 0o700


def test_replies_keep_their_tickets(new_client: NewClient):
    client = new_client()
    reserved = client.call(Reserve(chain("abc")), 10.0)
    tickets = {client.submit(Match(chain("abc"), limit)): limit for limit in range(50)}
    answered: dict[int, object] = {}

    def all_answered() -> bool:
        answered.update(client.poll())
        return len(answered) == len(tickets)

    eventually(all_answered, "every ticket is answered")
    for ticket, limit in tickets.items():
        reply = answered[ticket]
        assert isinstance(reply, Matched)
        assert reply.num_coming == min(limit, len(reserved.page_ids))


def test_refusal_reaches_the_caller_and_the_owner_goes_on(new_client: NewClient):
    client = new_client()
    with pytest.raises(StoreError, match="released before"):
        client.call(Release([5]), 10.0)
    assert client.call(Stats(audit=True), 10.0).free == 16


# Starting


def test_processes_that_start_together_get_one_owner(new_rank: NewRank, socket_path: Path):
    ranks = [new_rank(rank=number) for number in range(6)]
    answers = [rank.answer() for rank in ranks]
    owners = {answer["owner"] for answer in answers}
    assert len(owners) == 1, answers
    assert ranks[0].do("stats")["clients"] == 6
    for rank in ranks:
        rank.do("close")
    owner_ends(owners.pop())
    assert files_beside(socket_path) == []


def test_joining_while_the_owner_leaves_always_ends_in_an_owner(new_rank: NewRank, socket_path: Path):
    ranks = [new_rank(rank=number) for number in range(3)]
    for rank in ranks:
        rank.answer()
        rank.do("close")
    for rank in ranks:
        rank.start("churn", rounds=8, socket_path=str(socket_path))
    assert [rank.answer() for rank in ranks] == [8, 8, 8]
    eventually(lambda: files_beside(socket_path) == [], "the last owner removes its files")


def test_engine_gets_no_child_to_wait_for(new_client: NewClient):
    before = {child.pid for child in psutil.Process().children()}
    client = new_client()
    with pytest.raises(ChildProcessError):
        os.waitpid(client.owner_pid, os.WNOHANG)
    assert {child.pid for child in psutil.Process().children()} <= before


def test_owner_runs_in_a_session_of_its_own(new_client: NewClient):
    client = new_client()
    assert os.getsid(client.owner_pid) not in (os.getsid(0), 0)
    for _ in range(3):  # an owner that stops would still answer what came together with the signal
        os.kill(client.owner_pid, signal.SIGINT)
        assert client.call(Stats(), 10.0).clients == 1


def test_socket_that_a_killed_owner_left_is_replaced(new_client: NewClient, socket_path: Path):
    first = new_client()
    os.kill(first.owner_pid, signal.SIGKILL)
    owner_ends(first.owner_pid)
    assert socket_path.exists()
    second = new_client()
    assert second.owner_pid != first.owner_pid
    assert second.call(Stats(), 10.0).clients == 1
    first.close()
    assert socket_path.exists(), "the old client removed the socket of the new owner"


def test_file_that_is_no_socket_is_replaced(new_client: NewClient, socket_path: Path):
    socket_path.write_text("left by something")
    assert new_client().call(Stats(), 10.0).clients == 1


def python_that(does: str, socket_path: Path) -> str:
    """An executable to be started in place of Python."""
    program = socket_path.parent / "python"
    program.write_text(f"#!/bin/sh\n{does}\n")
    program.chmod(0o700)
    return str(program)


def test_owner_that_never_gets_ready_is_given_up_and_killed(
    new_client: NewClient, socket_path: Path, monkeypatch: pytest.MonkeyPatch
):
    pid_file = socket_path.parent / "pid"
    monkeypatch.setattr(sys, "executable", python_that(f"echo $$ > {pid_file}; exec sleep 600", socket_path))
    with pytest.raises(DeadlineExceeded, match="not ready within"):
        new_client(deadline_s=1.0)
    assert not is_running(int(pid_file.read_text()))
    monkeypatch.undo()
    assert new_client().num_pages == 16, "the lock is free again"


def test_owner_that_dies_at_once_is_an_error(
    new_client: NewClient, socket_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sys, "executable", python_that("exit 3", socket_path))
    with pytest.raises(StoreError, match="did not start"):
        new_client()


def test_pool_larger_than_memory_is_refused_to_the_starter(new_client: NewClient, socket_path: Path):
    with pytest.raises(ConfigError, match=r"store\.host_bytes .* available"):
        new_client(host_bytes=1 << 60, page_bytes=1 << 30)
    assert not socket_path.exists()
    assert new_client().num_pages == 16


def test_pool_smaller_than_a_page_is_refused(new_client: NewClient):
    with pytest.raises(ConfigError, match=r"store\.host_bytes"):
        new_client(host_bytes=4095)


def test_too_long_socket_path_is_refused(socket_path: Path):
    path = socket_path.parent / ("x" * 120)
    with pytest.raises(ConfigError, match="longer than"):
        StoreClient.connect(path, host_bytes=4096, page_bytes=4096, group=b"", rank=0, deadline_s=5.0)


def test_other_page_size_is_refused_by_name(new_client: NewClient):
    new_client()
    with pytest.raises(StoreError, match="pages of 4096 bytes, this client needs 8192"):
        new_client(page_bytes=8192)


# Leaving and dying


def test_owner_leaves_nothing_behind_when_its_last_client_is_gone(new_client: NewClient, socket_path: Path):
    shared_memory_before = sorted(os.listdir("/dev/shm"))
    first, second = new_client(), new_client(group=b"another")
    first.close()
    first.close()
    assert second.call(Stats(), 10.0).clients == 1
    second.close()
    owner_ends(first.owner_pid)
    assert files_beside(socket_path) == []
    assert sorted(os.listdir("/dev/shm")) == shared_memory_before
    with pytest.raises(StoreLost):
        first.submit(Stats())


def test_owner_lingers_as_long_as_told(new_client: NewClient):
    first = new_client(linger_s=60.0)
    first.call(Reserve(chain("a")), 10.0)
    descriptors = Path(f"/proc/{first.owner_pid}/fd")
    num_open = len(os.listdir(descriptors))
    first.close()
    eventually(lambda: len(os.listdir(descriptors)) < num_open, "the owner has seen its last client go")
    second = new_client()
    assert second.owner_pid == first.owner_pid
    second.close()
    os.kill(first.owner_pid, signal.SIGTERM)
    owner_ends(first.owner_pid)


def test_killed_rank_loses_its_lease_when_its_process_is_gone(new_rank: NewRank):
    watcher, reader = new_rank(group="watcher"), new_rank(group="reader")
    watcher.answer(), reader.answer()
    watcher.do("store", text="abc")
    assert reader.do("match", text="abc")["lease"]
    reader.do("store", text="xy", commit=False)
    stats = watcher.do("stats")
    assert (stats["leases"], stats["reserved"]) == (1, 2)
    reader.kill()
    stats = eventually(lambda: (now := watcher.do("stats"))["clients"] == 1 and now, "the dead rank is noticed")
    assert (stats["leases"], stats["reserved"], stats["free"], stats["problem"]) == (0, 0, 13, "")


def test_lost_connection_keeps_its_lease_while_the_process_lives(new_rank: NewRank):
    watcher, reader = new_rank(group="watcher"), new_rank(group="reader")
    watcher.answer(), reader.answer()
    watcher.do("store", text="abc")
    pages = reader.do("match", text="abc")["pages"]
    reader.do("hang_up")
    # The owner answers in order of arrival, so after a few rounds it has seen the end of the connection.
    for _ in range(20):
        stats = watcher.do("stats")
        assert (stats["leases"], stats["clients"]) == (1, 2)
    taken = watcher.do("store", text="nopqrstuvwxyz", commit=False)
    assert len(taken) == 13
    assert not set(taken) & set(pages)
    assert watcher.do("store", text="0", commit=False) == []
    reader.kill()
    eventually(lambda: watcher.do("stats")["leases"] == 0, "the lease returns with the death of the process")
    assert watcher.do("store", text="0", commit=False) != []


def test_pages_of_a_dead_master_stay_while_another_rank_of_its_group_lives(new_rank: NewRank):
    watcher = new_rank(group="watcher")
    master, other = new_rank(group="replica", rank=0), new_rank(group="replica", rank=1)
    watcher.answer(), master.answer(), other.answer()
    watcher.do("store", text="abc")
    lease = master.do("match", text="abc")["lease"]
    master.do("store", text="xy", commit=False)
    master.kill()
    eventually(lambda: watcher.do("stats")["clients"] == 2, "the dead master is noticed")
    stats = watcher.do("stats")
    assert (stats["leases"], stats["reserved"]) == (1, 2)
    other.do("release", lease=lease)
    other.do("close")
    stats = watcher.do("stats")
    assert (stats["leases"], stats["reserved"], stats["clients"]) == (0, 0, 1)


def test_owner_ends_when_all_ranks_were_killed(new_rank: NewRank, socket_path: Path):
    ranks = [new_rank(rank=number) for number in range(2)]
    owner = {rank.answer()["owner"] for rank in ranks}.pop()
    for rank in ranks:
        rank.kill()
    owner_ends(owner)
    assert files_beside(socket_path) == []


def test_killed_owner_is_noticed_and_nothing_stays_behind(new_rank: NewRank, socket_path: Path):
    ranks = [new_rank(rank=number) for number in range(2)]
    owner = {rank.answer()["owner"] for rank in ranks}.pop()
    written = ranks[0].do("store", text="ab")
    os.kill(owner, signal.SIGKILL)
    owner_ends(owner)
    for rank in ranks:
        assert rank.do("match", text="ab")["error"] == "StoreLost"
        assert rank.do("stats")["error"] == "StoreLost"
        # Copies under way end in peace: the mapping is still there.
        assert rank.do("peek", pages=written) == ["aa", "bb"]
        rank.do("close")
    assert files_beside(socket_path) == []


def test_loss_is_told_once_to_who_polls(new_client: NewClient):
    client = new_client()
    os.kill(client.owner_pid, signal.SIGKILL)
    owner_ends(client.owner_pid)
    with pytest.raises(StoreLost, match=f"pid {client.owner_pid}"):
        client.poll()
    assert client.poll() == []
    with pytest.raises(StoreLost):
        client.submit(Stats())


def test_terminated_owner_removes_its_files(new_client: NewClient, socket_path: Path):
    client = new_client()
    os.kill(client.owner_pid, signal.SIGTERM)
    owner_ends(client.owner_pid)
    assert files_beside(socket_path) == []
    with pytest.raises(StoreLost):
        client.call(Stats(), 10.0)


def test_owner_whose_folder_was_removed_still_ends(new_client: NewClient, socket_path: Path):
    client = new_client()
    shutil.rmtree(socket_path.parent)
    client.close()
    owner_ends(client.owner_pid)


# An owner that is slow


def test_call_has_a_deadline_and_its_late_lease_is_given_back(new_client: NewClient, new_rank: NewRank):
    client = new_client()
    writer = new_rank(group="writer")
    writer.answer()
    writer.do("store", text="ab")
    os.kill(client.owner_pid, signal.SIGSTOP)
    try:
        with pytest.raises(DeadlineExceeded, match="did not answer a Match"):
            client.call(Match(chain("ab"), 2), 0.05)
        waiting = client.submit(Match(chain("ab"), 2))
        client.abandon(waiting)
        with pytest.raises(DeadlineExceeded):
            new_client_of_stopped_owner(client)
    finally:
        os.kill(client.owner_pid, signal.SIGCONT)

    def all_given_back() -> bool:
        assert client.poll() == []
        stats = writer.do("stats")
        return stats["pages_hit"] == 4 and stats["leases"] == 0

    eventually(all_given_back, "abandoned leases are released")


def new_client_of_stopped_owner(client: StoreClient) -> None:
    StoreClient.connect(
        client._socket_path, host_bytes=4096, page_bytes=4096, group=b"late", rank=0, deadline_s=0.2
    )


def test_too_many_open_requests_are_an_error_not_a_wait(new_client: NewClient, monkeypatch: pytest.MonkeyPatch):
    client = new_client()
    monkeypatch.setattr("mlkv.store.client.MAX_OUTSTANDING", 3)
    os.kill(client.owner_pid, signal.SIGSTOP)
    try:
        for _ in range(3):
            client.submit(Stats())
        with pytest.raises(StoreError, match="stuck"):
            client.submit(Stats())
    finally:
        os.kill(client.owner_pid, signal.SIGCONT)
    assert len(eventually(lambda: (seen := client.poll()) and seen, "answers come")) >= 1


def test_close_with_open_requests_leaves_no_lease_to_the_group(new_client: NewClient):
    first, second = new_client(), new_client(rank=1)
    reserved = first.call(Reserve(chain("abc")), 10.0)
    assert reserved.reservation
    first.submit(Reserve(chain("xyz")))
    first.close()
    report = second.call(Stats(audit=True), 10.0)
    assert (report.reservations, report.reserved) == (1, 3)
