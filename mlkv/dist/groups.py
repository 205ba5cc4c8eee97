"""Gloo groups whose name does not depend on what else a process has made."""

from __future__ import annotations

import datetime
from collections import Counter
from collections.abc import Sequence

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

_made: Counter[str] = Counter()


def gloo_group_like(group: dist.ProcessGroup, timeout: datetime.timedelta) -> dist.ProcessGroup:
    """A new Gloo group of the ranks of `group`, in its order. Collective over that group only.

    `dist.new_group(ranks, use_local_synchronization=True)` promises the same, but names the group by its ranks and
    the number of groups that this process is in (torch 2.1 to 2.13): two ranks of which one is also in another
    group, as with pipeline or expert parallelism, look for each other under different names until they time out.
    And it sorts the ranks. Here the name comes from that of `group`, which its ranks share, so it must be made as
    often on each of them.
    """
    ranks = dist.get_process_group_ranks(group)
    kin = f"mlkv/{group.group_name}/{'_'.join(map(str, ranks))}"
    _made[kin] += 1
    return _named_gloo_group(f"{kin}/{_made[kin]}", ranks, timeout)


def _named_gloo_group(name: str, ranks: Sequence[int], timeout: datetime.timedelta) -> dist.ProcessGroup:
    # The way by which `dist.new_group` makes groups, less the choice of a name.
    made: dist.ProcessGroup
    made, _ = c10d._new_process_group_helper(
        len(ranks),
        ranks.index(dist.get_rank()),
        list(ranks),
        c10d.Backend("gloo"),
        c10d._get_default_store(),
        name,  # type: ignore[arg-type]  # newer torch has a NewType of str here
        timeout=timeout,
    )
    c10d._world.pg_group_ranks[made] = {rank: at for at, rank in enumerate(ranks)}
    return made
