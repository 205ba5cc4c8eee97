"""Quotas: how many pages of the host pool each namespace may take."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import numpy as np

from mlkv.errors import ConfigError
from mlkv.store.epochs import Namespace
from mlkv.store.page_arrays import Pages, Rows
from mlkv.store.page_stack import PageStack
from mlkv.store.policy.base import Policy
from mlkv.store.policy.shares import Shares

EVERY_OTHER: Final = "*"
"""The quota of each namespace whose model is not named."""


class CountedStack(PageStack):
    """Tells which pages become free."""

    def __init__(self, num_pages: int, on_freed: Callable[[Pages | Rows], None]) -> None:
        super().__init__(num_pages)
        self._on_freed = on_freed

    def extend(self, pages: Pages | Rows) -> None:
        self._on_freed(pages)
        super().extend(pages)


class Share:
    """What one namespace may take, and which of its own pages make room for it. See `Index.reserve`."""

    def __init__(self, owner: int, limit_pages: int, policy: Shares) -> None:
        self.limit_pages = limit_pages
        self.num_pages = 0
        self._owner = owner
        self._policy = policy

    @property
    def room(self) -> int:
        """Pages that it may take; below 0 where lower tiers have brought more of its pages than it may have."""
        return self.limit_pages - self.num_pages

    def victim(self) -> int | None:
        return self._policy.own_victim(self._owner)

    def count_leaving(self, run: Rows) -> int:
        return self._policy.own_count_leaving(run)


class Quotas:
    """Counts the pages of each namespace, from their reservation until they are free again.

    A namespace that has what it may have evicts its own pages for new ones; when none of them can go, it gets
    none. What others have is not touched for it. Everything takes constant time a page.

    Args:
        limits: bytes by the model of a namespace, see `EVERY_OTHER`.
        policy: chooses among the pages of all when the pool is full.

    Attributes:
        policy, free: for the index.

    Raises ConfigError for a limit below a page.
    """

    def __init__(self, limits: Mapping[str, int], page_bytes: int, num_pages: int, policy: Policy) -> None:
        for model, limit_bytes in limits.items():
            if limit_bytes < page_bytes:
                raise ConfigError(
                    f"store.quotas: {limit_bytes} bytes for {model!r} are less than a page of {page_bytes} bytes"
                )
        self._limit_pages = {model: limit_bytes // page_bytes for model, limit_bytes in limits.items()}
        self._num_pages = num_pages
        self.policy = Shares(policy, num_pages)
        self.free = CountedStack(num_pages, self._on_freed)
        self._owners: dict[bytes, int] = {}  # by fingerprint, from 1 on
        self._shares: list[Share] = []  # of owner 1, 2, ...

    def share_of(self, namespace: Namespace) -> Share:
        """The share of a namespace that was opened."""
        owner = self._owners.get(namespace.fingerprint)
        if owner is None:
            owner = self._owners[namespace.fingerprint] = len(self._shares) + 1
            limit = self._limit_pages.get(namespace.model, self._limit_pages.get(EVERY_OTHER, self._num_pages))
            self._shares.append(Share(owner, limit, self.policy))
            self.policy.limit(owner)
        return self._shares[owner - 1]

    def assign(self, pages: Pages, namespace: Namespace) -> None:
        """These pages, which were free, are taken by this namespace."""
        self.share_of(namespace).num_pages += len(pages)
        self.policy.assign(pages, self._owners[namespace.fingerprint])

    def _on_freed(self, pages: Pages | Rows) -> None:
        counts = np.bincount(self.policy.owner[pages], minlength=1).tolist()
        for owner, count in enumerate(counts):
            if owner and count:
                self._shares[owner - 1].num_pages -= count
        self.policy.owner[pages] = 0
