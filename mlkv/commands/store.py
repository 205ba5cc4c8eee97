"""`mlkv store`: the owner of a store, run by hand in the foreground, so that the cache outlives engines."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from mlkv.commands.find import named_socket, settings_of
from mlkv.config import MLKVConfig
from mlkv.errors import ConfigError
from mlkv.store.settings import OwnerSettings
from mlkv.store.spawn import owner_environment

_HOW_TO_KNOW = (
    "give --page-bytes, or --model with the model's folder. In an engine it is `layout.page_bytes`, and one that "
    "meets a store with other pages says it in its error"
)


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Make it known to the parser."""
    parser = commands.add_parser(
        "store",
        help="run the store of this host, so that it outlives engines",
        description="Runs the store of this host in the foreground until SIGTERM or Ctrl-C. Engines with the same "
        "store.name and store.directory use it; its settings come from the same file as theirs.",
    )
    parser.add_argument("--config", type=Path, metavar="FILE", required=True, help="settings file of the engines")
    parser.add_argument("--socket", type=Path, metavar="PATH", help="default: from store.name and store.directory")
    parser.add_argument("--page-bytes", type=int, metavar="N", help="size of a page of the model")
    parser.add_argument("--model", type=Path, metavar="DIR", help="folder with the model's config.json, instead")
    parser.add_argument("--dtype", default="bfloat16", help="of the KV, with --model (bfloat16)")
    parser.set_defaults(run=run, name="", directory=None)


def run(options: argparse.Namespace) -> int:
    """Become the owner; does not return when it could start."""
    config = settings_of(options)
    assert config is not None
    settings = owner_settings(options, config)
    # The model's configuration may have loaded a lot that an owner has no use for: begin anew, as ourselves.
    settings_fd = settings.to_fd()
    os.set_inheritable(settings_fd, True)
    sys.stdout.flush()
    argv = [sys.executable, "-m", "mlkv.store.owner", f"--socket={settings.socket_path}"]
    os.execve(sys.executable, [*argv, f"--settings-fd={settings_fd}"], owner_environment())


def owner_settings(options: argparse.Namespace, config: MLKVConfig) -> OwnerSettings:
    """What the owner is told. Raises ConfigError when something is missing."""
    path = named_socket(options, config)
    if path is None:
        raise ConfigError("engines find a store by its name: set store.name in the settings, or give --socket")
    page_bytes = options.page_bytes
    if page_bytes is None:
        if options.model is None:
            raise ConfigError(f"the size of a page is not known: {_HOW_TO_KNOW}")
        page_bytes = _page_bytes(options.model, options.dtype, config.page_tokens)
    store = config.store
    return OwnerSettings(
        socket_path=path,
        host_bytes=int(store.host_bytes),
        page_bytes=page_bytes,
        keep=True,
        disk=store.disk,
        remote=store.remote,
        admission=store.admission,
        policy=store.policy,
        interleave=store.interleave,
        quotas=dict(store.quotas),
        metrics=config.metrics,
    )


def _page_bytes(model: Path, dtype: str, page_tokens: int) -> int:
    """Of an engine that keeps keys and values as the model has them."""
    try:
        from transformers import AutoConfig

        from mlkv.engine.model import DTYPES, check_model
    except ImportError as error:
        raise ConfigError(f"--model needs the extra `engine`: pip install 'mlkv[engine]' ({error})") from None
    if dtype not in DTYPES:
        raise ConfigError(f"--dtype {dtype} is not one of {', '.join(DTYPES)}")
    try:
        found = AutoConfig.from_pretrained(model, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--model {model} has no configuration that can be read: {error}") from None
    return check_model(found, 1).kv_layout(DTYPES[dtype], page_tokens).page_bytes
