"""Who of the job's ranks is gone, and the end of those that would wait for it.

In a step of the cache the agreement names a rank that is lost. Elsewhere ranks wait too: for each other to start,
in the model's collectives, for the books of another replica. There the backend says at best that a connection
broke, and NCCL may say nothing for minutes. All ranks of the main job run on one host, so each watches the others'
processes. How they found the job's end is told in files (see plan.py), as everything between replicas.
"""

from __future__ import annotations

import os
import re
import select
import threading
import time
from collections.abc import Callable
from pathlib import Path

from mlkv.engine import plan as files
from mlkv.errors import AgreementError, MLKVError

PATIENCE_S = 1.0
"""How long an error waits for its explanation, and the watch for the rank to end by itself, in its own words."""

_START_POLL_S = 0.05  # while ranks are missing; their arrival makes no event


class RankGone(AgreementError):
    """A rank of the job ended early, or stopped.

    Attributes:
        rank: its global rank.
    """

    def __init__(self, rank: int, why: str) -> None:
        self.rank = rank
        self.why = why
        super().__init__(f"rank {rank} of the job was lost: {why}")

    def __reduce__(self) -> tuple[type[RankGone], tuple[int, str]]:
        return type(self), (self.rank, self.why)


class Watch:
    """Watches the processes of all other ranks of the job, on a thread that sleeps until one of them ends.

    Args:
        folder: of this start of the job; each rank checks in there, and leaves its result or error.
        tp: ranks of a replica, which wait for each other more than for the rest of the job.
        deadline_s: for all ranks to check in.
        on_gone: called on the thread when a rank is gone and this one has not ended `PATIENCE_S` later: it is
            stuck in something that cannot be interrupted.
    """

    def __init__(
        self,
        folder: Path,
        rank: int,
        num_ranks: int,
        tp: int,
        deadline_s: float,
        on_gone: Callable[[RankGone], None],
    ) -> None:
        self._folder, self._rank = folder, rank
        self._others = [other for other in range(num_ranks) if other != rank]
        self._peers = [other for other in self._others if other // tp == rank // tp]
        self._deadline_s, self._on_gone = deadline_s, on_gone
        self._gone: RankGone | None = None
        self._found = threading.Event()
        self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._closing = threading.Event()
        files.write(files.CheckedIn(rank, os.getpid()), self._path("present", rank))
        self._thread = threading.Thread(target=self._run, name="mlkv-watch", daemon=True)
        self._thread.start()

    def explain(self, error: BaseException) -> BaseException:
        """What to report instead of an error that another rank's loss may have caused: who it was, or `error`.

        A collective that timed out does not tell whom it waited for. Every rank that comes here with such an error
        says so, and one that does not, while nobody has ended, is the one that is stuck.
        """
        if not isinstance(error, (RuntimeError, TimeoutError)):
            return error
        timed_out = _has_timed_out(error)
        if timed_out:
            self._path("stuck", self._rank).touch()
        self._found.wait(PATIENCE_S)
        if self._gone is not None:
            return self._gone
        if not timed_out:  # a rank's own, such as no memory left
            return error
        for waited_for in (self._peers, self._others):
            for rank in waited_for:
                if not self._has(rank, "stuck", "error", "rank"):
                    return RankGone(rank, f"it does not take part, and has not ended ({error})")
        return error

    def close(self) -> None:
        """This rank is done. Harmless when repeated."""
        if self._closing.is_set():
            return
        self._closing.set()
        os.write(self._wake_write, b"\0")
        self._thread.join()
        os.close(self._wake_read)
        os.close(self._wake_write)

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._wake_read, select.POLLIN)
        rank_of: dict[int, int] = {}
        missing = set(self._others)
        late_at = time.monotonic() + self._deadline_s
        while not self._closing.is_set():
            missing -= {rank for rank in missing if self._register(rank, poll, rank_of)}
            ready = {rank_of[fd] for fd, _ in poll.poll(_START_POLL_S * 1e3 if missing else None) if fd in rank_of}
            for fd in [fd for fd, rank in rank_of.items() if rank in ready]:
                poll.unregister(fd)
                os.close(fd)
                del rank_of[fd]
            # One that has left its result ended as it should.
            self._gone = self._cause({rank for rank in ready if not self._has(rank, "rank")})
            if self._gone is None and missing and time.monotonic() > late_at:
                self._gone = RankGone(min(missing), f"it did not start within {self._deadline_s:g} s")
            if self._gone is not None:
                break
        self._found.set()
        if self._gone is not None and not self._closing.wait(PATIENCE_S):
            self._on_gone(self._gone)

    def _register(self, rank: int, poll: select.poll, rank_of: dict[int, int]) -> bool:
        path = self._path("present", rank)
        if not path.exists():
            return False
        pid = files.read(path, files.CheckedIn).pid
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            # Ended between checking in and now: found by the next look, as all others are.
            fd = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:  # no pidfd here (old kernel, seccomp): left to the deadlines
            return True
        rank_of[fd] = rank
        poll.register(fd, select.POLLIN)
        return True

    def _cause(self, ended: set[int]) -> RankGone | None:
        """Of those that ended together, the one that did not end because of another."""
        blamed: RankGone | None = None
        for rank in sorted(ended):
            path = self._path("error", rank)
            if not path.exists():
                return RankGone(rank, "its process has ended without a word")
            try:
                left = files.read(path, files.RankError)
            except MLKVError:  # of another version, or damaged: it ended all the same
                return RankGone(rank, "its process has ended")
            if left.lost < 0:
                return RankGone(rank, f"it ended with {left.kind}: {left.message}")
            blamed = RankGone(left.lost, f"rank {rank} found that: {left.message}")
        return blamed

    def _has(self, rank: int, *kinds: str) -> bool:
        return any(self._path(kind, rank).exists() for kind in kinds)

    def _path(self, kind: str, rank: int) -> Path:
        return self._folder / f"{kind}{rank}.json"


def _has_timed_out(error: BaseException) -> bool:
    # There is no type for it: "Timed out waiting 8000ms for recv operation" (Gloo), "wait timeout after 8000ms"
    # (the store of torch.distributed), both RuntimeError.
    return isinstance(error, TimeoutError) or re.search("timed out|timeout", str(error), re.IGNORECASE) is not None
