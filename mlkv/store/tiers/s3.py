"""A bucket of an S3-compatible object store as a tier: every page is an object."""

from __future__ import annotations

import itertools
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import SecretStr

from mlkv.errors import ConfigError, TierUnavailable
from mlkv.store.tiers import naming
from mlkv.store.tiers.base import ReadOnlyPages, StoredPage, Tier, TierStats, WritablePages

_FORM = "s3://BUCKET[/PREFIX], with the endpoint as a setting of its own"
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,61}[A-Za-z0-9]")
_ENDPOINT_VARIABLES = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")

MAX_REQUESTS = 16
"""Requests at once, of all calls together. Object stores answer in milliseconds and scale with connections."""

_FIRST_PROBES = 4
"""HEAD requests that a look-up begins with: each is paid, and most that find nothing find it out at once."""

_CHUNK_BYTES = 256 << 10
"""What the client collects of a page before it is copied into place, so its memory per request. Pages of 8 MiB
take 0.79 of the time of the client's own `bytes()` with 256 KiB, the same as that with 1 MiB and more."""

_LIST_OBJECTS = 1000  # in one answer, and in one request to delete
_ERROR_CODE = re.compile(r"<Code>(\w+)</Code>")

# How a call's deadline is divided: no request begins after the first half, a quick failure (a dropped connection,
# "slow down") is tried again for another tenth, and what is left is the longest that one request may take.
_START_SHARE = 0.5
_RETRY_SHARE = 0.1
_REQUEST_SHARE = 1 - _START_SHARE - _RETRY_SHARE - 0.05

Item = TypeVar("Item")
Outcome: TypeAlias = "bool | TierUnavailable"


@dataclass(frozen=True)
class Bucket:
    """Where objects are kept, and with which keys. Its text form has no secrets.

    What is not given here, the client takes from its usual environment: `AWS_REGION`, `AWS_ACCESS_KEY_ID`,
    `AWS_SECRET_ACCESS_KEY`, `AWS_SESSION_TOKEN`, a web identity, the machine's role.
    """

    name: str
    prefix: str = ""
    endpoint: str = ""
    region: str = ""
    access_key_id: SecretStr | None = None
    secret_access_key: SecretStr | None = None
    session_token: SecretStr | None = None

    def __str__(self) -> str:
        where = f" at {self.endpoint}" if self.endpoint else ""
        return f"s3://{self.name}/{self.prefix}".rstrip("/") + where


class S3Tier(Tier):
    """Pages in a bucket. The bucket must exist; it needs the rights to get, put, delete and list.

    It evicts nothing: a lifecycle rule of the bucket may expire old pages. A call takes at most `deadline_s`.
    """

    name: ClassVar[str] = "s3"
    shared = True

    def __init__(self, page_bytes: int, bucket: Bucket, *, deadline_s: float = 10.0) -> None:
        self.page_bytes = page_bytes
        self.deadline_s = deadline_s
        self.batch_pages = naming.batch_pages(page_bytes)
        self._bucket = bucket
        self._names = naming.Names(page_bytes)
        self._obstore = _client()
        self._store: Any = None
        # Threads, since the client's asynchronous calls may abort the interpreter while it ends (obstore 0.12).
        self._requests = ThreadPoolExecutor(MAX_REQUESTS, thread_name_prefix="mlkv-s3")

    @classmethod
    def from_url(
        cls,
        url: str,
        page_bytes: int,
        *,
        endpoint: str = "",
        region: str = "",
        access_key_id: SecretStr | None = None,
        secret_access_key: SecretStr | None = None,
        session_token: SecretStr | None = None,
        deadline_s: float = 10.0,
    ) -> S3Tier:
        """A tier for `s3://BUCKET[/PREFIX]`.

        Args:
            endpoint: `http://HOST[:PORT]` or `https://...` of a store that is not Amazon's; default:
                `AWS_ENDPOINT_URL_S3` or `AWS_ENDPOINT_URL`.
            region, access_key_id, secret_access_key, session_token: default: the client's usual environment.

        Raises ConfigError for a malformed URL or endpoint, or half a pair of keys.
        """
        parts = naming.split_url(url, ("s3",), _FORM)
        if not _BUCKET.fullmatch(parts.netloc):
            raise ConfigError(f"{url!r} names no bucket; expected {_FORM}")
        prefix = parts.path.strip("/")
        if any(segment in ("", ".", "..") for segment in prefix.split("/")) and prefix:
            raise ConfigError(f"{url!r}: the prefix has an empty or dotted segment; expected {_FORM}")
        endpoint = endpoint or next((os.environ[name] for name in _ENDPOINT_VARIABLES if os.environ.get(name)), "")
        if endpoint:
            naming.split_url(endpoint, ("http", "https"), "an endpoint such as https://HOST[:PORT]")
        if (access_key_id is None) != (secret_access_key is None):
            raise ConfigError("an S3 store needs both access_key_id and secret_access_key, or neither")
        bucket = Bucket(
            parts.netloc, prefix, endpoint.rstrip("/"), region, access_key_id, secret_access_key, session_token
        )
        return cls(page_bytes, bucket, deadline_s=deadline_s)

    def __repr__(self) -> str:
        return f"S3Tier({self._bucket}, page_bytes={self.page_bytes})"

    def connect(self, pool: memoryview) -> None:
        store = self._new_store()  # and with it new connections
        try:
            # Tells a missing bucket and wrong keys, where a missing object would look the same.
            next(iter(self._obstore.list(store, prefix=self._names.pages)), None)
        except Exception as error:  # of whatever kind: the client raises many
            raise self._unavailable(error) from None
        self._store = store

    def contains(self, keys: Sequence[bytes]) -> int:
        found = 0
        deadline = self._start_deadline()
        at, size = 0, _FIRST_PROBES
        while at < len(keys):
            probes = [self._names.page(key) for key in keys[at : at + size]]
            for present in self._all(self._is_present, probes, deadline):
                if isinstance(present, TierUnavailable):
                    raise present
                if not present:
                    return found
                found += 1
            at, size = at + size, MAX_REQUESTS
        return found

    def read(self, keys: Sequence[bytes], pages: WritablePages) -> NDArray[np.bool_]:
        work = zip((self._names.page(key) for key in keys), pages, strict=True)
        return _judge(self._all(self._get, work, self._start_deadline()))

    def write(self, stored: Sequence[StoredPage], pages: ReadOnlyPages) -> NDArray[np.bool_]:
        # A present key is overwritten: nothing cheaper than that heals a damaged or outdated object.
        wrong = next((len(page) for page in pages if len(page) != self.page_bytes), None)
        if wrong is not None:
            raise ValueError(f"a page of {wrong} bytes where pages have {self.page_bytes}")
        work = zip((self._names.page(what.key) for what in stored), pages, strict=True)
        return _judge(self._all(self._put, work, self._start_deadline()))

    def delete(self, keys: Sequence[bytes]) -> None:
        deadline = self._start_deadline()
        for at in range(0, len(keys), _LIST_OBJECTS):
            self._delete([self._names.page(key) for key in keys[at : at + _LIST_OBJECTS]], deadline)

    def clear(self) -> None:
        """Forget this deployment's pages, and nothing else that is in the bucket."""
        deadline = self._start_deadline()
        for names in self._listed("", deadline):
            self._delete(names, deadline)

    def scan(self, after: bytes, limit: int) -> list[bytes]:
        start = self._names.page(after) if after else ""
        names = itertools.chain.from_iterable(self._listed(start, self._start_deadline()))
        keys = (key for key in map(self._names.key_of, names) if key is not None)
        return sorted(itertools.islice(keys, limit))

    def load_note(self, name: str) -> bytes | None:
        path = self._names.note(name)
        try:
            return bytes(self._obstore.get(self._connected(), path).bytes())
        except FileNotFoundError:
            return None
        except Exception as error:  # see `connect`
            raise self._unavailable(error) from None

    def store_note(self, name: str, value: bytes) -> None:
        naming.check_note(value)
        path = self._names.note(name)
        try:
            self._obstore.put(self._connected(), path, value)
        except Exception as error:  # see `connect`
            raise self._unavailable(error) from None

    def stats(self) -> TierStats:
        return TierStats()

    def close(self) -> None:
        """Stop. Requests under way end by their own time limit; the calls that wait for them with them."""
        self._store = None
        self._requests.shutdown(wait=False, cancel_futures=True)

    def _is_present(self, path: str) -> bool:
        return bool(self._obstore.head(self._connected(), path)["size"] == self.page_bytes)

    def _get(self, work: tuple[str, memoryview]) -> bool:
        path, page = work
        found = self._obstore.get(self._connected(), path)
        if found.meta["size"] != len(page):
            return False
        target = np.frombuffer(page, np.uint8)
        at = 0
        for chunk in found.stream(_CHUNK_BYTES):
            part = np.frombuffer(chunk, np.uint8)
            target[at : at + len(part)] = part  # numpy copies without the interpreter lock
            at += len(part)
        return at == len(page)

    def _put(self, work: tuple[str, memoryview]) -> bool:
        path, page = work
        self._obstore.put(self._connected(), path, page, use_multipart=False)  # sent from where it lies
        return True

    def _delete(self, names: list[str], deadline: float) -> None:
        if time.monotonic() > deadline:
            raise TierUnavailable(f"{self._bucket}: not all of the pages were deleted in time; call again")
        try:
            self._obstore.delete(self._connected(), names)
        except Exception as error:  # see `connect`
            raise self._unavailable(error) from None

    def _listed(self, after: str, deadline: float) -> Iterator[list[str]]:
        """Names of this deployment's pages, ascending. No request for more of them begins after `deadline`."""
        listing = self._obstore.list(
            self._connected(), prefix=self._names.pages, offset=after or None, chunk_size=_LIST_OBJECTS
        )
        while True:
            try:
                objects = next(listing, None)
            except Exception as error:  # see `connect`
                raise self._unavailable(error) from None
            if objects is None:
                return
            yield [found["path"] for found in objects]
            if time.monotonic() > deadline:
                raise TierUnavailable(
                    f"{self._bucket}: there are more pages than can be listed in time; call again"
                )

    def _all(
        self, request: Callable[[Item], bool], items: Iterator[Item] | list[Item], deadline: float
    ) -> list[Outcome]:
        """The outcomes of a request for each item, several at a time; none begins after `deadline`.

        Returns when no request is under way any more, so that nobody touches their pages.
        """

        def attempt(item: Item) -> Outcome:
            if time.monotonic() > deadline:
                return TierUnavailable(f"{self._bucket}: its turn did not come within {self.deadline_s:g} s")
            try:
                return request(item)
            except FileNotFoundError:
                return False
            except TierUnavailable as error:
                return error
            except Exception as error:  # see `connect`
                return self._unavailable(error)

        try:
            futures = [self._requests.submit(attempt, item) for item in items]
        except RuntimeError:
            raise TierUnavailable(f"{self._bucket}: this tier was closed") from None
        return [TierUnavailable("closed") if one.cancelled() else one.result() for one in futures]

    def _start_deadline(self) -> float:
        return time.monotonic() + _START_SHARE * self.deadline_s

    def _connected(self) -> Any:
        store = self._store
        if store is None:
            raise TierUnavailable(f"{self._bucket}: not connected")
        return store

    def _new_store(self) -> Any:
        bucket = self._bucket
        given = {
            "endpoint": bucket.endpoint,
            "region": bucket.region,
            "access_key_id": bucket.access_key_id and bucket.access_key_id.get_secret_value(),
            "secret_access_key": bucket.secret_access_key and bucket.secret_access_key.get_secret_value(),
            "session_token": bucket.session_token and bucket.session_token.get_secret_value(),
        }
        longest = timedelta(seconds=_REQUEST_SHARE * self.deadline_s)
        pause = timedelta(seconds=0.02 * self.deadline_s)
        return self._obstore.store.S3Store(
            bucket.name,
            prefix=bucket.prefix or None,
            config={
                # Hashing every page would cost more than sending it; pages carry checksums of their own.
                "unsigned_payload": True,
                **{name: value for name, value in given.items() if value},
            },
            client_options={
                "timeout": longest,
                "connect_timeout": longest,
                "allow_http": bucket.endpoint.startswith("http://"),
            },
            retry_config={
                "max_retries": 2,
                "retry_timeout": timedelta(seconds=_RETRY_SHARE * self.deadline_s),
                "backoff": {"init_backoff": pause, "max_backoff": pause, "base": 2},
            },
        )

    def _unavailable(self, error: Exception) -> TierUnavailable:
        """What the client raised, without the server's answer: that repeats key ids and signatures."""
        text = str(error).partition("\n")[0].partition("<")[0].strip(" :")
        code = _ERROR_CODE.search(str(error))
        return TierUnavailable(f"{self._bucket}: {text}{f' ({code[1]})' if code else ''}")


def _client() -> Any:
    try:
        import obstore.store
    except ImportError:
        raise ConfigError("an s3:// store needs the obstore package: pip install 'mlkv[s3]'") from None
    return obstore


def _judge(outcomes: list[Outcome]) -> NDArray[np.bool_]:
    """Per page, unless all failed and one of them for a reason that is not its own."""
    trouble = next((one for one in outcomes if isinstance(one, TierUnavailable)), None)
    if trouble is not None and not any(one is True for one in outcomes):
        raise trouble
    return np.array([one is True for one in outcomes], np.bool_)
