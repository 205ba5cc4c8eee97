"""What the index asks of an eviction policy."""

from __future__ import annotations

from abc import ABC, abstractmethod


class Policy(ABC):
    """Chooses the next page to evict among those that may go.

    The index calls it from one thread, between two requests or inside one, and tells it four things about
    pages, which are plain numbers in [0, num_pages). A *candidate* is a page that is complete, pinned by
    nobody and has no page below it in the tree of prefixes. Since only such leaves are ever candidates, a
    suffix leaves before its prefix under every policy; a policy decides only between leaves.

    A policy is pure: no clock, no input or output, and the same calls always give the same victims. Every
    call takes O(log n) amortised at most, and `victim` with no candidate takes O(1): a pool in which
    everything is pinned must refuse at once.
    """

    @abstractmethod
    def touch(self, page: int) -> None:
        """`page` and the whole prefix above it are in use now. Called with the deepest page only."""

    @abstractmethod
    def expose(self, page: int) -> None:
        """`page` is a candidate from now on. No effect when it is one already."""

    @abstractmethod
    def hide(self, page: int) -> None:
        """`page` is no candidate any more. No effect when it is none."""

    @abstractmethod
    def forget(self, page: int, parent: int | None) -> None:
        """`page` left the tree and its number may come back as another page.

        `parent` is the page it hung below, or None at the root: what the policy knows about the use of
        `page` was also use of `parent`.
        """

    @abstractmethod
    def victim(self) -> int | None:
        """The candidate that should go next; None when there is none. Changes nothing."""

    @abstractmethod
    def __contains__(self, page: int) -> bool:
        """Whether `page` is a candidate."""

    @abstractmethod
    def __len__(self) -> int:
        """Number of candidates."""
