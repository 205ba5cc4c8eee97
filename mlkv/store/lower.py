"""The lower tiers of a host as one: what the service tells them, and what they tell of themselves."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from mlkv.store import wire
from mlkv.store.grants import Lease, Reservation
from mlkv.store.index import Index
from mlkv.store.lookups import Lookups
from mlkv.store.pool import HostPool
from mlkv.store.promotion import Promoter
from mlkv.store.tiers.runner import TierRunner
from mlkv.store.writeback import WriteBack
from mlkv.store_config import Admission


class LowerTiers:
    """Brings pages up, writes pages down, and forgets what is to be forgotten, in every tier.

    Nothing here waits for a tier. The owner calls `poll` when one of `fds` is readable, and at `due_at`.

    Args:
        runners: the tiers, the nearest one first.
        clock: the same as that of the runners, in seconds.
    """

    def __init__(
        self,
        index: Index,
        pool: HostPool,
        runners: Sequence[TierRunner],
        admission: Admission = "write",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.runners = self._runners = list(runners)
        self._clock = clock
        self._writeback = WriteBack(index, pool, self._runners, admission)
        self._promoter = Promoter(index, pool, self._runners, self._on_promoting, self._on_published)
        self._lookups = Lookups(index, self._promoter)
        self._source = np.zeros(index.num_pages, np.uint8)  # 1 + the tier that a page is from, until it is matched
        self._num_hits = np.zeros(len(self._runners) + 1, np.int64)
        self._num_promoted = [0] * len(self._runners)
        self.on_promoted: Callable[[NDArray[np.int32]], None] = lambda _pages: None
        """Told of pages of one chain that a tier has brought, once they can be matched."""
        self.pages_evicted = 0
        """From the host pool, to make room for pages of lower tiers."""

    # What the service tells

    def match(
        self, owner: object, keys: bytes, limit: int, wait_s: float, answer: Callable[[Lease, bytes], None]
    ) -> None:
        """Find a chain here or below; see `Lookups.match`. `answer` is also told the sources as `wire.Matched`."""

        def answered(lease: Lease) -> None:
            answer(lease, self._on_matched(lease.pages))

        give_up_at = self._clock() + wait_s if wait_s > 0 else None
        self._lookups.match(owner, keys, limit, give_up_at, answered)

    def forget_lookups(self, owner: object) -> None:
        """Nobody wants the answers to this owner's matches any more."""
        self._lookups.forget(owner)

    def on_reserved(self, reservation: Reservation) -> None:
        """Pages get new content."""
        self._source[reservation.pages] = 0
        self._writeback.on_reserved(reservation.pages)

    def on_committed(self, pages: NDArray[np.int32]) -> None:
        """An engine has completed these pages."""
        self._writeback.on_committed(pages)

    def delete(self, keys: Sequence[bytes]) -> None:
        """These keys were found bad: a tier may be where they came from."""
        for runner in self._runners:
            runner.delete(keys)

    def clear(self) -> None:
        """Every key was forgotten."""
        self._writeback.on_cleared()
        for runner in self._runners:
            runner.clear()

    # What the owner's loop does

    @property
    def fds(self) -> list[int]:
        return [runner.fileno() for runner in self._runners]

    @property
    def due_at(self) -> float | None:
        if self._writeback.can_feed:
            return self._clock()
        times = [runner.due_at for runner in self._runners] + [self._lookups.due_at]
        return min((at for at in times if at is not None), default=None)

    def poll(self) -> None:
        """Take in what the tiers have done, and give up on what has taken too long."""
        for runner in self._runners:
            runner.poll()
        self._writeback.feed()
        self._lookups.expire(self._clock())

    @property
    def is_busy(self) -> bool:
        """Whether something is still to be written to a tier that works."""
        return self._writeback.is_busy

    def close(self, deadline_s: float) -> bool:
        """Stop. False if a call still hangs at the deadline."""
        give_up_at = time.monotonic() + deadline_s
        results = [runner.close(max(0.0, give_up_at - time.monotonic())) for runner in self._runners]
        return all(results)

    @property
    def names(self) -> list[str]:
        return [runner.name for runner in self._runners]

    def reports(self) -> list[wire.TierReport]:
        """Each tier's account."""
        return [self._report(number, runner) for number, runner in enumerate(self._runners)]

    # Inside

    def _on_promoting(self, reservation: Reservation) -> None:
        self.pages_evicted += len(reservation.evicted)
        self.on_reserved(reservation)

    def _on_published(self, pages: NDArray[np.int32], tier: int) -> None:
        self._num_promoted[tier] += len(pages)
        self._source[pages] = tier + 1
        self._writeback.on_published(pages, tier)
        self.on_promoted(pages)

    def _on_matched(self, pages: NDArray[np.int32]) -> bytes:
        """Pages are handed out. Returns where each of them is from."""
        if not len(pages):
            return b""
        sources = self._source[pages]
        self._num_hits += np.bincount(sources, minlength=len(self._num_hits))
        self._source[pages] = 0
        self._writeback.on_matched(pages)
        return sources.tobytes()

    def _report(self, number: int, runner: TierRunner) -> wire.TierReport:
        counters, state, own = runner.counters, runner.state, runner.tier_stats()
        return wire.TierReport(
            name=runner.name,
            breaker=state.breaker,
            connected=state.connected,
            pages_hit=int(self._num_hits[number + 1]),
            pages_promoted=self._num_promoted[number],
            pages_bad=self._promoter.num_bad_headers[number] + own.pages_damaged,
            hits=counters.hits,
            misses=counters.misses,
            bytes_read=counters.bytes_read,
            bytes_written=counters.bytes_written,
            pages_refused=counters.pages_refused,
            dropped_writes=counters.dropped_writes,
            openings=counters.openings,
            failures=dict(counters.failures),
            calls=dict(counters.calls),
            seconds=dict(counters.seconds),
            latency={
                kind: wire.Latency(list(found.counts), found.total_s) for kind, found in counters.latency.items()
            },
            queued_loads=state.queued_loads,
            queued_pages=state.queued_write_pages + self._writeback.num_waiting(number),
            running=state.running,
            hung=state.hung,
            erasures=state.erasures,
            num_pages=own.num_pages,
            used_bytes=own.used_bytes,
            limit_bytes=own.limit_bytes,
            pages_evicted=own.pages_evicted,
        )
