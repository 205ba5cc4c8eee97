"""Remember: which page keys exist on this host, who holds them, what to evict.

One owner process per host has the index and a pool of host memory; ranks map the pool and talk to the owner
through a `StoreClient`, with the requests and replies of `mlkv.store.wire`. Of a page only the identity in its
header is looked at here, when it goes to a lower tier or comes from one.

Read in this order: index.py (the rules), service.py (requests and groups), owner.py (the process), client.py (a
rank's end); then lower.py and what it is made of: lookups.py and promotion.py (up), writeback.py (down),
tiers/base.py (the contract of a tier), tiers/runner.py (threads, deadlines, deletions).
"""

from __future__ import annotations

from mlkv.store.client import MAX_OUTSTANDING, StoreClient
from mlkv.store.wire import (
    Cancel,
    Clear,
    Commit,
    Done,
    Failed,
    Match,
    Matched,
    Published,
    Quarantine,
    Release,
    Reply,
    Report,
    Request,
    Reserve,
    Reserved,
    Stats,
)
from mlkv.store.wire_tools import Invalidate, Open, Opened, Stale

__all__ = [
    "MAX_OUTSTANDING",
    "Cancel",
    "Clear",
    "Commit",
    "Done",
    "Failed",
    "Invalidate",
    "Match",
    "Matched",
    "Open",
    "Opened",
    "Published",
    "Quarantine",
    "Release",
    "Reply",
    "Report",
    "Request",
    "Reserve",
    "Reserved",
    "Stale",
    "Stats",
    "StoreClient",
]
