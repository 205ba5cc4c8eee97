"""What the index asks of an eviction policy."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Final, Protocol

from mlkv.store.page_arrays import Rows

MAX_CHILDREN: Final = 8
"""Of the pages below a matched one a policy is told these many, which bounds the time of a match. A page with so
many continuations at once is a common beginning, such as a system prompt, rather than a chain that goes on."""


class Chooser(Protocol):
    """Says which page leaves; see `Policy` for both methods."""

    def victim(self) -> int | None: ...

    def count_leaving(self, run: Rows) -> int: ...


class Share(Chooser, Protocol):
    """What a writer may take of the pool, and which pages make room for it."""

    @property
    def room(self) -> int:
        """Pages that it may take now; follows what becomes free."""


class Policy(ABC):
    """Chooses the next page to evict among those that may go.

    The index calls it from one thread, between two requests or inside one, and tells it about pages, which are
    plain numbers in [0, num_pages). A *candidate* is a page that is complete, pinned by nobody and has no page
    below it in the tree of prefixes. Since only such leaves are ever candidates, a suffix leaves before its
    prefix under every policy; a policy decides only between leaves.

    A policy is pure: no clock, no input or output, and the same calls always give the same victims. A call takes
    O(log n) amortised at most, beside whole-array operations on the pages it is given, and `victim` with no
    candidate takes O(1): a pool in which everything is pinned must refuse at once.
    """

    @abstractmethod
    def touch(self, page: int) -> None:
        """`page` and the whole prefix above it are in use now. Called with the deepest page only."""

    def match(self, page: int, num_found: int, num_asked: int, children: Sequence[int]) -> None:
        """A new request asked for a chain of `num_asked` pages; `num_found` were there and `page` is the last.

        `children`: pages that are below `page` in the tree, the newest first, `MAX_CHILDREN` at most.
        """
        self.touch(page)

    @abstractmethod
    def extend(self, pages: Rows, parent: int | None, is_fork: bool, key: int) -> None:
        """`pages` were reserved as one run below `parent`, None at the root; they are about to be written.

        `is_fork`: there are other pages below `parent`. `key`: 64 bits that stand for the first of the pages, also
        after it was evicted.
        """

    @abstractmethod
    def expose(self, page: int) -> None:
        """`page` is a candidate from now on. No effect when it is one already."""

    @abstractmethod
    def hide(self, page: int) -> None:
        """`page` is no candidate any more. No effect when it is none."""

    @abstractmethod
    def victim(self) -> int | None:
        """The candidate that should go next; None when there is none. The next call says the same unless
        something happened between."""

    @abstractmethod
    def count_leaving(self, run: Rows) -> int:
        """How many of `run` go together: at least one, the victim itself.

        `run` is the victim, its parent, and so on upwards, each of which would be a candidate once those before
        it are gone. The policy stops at the first one after which it would name a page that is not in `run`.
        """

    @abstractmethod
    def forget(self, run: Rows, key: int, parent: int | None, parent_is_leaf: bool) -> None:
        """The pages of `run` left the tree, and their numbers may come back as other pages.

        They are one chain, the deepest first, and hung below `parent`, None at the root: what the policy knows
        about their use was also use of `parent`. `key` stands for the last of them as in `extend`.
        """

    @abstractmethod
    def clear(self) -> None:
        """All pages were forgotten; there is no candidate."""

    @abstractmethod
    def __contains__(self, page: int) -> bool:
        """Whether `page` is a candidate."""

    @abstractmethod
    def __len__(self) -> int:
        """Number of candidates."""

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """Memory of its tables."""
