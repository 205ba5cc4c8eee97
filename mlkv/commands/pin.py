"""`mlkv pin` and `mlkv unpin`: keep a prefix in host memory, whatever else comes."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

from mlkv.commands.find import DEADLINE_S, add_json, add_options, connect
from mlkv.commands.pages import choose_namespace
from mlkv.commands.show import print_json
from mlkv.errors import ConfigError, StoreError
from mlkv.keys import page_keys, root_key
from mlkv.store import StoreClient
from mlkv.store.wire_tools import Pin, Pinned, Pins, Unpin

_KEY = re.compile(r"[0-9a-fA-F]{32}")


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Make them known to the parser."""
    pin = commands.add_parser("pin", help="keep a prefix in host memory until it is unpinned or the store ends")
    unpin = commands.add_parser("unpin", help="let a pinned prefix go")
    unpin.add_argument("--all", action="store_true", help="everything that is pinned")
    for parser in (pin, unpin):
        parser.add_argument(
            "what",
            nargs="?" if parser is unpin else None,
            metavar="KEY|TOKENS",
            help="key of a page in hex (mlkv ls --pages), or token ids: comma-separated, or a file of them",
        )
        parser.add_argument(
            "--namespace", default="", metavar="NAME", help="of the tokens: a model or fingerprint"
        )
        parser.add_argument("--adapter", default="", help="of the tokens, as given to the engine")
        parser.add_argument("--salt", default="", help="of the tokens, as given to the engine")
        add_options(parser)
        add_json(parser)
    pin.set_defaults(run=_pin)
    unpin.set_defaults(run=_unpin)


def _pin(options: argparse.Namespace) -> int:
    with connect(options) as client:
        keys, is_chain = _keys(client, options)
        return _tell(options, client.call(Pin(keys, is_chain), DEADLINE_S))


def _unpin(options: argparse.Namespace) -> int:
    if options.all == (options.what is not None):
        raise ConfigError("unpin needs a key, token ids, or --all")
    with connect(options) as client:
        keys = b""
        if not options.all:
            keys, is_chain = _keys(client, options)
            if is_chain:
                keys = _pinned_end(client, keys)
        return _tell(options, client.call(Unpin(keys), DEADLINE_S))


def _keys(client: StoreClient, options: argparse.Namespace) -> tuple[bytes, bool]:
    """The key, or the chain of keys, that the options name, and whether it is a chain."""
    if _KEY.fullmatch(options.what):
        return bytes.fromhex(options.what), False
    tokens = read_tokens(options.what)
    entry = choose_namespace(client, options.namespace)
    root = root_key(entry.fingerprint, entry.epoch, adapter=options.adapter, salt=options.salt)
    keys = page_keys(tokens, entry.page_tokens, root)
    if not keys:
        raise ConfigError(f"{len(tokens)} tokens are less than a page of {entry.page_tokens}")
    return keys, True


def read_tokens(text: str) -> list[int]:
    """Token ids from `text`, or from the file with this name: a JSON list, or numbers between commas or spaces.

    Raises ConfigError when they are none.
    """
    path = Path(text)
    if not re.fullmatch(r"[\d\s,]+", text):
        try:
            text = path.read_text()
        except OSError as error:
            raise ConfigError(f"{path} is neither a key, nor token ids, nor a file: {error.strerror}") from None
    try:
        if text.lstrip().startswith("["):
            found = json.loads(text)
        else:
            found = [int(word) for word in re.split(r"[\s,]+", text) if word]
    except ValueError as error:
        raise ConfigError(f"not a list of token ids: {error}") from None
    if not all(isinstance(token, int) for token in found):
        raise ConfigError("not a flat list of token ids")
    return list(found)


def _pinned_end(client: StoreClient, chain: bytes) -> bytes:
    """The last key of this chain at which a pin ends."""
    pinned = client.call(Pins(), DEADLINE_S).keys
    ends = {pinned[at : at + 16] for at in range(0, len(pinned), 16)}
    for at in range(len(chain) - 16, -1, -16):
        if chain[at : at + 16] in ends:
            return chain[at : at + 16]
    raise StoreError("no prefix of these tokens is pinned")


def _tell(options: argparse.Namespace, pinned: Pinned) -> int:
    if options.json:
        pins = [
            {"key": pinned.keys[16 * at : 16 * at + 16].hex(), "pages": pages}
            for at, pages in enumerate(pinned.lengths)
        ]
        print_json({"pages": pinned.num_pages, "pins": pins})
    else:
        print(f"{len(pinned.lengths)} pins hold {pinned.num_pages} pages")
    return 0
