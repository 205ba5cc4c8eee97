"""Which channel a replica uses."""

from __future__ import annotations

import logging
from typing import Literal

from mlkv.dist.channel import Channel, LocalChannel
from mlkv.dist.hierarchical_channel import HierarchicalChannel
from mlkv.dist.ledger_channel import LedgerChannel
from mlkv.dist.object_channel import ObjectChannel
from mlkv.dist.replica import Replica
from mlkv.dist.tensor_channel import open_tensor
from mlkv.errors import ConfigError, MLKVError

log = logging.getLogger(__name__)

ChannelName = Literal["auto", "object", "ledger", "tensor", "hierarchical"]
Lateness = Literal["auto", "on", "off"]

_CROSS_HOSTS = ("tensor", "hierarchical")


def open_channel(name: str, late: str, replica: Replica) -> Channel:
    """The channel of that name for this replica; `auto` chooses by where its ranks run. Collective over it.

    Every rank must pass the same arguments. `late` "auto" is on where the exchange crosses hosts: waiting for a
    link of 0.2 ms costs a step of 5 ms a tenth, being one step late about nothing (see docs/protocol.md).

    Raises ConfigError, before anything is exchanged, for a channel or a lateness that cannot be.
    """
    hosts = replica.host_ranks
    if name not in ("auto", "object", "ledger", *_CROSS_HOSTS):
        raise ConfigError(f"agree.channel: {name!r} is none of auto, object, ledger, tensor, hierarchical")
    if late not in ("auto", "on", "off"):
        raise ConfigError(f"agree.late: {late!r} is none of auto, on, off")
    if name == "ledger" and len(hosts) > 1:
        where = "; ".join(",".join(map(str, ranks)) for ranks in hosts)
        raise ConfigError(
            f"agree.channel: 'ledger' is for ranks of one host, but this replica's are on {len(hosts)} "
            f"(ranks {where}); use 'auto' or 'hierarchical'"
        )
    if late == "on" and name in ("object", "ledger"):
        raise ConfigError(f"agree.late: 'on' is for channels that cross hosts, not for {name!r}")
    if replica.size == 1:
        return LocalChannel()
    if name == "hierarchical" and len(hosts) == 1:
        raise ConfigError("agree.channel: 'hierarchical' is for several hosts, this replica has one; use 'auto'")
    is_late = late == "on" or (late == "auto" and len(hosts) > 1)
    if name == "auto":
        return _choose(replica, is_late)
    if name == "object":
        return ObjectChannel(replica)
    if name == "ledger":
        return LedgerChannel(replica)
    return open_tensor(replica, is_late) if name == "tensor" else HierarchicalChannel(replica, late=is_late)


def _choose(replica: Replica, late: bool) -> Channel:
    hosts = replica.host_ranks
    reason = f"{replica.size} ranks on {len(hosts)} host{'s' * (len(hosts) > 1)}"
    channel: Channel
    try:
        if len(hosts) == 1:
            channel = LedgerChannel(replica)
        elif len(hosts) < replica.size:
            channel = HierarchicalChannel(replica, late=late)
        else:
            channel = open_tensor(replica, late)
    except MLKVError as error:
        # Raised on every rank alike, so every rank comes here.
        channel = open_tensor(replica, late)
        reason += f", without shared memory ({error})"
    if replica.is_master:
        lateness = ", one step late" if channel.late else ""
        log.info("replica %d agrees over %s%s: %s", replica.index, channel.name, lateness, reason)
    return channel
