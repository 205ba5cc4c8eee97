"""Transcripts: stories of commands and what came of them, that people read and tests replay.

Lines that begin in the first column are commands, as `mlkv.explore.script` writes them, and two more:

    world ranks=2 hosts=1 replicas=1 pages=8 blocks=12 late=no stored="the cat sat on"
    show ranks | show store

What comes of a command stands below it, four blanks in; often that is nothing to speak of. `#` begins a comment.
"""

from __future__ import annotations

import argparse
import difflib
import shlex
import sys
from pathlib import Path

from mlkv.dist.explore import SETTLE, Action, Violation, perform
from mlkv.explore.parts import Shape
from mlkv.explore.script import parse_action
from mlkv.explore.world import VirtualWorld

FOLDER = Path(__file__).parent.parent / "transcripts"

_SIZES = {
    "ranks": "num_ranks",
    "hosts": "num_hosts",
    "replicas": "num_replicas",
    "pages": "num_pages",
    "blocks": "num_blocks",
}


def replay(text: str) -> str:
    """The transcript with what really comes of its commands."""
    world: VirtualWorld | None = None
    lines: list[str] = []
    for line in text.splitlines():
        if line.startswith("    "):
            continue  # what came of it the last time
        lines.append(line.rstrip())
        command = line.split("#")[0].strip()
        if not command:
            continue
        if command.startswith("world"):
            world = VirtualWorld(_shape(command))
            world.lines = []
            continue
        assert world is not None, "a transcript begins with a world"
        lines += [f"    {line}" for line in _obey(world, command)]
    return "\n".join(lines) + "\n"


def _shape(command: str) -> Shape:
    values: dict[str, object] = {}
    for word in shlex.split(command)[1:]:
        key, _, value = word.partition("=")
        if key == "stored":
            values["stored"] = (value,)
        elif key == "late":
            values["is_late"] = value == "yes"
        else:
            values[_SIZES[key]] = int(value)
    return Shape(**values)  # type: ignore[arg-type]


def _obey(world: VirtualWorld, command: str) -> list[str]:
    if command.startswith("show"):
        return _show(world, command.split()[1])
    action: Action = parse_action(command, store=min(world.stores))
    assert world.lines is not None
    world.lines.clear()
    try:
        happened = perform(world, action)
    except Violation as broken:
        return [*world.lines, f"BROKEN {broken}"]
    if not happened:
        return ["cannot happen now"]
    return [*world.lines, "all is done, nothing is left"] if action == SETTLE else list(world.lines)


def _show(world: VirtualWorld, what: str) -> list[str]:
    if what == "store":
        return [line for store in world.stores.values() for line in store.describe()]
    if what == "ranks":
        return [line for replica in world.replicas for line in replica.describe()]
    raise ValueError(f"there is nothing called {what!r} to show")


def main() -> int:
    """`python -m tests.explore.transcript [--rewrite] [FILE ...]`: show what differs, or write it down."""
    parser = argparse.ArgumentParser(prog="python -m tests.explore.transcript")
    parser.add_argument("files", nargs="*", type=Path, help="default: all transcripts")
    parser.add_argument(
        "--rewrite", action="store_true", help="put what really comes of the commands into the files"
    )
    args = parser.parse_args()
    changed = 0
    for path in args.files or sorted(FOLDER.glob("*.txt")):
        written = path.read_text()
        real = replay(written)
        changed += real != written
        if args.rewrite:
            path.write_text(real)
        else:
            sys.stdout.writelines(
                difflib.unified_diff(
                    written.splitlines(True), real.splitlines(True), str(path), "what comes of it"
                )
            )
    return int(changed > 0 and not args.rewrite)


if __name__ == "__main__":
    sys.exit(main())
