"""Whether the processes of other ranks of this host still live."""

from __future__ import annotations

import os
import select

from mlkv.dist.replica import Replica


class Processes:
    """Holds a pidfd for each other rank of this host, so that a number used again is not taken for the rank."""

    def __init__(self, replica: Replica) -> None:
        self._pids = {rank: replica.places[rank].pid for rank in replica.neighbours if rank != replica.rank}
        self._handles: dict[int, int] = {}
        self._gone: set[int] = set()
        self._poll = select.poll()
        self._rank_of: dict[int, int] = {}
        for rank, pid in self._pids.items():
            try:
                handle = os.pidfd_open(pid)
            except ProcessLookupError:
                self._gone.add(rank)
                continue
            except OSError:  # no pidfd here (old kernel, seccomp): not known to be gone until the deadline
                continue
            self._handles[rank] = handle
            self._rank_of[handle] = rank
            # Readable from the moment the process has exited, also while it is a zombie.
            self._poll.register(handle, select.POLLIN)

    def find_gone(self) -> set[int]:
        """The group ranks of this host whose process has ended."""
        if len(self._gone) < len(self._pids):
            self._gone.update(self._rank_of[handle] for handle, _ in self._poll.poll(0))
        return self._gone

    def describe(self, rank: int) -> str:
        return f"its process (pid {self._pids[rank]}) is gone"

    def close(self) -> None:
        for handle in self._handles.values():
            self._poll.unregister(handle)
            os.close(handle)
        self._handles.clear()
