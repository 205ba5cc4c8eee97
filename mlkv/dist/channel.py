"""Channels carry the step protocol between the ranks of a replica."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from mlkv.dist.protocol import Words
from mlkv.dist.replica import Replica
from mlkv.errors import ConfigError

Decide = Callable[[Sequence[Words]], bytes]
"""The master's decision: from the words of all ranks, in group order, to the message for all of them."""


class Channel(ABC):
    """One exchange per engine step: words from every rank to the master, one message back to every rank.

    Every rank calls `exchange` exactly once per step, whether or not it has anything to say; the number of
    messages of a step does not depend on their content. Only the master passes `decide`. An implementation waits
    at most the replica's deadline and then raises RankLost naming the rank that did not come.
    """

    name: str

    @abstractmethod
    def exchange(self, words: Words, decide: Decide | None) -> bytes:
        """Send `words` (int64, fixed size), return the master's message of this step."""

    @abstractmethod
    def close(self) -> None:
        """Release what the channel holds. Not collective."""


class LocalChannel(Channel):
    """The channel of a replica of one rank."""

    name = "local"

    def exchange(self, words: Words, decide: Decide | None) -> bytes:
        if decide is None:
            raise AssertionError("the only rank of a replica is its master")
        return decide([words])

    def close(self) -> None:
        """Holds nothing."""


def open_channel(name: str, replica: Replica) -> Channel:
    """The channel of that name for this replica; `auto` chooses. Collective over the replica."""
    from mlkv.dist.object_channel import ObjectChannel  # here, because it imports this module

    if replica.size == 1:
        return LocalChannel()
    if name in ("auto", ObjectChannel.name):
        return ObjectChannel(replica)
    raise ConfigError(f"agree.channel: {name!r} is not a channel; there are 'auto' and 'object'")
