"""The facade of one rank: agree, move and remember meet here and nowhere else.

A request's way through it::

    lookup --> [owner matches, leases] --> HitFact --> step.hits --> load --> copy --> mark LOADED --> step.loaded
    offload -> [owner reserves] -> ReserveFact -> copy -> mark RELEASED -> step.released
                                                       -> mark OFFLOADED -> [owner commits] -> StoredFact
                                                                                            -> step.offloaded

Calls are recorded in the stream of calls, so ranks that call differently are told apart in the next step. Only
the master talks to the owner; what it learns reaches every rank as a fact. Every rank applies facts and marks of
a step in the same order, so the state kept here is the same on all ranks.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Sequence
from hashlib import blake2b

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from mlkv import host_store
from mlkv.config import MLKVConfig
from mlkv.cooperation import Partnership
from mlkv.dist import NOTHING_AGREED, Agreement, Mark, Replica
from mlkv.errors import CacheUsageError, ConfigError
from mlkv.faults import FaultPlan
from mlkv.kernels import Cooperation
from mlkv.keys import KEY_BYTES, Namespace, page_keys
from mlkv.layout import KVLayout, KVPool, RankSlice
from mlkv.lifecycle import Lifecycle
from mlkv.mover import Mover
from mlkv.planner import Planner
from mlkv.rank_metrics import Watch
from mlkv.remote import RemoteMover, connect_member
from mlkv.store import Report, Stats, StoreClient
from mlkv.tasks import NOTHING_TOLD, CacheStats, StepResult

log = logging.getLogger(__name__)

_CLOSE_DEADLINE_S = 30.0
_MARKS = {"loaded": Mark.LOADED, "released": Mark.RELEASED, "offloaded": Mark.OFFLOADED}

Tokens = Sequence[int] | npt.NDArray[np.integer]


class MultiLevelCache:
    """One rank's view of the cache of its replica.

    Between two calls of `step` every rank of a replica makes the same calls in the same order with the same
    arguments (slots may differ in value, not in number). No call waits for another rank or for the store; only
    `step` communicates, and no rank waits in it longer than `config.agree.deadline_s`.

    Args:
        layout: geometry of the model over all ranks.
        pool: this rank's paged KV tensors.
        replica: the ranks that execute the same requests.
        rank_slice: the heads of this rank; default: `RankSlice.of_rank` for the replica's size.

    Raises:
        ConfigError: ranks were given different settings, or settings that do not fit where they run.
        StoreError: no owner process could be found or started on some rank's host.
    """

    _cooperation: Cooperation[int] | None = None  # of loads with those of other ranks

    def __init__(
        self,
        config: MLKVConfig,
        layout: KVLayout,
        pool: KVPool,
        replica: Replica,
        *,
        rank_slice: RankSlice | None = None,
    ) -> None:
        _check_page_tokens(config, layout)
        if rank_slice is None:
            rank_slice = RankSlice.of_rank(layout.num_kv_heads, replica.size, replica.rank)
        if rank_slice.num_heads > pool.local_heads:
            raise ConfigError(
                f"rank {replica.rank} is to hold {rank_slice.num_heads} heads, its pool {pool.local_heads}"
            )
        host_store.check_same_everywhere(config, layout, replica)
        rank_slice = host_store.written_here(rank_slice, replica)
        client = host_store.connect(config, layout, replica)
        partnership = Partnership(config, replica, rank_slice, pool.device)
        mover = Mover(
            config,
            layout,
            pool,
            np.frombuffer(client.pool, np.uint8),
            rank_slice=rank_slice,
            fingerprint=Namespace(config.model, layout, config.version).fingerprint,
            rank=replica.rank,
            writes_identity=host_store.writes_identity(replica),
            exchange=partnership.exchange,
            exchange_deadline_s=partnership.deadline_s,
        )
        try:
            partnership.settle(mover.cooperation)
        except BaseException:
            mover.close(_CLOSE_DEADLINE_S)
            client.close()
            raise
        self._cooperation = mover.cooperation
        self._assemble(config, layout, replica, client, mover, rank_slice, pool.num_slots)

    @classmethod
    def central(
        cls, config: MLKVConfig, layout: KVLayout, mover: RemoteMover, *, engine: str, num_slots: int
    ) -> MultiLevelCache:
        """The cache of an engine with one scheduler, in the scheduler's process; its workers do the copying.

        Used like the cache of a replica of one rank, but the engine carries `mover.take_orders()` to its workers
        and their reports to `mover.hear()`. A load or offload is over when every worker has reported it.

        Args:
            engine: a name shared with the `TransferWorker`s, and with no other engine of the store.
            num_slots: of each worker's KV pool.

        Raises:
            ConfigError, StoreError: as the constructor.
        """
        _check_page_tokens(config, layout)
        cache = cls.__new__(cls)
        heads = RankSlice.of_rank(layout.num_kv_heads, 1, 0)
        client = connect_member(config, layout, engine, 0)
        cache._assemble(config, layout, Replica.single(), client, mover, heads, num_slots)
        return cache

    def _assemble(
        self,
        config: MLKVConfig,
        layout: KVLayout,
        replica: Replica,
        client: StoreClient,
        mover: Mover | RemoteMover,
        rank_slice: RankSlice,
        num_slots: int,
    ) -> None:
        self._config = config
        self._layout = layout
        self._num_slots = num_slots
        self._replica = replica
        self._slice = rank_slice
        self._namespace = host_store.open_namespace(
            client, Namespace(config.model, layout, config.version), replica, config.store.connect_deadline_s
        )
        self._client = client
        self._mover = mover
        self._planner = (
            Planner(self._client, config.store.answer_deadline_s, config.move.max_tasks, config.store.tier_wait_s)
            if replica.is_master
            else None
        )
        agree = config.agree
        self._agreement = Agreement(
            replica.within(agree.deadline_s), agree.channel, late=agree.late, dump_stacks=agree.dump_stacks
        )
        self._strikes = FaultPlan.parse(config.faults).of_steps(replica.rank)
        self._lifecycle = Lifecycle(
            layout,
            rank_slice,
            self._agreement.member,
            self._mover,
            self._planner,
            min_load_tokens=config.min_load_tokens,
            max_tasks=config.move.max_tasks,
            epoch=self._namespace.epoch,
        )
        rank = replica.global_ranks[replica.rank]
        self._watch = Watch(config.metrics, rank, self._lifecycle.stats)
        self._lifecycle.observer = self._watch.observer
        self._digest = b""
        self._closed = False

    # -- what engines call ---------------------------------------------------------------------------------

    def lookup(
        self,
        request_id: str,
        tokens: Tokens,
        *,
        device_tokens: int = 0,
        adapter: str = "",
        media: Sequence[str] = (),
        salt: str = "",
    ) -> None:
        """Ask for the longest cached prefix of `tokens`; answered as `step.hits[request_id]` in a later step.

        The answer never covers the last token, which must be computed for its logits. Pages that the device
        lacks stay leased until `load`, `decline` or `abort`.

        Args:
            device_tokens: tokens from the front whose KV the device has already.
            adapter, media, salt: see `Namespace.root`.
        """
        if device_tokens < 0:
            raise CacheUsageError(f"request {request_id!r}: device_tokens is {device_tokens}")
        root = self.namespace.root(adapter=adapter, media=media, salt=salt)
        keys = page_keys(tokens[: max(0, len(tokens) - 1)], self._layout.page_tokens, root)
        self._lifecycle.lookup(request_id, keys, device_tokens)

    def load(self, request_id: str, slots: torch.Tensor) -> int:
        """Start the asynchronous copy of an answered hit into device slots.

        Returns the number by which a `TransferOrder` names this load.

        Args:
            slots: int64 `[hit.num_tokens - hit.start]`, one for each token from `hit.start`; -1 for a token
                that the device has already and that must not be written.
        """
        num_pages = len(self._lifecycle.answered(request_id).indices)
        self._check_slots(request_id, slots, num_pages * self._layout.page_tokens, lowest=-1)
        return self._lifecycle.load(request_id, slots)

    def decline(self, request_id: str) -> None:
        """Do not use a hit, answered or not; its lease is returned. No event follows."""
        self._lifecycle.decline(request_id)

    def offload(
        self,
        request_id: str,
        tokens: Tokens,
        slots: torch.Tensor,
        *,
        adapter: str = "",
        media: Sequence[str] = (),
        salt: str = "",
    ) -> None:
        """Start the asynchronous copy of the whole pages of `tokens` into the store, prompt and generated.

        Pages that the store has, or that somebody is writing, are not copied. The slots must keep their KV until
        `step.released` lists the request; `step.offloaded` or `step.failed` follows.

        Args:
            slots: int64 `[len(tokens)]`: where the KV of each token lies on this rank.
        """
        if len(slots) != len(tokens):
            raise CacheUsageError(f"request {request_id!r}: {len(tokens)} tokens but {len(slots)} slots")
        self._check_slots(request_id, slots, len(tokens), lowest=0)
        root = self.namespace.root(adapter=adapter, media=media, salt=salt)
        keys = page_keys(tokens, self._layout.page_tokens, root)
        whole = len(keys) // KEY_BYTES * self._layout.page_tokens
        self._lifecycle.offload(request_id, keys, root, slots[:whole])

    def abort(self, request_id: str) -> None:
        """Give up a request, in any state. `step.released` lists it once no transfer touches its slots.

        The id may be used again at once; answers for its new life wait until the old one is drained.
        """
        self._lifecycle.abort(request_id)

    def step(self) -> StepResult:
        """Exchange progress with the replica and apply what it agrees. Exactly once per engine step.

        Raises:
            RankLost, RanksDiverged, MasterFailed: the replica cannot go on.
        """
        if self._closed:
            raise CacheUsageError("step() on a closed cache")
        lifecycle, agreement = self._lifecycle, self._agreement
        if self._strikes:
            for strike in self._strikes.pop(lifecycle.stats.steps + 1, []):
                strike()
        # Between two steps the model runs and takes the processor's caches, so that each further call costs one or
        # two microseconds. What is idle is therefore seen here, and not asked.
        if lifecycle.tasks:  # without one nothing is being copied
            self._tell_finished()
        planner = self._planner
        asks = planner is not None and (planner.asked or planner.answers)
        observer = lifecycle.observer
        began_s = time.monotonic() if observer is not None else 0.0
        agreed = agreement.step(lifecycle.collect_facts if asks else None)
        agreed_s = time.monotonic() if observer is not None else 0.0
        if agreed is NOTHING_AGREED and not lifecycle.early and not lifecycle.early_released:
            result = NOTHING_TOLD
        else:
            result = lifecycle.apply(agreed)
        lifecycle.stats.steps += 1
        if observer is not None:
            observer.stepped(lifecycle.stats.steps, began_s, agreed_s, time.monotonic())
        if result is not NOTHING_TOLD and result:
            told = msgspec.msgpack.encode((lifecycle.stats.steps, result))
            self._digest = blake2b(self._digest + told, digest_size=16).digest()
        return result

    def _tell_finished(self) -> None:
        """Tell the others, in the step to come, what this rank has copied."""
        for done in self._mover.poll():
            if done.num_good is not None:
                log.warning("rank %d: %s: %s", self._replica.rank, done, done.reason)
            self._agreement.member.finish(_MARKS[done.kind], done.number, done.num_good)

    def clear(self) -> None:
        """Forget every page of the host's store. Loads in flight finish; what is being written is not kept."""
        self._lifecycle.clear()

    def invalidate(self) -> None:
        """The weights have changed: from now on no older page of this namespace is found, in any tier.

        Collective as every call; legal at any time. Lookups in flight are answered with no hit, loads in flight
        (and of hits answered before) end in `step.failed` with nothing loaded, offloads in flight in
        `step.unstored`. It holds after a restart of everything too: the master waits here until the store has it
        on record in every tier that answers, for `store.answer_deadline_s` at most.

        All replicas and engines that use the namespace with one store are in this together. Each of them learns of
        it with its next request, and what it asks or stores until then is of no effect. So all of them must have
        the new weights before one goes on. Calling it in each of them invalidates once or a few times more, which
        costs pages, never correctness. Where replicas are updated one by one, give them another `version`.
        """
        self._lifecycle.invalidate()

    @property
    def namespace(self) -> Namespace:
        """What the keys of this cache depend on besides the tokens; its epoch changes with `invalidate`."""
        if self._namespace.epoch != self._lifecycle.epoch:
            self._namespace = dataclasses.replace(self._namespace, epoch=self._lifecycle.epoch)
        return self._namespace

    @property
    def pending(self) -> int:
        """Lookups, loads and offloads in flight, the same number on every rank."""
        return self._lifecycle.pending

    @property
    def transferring(self) -> int:
        """Transfers in flight on this rank; differs between ranks."""
        return self._mover.in_flight

    @property
    def results_digest(self) -> bytes:
        """16 bytes over all step results so far; equal on every rank of a replica."""
        return self._digest

    @property
    def counters(self) -> CacheStats:
        """The counters of `stats` without the costs of agreement; live, only to be read, cheap in every step."""
        return self._lifecycle.stats

    def stats(self) -> CacheStats:
        """Counters of this rank so far."""
        return dataclasses.replace(
            self._lifecycle.stats,
            agree_us=self._agreement.cost_us(),
            channel=self._agreement.channel_name,
            cooperative=self._cooperation is not None and self._cooperation.is_on,
        )

    def audit(self, deadline_s: float = 10.0) -> Report:
        """The store's own count of its pages and holders, after a check of its whole index.

        Waits for the owner; not for the path of a step. Not collective. Raises StoreError, DeadlineExceeded.
        """
        if self._planner is not None:
            self._planner.settle(deadline_s)
        return self._client.call(Stats(audit=True), deadline_s)

    def close(self) -> None:
        """Wait for this rank's copies, then leave the store. Not collective; harmless when repeated.

        What is in flight is given up. To keep it, step until `pending` is 0 first.
        """
        if self._closed:
            return
        self._closed = True
        try:
            self._mover.close(_CLOSE_DEADLINE_S)
        finally:
            self._agreement.close()
            self._client.close()
            self._watch.close()

    def _check_slots(self, request_id: str, slots: torch.Tensor, num_tokens: int, lowest: int) -> None:
        if slots.dtype != torch.int64 or slots.dim() != 1 or len(slots) != num_tokens:
            raise CacheUsageError(
                f"request {request_id!r}: slots must be int64 [{num_tokens}], got {slots.dtype} "
                f"{list(slots.shape)}"
            )
        if slots.is_cpu and num_tokens:
            low, high = int(slots.min()), int(slots.max())
            if low < lowest or high >= self._num_slots:
                raise CacheUsageError(
                    f"request {request_id!r}: slots {low}..{high} leave [{lowest}, {self._num_slots})"
                )


def _check_page_tokens(config: MLKVConfig, layout: KVLayout) -> None:
    if config.page_tokens != layout.page_tokens:
        raise ConfigError(
            f"page_tokens={config.page_tokens} of the settings is not the layout's {layout.page_tokens}"
        )
