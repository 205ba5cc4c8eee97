"""What a rank tells whoever watches it: the tasks of its requests, and its steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol, TypeAlias

TaskKind: TypeAlias = Literal["lookup", "load", "offload"]


class Observer(Protocol):
    """Told from the thread that steps, so it must return at once and never raise. Times are of `time.monotonic`.

    `call` is the number of the facade call that began the request's task.
    """

    def began(self, kind: TaskKind, call: int, request_id: str) -> None:
        """A task begins."""

    def released(self, call: int, request_id: str) -> None:
        """The device slots of an offload were released."""

    def ended(self, kind: TaskKind, call: int, request_id: str, num_tokens: int, why: str) -> None:
        """A task is over, with so many tokens found, loaded or stored. `why` it is less than asked for, or ""."""

    def stepped(self, step: int, began_s: float, agreed_s: float, ended_s: float) -> None:
        """A step: from `began_s` to `agreed_s` it exchanged with the other ranks and waited for them."""


class Observers:
    """Several as one."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._observers = observers

    def began(self, kind: TaskKind, call: int, request_id: str) -> None:
        for observer in self._observers:
            observer.began(kind, call, request_id)

    def released(self, call: int, request_id: str) -> None:
        for observer in self._observers:
            observer.released(call, request_id)

    def ended(self, kind: TaskKind, call: int, request_id: str, num_tokens: int, why: str) -> None:
        for observer in self._observers:
            observer.ended(kind, call, request_id, num_tokens, why)

    def stepped(self, step: int, began_s: float, agreed_s: float, ended_s: float) -> None:
        for observer in self._observers:
            observer.stepped(step, began_s, agreed_s, ended_s)
