"""What is special about S3: URLs, credentials, buckets, and what a look-up costs."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr
from remote_engines import PAGE_BYTES, Pool, S3Engine, keys, stored
from remote_servers import S3Server

from mlkv.errors import ConfigError, TierUnavailable
from mlkv.store.tiers.s3 import S3Tier

pytest.importorskip("obstore")


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Engine]:
    if S3Server.missing():
        pytest.skip(S3Server.missing())
    engine = S3Engine(Path(tmp_path_factory.mktemp("s3")))
    yield engine
    engine.close()


@pytest.fixture
def pool() -> Pool:
    return Pool()


@pytest.fixture(autouse=True)
def _no_keys_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        "ACCESS_KEY_ID",
        "SECRET_ACCESS_KEY",
        "SESSION_TOKEN",
        "ENDPOINT_URL",
        "ENDPOINT_URL_S3",
        "REGION",
    ):
        monkeypatch.delenv(f"AWS_{name}", raising=False)


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("s3://bucket", "s3://bucket at"),
        ("s3://bucket/", "s3://bucket at"),
        ("s3://my.bucket-1/some/prefix/", "s3://my.bucket-1/some/prefix at"),
    ],
)
def test_urls_name_bucket_and_prefix(url: str, text: str) -> None:
    assert text in repr(S3Tier.from_url(url, PAGE_BYTES, endpoint="https://store:9000"))


@pytest.mark.parametrize(
    "url",
    [
        "",
        "bucket",
        "s3://",
        "s3:///prefix",
        "s3://b",
        "s3://bucket:9000/x",
        "s3://bucket/a//b",
        "s3://bucket/../x",
    ],
)
def test_malformed_urls_are_refused_with_the_right_form(url: str) -> None:
    with pytest.raises(ConfigError, match=r"s3://BUCKET"):
        S3Tier.from_url(url, PAGE_BYTES)


@pytest.mark.parametrize("endpoint", ["store:9000", "ftp://store", "http://", "http://store:x"])
def test_malformed_endpoints_are_refused(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="endpoint"):
        S3Tier.from_url("s3://bucket", PAGE_BYTES, endpoint=endpoint)


def test_credentials_in_url_or_endpoint_are_refused_without_being_repeated() -> None:
    for url, endpoint in (("s3://id:open-sesame@bucket", ""), ("s3://bucket", "http://id:open-sesame@store")):
        with pytest.raises(ConfigError) as caught:
            S3Tier.from_url(url, PAGE_BYTES, endpoint=endpoint)
        assert "sesame" not in str(caught.value)


def test_half_a_pair_of_keys_is_refused() -> None:
    with pytest.raises(ConfigError, match="both"):
        S3Tier.from_url("s3://bucket", PAGE_BYTES, access_key_id=SecretStr("id"))


def test_credentials_are_never_shown(engine: S3Engine, pool: Pool, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    shown: list[str] = []

    def tier(key_id: str, secret: str) -> S3Tier:
        return S3Tier.from_url(
            f"s3://{S3Server.BUCKET}",
            PAGE_BYTES,
            endpoint=engine.server.endpoint,
            access_key_id=SecretStr(key_id),
            secret_access_key=SecretStr(secret),
        )

    right = tier(S3Server.ACCESS_KEY, S3Server.SECRET_KEY)
    right.connect(pool.memory)
    assert right.write(stored(keys(0, 2)), pool.pages(0, 2)).all()
    wrong = tier(S3Server.ACCESS_KEY, "another" + S3Server.SECRET_KEY)
    unknown = tier("nobody" + S3Server.ACCESS_KEY, S3Server.SECRET_KEY)
    for refused in (wrong, unknown):
        with pytest.raises(TierUnavailable, match="403") as caught:
            refused.connect(pool.memory)
        assert caught.value.__cause__ is None  # what the client raised repeats the server's answer
        shown.append(str(caught.value))
    for one in (right, wrong, unknown):
        shown.append(repr(one) + str(vars(one)))
        one.close()
    assert S3Server.ACCESS_KEY not in "".join(shown) + caplog.text
    assert S3Server.SECRET_KEY not in "".join(shown) + caplog.text


def test_an_answer_that_repeats_key_and_signature_is_not_passed_on(pool: Pool) -> None:
    class Refusal(BaseHTTPRequestHandler):
        """As Amazon's S3 answers a wrong signature."""

        def do_GET(self) -> None:
            body = (
                "<Error><Code>SignatureDoesNotMatch</Code><Message>wrong</Message>"
                f"<AWSAccessKeyId>{S3Server.ACCESS_KEY}</AWSAccessKeyId>"
                "<StringToSign>AWS4-HMAC-SHA256 of-this-request</StringToSign></Error>"
            ).encode()
            self.send_response(403)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Refusal) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        tier = S3Tier.from_url(
            "s3://bucket",
            PAGE_BYTES,
            endpoint=f"http://127.0.0.1:{server.server_port}",
            access_key_id=SecretStr(S3Server.ACCESS_KEY),
            secret_access_key=SecretStr(S3Server.SECRET_KEY),
        )
        with pytest.raises(TierUnavailable, match="SignatureDoesNotMatch") as caught:
            tier.connect(pool.memory)
        server.shutdown()
        thread.join()
    tier.close()
    assert S3Server.ACCESS_KEY not in str(caught.value)
    assert "StringToSign" not in str(caught.value)


def test_credentials_come_from_the_usual_environment(
    engine: S3Engine, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", S3Server.ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", S3Server.SECRET_KEY)
    monkeypatch.setenv("AWS_ENDPOINT_URL", engine.server.endpoint)
    tier = S3Tier.from_url(f"s3://{S3Server.BUCKET}/by-environment", PAGE_BYTES)
    tier.connect(pool.memory)
    assert tier.write(stored(keys(0, 2)), pool.pages(0, 2)).all()
    assert tier.contains(keys(0, 3)) == 2
    tier.close()


def test_prefixes_of_one_bucket_do_not_meet(engine: S3Engine, pool: Pool) -> None:
    tier = engine.tier()
    other = S3Tier.from_url(
        f"s3://{S3Server.BUCKET}/{S3Engine.PREFIX}-2",
        PAGE_BYTES,
        endpoint=engine.server.endpoint,
        access_key_id=SecretStr(S3Server.ACCESS_KEY),
        secret_access_key=SecretStr(S3Server.SECRET_KEY),
    )
    for one in (tier, other):
        one.connect(pool.memory)
    tier.write(stored(keys(0, 2)), pool.pages(0, 2))
    assert other.contains(keys(0, 2)) == 0
    other.write(stored(keys(0, 2)), pool.pages(0, 2))
    tier.clear()
    assert other.contains(keys(0, 2)) == 2
    for one in (tier, other):
        one.close()


def test_calls_before_connecting_are_refused(engine: S3Engine, pool: Pool) -> None:
    tier = engine.tier()
    with pytest.raises(TierUnavailable, match="not connected"):
        tier.read(keys(0, 1), pool.pages(0, 1))
    tier.close()


def test_calls_after_closing_are_refused(engine: S3Engine, pool: Pool) -> None:
    tier = engine.tier()
    tier.connect(pool.memory)
    tier.close()
    with pytest.raises(TierUnavailable):
        tier.read(keys(0, 1), pool.pages(0, 1))


def test_more_pages_than_fit_at_once_end_by_the_deadline_too(engine: S3Engine, pool: Pool) -> None:
    tier = engine.tier(deadline_s=2.0)
    tier.connect(pool.memory)
    engine.server.hold()
    try:
        started = time.monotonic()
        with pytest.raises(TierUnavailable):
            tier.read(keys(0, 64), pool.pages(0, 64))
        assert time.monotonic() - started < 2.0 + 0.5
    finally:
        engine.server.resume()
    tier.close()


class CountingClient:
    """The client's module, with its HEAD requests counted."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self.heads = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def head(self, *arguments: Any) -> Any:
        self.heads += 1
        return self._client.head(*arguments)


def test_a_lookup_that_finds_nothing_costs_few_requests(engine: S3Engine, pool: Pool) -> None:
    tier = engine.tier()
    assert isinstance(tier, S3Tier)
    client = CountingClient(tier._obstore)
    tier._obstore = client
    tier.connect(pool.memory)
    tier.clear()
    assert tier.contains(keys(0, 1000)) == 0
    assert client.heads <= 4
    client.heads = 0
    tier.write(stored(keys(0, 10)), pool.pages(0, 10))
    assert tier.contains(keys(0, 1000)) == 10
    assert client.heads <= 10 + 16
    tier.close()
