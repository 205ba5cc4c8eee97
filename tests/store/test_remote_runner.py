"""Remote tiers on real servers behind the runner, as in the owner: trouble is a miss, and passes by itself."""

from __future__ import annotations

import select
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pydantic import SecretStr
from remote_engines import ENGINES, PAGE_BYTES, Engine, Pool, keys, stored
from store_helpers import eventually

from mlkv.errors import ConfigError
from mlkv.store.tiers.calls import Answer
from mlkv.store.tiers.mooncake import MooncakeTier
from mlkv.store.tiers.open import open_remote
from mlkv.store.tiers.redis import RedisTier
from mlkv.store.tiers.runner import TierRunner
from mlkv.store.tiers.s3 import S3Tier
from mlkv.store_config import RemoteConfig

SLACK_S = 2.0


@pytest.fixture(params=ENGINES, ids=lambda kind: kind.name)
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Engine]:
    kind = request.param
    if kind.missing():
        pytest.skip(kind.missing())
    engine: Engine = kind(tmp_path)
    yield engine
    engine.close()


class Owner:
    """What the owner's loop does with one runner."""

    def __init__(self, engine: Engine, pool: Pool) -> None:
        self.deadline_s = engine.short_deadline_s
        tier = engine.tier(deadline_s=self.deadline_s)
        self.runner = TierRunner(tier, pool.memory, PAGE_BYTES, max_write_pages=64)
        self.pool = pool

    def turn(self) -> None:
        select.select([self.runner], [], [], 0.05)
        self.runner.poll()

    def ask(self, request: Callable[[Callable[[Answer], None]], bool]) -> Answer | None:
        """The answer, which must come by the deadline; None if the request was refused."""
        answers: list[Answer] = []
        if not request(answers.append):
            return None
        give_up_at = time.monotonic() + self.deadline_s + SLACK_S
        while not answers:
            self.turn()
            assert time.monotonic() < give_up_at, "no answer by the deadline"
        return answers[0]

    def write(self) -> bool:
        """Whether pages 0..8 could be written."""
        self.turn()
        answer = self.ask(lambda tell: self.runner.write(stored(keys(0, 8)), self.pool.pages(0, 8), tell, nothing))
        return answer is not None and bool(answer.good.all())

    def read(self) -> bool:
        """Whether pages 0..8 could be read, into 8..16."""
        self.turn()
        answer = self.ask(lambda tell: self.runner.read(keys(0, 8), self.pool.pages(8, 16), tell, nothing))
        return answer is not None and bool(answer.good.all())


def nothing() -> None:
    pass


@pytest.mark.parametrize("trouble", ["hangs", "is killed and comes back empty"])
def test_a_server_in_trouble_is_missed_and_found_again(engine: Engine, trouble: str) -> None:
    pool = Pool(num_pages=16)
    pool.fill(0, 8, seed=1)
    owner = Owner(engine, pool)
    eventually(owner.write, "the runner has connected in the background")
    assert owner.read()
    if trouble == "hangs":
        engine.server.hold()
        assert not owner.read()
        engine.server.resume()
    else:
        engine.server.kill()
        assert not owner.read()
        engine.restart_empty()
        eventually(owner.write, "the runner has found back and writes")
    pool.poison(8, 16)
    eventually(owner.read, "the runner has found back and reads")
    assert [bytes(page) for page in pool.pages(8, 16)] == [bytes(page) for page in pool.pages(0, 8)]
    assert owner.runner.close(SLACK_S + 3 * owner.deadline_s)


def test_settings_open_the_tier_that_the_url_names() -> None:
    redis = open_remote(RemoteConfig(url="redis://h/1", password=SecretStr("p"), deadline_s=3), PAGE_BYTES)
    s3 = open_remote(RemoteConfig(url="s3://bucket/p", endpoint="https://h", deadline_s=3), PAGE_BYTES)
    mooncake = open_remote(RemoteConfig(url="mooncake://h:1", segment_bytes="1MiB", deadline_s=3), PAGE_BYTES)
    assert isinstance(redis, RedisTier)
    assert isinstance(s3, S3Tier)
    assert isinstance(mooncake, MooncakeTier)
    for tier in (redis, s3, mooncake):
        assert tier.deadline_s == 3
        assert tier.shared
        tier.close()


@pytest.mark.parametrize("url", ["redis://h/x", "s3://b", "mooncake://h"])
def test_settings_with_a_malformed_url_are_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="expected"):
        open_remote(RemoteConfig(url=url), PAGE_BYTES)
