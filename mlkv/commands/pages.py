"""What commands read of a store: its namespaces and pages, with the pool mapped into the command's own process."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mlkv.commands.find import DEADLINE_S
from mlkv.errors import ConfigError
from mlkv.page import peek_header
from mlkv.store import StoreClient
from mlkv.store.states import READY
from mlkv.store.wire_tools import ListPages, NamespaceEntry, Namespaces, PageList


@dataclass(frozen=True)
class ListedPage:
    """A page of the host pool that has a key. `state` as in `mlkv.store.states`."""

    number: int
    key: bytes
    generation: int
    state: int


def page_lists(client: StoreClient, limit: int, at_once: int = 4096) -> Iterator[PageList]:
    """The first `limit` pages that have a key. The store goes on meanwhile: a list is of its moment."""
    start = 0
    while start >= 0 and limit > 0:
        found = client.call(ListPages(start, min(limit, at_once)), DEADLINE_S)
        yield found
        limit -= len(found.page_ids)
        start = found.next


def pages_of(found: PageList) -> Iterator[ListedPage]:
    """The entries of a list."""
    numbers, generations = found.page_ids.tolist(), found.page_generations.tolist()
    for at, (number, generation) in enumerate(zip(numbers, generations, strict=True)):
        yield ListedPage(number, found.keys[16 * at : 16 * at + 16], generation, found.states[at])


def bytes_of(client: StoreClient, number: int) -> npt.NDArray[np.uint8]:
    """The bytes of a page of the pool, as they are now: uint8 `[page_bytes]`, read-only."""
    page = np.frombuffer(client.pool, np.uint8, client.page_bytes, number * client.page_bytes)
    page.flags.writeable = False
    return page


def namespace_of(client: StoreClient, page: ListedPage) -> bytes | None:
    """The fingerprint in the header of a complete page."""
    header = peek_header(bytes_of(client, page.number)) if page.state == READY else None
    return None if header is None or header.identity.key != page.key else header.identity.fingerprint


def namespaces(client: StoreClient) -> list[NamespaceEntry]:
    """Those that clients have opened."""
    return client.call(Namespaces(), DEADLINE_S).entries


def choose_namespace(client: StoreClient, wanted: str) -> NamespaceEntry:
    """The namespace with this model or (the beginning of) this fingerprint in hex; "": the only one there is.

    Raises ConfigError when it is not one.
    """
    known = namespaces(client)
    found = [entry for entry in known if entry.model == wanted or entry.fingerprint.hex().startswith(wanted)]
    if len(found) == 1:
        return found[0]
    names = ", ".join(f"{entry.fingerprint.hex()} ({entry.model})" for entry in known) or "none"
    what = f"{wanted!r} names {len(found)} namespaces" if wanted else f"there are {len(known)} namespaces"
    raise ConfigError(f"{what}; name one of those that engines have opened: {names}")
