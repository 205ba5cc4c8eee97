"""Remote tiers of which one read, write or connect fails, whichever: pages may be missing, and never wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cutting_proxy import CuttingProxy, Event
from remote_engines import Engine, MooncakeEngine, Pool, RedisEngine, S3Engine, keys, stored

from mlkv.errors import TierUnavailable
from mlkv.store.tiers import Tier

PAGE_BYTES = 4096
NUM_KEYS = 6
MAX_NUMBER = 200
"""Of faults that are tried one after the other; the traffic has far fewer events."""


class Script:
    """A traffic of every kind of call, and what may be found afterwards.

    `possible[n]`: contents that key n may have, None for none. A call that failed may have been done or not.
    """

    def __init__(self, tier: Tier, pool: Pool) -> None:
        self._tier = tier
        self._pool = pool
        self._keys = keys(0, NUM_KEYS)
        self.possible: list[set[bytes | None]] = [{None} for _ in range(NUM_KEYS)]
        self.num_failed = 0

    def run(self) -> None:
        self._call(lambda: self._tier.connect(self._pool.memory))
        self.write(range(4), seed=1)
        self.read()
        self._call(lambda: self._tier.contains(self._keys))
        self.forget(lambda: self._tier.delete(self._keys[1:2]), range(1, 2))
        self.write(range(1, NUM_KEYS), seed=2)
        self.read()
        self._call(lambda: self._tier.store_note("note", b"value"))
        self._call(lambda: self._tier.load_note("note"))
        self.forget(self._tier.clear, range(NUM_KEYS))
        self.write(range(2), seed=3)
        self.read()

    def _call(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except TierUnavailable:
            self.num_failed += 1
            return None

    def write(self, which: range, seed: int) -> None:
        self._pool.fill(0, NUM_KEYS, seed)
        pages = self._pool.pages(which.start, which.stop)
        good = self._call(lambda: self._tier.write(stored(self._keys[which.start : which.stop]), pages))
        for at, number in enumerate(which):
            content = bytes(pages[at])
            if good is not None and good[at]:
                self.possible[number] = {content}
            else:
                self.possible[number] |= {content, None}

    def forget(self, call: Callable[[], None], which: range) -> None:
        before = self.num_failed
        self._call(call)
        for number in which:
            self.possible[number] = {None} if self.num_failed == before else self.possible[number] | {None}

    def read(self) -> list[bool]:
        """Which keys were read; what is read must be one of the contents that were written last."""
        self._pool.poison(NUM_KEYS, 2 * NUM_KEYS)
        pages = self._pool.pages(NUM_KEYS, 2 * NUM_KEYS)
        good = self._call(lambda: self._tier.read(self._keys, pages))
        for number in range(NUM_KEYS):
            assert good is None or not good[number] or bytes(pages[number]) in self.possible[number], number
        return [False] * NUM_KEYS if good is None else [bool(ok) for ok in good]

    def check_recovered(self) -> None:
        """Connected anew it has what it must have, and works."""
        self._tier.connect(self._pool.memory)
        found = self.read()
        assert [
            number for number in range(NUM_KEYS) if not found[number] and None not in self.possible[number]
        ] == []
        self.write(range(NUM_KEYS), seed=4)
        assert all(self.read())
        self._tier.clear()


@pytest.fixture(scope="module", params=[RedisEngine, S3Engine], ids=lambda kind: kind.name)
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    kind = request.param
    if kind.missing():
        pytest.skip(kind.missing())
    engine: Engine = kind(Path(tmp_path_factory.mktemp(kind.name)))
    yield engine
    engine.close()


@pytest.mark.timeout(200)
@pytest.mark.parametrize("event", ["connect", "write", "read"])
def test_a_connection_that_breaks_anywhere_costs_pages_and_never_the_truth(engine: Engine, event: Event) -> None:
    pool = Pool(PAGE_BYTES, 2 * NUM_KEYS)
    for number in range(MAX_NUMBER):
        with CuttingProxy(engine.server.port, event, number) as proxy:
            tier = engine.tier(PAGE_BYTES, port=proxy.port)
            script = Script(tier, pool)
            script.run()
            proxy.disarm()
            script.check_recovered()
            tier.close()
        if not proxy.has_cut:
            break
    assert number >= (1 if event == "connect" else 5), "nothing was made to fail"
    assert number < MAX_NUMBER - 1, "there are more events than were tried"
    assert script.num_failed == 0, "calls fail without a fault"


@pytest.mark.skipif(bool(MooncakeEngine.missing()), reason=MooncakeEngine.missing())
@pytest.mark.parametrize("is_done", [False, True], ids=["before it is done", "after it was done"])
def test_an_order_to_mooncake_that_fails_costs_pages_and_never_the_truth(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_done: bool
) -> None:
    engine = MooncakeEngine(tmp_path)
    tier, pool = engine.tier(PAGE_BYTES, segment_bytes=256 << 20), Pool(PAGE_BYTES, 2 * NUM_KEYS)
    tier.connect(pool.memory)
    process = tier._process
    assert process is not None
    order = process.order
    left = 0

    def fail_once(*arguments: Any) -> Any:
        nonlocal left
        left -= 1
        if left != -1:
            return order(*arguments)
        if is_done:
            order(*arguments)
        raise TierUnavailable("the order was lost")

    monkeypatch.setattr(process, "order", fail_once)
    number = 0
    while True:
        left = number
        script = Script(tier, pool)
        script.run()
        has_failed, left = left < 0, -1
        script.check_recovered()
        if not has_failed:
            break
        number += 1
    assert number >= 8, "nothing was made to fail"
    assert script.num_failed == 0
    tier.close()
    engine.close()
