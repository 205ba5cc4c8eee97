"""What the owner does with a request: index, groups of clients, lower tiers. No sockets and no processes here."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from mlkv.errors import StoreError
from mlkv.histogram import Histogram
from mlkv.page import peek_header
from mlkv.store import wire, wire_tools
from mlkv.store.desk import Desk
from mlkv.store.epochs import Epochs, Namespace
from mlkv.store.grants import Lease, Reservation
from mlkv.store.index import KEY_BYTES, Index, IndexBroken
from mlkv.store.lower import LowerTiers
from mlkv.store.pins import Pins
from mlkv.store.pool import HostPool
from mlkv.store.quotas import Quotas
from mlkv.store.sweep import Sweeper

Answering: TypeAlias = Callable[[wire.Reply], None]

MAX_HOLDS = 65536
"""Leases, and reservations, that a group may have at once: far beyond what an engine has in flight, so that one
which never gives them back is told before the owner runs out of memory."""


@dataclass
class _Group:
    """The ranks of one replica, and what they hold together. `namespace`: what it works in, if it has said so."""

    namespace: Namespace | None = None
    members: set[int] = field(default_factory=set)
    leases: set[int] = field(default_factory=set)
    reservations: set[int] = field(default_factory=set)


@dataclass
class _Totals:
    pages_asked: int = 0
    pages_hit: int = 0
    pages_evicted: int = 0
    pages_written: int = 0
    pages_bad: int = 0


class StoreService:
    """Answers requests, one at a time.

    Leases and reservations belong to a group. While any member of it may still touch pages they stay, because
    a page that one rank asked for is being copied by all of them; when the last member is gone they are given
    back.

    Args:
        lower: the tiers below the host pool, if there are any.
        pool: where the pages of `index` lie; without it their memory is not looked at here.
        quotas: those whose policy and free pages `index` has.
    """

    def __init__(
        self,
        index: Index,
        lower: LowerTiers | None = None,
        pool: HostPool | None = None,
        quotas: Quotas | None = None,
    ) -> None:
        self._index = index
        self._lower = lower
        self._pool = pool
        self._quotas = quotas
        if lower is not None and quotas is not None:
            lower.on_promoted = self._on_promoted
        runners = [] if lower is None else lower.runners
        self._sweeper = None if pool is None else Sweeper(index, pool)
        self._pins = Pins(index)
        self._epochs = Epochs(runners, self._on_raised)
        self._desk = Desk(index, pool, runners, self._pins, self._epochs, self._quotas, self._take_hidden)
        self._groups: dict[bytes, _Group] = {}
        self._totals = _Totals()
        self._lookups = Histogram()

    @property
    def num_members(self) -> int:
        """Clients that may still touch pages."""
        return sum(len(group.members) for group in self._groups.values())

    def join(self, group_name: bytes, member: int) -> None:
        """A client begins to take part in its group."""
        self._groups.setdefault(group_name, _Group()).members.add(member)

    def leave(self, group_name: bytes, member: int) -> None:
        """A client can touch no page any more: it said so, or its process is gone."""
        group = self._groups[group_name]
        group.members.discard(member)
        self.stop_waiting(group_name, member)
        if group.members:
            return
        del self._groups[group_name]
        for reservation in group.reservations:
            self._index.cancel(reservation)
        self._index.release(list(group.leases))

    def handle_later(
        self, group_name: bytes, member: int, request: wire.Match | wire.SlowRequest, answer: Answering
    ) -> None:
        """Answer a request that may wait for lower tiers, now or later: a Match after its `wait_s` at most.

        Raises StoreError, with nothing changed, to refuse it.
        """
        group = self._groups[group_name]
        match request:
            case wire.Match():
                self._match(group, (group_name, member), request, request.wait_s, answer)
            case wire_tools.Open():
                group.namespace = self._epochs.open(
                    request.fingerprint,
                    request.model,
                    request.page_tokens,
                    lambda namespace, is_saved: answer(wire_tools.Opened(namespace.epoch, is_saved)),
                )
            case wire_tools.Invalidate():
                self._invalidate(group, request, answer)
            case wire_tools.ListTier():
                self._desk.list_tier(request, answer)
            case wire_tools.Fetch():
                self._desk.fetch(request, answer, lambda reservation: self._lend(group_name, reservation))

    @property
    def due_at(self) -> float | None:
        """When `poll` has something to do by itself."""
        return 0.0 if self._sweeper is not None and self._sweeper.is_busy else self._epochs.due_at

    def poll(self) -> None:
        """Do what nobody asks for."""
        self._epochs.poll()
        if self._sweeper is not None and self._sweeper.is_busy:
            self._sweeper.poll()
            self._pins.prune()

    def stop_waiting(self, group_name: bytes, member: int) -> None:
        """A member does not want the answers to its matches any more."""
        if self._lower is not None:
            self._lower.forget_lookups((group_name, member))

    def handle(self, group_name: bytes, request: wire.Request) -> wire.Reply:
        """Answer one request of a member of a group, at once.

        Raises StoreError, with nothing changed, to refuse it.
        """
        group = self._groups[group_name]
        match request:
            case wire.Match():
                return self._match_now(group, request)
            case wire.Reserve():
                return self._reserve(group, request)
            case wire.Commit():
                return self._commit(group, request)
            case wire.Cancel():
                self._commit(group, wire.Commit(request.reservation, 0))
            case wire.Release():
                self._release(group, request)
            case wire.Quarantine():
                self._quarantine(request)
            case wire.Clear():
                self._clear()
            case wire.Stats():
                return self.report(request.audit)
            case (
                wire_tools.Namespaces()
                | wire_tools.ListPages()
                | wire_tools.Pin()
                | wire_tools.Unpin()
                | wire_tools.Pins()
                | wire_tools.Forget()
            ):
                return self._desk.handle(request)
            case _:
                raise StoreError(f"a {type(request).__name__} is not expected here")
        return wire.Done()

    def check(self) -> str:
        """ "" if every rule of the index holds, else what is wrong."""
        try:
            self._index.check()
        except IndexBroken as problem:
            return str(problem)
        return ""

    # Requests

    def _match_now(self, group: _Group, request: wire.Match) -> wire.Reply:
        answers: list[wire.Reply] = []
        self._match(group, None, request, 0.0, answers.append)
        return answers[0]

    def _match(
        self,
        group: _Group,
        asker: object,
        request: wire.Match,
        wait_s: float,
        answer: Answering,
    ) -> None:
        _check_holds(len(group.leases), "leases")
        namespace = group.namespace
        if namespace is not None and request.epoch != namespace.epoch:
            answer(wire_tools.Stale(namespace.epoch))
            return

        began_s = time.monotonic()

        def answered(lease: Lease, sources: bytes = b"") -> None:
            self._lookups.observe(time.monotonic() - began_s)
            answer(self._grant(group, request, lease, sources))

        if self._lower is None or (namespace is not None and not self._epochs.may_ask_tiers(namespace)):
            answered(self._index.match(request.keys, request.limit))
        else:
            self._lower.match(asker, request.keys, request.limit, wait_s, answered)

    def _grant(self, group: _Group, request: wire.Match, lease: Lease, sources: bytes) -> wire.Matched:
        if lease.id:
            group.leases.add(lease.id)
        self._totals.pages_asked += min(len(request.keys) // KEY_BYTES, request.limit)
        self._totals.pages_hit += len(lease.pages)
        return wire.Matched(
            lease.id,
            wire.page_bytes_of(lease.pages),
            wire.generation_bytes_of(lease.generations),
            lease.num_coming,
            sources,
        )

    def _reserve(self, group: _Group, request: wire.Reserve) -> wire.Reserved | wire_tools.Stale:
        _check_holds(len(group.reservations), "reservations")
        if group.namespace is not None and request.epoch != group.namespace.epoch:
            return wire_tools.Stale(group.namespace.epoch)
        reservation = self._take(request.keys, request.start, group.namespace)
        if reservation.id:
            group.reservations.add(reservation.id)
        return wire.Reserved(
            reservation.id,
            reservation.first,
            reservation.num_ready,
            wire.page_bytes_of(reservation.pages),
            wire.generation_bytes_of(reservation.generations),
        )

    def _take(self, keys: bytes, start: int, namespace: Namespace | None = None) -> Reservation:
        if self._quotas is None or namespace is None:
            reservation = self._index.reserve(keys, start)
        else:
            reservation = self._index.reserve(keys, start, self._quotas.share_of(namespace))
            self._quotas.assign(reservation.pages, namespace)
        self._totals.pages_evicted += len(reservation.evicted)
        if reservation.id and self._lower is not None:
            self._lower.on_reserved(reservation)
        return reservation

    def _take_hidden(self, num_pages: int) -> Reservation:
        """Pages under keys that nobody can know, and that are forgotten at once."""
        reservation = self._take(os.urandom(KEY_BYTES * num_pages), start=0)
        if reservation.id:
            self._index.disown(reservation.id)
        return reservation

    def _commit(self, group: _Group, request: wire.Commit) -> wire.Published:
        if request.reservation not in group.reservations:
            raise StoreError(
                f"reservation {request.reservation} does not exist or is not this group's; "
                "it was ended before or never granted"
            )
        committed = self._index.commit(request.reservation, request.num_good)
        group.reservations.discard(request.reservation)
        self._totals.pages_written += committed.num_good
        if self._lower is not None and committed.num_good:
            self._lower.on_committed(committed.pages)
        return wire.Published(committed.num_good, committed.num_readable)

    def _release(self, group: _Group, request: wire.Release) -> None:
        foreign = [lease for lease in request.leases if lease not in group.leases]
        if foreign:
            raise StoreError(
                f"leases {foreign} do not exist or are not this group's; "
                "they were released before or never granted"
            )
        self._index.release(request.leases)
        group.leases.difference_update(request.leases)

    def _quarantine(self, request: wire.Quarantine) -> None:
        if len(request.pages) % 4 or len(request.generations) % 8:
            raise StoreError("pages are 4 bytes and generations 8 bytes each")
        pages = np.frombuffer(request.pages, "<i4").tolist()
        generations = np.frombuffer(request.generations, "<u8").tolist()
        removed = self._index.quarantine(pages, generations)
        self._totals.pages_bad += len(removed.bad_keys)
        if removed.bad_keys:
            self._pins.prune()
            if self._lower is not None:
                self._lower.delete(removed.bad_keys)

    def _invalidate(self, group: _Group, request: wire_tools.Invalidate, answer: Answering) -> None:
        namespace = group.namespace
        if request.fingerprint:
            namespace = self._epochs.find(request.fingerprint)
        if namespace is None:
            raise StoreError("an Invalidate names a namespace, or comes from a group that has opened one")
        self._epochs.raise_to(
            namespace,
            request.epoch or namespace.epoch + 1,
            lambda raised, is_saved: answer(wire_tools.Opened(raised.epoch, is_saved)),
        )

    def _on_raised(self, namespace: Namespace) -> None:
        """Nothing of a namespace that is being written will be published, and what is here can go."""
        for group in self._groups.values():
            if group.namespace is namespace:
                for reservation in group.reservations:
                    self._index.disown(reservation)
        if self._sweeper is not None:
            self._sweeper.sweep(namespace.fingerprint)

    def _on_promoted(self, pages: NDArray[np.int32]) -> None:
        """Count pages of one chain, which a tier has brought, for the namespace that their headers name."""
        assert self._quotas is not None
        assert self._pool is not None
        header = peek_header(np.frombuffer(self._pool.page(int(pages[0])), np.uint8))
        namespace = None if header is None else self._epochs.known(header.identity.fingerprint)
        if namespace is not None:
            self._quotas.assign(pages, namespace)
            share = self._quotas.share_of(namespace)
            self._totals.pages_evicted += len(self._index.evict(-share.room, share))

    def _lend(self, group_name: bytes, reservation: int) -> bool:
        """Give a reservation to a group; False if the group is gone."""
        group = self._groups.get(group_name)
        if group is None:
            return False
        group.reservations.add(reservation)
        return True

    def _clear(self) -> None:
        self._index.clear()
        self._pins.prune()
        if self._lower is not None:
            self._lower.clear()

    def report(self, audit: bool = False) -> wire.Report:
        """Everything that is counted."""
        totals = asdict(self._totals)
        if self._lower is not None:
            totals["pages_evicted"] += self._lower.pages_evicted
        return wire.Report(
            **asdict(self._index.counts()),
            clients=self.num_members,
            **totals,
            problem=self.check() if audit else "",
            lookup_latency=wire.Latency(list(self._lookups.counts), self._lookups.total_s),
            tiers=[] if self._lower is None else self._lower.reports(),
        )


def _check_holds(number: int, what: str) -> None:
    if number >= MAX_HOLDS:
        raise StoreError(f"this group has {number} {what} already; it must give some back")
