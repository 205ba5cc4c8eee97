"""Spreading the host pool over the memory nodes of a host with several sockets."""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import platform
from pathlib import Path
from typing import Final

_MPOL_INTERLEAVE: Final = 3  # linux/mempolicy.h
_SYS_MBIND: Final = {"x86_64": 237, "aarch64": 235}
_WORD_BITS: Final = 64

_log = logging.getLogger("mlkv.store")


def memory_nodes(root: Path = Path("/sys/devices/system/node")) -> list[int]:
    """Numbers of the nodes that have memory; [] where the system does not tell."""
    try:
        text = (root / "has_memory").read_text().strip()
    except OSError:
        return []
    nodes: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        nodes += range(int(first), int(last or first) + 1)
    return nodes


def interleave(fd: int, num_bytes: int, nodes: list[int]) -> bool:
    """Have the memory of a shared file taken from `nodes` in turn, whoever touches it first.

    The policy belongs to the file, so one process sets it for all that map it. Where that is refused, memory comes
    from the node of whoever touches it first, as ever; one warning says so.

    Returns:
        whether it was set.
    """
    number = _SYS_MBIND.get(platform.machine())
    if number is None:
        _log.warning("host pool is not interleaved: unknown on %s", platform.machine())
        return False
    num_words = max(nodes) // _WORD_BITS + 1
    mask = (ctypes.c_uint64 * num_words)()
    for node in nodes:
        mask[node // _WORD_BITS] |= 1 << node % _WORD_BITS
    libc = ctypes.CDLL(None, use_errno=True)
    with mmap.mmap(fd, num_bytes, flags=mmap.MAP_SHARED) as mapping:
        memory = (ctypes.c_char * num_bytes).from_buffer(mapping)
        # The kernel takes one bit less than it is told (man mbind, "maxnode").
        bits = ctypes.c_ulong(num_words * _WORD_BITS + 1)
        refused = libc.syscall(
            number, ctypes.c_void_p(ctypes.addressof(memory)), ctypes.c_ulong(num_bytes), _MPOL_INTERLEAVE,
            ctypes.byref(mask), bits, 0,
        )  # fmt: skip
        reason = os.strerror(ctypes.get_errno()) if refused else ""
        del memory
    if refused:
        _log.warning(
            "host pool is not interleaved over memory nodes %s: %s; containers need CAP_SYS_NICE for it",
            nodes,
            reason,
        )
    return not refused
