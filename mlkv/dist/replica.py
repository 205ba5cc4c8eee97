"""Replicas: the ranks that execute the same requests, their master, and where each of them runs."""

from __future__ import annotations

import copy
import datetime
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from mlkv.dist.groups import gloo_group_like
from mlkv.dist.rendezvous import warn_of_stale_addresses
from mlkv.errors import ConfigError

DEFAULT_DEADLINE_S = 60.0


@dataclass(frozen=True)
class Place:
    """Where a rank runs. Equal `host` means: same kernel and same pid numbers, whatever the host's name says."""

    host: int
    pid: int

    @classmethod
    def here(cls) -> Place:
        # Containers of one kernel may share a boot id but not process numbers; both must match.
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.readlink("/proc/self/ns/pid")
        digest = blake2b(f"{boot}|{namespace}".encode(), digest_size=8).digest()
        return cls(int.from_bytes(digest, "little", signed=True), os.getpid())


class Replica:
    """One data-parallel group as seen by one of its ranks.

    Attributes:
        group: a Gloo process group of exactly these ranks, used by mlkv alone; None when `size` is 1.
        rank, size: group rank and number of ranks. The master is group rank 0.
        global_ranks: the members' ranks in the default process group, in group order.
        index: which replica of the world this is, where that is known (`from_world`), else 0.
        places: where each member runs, in group order.
        session: random, equal on these ranks and in no other replica, nor in one of an earlier start of the job.
        deadline_s: the longest any collective of this group waits.

    The constructors take `place`, where this rank runs, for trying several hosts on one; default: `Place.here()`.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        *,
        global_ranks: Sequence[int],
        rank: int,
        deadline_s: float = DEFAULT_DEADLINE_S,
        index: int = 0,
        place: Place | None = None,
    ) -> None:
        self.group = group
        self.global_ranks = tuple(global_ranks)
        self.rank = rank
        self.size = len(self.global_ranks)
        self.deadline_s = deadline_s
        self.index = index
        here = place or Place.here()
        rows = self._all_rows([here.host, here.pid, secrets.randbits(63)])
        self.places = tuple(Place(host, pid) for host, pid, _ in rows)
        self.session = rows[0][2]
        self._names: dict[str, int] = {}

    @classmethod
    def single(cls) -> Replica:
        """A replica of this process alone; needs no torch.distributed."""
        return cls(None, global_ranks=(0,), rank=0)

    @classmethod
    def from_world(
        cls, *, tp: int, dp: int = 1, deadline_s: float = DEFAULT_DEADLINE_S, place: Place | None = None
    ) -> Replica:
        """Split the default process group into `dp` replicas of `tp` neighbouring ranks.

        Collective over the default group. Raises ConfigError when `tp * dp` is not the world size.
        """
        world = dist.get_world_size() if dist.is_initialized() else 1
        if tp < 1 or dp < 1 or tp * dp != world:
            raise ConfigError(f"tp={tp} times dp={dp} must be the world size, which is {world}")
        if not dist.is_initialized():
            return cls.single()
        own = dist.get_rank() // tp
        group = None
        warn_of_stale_addresses()
        for index in range(dp):
            # Every rank of the world must take part in making every group.
            made = dist.new_group(
                list(range(index * tp, index * tp + tp)), backend="gloo", timeout=_timeout(deadline_s)
            )
            group = made if index == own else group
        ranks = range(own * tp, own * tp + tp)
        rank = dist.get_rank() % tp
        return cls(group, global_ranks=ranks, rank=rank, deadline_s=deadline_s, index=own, place=place)

    @classmethod
    def from_group(
        cls, group: dist.ProcessGroup, *, deadline_s: float = DEFAULT_DEADLINE_S, place: Place | None = None
    ) -> Replica:
        """The ranks of an existing process group (any backend). Collective over that group only.

        A Gloo group of its own is made for them, so that mlkv's messages never meet the engine's.
        """
        ranks = dist.get_process_group_ranks(group)
        warn_of_stale_addresses()
        own = gloo_group_like(group, _timeout(deadline_s))
        rank = ranks.index(dist.get_rank())
        return cls(own, global_ranks=ranks, rank=rank, deadline_s=deadline_s, place=place)

    @classmethod
    def from_device_mesh(
        cls, mesh: DeviceMesh, dim: str = "tp", *, deadline_s: float = DEFAULT_DEADLINE_S
    ) -> Replica:
        """The ranks along one named dimension of a DeviceMesh, usually the tensor-parallel one."""
        names = mesh.mesh_dim_names or ()
        if dim not in names:
            raise ConfigError(f"the device mesh has dimensions {names}, not {dim!r}")
        return cls.from_group(mesh.get_group(dim), deadline_s=deadline_s)

    def within(self, deadline_s: float) -> Replica:
        """The same replica, for waits of at most `deadline_s` seconds, or its own deadline if that is shorter."""
        bounded = copy.copy(self)
        bounded.deadline_s = min(self.deadline_s, deadline_s)
        return bounded

    @property
    def is_master(self) -> bool:
        return self.rank == 0

    @property
    def one_host(self) -> bool:
        """Whether all ranks of the replica run on one host."""
        return len({place.host for place in self.places}) == 1

    @property
    def host_ranks(self) -> tuple[tuple[int, ...], ...]:
        """The group ranks of each host, hosts in the order of their lowest rank, ranks ascending."""
        ranks_of: dict[int, list[int]] = {}
        for rank, place in enumerate(self.places):
            ranks_of.setdefault(place.host, []).append(rank)
        return tuple(tuple(ranks) for ranks in ranks_of.values())

    @property
    def neighbours(self) -> tuple[int, ...]:
        """The group ranks of this rank's host, itself included, ascending."""
        return next(ranks for ranks in self.host_ranks if self.rank in ranks)

    def unique_name(self, use: str) -> str:
        """For keys in the job's store: another one at each call, equal on ranks that make the same calls."""
        self._names[use] = self._names.get(use, 0) + 1
        return f"mlkv/{self.session:x}/{use}{self._names[use]}"

    def min_int(self, value: int) -> int:
        """The smallest `value` (a signed 64-bit integer) over the ranks. Collective over the replica."""
        return min(self.all_ints(value))

    def all_ints(self, value: int) -> list[int]:
        """Every rank's `value` (a signed 64-bit integer), in group order. Collective over the replica."""
        return [row[0] for row in self._all_rows([value])]

    def _all_rows(self, row: list[int]) -> list[list[int]]:
        if self.group is None:
            return [row]
        mine = torch.tensor(row, dtype=torch.int64)
        rows = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(rows, mine, group=self.group)
        return [[int(value) for value in found] for found in rows]


def _timeout(deadline_s: float) -> datetime.timedelta:
    return datetime.timedelta(seconds=deadline_s)
