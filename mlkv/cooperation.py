"""Which ranks load together, and whether it is worth it: decided by all ranks alike when a cache is made."""

from __future__ import annotations

import logging

import torch

from mlkv.config import MLKVConfig
from mlkv.dist import GroupExchange, Replica
from mlkv.errors import ConfigError, MLKVError
from mlkv.kernels import COOPERATIVE_BYTES, Cooperation
from mlkv.layout import RankSlice

log = logging.getLogger(__name__)

_WORTH_IT = 0.9
"""Together, bytes must come in less than this part of the time that they take alone; a smaller gain is not worth
depending on the pace of others."""

_KINDS = {"cpu": 1, "cuda": 2}


class Partnership:
    """The ranks of one host that read the same heads of every page, in a replica that has such.

    Making one is collective over the replica, and so is `settle`.

    Attributes:
        exchange: of this rank with its partners; None when it has none, or could not make one.
        deadline_s: how long a load may wait for the partners.
    """

    def __init__(self, config: MLKVConfig, replica: Replica, rank_slice: RankSlice, device: torch.device) -> None:
        self._replica = replica
        self._insists = config.move.cooperative == "on"
        self.deadline_s = min(replica.deadline_s, config.agree.deadline_s)
        self.exchange: GroupExchange | None = None
        partners = [] if config.move.cooperative == "off" else _partners(replica, rank_slice, device)
        if not self._insists and device.type == "cpu":
            partners = []  # memory that every rank reaches: there cooperation is for trying only
        self._partners = partners
        self._anybody = any(replica.all_ints(len(partners))) if replica.size > 1 else False
        if not self._anybody:
            return
        name = replica.unique_name("exchange")
        if partners:
            try:
                self.exchange = GroupExchange(replica, partners, name, device, self.deadline_s)
            except (RuntimeError, AttributeError) as error:  # torch may have been built without NCCL
                log.warning("no exchange for cooperative loads with ranks %s: %s", partners, error)

    def settle(self, cooperation: Cooperation[int] | None) -> None:
        """Measure on all ranks at once, and begin to cooperate on all of them or none.

        Args:
            cooperation: of this rank's transfers; None where they have no exchange.

        Raises:
            ConfigError: on all ranks, when the settings insist and some rank cannot cooperate.
        """
        if not self._anybody:
            return
        # Asked first, because to measure, all partners are needed.
        able = not self._partners or (cooperation is not None and cooperation.fits)
        alone_s, together_s = 0.0, 0.0
        if self._all(able) and cooperation is not None:
            try:
                # Half, so that who fails at once does not wait in vain for who waits for it.
                alone_s, together_s = cooperation.measure(self.deadline_s / 2)
            except (MLKVError, RuntimeError) as error:
                log.warning("rank %d: cooperative loads cannot be measured: %s", self._replica.rank, error)
                able = False
        able_ranks = self._replica.all_ints(int(able))
        alone_us = max(self._replica.all_ints(int(1e6 * alone_s)))
        together_us = max(self._replica.all_ints(int(1e6 * together_s)))
        worth_it = all(able_ranks) and (self._insists or together_us < _WORTH_IT * alone_us)
        if worth_it:
            if cooperation is not None:
                cooperation.begin(0 if self._insists else COOPERATIVE_BYTES)
        elif cooperation is not None:
            cooperation.close()
        if self._replica.is_master:
            times = f"{alone_us} us alone, {together_us} us together"
            log.info("cooperative loads: %s, able by rank %s, %s", "on" if worth_it else "off", able_ranks, times)
        if self._insists and not all(able_ranks):
            raise ConfigError(
                f"move.cooperative is on, but rank {able_ranks.index(0)} cannot take part in cooperative loads; "
                "see its warnings, or set it to auto"
            )

    def _all(self, able: bool) -> bool:
        return bool(self._replica.min_int(int(able)))


def _partners(replica: Replica, rank_slice: RankSlice, device: torch.device) -> list[int]:
    """The group ranks of this host that read the same heads, this one included; none if it is alone in that."""
    starts, counts = replica.all_ints(rank_slice.head_start), replica.all_ints(rank_slice.num_heads)
    kinds = replica.all_ints(_KINDS.get(device.type, 0))
    rows = list(zip(starts, counts, kinds, strict=True))
    same = [rank for rank in replica.neighbours if rows[rank] == rows[replica.rank]]
    return same if len(same) > 1 and rank_slice.num_heads and device.type in _KINDS else []
