"""Pages of the device pool: who uses them, and which prefixes they still hold (the first level of the cache)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

_ROOT = -1
"""The parent of a first page."""


class DevicePages:
    """Hands out pages, and finds prefixes of tokens whose KV still lies in some.

    A page is *used* (referenced by requests or transfers), *idle* (unreferenced, but its KV is still good for a
    prefix) or *free*. A registered page is known by its parent page and its own tokens, so a match compares the
    tokens themselves. A request holds all pages of its prefix and gives them back from the end, so in `_idle`
    every page comes before its parent: evicting the oldest never leaves a suffix without its prefix.
    """

    def __init__(self, num_pages: int, page_tokens: int, *, reuse: bool = True) -> None:
        """`reuse=False` forgets a page's KV as soon as nobody uses it, and finds no prefixes."""
        self.num_pages, self.page_tokens, self.reuse = num_pages, page_tokens, reuse
        self._refs = [0] * num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._page_of: dict[tuple[int, bytes], int] = {}
        self._name_of: dict[int, tuple[int, bytes]] = {}

    @property
    def num_available(self) -> int:
        """Pages that `allocate` can give, evicting idle ones."""
        return len(self._free) + len(self._idle)

    def match(self, tokens: npt.NDArray[np.int64], max_tokens: int) -> list[int]:
        """Pages that hold the longest known prefix of `tokens`, in whole pages of at most `max_tokens` tokens."""
        pages: list[int] = []
        parent = _ROOT
        for at in range(0, min(len(tokens), max_tokens) // self.page_tokens * self.page_tokens, self.page_tokens):
            page = self._page_of.get((parent, tokens[at : at + self.page_tokens].tobytes()))
            if page is None:
                break
            pages.append(page)
            parent = page
        return pages

    def hold(self, pages: Sequence[int]) -> None:
        """Add a reference to each page."""
        for page in pages:
            self._refs[page] += 1
            self._idle.pop(page, None)

    def allocate(self, count: int) -> list[int] | None:
        """`count` pages with one reference each and nothing known in them; None when there are not as many."""
        if count > self.num_available:
            return None
        while len(self._free) < count:
            page, _ = self._idle.popitem(last=False)
            self._forget(page)
            self._free.append(page)
        pages = [self._free.pop() for _ in range(count)]
        self.hold(pages)
        return pages

    def release(self, pages: Sequence[int]) -> None:
        """Take a reference from each page of a request's table (given from front to end)."""
        for page in reversed(pages):
            if self._refs[page] < 1:
                raise RuntimeError(f"device page {page} was released more often than it was held")
            self._refs[page] -= 1
            if self._refs[page] == 0:
                if page in self._name_of:
                    self._idle[page] = None
                else:
                    self._free.append(page)

    def register(self, tokens: npt.NDArray[np.int64], table: list[int], first: int, stop: int) -> None:
        """Make pages [first, stop) of a request's table findable: their KV is complete.

        Where the same prefix is known already, the table gets that page in exchange for its own. Nothing may be
        in flight to or from the exchanged pages.
        """
        if not self.reuse:
            return
        for index in range(first, stop):
            page, parent = table[index], table[index - 1] if index else _ROOT
            name = (parent, tokens[index * self.page_tokens : (index + 1) * self.page_tokens].tobytes())
            known = self._page_of.get(name)
            if known is None:
                self._page_of[name] = page
                self._name_of[page] = name
            elif known != page:
                self.hold([known])
                table[index] = known
                self.release([page])

    def _forget(self, page: int) -> None:
        del self._page_of[self._name_of.pop(page)]

    def check(self) -> None:
        """Raise RuntimeError unless every page is in exactly one state and every known prefix is reachable."""
        used = {page for page, refs in enumerate(self._refs) if refs}
        groups = (used, set(self._free), set(self._idle))
        if sum(map(len, groups)) != self.num_pages or set().union(*groups) != set(range(self.num_pages)):
            raise RuntimeError(f"device pages are not conserved: used, free, idle = {[len(g) for g in groups]}")
        if len(self._free) != len(groups[1]) or any(page in self._name_of for page in self._free):
            raise RuntimeError("a free device page is listed twice or still findable")
        for page, (parent, _) in self._name_of.items():
            if parent != _ROOT and parent not in self._name_of:
                raise RuntimeError(f"device page {page} is findable, its parent {parent} is not")
