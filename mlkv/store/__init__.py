"""Remember: which page keys exist on this host, who holds them, what to evict.

One owner process per host has the index and a pool of host memory; ranks map the pool and talk to the owner
through a `StoreClient`, with the requests and replies of `mlkv.store.wire`. A page is opaque bytes here.

Read in this order: index.py (the rules), service.py (requests, groups, lower tiers), owner.py (the process),
client.py (a rank's end).
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
