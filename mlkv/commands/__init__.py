"""The commands with which people run, watch and clean up a store: one module each."""

from __future__ import annotations

import argparse

from mlkv.commands import clear, look, pin, store, top, verify

_MODULES = (store, look, verify, clear, pin, top)


def add_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Make all of them known to the parser of `mlkv`."""
    for module in _MODULES:
        module.add(commands)
