"""Where the ranks of a replica keep its pages: one store on their host, or one on each of several hosts.

A replica on one host shares the host's store with every other replica of the job. One that spans hosts has a
store of its own on each of its hosts. The index of the master's host decides for all of them which page goes
where; the owners of the other hosts only lend a pool of as many pages, whose page `i` holds the heads of their
ranks of what page `i` of the master's host holds of its ranks. No byte of KV crosses the network.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path

from mlkv.address import owner_socket
from mlkv.config import MLKVConfig
from mlkv.dist import Replica
from mlkv.errors import ConfigError, MLKVError, StoreError
from mlkv.keys import Namespace
from mlkv.layout import KVLayout, RankSlice
from mlkv.store import Open, StoreClient


def check_same_everywhere(config: MLKVConfig, layout: KVLayout, replica: Replica) -> None:
    """Raise ConfigError on every rank when one has other settings. Hosts may differ in `store.host_bytes`."""
    exclude = None if replica.one_host else {"store": {"host_bytes"}}
    text = config.model_dump_json(exclude=exclude) + layout.fingerprint.hex()
    digest = int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)
    digests = replica.all_ints(digest)
    for rank, other in enumerate(digests):
        if other != digests[0]:
            raise ConfigError(f"rank {rank} of the replica has other settings or another layout than rank 0")


def connect(config: MLKVConfig, layout: KVLayout, replica: Replica) -> StoreClient:
    """This rank's connection to the owner of its host. A rank that gets none fails on every rank.

    Collective over the replica. Where it spans hosts, all pools have as many pages as the smallest.
    """
    if not replica.one_host and (config.store.disk or config.store.remote):
        raise ConfigError(
            "store.disk and store.remote need a replica on one host: where it spans hosts, none of them has whole "
            "pages; leave both out, or use more data-parallel replicas of fewer ranks"
        )
    members = ",".join(f"{place.host}:{place.pid}" for place in replica.places)
    group = blake2b(f"{members}/{replica.session}".encode(), digest_size=16).digest()
    path = owner_socket(config.store)
    host_bytes, linger_s = int(config.store.host_bytes), config.store.linger_s
    if not replica.one_host:
        # Of this replica and this start of the job alone, so nobody finds it again: it does not linger.
        path, linger_s = _private(path, replica), 0.0
        host_bytes = replica.min_int(host_bytes // layout.page_bytes) * layout.page_bytes
    client: StoreClient | None = None
    error: MLKVError | None = None
    try:
        client = StoreClient.connect(
            path,
            host_bytes=host_bytes,
            page_bytes=layout.page_bytes,
            group=group,
            rank=replica.rank,
            deadline_s=config.store.connect_deadline_s,
            linger_s=linger_s,
            disk=config.store.disk,
            remote=config.store.remote,
            admission=config.store.admission,
            policy=config.store.policy,
            interleave=config.store.interleave,
            quotas=config.store.quotas,
            metrics=config.metrics,
        )
    except MLKVError as problem:
        error = problem
    pages = replica.all_ints(0 if client is None else client.num_pages)
    if client is not None and all(pages) and (replica.one_host or len(set(pages)) == 1):
        return client
    if client is not None:
        client.close()
    if error is not None:
        raise error
    if all(pages):
        raise StoreError(f"the hosts of this replica lend pools of different sizes: {pages} pages by rank")
    raise StoreError(f"rank {pages.index(0)} of this replica could not reach the store; see its error")


def open_namespace(client: StoreClient, namespace: Namespace, replica: Replica, deadline_s: float) -> Namespace:
    """`namespace` in the epoch in which the store of the master's host has it. Collective over the replica."""
    epoch, error = -1, None
    if replica.is_master:
        try:
            request = Open(namespace.fingerprint, namespace.model, namespace.layout.page_tokens)
            epoch = client.call(request, deadline_s).epoch
        except MLKVError as problem:
            error = problem
    epoch = replica.all_ints(epoch)[0]
    if error is not None:
        raise error
    if epoch < 0:
        raise StoreError("rank 0 of this replica could not open its namespace in the store; see its error")
    return dataclasses.replace(namespace, epoch=epoch)


def writes_identity(replica: Replica) -> bool:
    """Whether this rank writes the identity of the pages of its host: the lowest rank of each host does."""
    return replica.rank == replica.neighbours[0]


def written_here(own: RankSlice, replica: Replica) -> RankSlice:
    """`own` with the heads that this rank must write, so that each host has all heads that its ranks read.

    Where KV heads are replicated over hosts, the one rank that writes a head for all may be on another host; then
    the lowest rank of this host that reads the head writes it as well. Collective over the replica.
    """
    starts, counts = replica.all_ints(own.head_start), replica.all_ints(own.num_heads)
    if replica.one_host:
        return own
    lower = [rank for rank in replica.neighbours if rank < replica.rank]
    taken = {head for rank in lower for head in range(starts[rank], starts[rank] + counts[rank])}
    mine = [head not in taken for head in range(own.head_start, own.head_start + own.num_heads)]
    num_written = sum(mine)
    if not all(mine[:num_written]):
        raise ConfigError(
            f"{_describe(starts, counts, lower)} overlap the front of {own}; they must be equal or apart"
        )
    return dataclasses.replace(own, num_written_heads=num_written)


def _private(path: Path, replica: Replica) -> Path:
    name = blake2b(f"{replica.session}/{replica.global_ranks}/{replica.neighbours}".encode(), digest_size=8)
    return path.with_name(f"replica-{name.hexdigest()}.sock")


def _describe(starts: Sequence[int], counts: Sequence[int], ranks: Sequence[int]) -> str:
    heads = ", ".join(f"{starts[rank]}..{starts[rank] + counts[rank]} of rank {rank}" for rank in ranks)
    return f"heads {heads}"
