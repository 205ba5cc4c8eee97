"""Runs one tier beside the owner's thread: queues, deadlines, a breaker, deletions that hold."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from mlkv.histogram import Histogram
from mlkv.store.tiers.base import ReadOnlyPages, StoredPage, Tier, TierStats, WritablePages
from mlkv.store.tiers.breaker import Breaker, BreakerState
from mlkv.store.tiers.calls import Answer, Call, TierCounters
from mlkv.store.tiers.erasures import Erasures
from mlkv.store.tiers.workers import Workers

MAX_LOADS: Final = 256
"""Lookups and reads that may wait for a thread. What comes later is a miss: it would only arrive later still."""

_POLL_S: Final = 0.002
"""Calls that have ended are taken in for this long and one more of them: engines wait for the owner meanwhile."""

_LEAST_CLOSE_S: Final = 0.5

_log = logging.getLogger("mlkv.store")


@dataclass(frozen=True)
class RunnerState:
    """What the runner of a tier has in hand now."""

    breaker: BreakerState
    connected: bool
    queued_loads: int
    queued_write_pages: int
    running: int
    hung: int
    """Calls that were given up on and have not returned."""
    erasures: int
    """Deletions that have not reached the tier yet."""


class TierRunner:
    """Gives a blocking tier its threads. Nothing here waits for the tier, except `close` until its deadline.

    One thread (the owner's) calls everything; callbacks run inside `poll`, on that thread. A call that is refused
    (False) is not called back.

    Order: deletions first, then lookups and reads, then writes. A deletion waits until the writes that run have
    ended, and no write begins before it is done, so what was written before it cannot stay; a write that hangs
    is deleted again when it comes back, and its keys are absent until then.

    A call that does not return by the tier's deadline counts as failed. It keeps its thread and its pages; another
    thread takes over, until as many calls hang as the tier may have threads. Then it gets no calls.

    Args:
        pool: the whole host pool, for `Tier.connect`.
        max_write_pages: pages that may wait to be written; more are dropped and counted.
        is_connected: `connect` has been called already, and succeeded.
        breaker: its settings; the default waits half a second at first, half a minute at most.
        clock: seconds.
    """

    def __init__(
        self,
        tier: Tier,
        pool: memoryview,
        page_bytes: int,
        max_write_pages: int,
        *,
        is_connected: bool = False,
        breaker: Breaker | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = tier.name
        self.batch_pages = tier.batch_pages
        self.concurrency = tier.concurrency
        self.counters = TierCounters()
        self._tier = tier
        self._page_bytes = page_bytes
        self._max_write_pages = max_write_pages
        self._clock = clock
        self._breaker = breaker or Breaker()
        if not is_connected:
            self._breaker.start_trying()
        self._is_connected = is_connected
        self._is_connecting = False
        self._loads: deque[Call] = deque()
        self._writes: deque[Call] = deque()
        self._num_write_pages = 0
        self._running: list[Call] = []
        self._hung: list[Call] = []
        self._erasures = Erasures()
        self._is_closed = False
        self._workers = Workers(tier, pool, clock)
        for _ in range(tier.concurrency):
            self._workers.add()
        self._dispatch()

    # Requests

    @property
    def is_usable(self) -> bool:
        """Whether a lookup or read could reach the tier now. If not, what is asked of it is a miss."""
        return (
            self._is_connected
            and not self._is_closed
            and self._breaker.state != "open"
            and not self._erasures.is_clear_due
            and len(self._hung) < self.concurrency
        )

    def contains(self, keys: Sequence[bytes], on_answer: Callable[[Answer], None]) -> bool:
        """Ask how many leading keys are there."""
        return self._queue_load(Call("contains", keys, on_answer=on_answer))

    def read(
        self,
        keys: Sequence[bytes],
        pages: WritablePages,
        on_answer: Callable[[Answer], None],
        on_return: Callable[[], None],
    ) -> bool:
        """Fill pages, at most `batch_pages`."""
        return self._queue_load(Call("read", keys, pages, (), on_answer, on_return))

    def write(
        self,
        stored: Sequence[StoredPage],
        pages: ReadOnlyPages,
        on_answer: Callable[[Answer], None],
        on_return: Callable[[], None],
    ) -> bool:
        """Keep pages, at most `batch_pages`. They must stay as they are until `on_return`."""
        if not self.is_usable or self._num_write_pages + len(pages) > self._max_write_pages:
            self.counters.dropped_writes += len(pages)
            return False
        keys = [page.key for page in stored]
        self._writes.append(Call("write", keys, pages, stored, on_answer, on_return))
        self._num_write_pages += len(pages)
        self._dispatch()
        return True

    def load_note(self, name: str, on_answer: Callable[[Answer], None]) -> bool:
        """Ask for a note; see `Tier.load_note`."""
        return self._queue_load(Call("load_note", note=(name, b""), on_answer=on_answer))

    def store_note(self, name: str, value: bytes, on_answer: Callable[[Answer], None]) -> bool:
        """Keep a note; see `Tier.store_note`."""
        return self._queue_load(Call("store_note", note=(name, value), on_answer=on_answer))

    def scan(self, after: bytes, limit: int, on_answer: Callable[[Answer], None]) -> bool:
        """List keys; see `Tier.scan`."""
        return self._queue_load(Call("scan", [after], limit=limit, on_answer=on_answer))

    def delete(self, keys: Sequence[bytes]) -> None:
        """Forget keys. They are absent from now on, whatever the tier still has."""
        self._drop_writes("its page was found bad", set(keys))
        self._erasures.delete(keys, self._hung)
        self._dispatch()

    def clear(self) -> None:
        """Forget every key. Everything is absent from now on, whatever the tier still has."""
        self._drop_loads("the store was cleared")
        self._drop_writes("the store was cleared")
        self._erasures.clear(self._hung)
        self._dispatch()

    # What the owner's loop does

    def fileno(self) -> int:
        """Readable when `poll` has something to do."""
        return self._workers.fileno()

    @property
    def due_at(self) -> float | None:
        """When `poll` has something to do though nothing is readable, on the clock of this runner."""
        # A call that no worker has taken yet will be taken within the blink of an eye.
        times = [(call.began_at or self._clock()) + self._tier.deadline_s for call in self._running]
        if self._breaker.due_at is not None and len(self._hung) < self.concurrency:
            times.append(self._breaker.due_at)
        return min(times, default=None)

    def poll(self) -> None:
        """Take what has ended, give up on what takes too long, tell those who asked, and start what comes next."""
        for call in self._workers.take_ended(_POLL_S):
            self._end(call)
        now = self._clock()
        for call in [c for c in self._running if c.began_at and now >= c.began_at + self._tier.deadline_s]:
            self._give_up(call)
        self._dispatch()

    @property
    def num_write_pages(self) -> int:
        """Pages that wait for a thread to write them."""
        return self._num_write_pages

    @property
    def has_writes(self) -> bool:
        """Whether something still waits to be written or deleted, or is on its way, by a tier that works."""
        if not self._is_connected or self._breaker.state == "open":
            return False
        running = any(call.kind in ("write", "delete", "clear") for call in self._running)
        return running or bool(self._writes) or bool(self._erasures)

    @property
    def state(self) -> RunnerState:
        return RunnerState(
            self._breaker.state,
            self._is_connected,
            len(self._loads),
            self._num_write_pages,
            len(self._running),
            len(self._hung),
            len(self._erasures),
        )

    def tier_stats(self) -> TierStats:
        """The tier's own account; unknown if it fails to give one."""
        try:
            return self._tier.stats()
        except Exception:
            # It is only for people to look at, and must not cost them the rest of what they asked for.
            _log.exception("tier %s has no statistics", self.name)
            return TierStats()

    def close(self, deadline_s: float) -> bool:
        """Stop, and wait for the calls under way. False if one still hangs then: its pages are never free."""
        self._is_closed = True
        give_up_at = time.monotonic() + deadline_s
        self._drop_loads("the store ends")
        self._drop_writes("the store ends")
        have_returned = self._workers.join(deadline_s)
        for call in self._workers.take_ended():
            self._end(call)
        closing = threading.Thread(target=self._close_tier, name=f"mlkv-{self.name}-close", daemon=True)
        closing.start()
        closing.join(max(_LEAST_CLOSE_S, give_up_at - time.monotonic()))
        if not have_returned or closing.is_alive():
            _log.warning("tier %s does not come back from %d calls", self.name, len(self._hung))
            return False
        self._workers.dispose()
        return True

    # Inside

    def _close_tier(self) -> None:
        try:
            self._tier.close()
        except Exception:
            # The store ends anyhow, and the other tiers have to be closed as well.
            _log.exception("tier %s did not close well", self.name)

    def _queue_load(self, call: Call) -> bool:
        # A server that hangs whatever it is asked costs one lookup its wait in each trial, not all that come then.
        is_tried = self._breaker.state == "half-open" and bool(self._running or self._loads)
        is_refused = is_tried and self.counters.openings > 0
        if is_refused or not self.is_usable or len(self._loads) >= MAX_LOADS:
            self.counters.misses += len(call.keys) if call.kind == "contains" else 0
            return False
        self._loads.append(call)
        self._dispatch()
        return True

    def _dispatch(self) -> None:
        """Start calls for as long as there are threads for them."""
        while not self._is_closed and len(self._running) < self.concurrency:
            now = self._clock()
            if len(self._hung) >= self.concurrency or not self._breaker.allows(now):
                return
            call = self._next_call()
            if call is None:
                return
            call.round = self._breaker.begin(now)
            call.num_erasures = self._erasures.num_asked
            self._running.append(call)
            self._workers.start(call)

    def _next_call(self) -> Call | None:
        if not self._is_connected:
            # Alone: calls that began before the failure have returned, or were given up on.
            if self._is_connecting or self._running:
                return None
            self._is_connecting = True
            return Call("connect")
        erasing = any(call.kind in ("delete", "clear") for call in self._running)
        if self._erasures and not erasing and not any(call.kind == "write" for call in self._running):
            return self._erasures.next_call()
        if self._loads:
            return self._loads.popleft()
        if self._writes and not self._erasures:
            call = self._writes.popleft()
            self._num_write_pages -= len(call.pages)
            return call
        return None

    def _end(self, call: Call) -> None:
        """A call has returned."""
        self.counters.calls[call.kind] += 1
        seconds = self.counters.seconds
        seconds[call.kind] = seconds.get(call.kind, 0.0) + call.ended_at - call.began_at
        self.counters.latency.setdefault(call.kind, Histogram()).observe(call.ended_at - call.began_at)
        if call.is_given_up:
            self._hung.remove(call)
            self._workers.remove()  # the thread that took over for it
            if call.kind == "write":
                self._erasures.end_hung_write(call, self._hung)
        else:
            self._running.remove(call)
            if call.failure is None:
                if call.kind == "connect":
                    # A server that lets us in may still hang on everything else: the next call will tell.
                    self._breaker.withdraw(call.round)
                else:
                    self._breaker.succeed(call.round)
                self._tell(call, call.answer or Answer())
            else:
                self._fail(call, type(call.failure).__name__, f"{call.failure}")
        call.on_return()

    def _give_up(self, call: Call) -> None:
        self._running.remove(call)
        self._hung.append(call)
        call.is_given_up = True
        self._workers.add()
        self._erasures.note_hung(self._hung)
        self._fail(call, "timeout", f"no answer within {self._tier.deadline_s:g} s")
        if len(self._hung) >= self.concurrency:
            self._drop_loads("every thread of the tier hangs")
            self._drop_writes("every thread of the tier hangs")

    def _fail(self, call: Call, cause: str, why: str) -> None:
        self.counters.failures[cause] += 1
        _log.warning("tier %s: %s failed: %s: %s", self.name, call.kind, cause, why)
        was_open = self._breaker.state == "open"
        self._breaker.fail(call.round, self._clock())
        opens = self._breaker.state == "open" and not was_open
        if opens:
            self.counters.openings += 1
            _log.warning("tier %s is left alone for a while: %s", self.name, why)
            self._is_connected = False
        self._tell(call, Answer(f"{cause}: {why}", good=np.zeros(len(call.pages), np.bool_)))
        if opens:
            self._drop_loads("the tier is out of order")
            self._drop_writes("the tier is out of order")

    def _tell(self, call: Call, answer: Answer) -> None:
        """What came of a call, at its end or its deadline."""
        if call.kind == "connect":
            self._is_connecting = False
            self._is_connected = not answer.error
            return
        if call.kind in ("delete", "clear"):
            self._erasures.end(call, answer.error)
            return
        if call.kind in ("load_note", "store_note", "scan"):
            call.on_answer(answer)
            return
        if call.kind == "contains":
            num_found = self._erasures.num_present(call.keys[: answer.num_found])
            self.counters.misses += len(call.keys) - num_found
            answer = Answer(answer.error, num_found)
        elif call.kind == "read":
            num_read = int(answer.good.sum())
            self.counters.hits += num_read
            self.counters.bytes_read += num_read * self._page_bytes
        else:
            num_written = int(answer.good.sum())
            self.counters.bytes_written += num_written * self._page_bytes
            self.counters.pages_refused += 0 if answer.error else len(call.pages) - num_written
        call.on_answer(answer)

    def _drop_loads(self, why: str) -> None:
        dropped, self._loads = self._loads, deque()
        for call in dropped:
            call.on_answer(Answer(why, good=np.zeros(len(call.pages), np.bool_)))
            call.on_return()

    def _drop_writes(self, why: str, keys: set[bytes] | None = None) -> None:
        dropped = [call for call in self._writes if keys is None or not keys.isdisjoint(call.keys)]
        self._writes = deque(call for call in self._writes if call not in dropped)
        for call in dropped:
            self._num_write_pages -= len(call.pages)
            self.counters.dropped_writes += len(call.pages)
            call.on_answer(Answer(why, good=np.zeros(len(call.pages), np.bool_)))
            call.on_return()
