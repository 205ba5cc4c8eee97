"""Epochs: what makes every older page of a namespace invisible at once, in every tier.

Keys of pages depend on the epoch of their namespace, so a page of an older epoch can lie wherever it likes: nobody
asks for it any more. What is kept here is which epoch is the current one. It only grows, it is told to every
client that still works in an older one, and each lower tier keeps it as a note, so that it outlives the owner and
reaches the owners of other hosts.

Until a tier has told its note of a namespace, that tier is not asked for pages of it: they might be of an epoch
that ended while this owner was not there to hear of it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from mlkv.errors import StoreError
from mlkv.store.tiers.calls import Answer
from mlkv.store.tiers.runner import TierRunner

MAX_NAMESPACES: Final = 1024
"""That one owner keeps apart; each takes a few hundred bytes for as long as the owner runs."""

OPEN_WAIT_S: Final = 2.0
"""How long whoever opens a namespace waits for tiers that do not answer. Once for each engine's start."""

SAVE_WAIT_S: Final = 1.0
"""How long an invalidation waits to be on record in every tier; below `store.answer_deadline_s`."""

_RETRY_S: Final = 0.5

_log = logging.getLogger("mlkv.store")


@dataclass(eq=False)
class _Note:
    """What one tier knows of a namespace."""

    epoch: int | None = None
    """None: not read since it was last in doubt."""
    was_read: bool = False
    is_busy: bool = False
    retry_at: float = 0.0

    def is_behind(self, epoch: int) -> bool:
        return self.epoch is None or self.epoch < epoch


@dataclass(eq=False)
class Namespace:
    """A namespace that somebody has opened. `notes`: of each tier."""

    fingerprint: bytes
    model: str
    page_tokens: int
    notes: list[_Note]
    epoch: int = 0


@dataclass(eq=False)
class _Waiter:
    namespace: Namespace
    give_up_at: float
    answer: Callable[[Namespace, bool], None]


class Epochs:
    """The namespaces of a store and their epochs.

    Args:
        runners: the lower tiers, the nearest one first.
        on_raised: told of a namespace whose epoch has grown, before anybody else hears of it.
        clock: seconds.
    """

    def __init__(
        self,
        runners: Sequence[TierRunner],
        on_raised: Callable[[Namespace], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._runners = runners
        self._on_raised = on_raised
        self._clock = clock
        self._by_fingerprint: dict[bytes, Namespace] = {}
        self._waiters: list[_Waiter] = []
        self._behind: dict[_Note, tuple[Namespace, TierRunner]] = {}

    def all(self) -> list[Namespace]:
        """In the order in which they were opened."""
        return list(self._by_fingerprint.values())

    def known(self, fingerprint: bytes) -> Namespace | None:
        """The namespace with this fingerprint, if somebody has opened it."""
        return self._by_fingerprint.get(fingerprint)

    def find(self, fingerprint: bytes) -> Namespace:
        """Raises StoreError for a namespace that nobody has opened."""
        namespace = self._by_fingerprint.get(fingerprint)
        if namespace is None:
            raise StoreError(f"no client of this store has opened namespace {fingerprint.hex()}")
        return namespace

    def open(
        self, fingerprint: bytes, model: str, page_tokens: int, answer: Callable[[Namespace, bool], None]
    ) -> Namespace:
        """Answer with the namespace and whether all tiers have told their notes; now, or when they have.

        Raises StoreError when it is malformed, or there are too many.
        """
        if len(fingerprint) != 16 or page_tokens < 1:
            raise StoreError("a namespace has a fingerprint of 16 bytes and pages of at least one token")
        namespace = self._by_fingerprint.get(fingerprint)
        if namespace is None:
            if len(self._by_fingerprint) >= MAX_NAMESPACES:
                raise StoreError(f"this store keeps {MAX_NAMESPACES} namespaces apart already; use another one")
            namespace = Namespace(fingerprint, model, page_tokens, [_Note() for _ in self._runners])
            self._by_fingerprint[fingerprint] = namespace
        for note in namespace.notes:
            note.epoch = None  # the owner of another host may have raised it
        self._wait(namespace, OPEN_WAIT_S, answer)
        return namespace

    def raise_to(self, namespace: Namespace, epoch: int, answer: Callable[[Namespace, bool], None]) -> None:
        """Begin `epoch` unless it has begun; answer with whether every tier has it on record."""
        self._raise(namespace, epoch)
        for note in namespace.notes:
            note.epoch = None  # never put a lower epoch over that of another host
        self._wait(namespace, SAVE_WAIT_S, answer)

    def may_ask_tiers(self, namespace: Namespace) -> bool:
        """Whether each tier has told once which epoch this is, so that none can bring pages of an older one."""
        return all(note.was_read for note in namespace.notes)

    @property
    def due_at(self) -> float | None:
        """When `poll` has something to do though no tier has answered."""
        times = [waiter.give_up_at for waiter in self._waiters]
        times += [
            note.retry_at for note, (_, runner) in self._behind.items() if runner.is_usable and not note.is_busy
        ]
        return min(times, default=None)

    def poll(self) -> None:
        """Read and write notes as far as the tiers listen, and answer who has waited long enough."""
        if not self._behind and not self._waiters:
            return
        now = self._clock()
        for note, (namespace, runner) in list(self._behind.items()):
            if not note.is_behind(namespace.epoch):
                del self._behind[note]
            elif not note.is_busy and now >= note.retry_at:
                self._ask(namespace, note, runner)
        waiting, self._waiters = self._waiters, []
        for waiter in waiting:
            namespace = waiter.namespace
            is_saved = not any(note.is_behind(namespace.epoch) for note in namespace.notes)
            if is_saved or self._is_hopeless(namespace) or now >= waiter.give_up_at:
                waiter.answer(namespace, is_saved)
            else:
                self._waiters.append(waiter)

    # Inside

    def _wait(self, namespace: Namespace, wait_s: float, answer: Callable[[Namespace, bool], None]) -> None:
        self._waiters.append(_Waiter(namespace, self._clock() + wait_s, answer))
        self._note_behind(namespace)
        self.poll()

    def _note_behind(self, namespace: Namespace) -> None:
        for note, runner in zip(namespace.notes, self._runners, strict=True):
            if note.is_behind(namespace.epoch):
                self._behind[note] = (namespace, runner)

    def _raise(self, namespace: Namespace, epoch: int) -> None:
        if epoch > namespace.epoch:
            namespace.epoch = epoch
            self._note_behind(namespace)
            _log.info("namespace %s (%s): epoch %d", namespace.fingerprint.hex(), namespace.model, epoch)
            self._on_raised(namespace)

    def _ask(self, namespace: Namespace, note: _Note, runner: TierRunner) -> None:
        name, epoch = f"epoch-{namespace.fingerprint.hex()}", namespace.epoch

        def loaded(answer: Answer) -> None:
            self._end(note, answer)
            if not answer.error:
                note.epoch = _parse(answer.note, runner.name)
                note.was_read = True
                self._raise(namespace, note.epoch)

        def stored(answer: Answer) -> None:
            self._end(note, answer)
            if not answer.error and note.epoch is not None:
                note.epoch = max(note.epoch, epoch)

        if note.epoch is None:
            note.is_busy = runner.load_note(name, loaded)
        else:
            note.is_busy = runner.store_note(name, str(epoch).encode(), stored)

    def _end(self, note: _Note, answer: Answer) -> None:
        note.is_busy = False
        if answer.error:
            note.retry_at = self._clock() + _RETRY_S

    def _is_hopeless(self, namespace: Namespace) -> bool:
        """Whether the tiers that are behind are known to be down: waiting for them is of no use."""
        return all(
            runner.state.breaker == "open"
            for note, runner in zip(namespace.notes, self._runners, strict=True)
            if note.is_behind(namespace.epoch)
        )


def _parse(value: bytes | None, tier: str) -> int:
    if value is None:
        return 0
    try:
        return int(value)
    except ValueError:
        _log.error("tier %s: its note of a namespace is no epoch; it counts as none", tier)
        return 0
