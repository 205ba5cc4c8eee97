"""Messages about namespaces, and those of people's tools: looking at pages, pinning and checking them.

Keys are 16 bytes each. Nothing here is on the path of a step.
"""

from __future__ import annotations

from typing import Final

import msgspec

from mlkv.store.wire_base import Message, NamesPages, NamesWrites

MAX_LISTED_PAGES: Final = 65536
"""Pages that one PageList names: about 2 MiB, gathered in under a millisecond."""

MAX_FETCHED_PAGES: Final = 64
"""Pages that one Fetch may ask for, and at most an eighth of the pool."""


# Namespaces


class Open(Message, frozen=True):
    """This group works in a namespace: its Match and Reserve name an epoch of it. Answer: Opened.

    The answer waits, for a bounded time, until every lower tier has told what it knows of the namespace.
    """

    fingerprint: bytes
    model: str
    page_tokens: int


class Invalidate(Message, frozen=True):
    """From now on no page of a namespace from before this request is found, in any tier. Answer: Opened.

    The epoch becomes `epoch`, or stays where it is if it is there already; with epoch 0 it becomes the next one.
    `fingerprint`: default: the namespace that this group has opened.
    """

    fingerprint: bytes = b""
    epoch: int = 0


class Opened(Message, frozen=True):
    """The epoch of the namespace; `is_saved`: every lower tier knows it, so that it survives this owner."""

    epoch: int
    is_saved: bool


class Stale(Message, frozen=True):
    """A Match or Reserve named an epoch that is over. Nothing was leased or reserved. `epoch`: that of now."""

    epoch: int


class Namespaces(Message, frozen=True):
    """Answer: NamespaceList."""


class NamespaceEntry(msgspec.Struct, frozen=True):
    """A namespace that a client has opened since this owner runs.

    Attributes:
        num_pages: of the host pool that it has taken; -1 where nobody counts, because there are no quotas.
        limit_pages: its quota.
    """

    fingerprint: bytes
    model: str
    page_tokens: int
    epoch: int
    num_pages: int = -1
    limit_pages: int = -1


class NamespaceList(Message, frozen=True):
    """In the order in which they were opened."""

    entries: list[NamespaceEntry]


# Pages


class ListPages(Message, frozen=True):
    """Name up to `limit` pages of the host pool that have a key, from page number `start` on. Answer: PageList."""

    start: int
    limit: int


class PageList(Message, NamesWrites, frozen=True):
    """Pages by ascending number. `next`: where the following list starts; -1 at the end of the pool."""

    pages: bytes
    keys: bytes
    generations: bytes
    states: bytes
    """A byte each, see `mlkv.store.states`."""
    next: int


class Pin(Message, frozen=True):
    """Keep pages in the host pool until they are unpinned. Answer: Pinned.

    `keys`: a chain from its root, or with `is_chain` false the key of one page, which is pinned with its prefix.
    """

    keys: bytes
    is_chain: bool


class Unpin(Message, frozen=True):
    """Undo the pins that end at these keys; all pins if there are none. Answer: Pinned."""

    keys: bytes


class Pins(Message, frozen=True):
    """Answer: Pinned."""


class Pinned(Message, frozen=True):
    """The pins there are: the last key of each, and its number of pages. `num_pages`: all of them together."""

    keys: bytes
    lengths: list[int]
    num_pages: int


# Pages of lower tiers


class ListTier(Message, frozen=True):
    """Up to `limit` keys of a lower tier, the first above `after` (b"": the lowest one). Answer: TierKeys."""

    tier: str
    after: bytes
    limit: int


class TierKeys(Message, frozen=True):
    """Ascending keys; fewer than asked for at the end."""

    keys: bytes


class Fetch(Message, frozen=True):
    """Read pages of a tier as they are into pages of the host pool that nobody else sees. Answer: Fetched."""

    tier: str
    keys: bytes


class Fetched(Message, NamesPages, frozen=True):
    """The pages, and for each a byte: 1 if the tier brought it. `reservation` is to be cancelled after looking."""

    reservation: int
    pages: bytes
    good: bytes


class Forget(Message, frozen=True):
    """Delete keys in a tier. Answer: Done."""

    tier: str
    keys: bytes
