"""How a command finds the store that it is about."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from mlkv.address import owner_socket, socket_folder
from mlkv.config import MLKVConfig
from mlkv.errors import ConfigError, StoreError
from mlkv.store import StoreClient
from mlkv.store.rendezvous import is_listening
from mlkv.store_config import StoreConfig

DEADLINE_S = 10.0
"""For each answer of the owner."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options that say which store, for a parser of a command."""
    group = parser.add_argument_group("which store (default: the only one of this user that runs)")
    group.add_argument("--socket", type=Path, metavar="PATH", help="its socket")
    group.add_argument("--name", default="", help="as store.name")
    group.add_argument("--directory", type=Path, metavar="DIR", help="as store.directory")
    group.add_argument("--config", type=Path, metavar="FILE", help="settings file of its engines")


def add_json(parser: argparse.ArgumentParser) -> None:
    """The option for programs that read the output."""
    parser.add_argument("--json", action="store_true", help="print JSON")


def settings_of(options: argparse.Namespace) -> MLKVConfig | None:
    """What `--config` says."""
    return None if options.config is None else MLKVConfig.load(options.config)


def named_socket(options: argparse.Namespace, config: MLKVConfig | None) -> Path | None:
    """The socket that the options name; None if they name none."""
    if options.socket is not None:
        return Path(options.socket).absolute()
    store = StoreConfig() if config is None else config.store
    name = options.name or store.name
    if not name:
        return None
    return owner_socket(StoreConfig(name=name, directory=options.directory or store.directory))


def connect(options: argparse.Namespace) -> StoreClient:
    """A connection to the store that the options name. Raises StoreError if it does not run."""
    config = settings_of(options)
    path = named_socket(options, config)
    if path is None:
        directory = options.directory or (None if config is None else config.store.directory)
        path = _only_store(socket_folder(directory))
    return StoreClient.find(path, group=os.urandom(16), deadline_s=DEADLINE_S)


def _only_store(folder: Path) -> Path:
    sockets = [path for path in sorted(folder.glob("*.sock")) if is_listening(path)] if folder.is_dir() else []
    if not sockets:
        raise StoreError(f"no store runs with a socket in {folder}")
    if len(sockets) > 1:
        raise ConfigError(f"several stores run; name one with --socket: {', '.join(map(str, sockets))}")
    return sockets[0]
