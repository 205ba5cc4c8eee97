"""Groups of clients and what they hold, without processes."""

from __future__ import annotations

import pytest
from store_helpers import chain

from mlkv.errors import StoreError
from mlkv.store import wire
from mlkv.store.index import Index
from mlkv.store.policy import LRU
from mlkv.store.service import StoreService


class Store:
    """A service whose only caller is one group."""

    def __init__(self, num_pages: int) -> None:
        self.service = StoreService(Index(num_pages, LRU(num_pages)))
        self.service.join(b"g", 1)

    def ask(self, request: wire.Request, group: bytes = b"g") -> wire.Reply:
        reply = self.service.handle(group, request)
        assert self.service.check() == ""
        return reply

    def store(self, text: str) -> wire.Reserved:
        reserved = self.ask(wire.Reserve(chain(text)))
        assert isinstance(reserved, wire.Reserved)
        if reserved.reservation:
            self.ask(wire.Commit(reserved.reservation, len(reserved.page_ids)))
        return reserved

    def match(self, text: str) -> wire.Matched:
        """The match, its lease given back at once."""
        matched = self.ask(wire.Match(chain(text), len(text)))
        assert isinstance(matched, wire.Matched)
        if matched.lease:
            self.ask(wire.Release([matched.lease]))
        return matched

    def report(self) -> wire.Report:
        report = self.ask(wire.Stats(audit=True))
        assert isinstance(report, wire.Report)
        assert report.free + report.reserved + report.ready + report.quarantined == report.num_pages
        assert report.problem == ""
        return report


# Groups


def test_leases_and_reservations_stay_while_any_rank_of_the_group_lives():
    store = Store(4)
    store.service.join(b"g", 2)
    store.store("ab")
    store.ask(wire.Match(chain("ab"), 2))
    store.ask(wire.Reserve(chain("x")))
    store.service.leave(b"g", 1)
    assert (store.report().leases, store.report().reservations) == (1, 1)
    store.service.join(b"other", 3)
    store.service.leave(b"g", 2)
    report = store.service.handle(b"other", wire.Stats(audit=True))
    assert isinstance(report, wire.Report)
    assert (report.leases, report.reservations, report.free, report.ready) == (0, 0, 2, 2)


def test_group_cannot_end_what_another_group_holds():
    store = Store(4)
    store.service.join(b"other", 2)
    store.store("ab")
    matched = store.ask(wire.Match(chain("ab"), 2))
    reserved = store.ask(wire.Reserve(chain("x")))
    assert isinstance(matched, wire.Matched)
    assert isinstance(reserved, wire.Reserved)
    before = store.report()
    for request in (
        wire.Release([matched.lease]),
        wire.Commit(reserved.reservation, 1),
        wire.Cancel(reserved.reservation),
    ):
        with pytest.raises(StoreError, match="not this group's"):
            store.ask(request, b"other")
    assert store.report() == before
    store.ask(wire.Release([matched.lease]))
    store.ask(wire.Cancel(reserved.reservation))


def test_refused_requests_leave_no_trace():
    store = Store(4)
    store.store("ab")
    before = store.report()
    for request in (
        wire.Release([77]),
        wire.Commit(77, 0),
        wire.Match(b"x", 1),
        wire.Reserve(chain("xy"), -1),
        wire.Quarantine(b"xxx", b""),
        wire.Quarantine(b"\xff\xff\xff\xff", bytes(8)),
        wire.Quarantine(bytes(4), b""),
        wire.Hello(1),
    ):
        with pytest.raises(StoreError):
            store.ask(request)
    assert store.report() == before


def test_group_that_never_gives_back_is_told(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("mlkv.store.service.MAX_HOLDS", 2)
    store = Store(4)
    store.store("ab")
    for _ in range(2):
        store.ask(wire.Match(chain("ab"), 2))
    with pytest.raises(StoreError, match="2 leases"):
        store.ask(wire.Match(chain("ab"), 2))
    store.ask(wire.Reserve(chain("x")))
    store.ask(wire.Reserve(chain("y")))
    with pytest.raises(StoreError, match="2 reservations"):
        store.ask(wire.Reserve(chain("z")))


def test_report_counts_what_happened():
    store = Store(2)
    written = store.store("ab")
    store.match("abc")
    store.store("x")
    store.ask(wire.Quarantine(written.pages[:4], written.generations[:8]))
    report = store.report()
    assert (report.pages_written, report.pages_asked, report.pages_hit) == (3, 3, 2)
    assert (report.pages_evicted, report.pages_bad, report.clients) == (1, 1, 1)
