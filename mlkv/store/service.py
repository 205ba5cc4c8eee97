"""What the owner does with a request: index, groups of clients, lower tiers. No sockets and no processes here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field

import numpy as np

from mlkv.errors import StoreError
from mlkv.store import wire
from mlkv.store.grants import Lease
from mlkv.store.index import KEY_BYTES, Index, IndexBroken
from mlkv.store.lower import LowerTiers

MAX_HOLDS = 65536
"""Leases, and reservations, that a group may have at once: far beyond what an engine has in flight, so that one
which never gives them back is told before the owner runs out of memory."""


@dataclass
class _Group:
    """The ranks of one replica, and what they hold together."""

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
    """

    def __init__(self, index: Index, lower: LowerTiers | None = None) -> None:
        self._index = index
        self._lower = lower
        self._groups: dict[bytes, _Group] = {}
        self._totals = _Totals()

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

    def match_later(
        self, group_name: bytes, member: int, request: wire.Match, answer: Callable[[wire.Matched], None]
    ) -> None:
        """Answer a Match now, or when lower tiers have had `wait_s` to add to it.

        Raises StoreError, with nothing changed, to refuse it.
        """
        group = self._groups[group_name]
        self._match(group, (group_name, member), request, request.wait_s, answer)

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
                return self._report(request.audit)
            case wire.Hello() | wire.Bye():
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

    def _match_now(self, group: _Group, request: wire.Match) -> wire.Matched:
        answers: list[wire.Matched] = []
        self._match(group, None, request, 0.0, answers.append)
        return answers[0]

    def _match(
        self,
        group: _Group,
        asker: object,
        request: wire.Match,
        wait_s: float,
        answer: Callable[[wire.Matched], None],
    ) -> None:
        _check_holds(len(group.leases), "leases")

        def answered(lease: Lease, sources: bytes = b"") -> None:
            answer(self._grant(group, request, lease, sources))

        if self._lower is None:
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

    def _reserve(self, group: _Group, request: wire.Reserve) -> wire.Reserved:
        _check_holds(len(group.reservations), "reservations")
        reservation = self._index.reserve(request.keys, request.start)
        self._totals.pages_evicted += len(reservation.evicted)
        if reservation.id:
            group.reservations.add(reservation.id)
            if self._lower is not None:
                self._lower.on_reserved(reservation)
        return wire.Reserved(
            reservation.id,
            reservation.first,
            reservation.num_ready,
            wire.page_bytes_of(reservation.pages),
            wire.generation_bytes_of(reservation.generations),
        )

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
        if removed.bad_keys and self._lower is not None:
            self._lower.delete(removed.bad_keys)

    def _clear(self) -> None:
        self._index.clear()
        if self._lower is not None:
            self._lower.clear()

    def _report(self, audit: bool) -> wire.Report:
        totals = asdict(self._totals)
        if self._lower is not None:
            totals["pages_evicted"] += self._lower.pages_evicted
        return wire.Report(
            **asdict(self._index.counts()),
            clients=self.num_members,
            **totals,
            problem=self.check() if audit else "",
            tiers=[] if self._lower is None else self._lower.reports(),
        )


def _check_holds(number: int, what: str) -> None:
    if number >= MAX_HOLDS:
        raise StoreError(f"this group has {number} {what} already; it must give some back")
