"""All-gathers of device memory among some ranks of one host, on a communicator that nobody else uses."""

from __future__ import annotations

import datetime
import logging
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from mlkv.dist.replica import Replica

log = logging.getLogger(__name__)

_WATCHDOG_FACTOR = 2
"""NCCL's own watchdog, which ends the process, comes so many deadlines after those who wait have given up."""


class GroupExchange:
    """Gathers over NCCL on CUDA devices, over Gloo on the CPU. Not thread-safe.

    A communicator of its own, because its collectives run beside the model's and must never come between them; and
    not made by `dist.new_group`, which the whole world must call where the default group is bound to a device.

    Attributes:
        rank: of this process among the members.
        size: the number of members.

    Args:
        members: group ranks of the replica, ascending, this one among them.
        name: equal on all members, and used once in the job.
        device: of this rank; each member has another one, or all are the CPU.
        deadline_s: of one gather.

    Making one does not wait for the other members; the first gather does.
    """

    def __init__(
        self, replica: Replica, members: Sequence[int], name: str, device: torch.device, deadline_s: float
    ) -> None:
        self.rank, self.size = members.index(replica.rank), len(members)
        self._device = device
        self._deadline_s = deadline_s
        self._store = PrefixStore(f"{name}/{members[0]}/", _get_default_store())
        self._global_ranks = [replica.global_ranks[member] for member in members]
        self._streams: dict[int, torch.cuda.Stream] = {}  # by handle
        self._options = AllgatherOptions()
        # Where torch knows this (2.8 and later), the gather runs on the given stream itself.
        self._options.asyncOp = False
        self._group: Any = self._nccl() if device.type == "cuda" else self._gloo()

    def all_gather(self, out: torch.Tensor, part: torch.Tensor, stream: int) -> None:
        """See `kernels.cooperative.Exchange`. `stream`: raw handle on CUDA; on the CPU the caller waits."""
        if self._group is None:
            raise RuntimeError("the exchange was aborted")
        if self._device.type != "cuda":
            self._group._allgather_base(out, part).wait()
            return
        on = self._streams.get(stream)
        if on is None:
            on = torch.cuda.ExternalStream(stream, self._device)  # type: ignore[no-untyped-call]
            self._streams[stream] = on
        with torch.cuda.stream(on):
            work = self._group._allgather_base(out, part, self._options)
            if work is not None:
                work.wait()  # lets the stream wait, not the caller

    def abort(self) -> None:
        """End what is under way and let go of the communicator; the other members are not waited for."""
        group, self._group = self._group, None
        if group is None or self._device.type != "cuda":
            return  # a gather over Gloo ends by its own deadline
        try:
            group.abort()
        except RuntimeError as error:  # in a device that is in error anyway
            log.warning("the communicator of cooperative loads could not be aborted: %s", error)

    def _gloo(self) -> Any:
        return dist.ProcessGroupGloo(
            self._store, self.rank, self.size, datetime.timedelta(seconds=self._deadline_s)
        )

    def _nccl(self) -> Any:
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        options._timeout = datetime.timedelta(seconds=_WATCHDOG_FACTOR * self._deadline_s)
        options.global_ranks_in_group = self._global_ranks
        return dist.ProcessGroupNCCL(self._store, self.rank, self.size, options)
