"""The command line of an owner process."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mlkv.store.settings import OwnerSettings


@dataclass(frozen=True)
class Arguments:
    """Settings, and what a starter passes on: the lock of the socket, and a pipe for the news."""

    settings: OwnerSettings
    lock_fd: int | None
    ready_fd: int | None


def parse_arguments(argv: Sequence[str] | None) -> Arguments:
    """`argv` None: those of this process. Ends it with a message when they are wrong.

    A starter gives `--settings-fd`; then all settings come from there.
    """
    parser = argparse.ArgumentParser(prog="python -m mlkv.store.owner", description="The store of one host.")
    parser.add_argument("--socket", type=Path, help="path of its Unix socket")
    parser.add_argument("--host-bytes", type=int, help="size of the host pool")
    parser.add_argument("--page-bytes", type=int, help="size of one page, a multiple of 4096")
    parser.add_argument("--linger-s", type=float, default=0.0, help="how long it outlives its last client")
    parser.add_argument("--keep", action="store_true", help="stay until SIGTERM or Ctrl-C")
    parser.add_argument("--log-file", type=Path, help="default: standard error")
    parser.add_argument("--settings-fd", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--lock-fd", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--ready-fd", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.settings_fd is not None:
        return Arguments(OwnerSettings.from_fd(args.settings_fd), args.lock_fd, args.ready_fd)
    missing = [name for name in ("socket", "host_bytes", "page_bytes") if getattr(args, name) is None]
    if missing:
        parser.error(f"these must be given: {', '.join('--' + name.replace('_', '-') for name in missing)}")
    settings = OwnerSettings(
        socket_path=args.socket.absolute(),
        host_bytes=args.host_bytes,
        page_bytes=args.page_bytes,
        linger_s=args.linger_s,
        keep=args.keep,
        log_file=args.log_file,
    )
    return Arguments(settings, args.lock_fd, args.ready_fd)
