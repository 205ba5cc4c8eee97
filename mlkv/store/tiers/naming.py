"""How pages and notes are called in a store that others use as well, and what a remote store's URL may say."""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import SplitResult, urlsplit

from mlkv.errors import ConfigError
from mlkv.keys import KEY_BYTES
from mlkv.page import FORMAT_VERSION

MAX_NOTE_BYTES = 1024
_NOTE_NAME = re.compile(r"[A-Za-z0-9-]{1,64}")
_HEX_KEY = re.compile(rf"[0-9a-f]{{{2 * KEY_BYTES}}}")


@dataclass(frozen=True)
class Names:
    """The names of one deployment's objects.

    They begin with the version of the page format and the size of a page, so that deployments which could not
    read each other's pages do not see them either, and so that one may be cleared without the others.
    """

    page_bytes: int

    @property
    def pages(self) -> str:
        """What every page's name begins with, and nothing else's."""
        return f"mlkv/{FORMAT_VERSION}/{self.page_bytes}/p/"

    def page(self, key: bytes) -> str:
        """For engines whose names are text. Ascending keys have ascending names."""
        return self.pages + key.hex()

    def binary_page(self, key: bytes) -> bytes:
        """For engines whose names are bytes."""
        return self.pages.encode() + key

    def key_of(self, name: str) -> bytes | None:
        """The key of `page(key)`; None for anything else."""
        text = name.removeprefix(self.pages)
        return bytes.fromhex(text) if len(text) < len(name) and _HEX_KEY.fullmatch(text) else None

    def note(self, name: str) -> str:
        """Raises ValueError for a name that the contract of tiers does not allow."""
        if not _NOTE_NAME.fullmatch(name):
            raise ValueError(f"the name of a note is 1 to 64 letters, digits and dashes, not {name!r}")
        return f"mlkv/{FORMAT_VERSION}/{self.page_bytes}/n/{name}"


def check_note(value: bytes) -> None:
    """Raises ValueError for a value that is too large for a note."""
    if len(value) > MAX_NOTE_BYTES:
        raise ValueError(f"a note holds at most {MAX_NOTE_BYTES} bytes, not {len(value)}")


def split_url(url: str, schemes: tuple[str, ...], form: str) -> SplitResult:
    """The parts of a remote store's URL. `form` says in messages how it should look.

    Raises ConfigError when it is malformed or carries credentials. The message does not repeat what it cannot
    read: that may be a password in the wrong place.
    """
    if "@" in url:
        raise ConfigError(
            "the URL of a remote store must not carry credentials, since URLs are printed: give them as settings "
            f"or in the engine's environment variables; expected {form}"
        )
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise ConfigError(f"the URL of a remote store has a malformed host or port; expected {form}") from None
    if parts.scheme not in schemes or not parts.hostname or port == 0:
        raise ConfigError(f"the URL of a remote store names no such store; expected {form}")
    if parts.query or parts.fragment:
        raise ConfigError(
            f"the URL of a remote store has no options, these are settings of their own; expected {form}"
        )
    return parts


def batch_pages(page_bytes: int, most: int = 64, budget_bytes: int = 64 << 20) -> int:
    """Pages for one call: enough to hide round trips, few enough that one call does not fill a link for seconds.

    64 MiB take about half a second on a network of 1 Gbit/s.
    """
    return max(1, min(most, budget_bytes // page_bytes))
