"""What is special about Redis: URLs, logins, a full server, odd answers."""

from __future__ import annotations

import logging
import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from pydantic import SecretStr
from remote_engines import PAGE_BYTES, Pool, RedisEngine, key, keys, stored
from remote_servers import RedisServer, free_port, running
from store_helpers import eventually

from mlkv.errors import ConfigError, TierUnavailable
from mlkv.store.tiers.redis import RedisTier

SECRET = "open-sesame-4711"
needs_server = pytest.mark.skipif(bool(RedisServer.missing()), reason=RedisServer.missing())


@pytest.fixture
def pool() -> Pool:
    pool = Pool(num_pages=32)
    pool.fill(0, 32, seed=1)
    return pool


@contextmanager
def answering(*answers: bytes) -> Iterator[int]:
    """A port on which each thing that is received is answered with the next of `answers`; then it hangs up."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                for answer in answers:
                    if not connection.recv(1 << 20):
                        return
                    connection.sendall(answer)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield listener.getsockname()[1]
        thread.join(10)


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("redis://cache:6380/3", "redis://cache:6380/3"),
        ("redis://cache", "redis://cache:6379/0"),
        ("redis://10.0.0.7/", "redis://10.0.0.7:6379/0"),
        ("rediss://cache:7000/1", "rediss://cache:7000/1"),
        ("redis://[::1]:7000", "redis://[::1]:7000/0"),
    ],
)
def test_urls_name_host_port_and_database(url: str, text: str) -> None:
    assert text in repr(RedisTier.from_url(url, PAGE_BYTES))


@pytest.mark.parametrize(
    "url",
    [
        "",
        "cache:6379",
        "http://cache",
        "redis://",
        "redis:///3",
        "redis://cache:port",
        "redis://cache:99999",
        "redis://cache:0",
        "redis://cache/three",
        "redis://cache/1/2",
        "redis://cache/-1",
        "redis://cache/0?timeout=3",
        "redis://[::1",
    ],
)
def test_malformed_urls_are_refused_with_the_right_form(url: str) -> None:
    with pytest.raises(ConfigError, match=r"redis://HOST"):
        RedisTier.from_url(url, PAGE_BYTES)


@pytest.mark.parametrize(
    "url",
    [
        f"redis://user:{SECRET}@cache/0",
        f"redis://:{SECRET}@cache",
        f"redis://user:{SECRET}/x@cache",
        f"redis://cache:{SECRET}",
        f"redis://cache/0?password={SECRET}",
        f"redis://cache/0#{SECRET}",
        f"{SECRET}@cache",
    ],
)
def test_credentials_in_the_url_are_refused_without_being_repeated(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        RedisTier.from_url(url, PAGE_BYTES)
    assert SECRET not in str(caught.value)


def test_a_username_needs_a_password() -> None:
    with pytest.raises(ConfigError, match="no password"):
        RedisTier.from_url("redis://cache", PAGE_BYTES, username="someone")


@needs_server
def test_the_password_is_used_and_never_shown(
    tmp_path: Path, pool: Pool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.DEBUG)
    shown: list[str] = []
    with running(RedisServer(tmp_path, password=SECRET)) as server:
        url = f"redis://127.0.0.1:{server.port}/2"
        right = RedisTier.from_url(url, PAGE_BYTES, password=SecretStr(SECRET))
        right.connect(pool.memory)
        assert right.write(stored(keys(0, 2)), pool.pages(0, 2)).all()
        named = RedisTier.from_url(url, PAGE_BYTES, username="default", password=SecretStr(SECRET))
        named.connect(pool.memory)
        assert named.contains(keys(0, 3)) == 2
        without = RedisTier.from_url(url, PAGE_BYTES)
        wrong = RedisTier.from_url(url, PAGE_BYTES, password=SecretStr("wrong" + SECRET))
        for tier, code in ((without, "NOAUTH"), (wrong, "WRONGPASS")):
            with pytest.raises(TierUnavailable, match=code) as caught:
                tier.connect(pool.memory)
            shown.append(str(caught.value))
        monkeypatch.setenv("REDISCLI_AUTH", SECRET)
        by_environment = RedisTier.from_url(url, PAGE_BYTES)
        by_environment.connect(pool.memory)
        tiers = (right, named, without, wrong, by_environment)
        shown += [repr(tier) + str(vars(tier)) for tier in tiers]
        for tier in tiers:
            tier.close()
    assert SECRET not in "".join(shown) + caplog.text


@needs_server
@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl to make a certificate")
def test_tls_checks_the_certificate_and_the_name(
    tmp_path: Path, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject = ["-subj", "/CN=test", "-addext", "subjectAltName=IP:127.0.0.1"]
    files = ["-keyout", str(tmp_path / "key.pem"), "-out", str(tmp_path / "cert.pem")]
    subprocess.run(
        [
            "openssl",
            "req",
            "-x509",
            "-newkey",
            "ec",
            "-pkeyopt",
            "ec_paramgen_curve:prime256v1",
            "-nodes",
            "-days",
            "1",
            *subject,
            *files,
        ],
        check=True,
        capture_output=True,
    )
    tls_port = free_port()
    settings = f"tls-port {tls_port}\ntls-cert-file cert.pem\ntls-key-file key.pem\ntls-auth-clients no"
    with running(RedisServer(tmp_path, settings=settings)):
        tier = RedisTier.from_url(f"rediss://127.0.0.1:{tls_port}", PAGE_BYTES)
        with pytest.raises(TierUnavailable, match="certificate verify failed"):
            tier.connect(pool.memory)
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "cert.pem"))
        tier.connect(pool.memory)
        assert tier.write(stored(keys(0, 8)), pool.pages(0, 8)).all()
        assert tier.read(keys(0, 8), pool.pages(8, 16)).all()
        assert [bytes(page) for page in pool.pages(8, 16)] == [bytes(page) for page in pool.pages(0, 8)]
        links = list(tier._idle)
        assert tier.contains(keys(0, 9)) == 8
        assert tier._idle == links  # it took up no new connection
        other_name = RedisTier.from_url(f"rediss://localhost:{tls_port}", PAGE_BYTES)
        with pytest.raises(TierUnavailable, match="certificate verify failed"):
            other_name.connect(pool.memory)
        for one in (tier, other_name):
            one.close()


@needs_server
def test_a_full_server_that_evicts_nothing_refuses_pages_one_by_one(tmp_path: Path, pool: Pool) -> None:
    settings = f"maxmemory {2 << 20}\nmaxmemory-policy noeviction"
    with running(RedisServer(tmp_path, settings=settings)) as server:
        tier = RedisTier.from_url(f"redis://127.0.0.1:{server.port}", PAGE_BYTES)
        tier.connect(pool.memory)
        outcome = tier.write(stored(keys(0, 32)), pool.pages(0, 32))
        assert outcome[0]
        assert not outcome[-1]
        assert tier.contains(keys(0, 32)) == int(outcome.sum())
        assert not tier.write(stored(keys(40, 42)), pool.pages(0, 2)).any()  # refused, yet no outage
        tier.delete(keys(0, 32))
        assert tier.write(stored(keys(40, 42)), pool.pages(0, 2)).all()
        tier.close()


@needs_server
def test_a_full_server_that_evicts_takes_new_pages(tmp_path: Path, pool: Pool) -> None:
    settings = f"maxmemory {3 << 20}\nmaxmemory-policy allkeys-lru"
    with running(RedisServer(tmp_path, settings=settings)) as server:
        tier = RedisTier.from_url(f"redis://127.0.0.1:{server.port}", PAGE_BYTES)
        tier.connect(pool.memory)
        for at in range(0, 128, 32):
            assert tier.write(stored(keys(at, at + 32)), pool.pages(0, 32)).all()
        assert tier.read([key(127)], [pool.page(0)]).all()
        assert tier.contains(keys(0, 32)) < 32
        tier.close()


@needs_server
def test_a_server_that_refuses_everything_is_an_outage_that_says_why(tmp_path: Path, pool: Pool) -> None:
    with running(RedisServer(tmp_path, settings="replicaof 127.0.0.1 1\nreplica-serve-stale-data no")) as server:
        tier = RedisTier.from_url(f"redis://127.0.0.1:{server.port}", PAGE_BYTES)
        with pytest.raises(TierUnavailable, match="MASTERDOWN"):
            tier.read(keys(0, 2), pool.pages(0, 2))
        with pytest.raises(TierUnavailable, match="MASTERDOWN"):
            tier.write(stored(keys(0, 2)), pool.pages(0, 2))
        tier.close()


@needs_server
def test_a_value_of_another_type_is_a_miss_for_that_page_only(tmp_path: Path, pool: Pool) -> None:
    engine = RedisEngine(tmp_path)
    tier = engine.tier()
    tier.connect(pool.memory)
    tier.write(stored(keys(0, 3)), pool.pages(0, 3))
    with engine._client() as client:
        name = engine.page_name(key(1)).encode("latin-1")
        client.delete(name)
        client.lpush(name, "not a page")
    assert tier.read(keys(0, 3), pool.pages(10, 13)).tolist() == [True, False, True]
    assert bytes(pool.page(12)) == bytes(pool.page(2))
    tier.close()
    engine.close()


@needs_server
def test_a_restarted_server_is_noticed_before_the_next_call(tmp_path: Path, pool: Pool) -> None:
    with running(RedisServer(tmp_path)) as server:
        tier = RedisTier.from_url(f"redis://127.0.0.1:{server.port}", PAGE_BYTES)
        tier.connect(pool.memory)
        server.kill()
        server.start()
        assert tier.write(stored([key(0)]), [pool.page(0)]).all()  # on a new connection, with no error between
        tier.close()


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        b"+PONG\r\n*x\r\n",
        b"\x00" * 40_000,
        b"*1\r\n*1\r\n*1\r\n*1\r\n*1\r\n*1\r\n",
        b"",
    ],
)
def test_something_else_on_that_port_is_an_outage(answer: bytes, pool: Pool) -> None:
    with answering(answer, b":x\r\n") as port:
        tier = RedisTier.from_url(f"redis://127.0.0.1:{port}", PAGE_BYTES, deadline_s=0.5)
        with pytest.raises(TierUnavailable, match=f"127.0.0.1:{port}"):
            tier.contains(keys(0, 1))
        tier.close()


def test_a_page_cut_off_by_the_server_is_not_success(pool: Pool) -> None:
    whole = b"+PONG\r\n", b"$%d\r\n" % PAGE_BYTES + b"x" * (PAGE_BYTES - 1)
    with answering(*whole) as port:
        tier = RedisTier.from_url(f"redis://127.0.0.1:{port}", PAGE_BYTES, deadline_s=2.0)
        with pytest.raises(TierUnavailable, match="closed the connection"):
            tier.read([key(0)], [pool.page(0)])
        tier.close()


def test_answers_that_trickle_in_do_not_extend_the_deadline(pool: Pool) -> None:
    stop = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def trickle() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(b"+PONG\r\n$%d\r\n" % PAGE_BYTES)
                try:
                    while not stop.wait(0.05):
                        connection.sendall(b"x")
                except OSError:
                    return

        thread = threading.Thread(target=trickle, daemon=True)
        thread.start()
        tier = RedisTier.from_url(f"redis://127.0.0.1:{listener.getsockname()[1]}", PAGE_BYTES, deadline_s=0.5)
        with pytest.raises(TierUnavailable, match=r"0\.5 s"):
            tier.read([key(0)], [pool.page(0)])
        assert (
            tier._idle == []
        )  # on that connection an answer is still owed, which the next call would take for its
        tier.close()
        stop.set()
        thread.join(10)


@needs_server
def test_closing_ends_the_calls_that_still_wait(tmp_path: Path, pool: Pool) -> None:
    with running(RedisServer(tmp_path)) as server:
        tier = RedisTier.from_url(f"redis://127.0.0.1:{server.port}", PAGE_BYTES, deadline_s=60.0)
        tier.connect(pool.memory)
        server.hold()
        failures: list[BaseException] = []

        def read() -> None:
            try:
                tier.read(keys(0, 8), pool.pages(0, 8))
            except TierUnavailable as error:
                failures.append(error)

        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        eventually(lambda: tier._busy, "the call has its connection")
        tier.close()
        reader.join(10)
        server.resume()
        assert not reader.is_alive()
        assert len(failures) == 1
