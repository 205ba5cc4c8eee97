"""Channels carry the step protocol between the ranks of a replica."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

from mlkv.errors import RankLost


class Decider(Protocol):
    """The deciding half of the protocol, as a channel uses it. Its messages are opaque to channels.

    `note` is called by the thread that steps; `decide` and `refuse` perhaps by another one, in the order of steps.
    """

    def note(self) -> bytes:
        """What only the master knows, for this step. Called once a step, on the master only; never raises."""

    def decide(self, step: int, reports: Sequence[bytes], note: bytes | None = None) -> bytes:
        """The message of `step` from the reports of all ranks, in group order, and the master's note.

        Without a note it calls `note` itself: for a master that decides alone, in the thread that steps. With one
        it is pure: ranks that call it with the same arguments in every step get messages that mean the same. An empty
        message means that nothing has changed. Never raises: what goes wrong is told in the message.
        """

    def refuse(self, step: int, rank: int, why: str) -> bytes:
        """The message that ends the replica because `rank` does not follow the others."""


class Channel(ABC):
    """One exchange per engine step: a report from every rank, one message back to every rank.

    Every rank calls `exchange` exactly once per step, whether or not it has anything to say; the number of
    messages of a step does not depend on their content, except that one too long for its fixed place brings a
    second one, on every rank. An implementation waits at most the replica's deadline and then raises RankLost
    naming the rank that did not come.

    Attributes:
        name: as in the setting `agree.channel`.
        late: whether `exchange(step, ...)` returns the message of `step - 1`. The first message is empty then.
    """

    name: str
    late: bool = False

    @abstractmethod
    def exchange(self, step: int, report: bytes, decider: Decider) -> bytes:
        """Send `report` (`REPORT_BYTES` bytes), return the message of this step, or of the last if late.

        Args:
            step: one more than in the last call.
        """

    def leave(self, why: str, lost: RankLost | None) -> None:  # noqa: B027 - a channel may have no way to tell
        """Take no further step because of `lost`, or of `why`; tell the others where that is possible."""

    @abstractmethod
    def close(self) -> None:
        """Release what the channel holds. Not collective."""


class LocalChannel(Channel):
    """The channel of a replica of one rank."""

    name = "local"

    def exchange(self, step: int, report: bytes, decider: Decider) -> bytes:
        return decider.decide(step, [report])

    def close(self) -> None:
        """Holds nothing."""
