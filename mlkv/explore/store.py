"""One host's store without its process: the real service and index, pages whose content is a name, a slow line."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple, cast

import numpy as np

from mlkv.dist.explore import Violation
from mlkv.errors import StoreError, StoreLost
from mlkv.explore.words import keys_of, split, text_of
from mlkv.store import wire
from mlkv.store.index import Index
from mlkv.store.policy import LRU
from mlkv.store.service import StoreService

_NEIGHBOUR = b"neighbour"


class Written(NamedTuple):
    """What one rank's slice of a page holds."""

    key: bytes
    generation: int


class Touch(NamedTuple):
    """A transfer of one rank that may read or write a page at any time between its start and its end."""

    rank: int
    kind: str
    request_id: str

    def __str__(self) -> str:
        verb = "reads it for" if self.kind == "load" else "writes it for"
        return f"rank {self.rank} still {verb} {self.request_id}"


class VirtualStore:
    """The owner process of a store and its pool.

    Attributes:
        contents: for each page and slice what was written there last; None: nothing whole.
        is_alive: a dead owner answers nobody; its pool stays mapped, so that copies can end.
    """

    def __init__(self, number: int, num_pages: int, num_slices: int, service_type: type[StoreService]) -> None:
        self.number = number
        self.num_pages = num_pages
        self.num_slices = num_slices
        self.is_alive = True
        self.index = Index(num_pages, LRU(num_pages))
        self.service = service_type(self.index)
        self.contents: list[list[Written | None]] = [[None] * num_slices for _ in range(num_pages)]
        self.rotten: set[tuple[int, int]] = set()
        self._touches: dict[int, list[Touch]] = {}
        self._bad: dict[tuple[bytes, Written], int] = {}  # what a group found bad, and its last question before
        self._writing: dict[int, list[tuple[int, Written]]] = {}  # reservation -> what is to be written where
        self._newest_generation = 0
        self._cleared_generation = 0
        self._num_submitted = 0
        self._num_neighbours = 0
        self.service.join(_NEIGHBOUR, -1)

    # What transfers do

    def start_touching(self, page: int, touch: Touch) -> None:
        self._touches.setdefault(page, []).append(touch)

    def stop_touching(self, page: int, touch: Touch) -> None:
        touches = self._touches[page]
        touches.remove(touch)
        if not touches:
            del self._touches[page]

    def found_bad(self, group: bytes, page: Written) -> None:
        """A group agreed that this page is bad: whatever it asks from now on must not bring the page back."""
        self._bad[group, page] = self._num_submitted

    def write(self, page: int, piece: int, content: Written | None) -> None:
        """One rank's slice of a page; None when the copy broke in the middle."""
        self.contents[page][piece] = content
        self.rotten.discard((page, piece))

    def describe(self) -> list[str]:
        """Its pages by state, and what each page holds as far as all slices hold the same."""
        if not self.is_alive:
            return [f"store {self.number}: its owner is dead"]
        counts = self.index.counts()
        held = [f"{getattr(counts, state)} {state}" for state in ("free", "reserved", "ready", "quarantined")]
        held += [_plural(counts.leases, "lease"), _plural(counts.reservations, "reservation")]
        lines = [f"store {self.number}: {', '.join(held)}"]
        for page, pieces in enumerate(self.contents):
            if any(pieces):
                names = [describe_content(piece) for piece in pieces]
                names = names[:1] if len(set(names)) == 1 else names
                rotten = [piece for number, piece in sorted(self.rotten) if number == page]
                rot = f", rotten for rank {_names(rotten)}" if rotten else ""
                lines.append(f"bytes of page {page}: {' | '.join(names)}{rot}")
        return lines

    def find_written(self, text: str, piece: int) -> int | None:
        """The page whose slice holds the last whole page of this prefix."""
        keys = split(keys_of(text))
        for page, pieces in enumerate(self.contents):
            content = pieces[piece]
            if keys and content is not None and content.key == keys[-1]:
                return page
        return None

    # What the owner does

    def next_question(self) -> int:
        """Numbers questions in the order in which masters ask them."""
        self._num_submitted += 1
        return self._num_submitted

    def handle(self, group: bytes, request: wire.Request, asked: int = 0) -> wire.Reply:
        """Answer one request with the real service, and look at what the answer promises."""
        try:
            reply = self.service.handle(group, request)
        except StoreError as refusal:
            reply = wire.Failed(str(refusal))
        if isinstance(reply, wire.Matched):
            self._check_matched(group, cast(wire.Match, request), reply, asked)
        elif isinstance(reply, wire.Reserved):
            self._check_reserved(cast(wire.Reserve, request), reply)
        elif isinstance(reply, wire.Published):
            self._check_published(cast(wire.Commit, request), reply)
        elif isinstance(request, wire.Cancel):
            self._writing.pop(request.reservation, None)
        elif isinstance(request, wire.Clear):
            self._cleared_generation = self._newest_generation
        self.check_books()
        return reply

    def check_books(self) -> None:
        problem = self.service.check()
        if problem:
            raise Violation("the books of the store are right", f"store {self.number}: {problem}")
        counts = self.index.counts()
        if counts.free + counts.reserved + counts.ready + counts.quarantined != self.num_pages:
            raise Violation("the books of the store are right", f"store {self.number} lost pages: {counts}")

    def _check_reserved(self, request: wire.Reserve, reply: wire.Reserved) -> None:
        for page, generation in zip(reply.page_ids.tolist(), reply.page_generations.tolist(), strict=True):
            self._newest_generation = max(self._newest_generation, generation)
            if page in self._touches:
                raise Violation(
                    "no page is reused while somebody may touch it",
                    f"page {page} of store {self.number} was given to whoever writes "
                    f"{text_of(split(request.keys)[-1])}, but {self._touches[page][0]}",
                )

        if reply.reservation:
            names = split(request.keys)[reply.first :]
            pages, generations = reply.page_ids.tolist(), reply.page_generations.tolist()
            self._writing[reply.reservation] = [
                (page, Written(key, generation))
                for page, generation, key in zip(pages, generations, names, strict=False)
            ]

    def _check_published(self, request: wire.Commit, reply: wire.Published) -> None:
        for page, content in self._writing.pop(request.reservation)[: reply.num_good]:
            self._check_whole(page, content, "was published")

    def _check_whole(self, page: int, wanted: Written, what: str) -> None:
        for piece, content in enumerate(self.contents[page]):
            if content != wanted:
                raise Violation(
                    "no byte is served under a key it was not written for",
                    f"page {page} {what} as {text_of(wanted.key)}, but the slice of rank {piece} holds "
                    f"{describe_content(content)}",
                )

    def _check_matched(self, group: bytes, request: wire.Match, reply: wire.Matched, asked: int) -> None:
        pages, generations = reply.page_ids.tolist(), reply.page_generations.tolist()
        for page, generation, key in zip(pages, generations, split(request.keys), strict=False):
            found = Written(key, generation)
            if generation <= self._cleared_generation:
                raise Violation(
                    "what was cleared is gone",
                    f"page {page} ({text_of(key)}) was given out before the store was cleared, and is found again",
                )
            if self._bad.get((group, found), asked) < asked:
                raise Violation(
                    "a bad page is never matched again",
                    f"page {page} ({text_of(key)}) was found bad, and a later lookup was given it again",
                )
            self._check_whole(page, found, "can be found")

    def press(self, num_pages: int) -> int:
        """A neighbour stores a prompt nobody else has; how many pages it was given."""
        self._num_neighbours += 1
        text = " ".join(f"n{self._num_neighbours}.{word}" for word in range(2 * num_pages))
        keys = keys_of(text)
        reply = self.handle(_NEIGHBOUR, wire.Reserve(keys))
        assert isinstance(reply, wire.Reserved)
        granted = len(reply.page_ids)
        if granted:
            self.write_all(reply, keys)
            self.handle(_NEIGHBOUR, wire.Commit(reply.reservation, granted))
        return granted

    def store(self, text: str) -> None:
        """A neighbour stores this prompt: where a world begins with something to find."""
        keys = keys_of(text)
        reply = self.handle(_NEIGHBOUR, wire.Reserve(keys))
        assert isinstance(reply, wire.Reserved)
        if reply.reservation:
            self.write_all(reply, keys)
            self.handle(_NEIGHBOUR, wire.Commit(reply.reservation, len(reply.page_ids)))

    def write_all(self, reply: wire.Reserved, keys: bytes) -> None:
        names = split(keys)[reply.first :]
        pages, generations = reply.page_ids.tolist(), reply.page_generations.tolist()
        for page, generation, key in zip(pages, generations, names, strict=False):
            for piece in range(self.num_slices):
                self.write(page, piece, Written(key, generation))


def describe_content(content: Written | None) -> str:
    return "nothing whole" if content is None else text_of(content.key)


@dataclass
class _Line:
    asked: deque[tuple[int, int, wire.Request]] = field(default_factory=deque)  # ticket, order, request
    answered: deque[tuple[int, wire.Reply]] = field(default_factory=deque)
    arrived: list[tuple[int, wire.Reply]] = field(default_factory=list)


class VirtualClient:
    """A master's line to its store: what a planner needs of a `StoreClient`, with every delay chosen outside."""

    def __init__(self, store: VirtualStore, group: bytes) -> None:
        self.store = store
        self._group = group
        self._line = _Line()
        self._last_ticket = 0

    def submit(self, request: wire.Request) -> int:
        if not self.store.is_alive:
            raise StoreLost(f"the owner of store {self.store.number} is gone")
        self._last_ticket += 1
        self._line.asked.append((self._last_ticket, self.store.next_question(), request))
        return self._last_ticket

    def poll(self) -> list[tuple[int, wire.Reply]]:
        if not self._line.arrived and not self.store.is_alive:
            raise StoreLost(f"the owner of store {self.store.number} is gone")
        arrived, self._line.arrived = self._line.arrived, []
        return arrived

    @property
    def num_asked(self) -> int:
        return len(self._line.asked) if self.store.is_alive else 0

    @property
    def num_answered(self) -> int:
        return len(self._line.answered) if self.store.is_alive else 0

    @property
    def num_arrived(self) -> int:
        # Nobody reads any more from an owner that is known to be dead.
        return len(self._line.arrived) if self.store.is_alive else 0

    def serve(self) -> tuple[wire.Request, wire.Reply]:
        """The owner handles the oldest request."""
        ticket, asked, request = self._line.asked.popleft()
        reply = self.store.handle(self._group, request, asked)
        self._line.answered.append((ticket, reply))
        return request, reply

    def deliver(self) -> None:
        """The oldest answer arrives."""
        self._line.arrived.append(self._line.answered.popleft())


def describe_request(request: wire.Request) -> str:
    """A request to the store in few words."""
    match request:
        case wire.Match():
            return f"match {text_of(split(request.keys)[-1])}"
        case wire.Reserve():
            return f"reserve {text_of(split(request.keys)[-1])}"
        case wire.Commit():
            return f"commit {_plural(request.num_good, 'page')}"
        case wire.Quarantine():
            return f"quarantine page {np.frombuffer(request.pages, '<i4').tolist()[0]}"
        case _:
            return type(request).__name__.lower()


def describe_reply(reply: wire.Reply) -> str:
    """An answer of the store in few words."""
    match reply:
        case wire.Matched():
            return f"found pages {_names(reply.page_ids.tolist())}" if reply.lease else "found nothing"
        case wire.Reserved():
            pages = _names(reply.page_ids.tolist())
            return f"write pages {pages}" if reply.reservation else "nothing to write"
        case wire.Published():
            return f"{_plural(reply.num_readable, 'page')} can be found"
        case wire.Failed():
            return f"refused: {reply.message}"
        case _:
            return "done"


def _names(pages: list[int]) -> str:
    return ", ".join(map(str, pages))


def _plural(number: int, word: str) -> str:
    return f"{number} {word}" if number == 1 else f"{number} {word}s"
