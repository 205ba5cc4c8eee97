"""What the owner does with a request: index, groups of clients, lower tiers. No sockets and no processes here."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import ParamSpec, TypeVar

import numpy as np
from numpy.typing import NDArray

from mlkv.errors import StoreError
from mlkv.store import wire
from mlkv.store.grants import Evicted
from mlkv.store.index import KEY_BYTES, Index, IndexBroken
from mlkv.store.pool import HostPool
from mlkv.store.tier import Tier, TierJob

MAX_HOLDS = 65536
"""Leases, and reservations, that a group may have at once: far beyond what an engine has in flight, so that one
which never gives them back is told before the owner runs out of memory."""

_log = logging.getLogger("mlkv.store")
_P = ParamSpec("_P")
_T = TypeVar("_T")
_NOTHING: NDArray[np.uint64] = np.empty(0, np.uint64)


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
    pages_promoted: int = 0
    tier_failures: int = 0


class StoreService:
    """Answers requests, one at a time.

    Leases and reservations belong to a group. While any member of it may still touch pages they stay, because
    a page that one rank asked for is being copied by all of them; when the last member is gone they are given
    back.
    """

    def __init__(self, index: Index, pool: HostPool, tiers: Sequence[Tier] = ()) -> None:
        self._index = index
        self._pool = pool
        self._tiers = list(tiers)
        self._groups: dict[bytes, _Group] = {}
        self._promotions: dict[int, TierJob] = {}  # by reservation: what tiers are filling
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
        if group.members:
            return
        del self._groups[group_name]
        for reservation in group.reservations:
            self._index.cancel(reservation)
        self._index.release(list(group.leases))

    def handle(self, group_name: bytes, request: wire.Request) -> wire.Reply:
        """Answer one request of a member of a group. Raises StoreError, with nothing changed, to refuse it."""
        group = self._groups[group_name]
        match request:
            case wire.Match():
                return self._match(group, request)
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

    def _match(self, group: _Group, request: wire.Match) -> wire.Matched:
        _check_holds(len(group.leases), "leases")
        lease = self._index.match(request.keys, request.limit)
        if lease.id:
            group.leases.add(lease.id)
        num_keys = min(len(request.keys) // KEY_BYTES, request.limit)
        num_present = len(lease.pages) + lease.num_coming
        self._totals.pages_asked += num_keys
        self._totals.pages_hit += len(lease.pages)
        num_promoted = self._promote(request.keys[: num_keys * KEY_BYTES], num_present)
        return wire.Matched(
            lease.id,
            wire.page_bytes_of(lease.pages),
            wire.generation_bytes_of(lease.generations),
            lease.num_coming + num_promoted,
        )

    def _reserve(self, group: _Group, request: wire.Reserve) -> wire.Reserved:
        _check_holds(len(group.reservations), "reservations")
        reservation = self._index.reserve(request.keys, request.start)
        self._demote(reservation.evicted)
        if reservation.id:
            group.reservations.add(reservation.id)
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
            for tier in self._tiers:
                self._ask(None, tier.delete, removed.bad_keys)

    def _clear(self) -> None:
        self._index.clear()
        for tier in self._tiers:
            self._ask(None, tier.clear)

    def _report(self, audit: bool) -> wire.Report:
        return wire.Report(
            **asdict(self._index.counts()),
            clients=self.num_members,
            **asdict(self._totals),
            problem=self.check() if audit else "",
        )

    # Lower tiers

    def tier_fds(self) -> list[int]:
        """Descriptors that are readable while `poll_tiers` has something to do."""
        fds = [self._ask(-1, tier.fileno) for tier in self._tiers]
        return [fd for fd in fds if fd >= 0]

    def poll_tiers(self) -> None:
        """Publish what lower tiers have brought back. Called when one of them is readable."""
        for tier in self._tiers:
            for job_id, num_good in self._ask([], tier.poll):
                job = self._promotions.pop(job_id, None)
                if job is None or not 0 <= num_good <= len(job.pages):
                    self._totals.tier_failures += 1
                    _log.error("%s says it read %d pages for job %d", type(tier).__name__, num_good, job_id)
                    num_good = 0
                if job is not None:
                    self._totals.pages_promoted += self._index.commit(job_id, num_good).num_good

    def close(self) -> None:
        """Stop all tiers; after this nothing in this process touches the pool."""
        for tier in self._tiers:
            self._ask(None, tier.close)

    def _promote(self, keys: bytes, start: int) -> int:
        """Have the first tier that knows how the chain goes on bring pages back. Returns how many will come."""
        if not self._tiers or start * KEY_BYTES >= len(keys):
            return 0
        wanted = [keys[at : at + KEY_BYTES] for at in range(start * KEY_BYTES, len(keys), KEY_BYTES)]
        for tier in self._tiers:
            found = self._ask(_NOTHING, tier.find, wanted)
            if not len(found):
                continue
            end = start + len(found)
            reservation = self._index.reserve(keys[: end * KEY_BYTES], start, found)
            self._demote(reservation.evicted)
            if not reservation.id:
                return 0  # no room; the next tier would find none either
            pages = [self._pool.page(page) for page in reservation.pages.tolist()]
            job = TierJob(reservation.id, wanted[: len(pages)], pages)
            if self._ask(False, tier.read, job):
                self._promotions[reservation.id] = job
                return len(pages)
            self._index.cancel(reservation.id)
        return 0

    def _demote(self, evicted: Sequence[Evicted]) -> None:
        """Offer evicted pages to the tiers, from the upper ones down, before anybody may overwrite them."""
        self._totals.pages_evicted += len(evicted)
        left = list(evicted)
        for tier in self._tiers:
            if not left:
                return
            keys = [page.key for page in left]
            generations = [page.generation for page in left]
            views = [self._pool.page(page.page).toreadonly() for page in left]
            left = left[self._ask(0, tier.write, keys, generations, views) :]

    def _ask(self, otherwise: _T, call: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        try:
            return call(*args, **kwargs)
        except Exception:
            # A tier is somebody else's code over devices and networks that fail; for engines that is a miss.
            self._totals.tier_failures += 1
            _log.exception("a lower tier failed")
            return otherwise


def _check_holds(number: int, what: str) -> None:
    if number >= MAX_HOLDS:
        raise StoreError(f"this group has {number} {what} already; it must give some back")
