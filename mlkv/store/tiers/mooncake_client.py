"""The process in which Mooncake's client lives.

A process of its own, because that client keeps Python's interpreter lock while it connects and disconnects: with
its master down, `setup` never returns (0.3.13), and every thread of the process that called it stands still. It
also may be killed, which is the only way to end a call of it.

Started by the tier as `python -m mlkv.store.tiers.mooncake_client POOL_FD CHANNEL_FD...`. Serves each channel, a
socket, in a thread. Ends when a channel does, so that it does not outlive who started it.
"""

from __future__ import annotations

import mmap
import os
import signal
import sys
import threading
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from mlkv.store.shared_memory import map_shared_memory
from mlkv.store.tiers import mooncake_wire as wire
from mlkv.store.tiers.mapped_file import address_of

_LOCAL_BUFFER_BYTES = 16 << 20
"""For values that are not in registered memory, which we have none of; Mooncake's own default."""

_NOTE_BYTES = 4096
_NOTE_MARK = b"\x01"
"""Before every note, since Mooncake keeps no empty values."""


class MooncakeClient:
    """Carries out orders on a store that was joined."""

    def __init__(self, setup: wire.Setup, pool_fd: int, num_channels: int) -> None:
        """Join the store. May not return.

        Raises ImportError if Mooncake is not installed, OSError if the store cannot be joined.
        """
        from mooncake.store import MooncakeDistributedStore, ReplicateConfig

        self._pool = map_shared_memory(pool_fd, setup.pool_offset + setup.pool_bytes)
        self._pool_bytes = setup.pool_bytes
        self._pool_address = address_of(memoryview(self._pool)) + setup.pool_offset
        self._notes = mmap.mmap(-1, num_channels * _NOTE_BYTES)
        self._keep: Any = ReplicateConfig()
        self._keep.with_hard_pin = True  # notes are not evicted
        self._store: Any = MooncakeDistributedStore()
        code = self._store.setup(
            setup.local_host,
            setup.metadata,
            setup.segment_bytes,
            _LOCAL_BUFFER_BYTES,
            setup.protocol,
            setup.devices,
            setup.master,
        )
        if code != 0:
            raise OSError(f"Mooncake's setup failed with code {code}")
        self._register(self._pool_address, setup.pool_bytes)
        self._register(address_of(memoryview(self._notes)), len(self._notes))

    def carry_out(self, order: wire.Order, channel: int) -> wire.Outcome:
        store, names = self._store, order.names
        if order.operation == "exist":
            return wire.Outcome(store.batch_is_exist(names))
        if order.operation == "get":
            return wire.Outcome(
                store.batch_get_into(names, self._addresses(order), [order.page_bytes] * len(names))
            )
        if order.operation == "put":
            # "Upsert" replaces what is there; "put" keeps it and says the same.
            sizes = [order.page_bytes] * len(names)
            return wire.Outcome(store.batch_upsert_from(names, self._addresses(order), sizes))
        if order.operation == "remove":
            # By force: what was looked up or read a short time ago is under a lease, and would stay.
            return wire.Outcome(store.batch_remove(names, True))
        if order.operation == "clear":
            return wire.Outcome([store.remove_by_regex(names[0], True)])
        if order.operation == "close":
            return wire.Outcome([store.close()])
        start = channel * _NOTE_BYTES
        address = address_of(memoryview(self._notes)) + start
        if order.operation == "load_note":
            (size,) = store.batch_get_into(names, [address], [_NOTE_BYTES])
            value = self._notes[start : start + size] if size > 0 else b""
            return wire.Outcome([size], value.removeprefix(_NOTE_MARK))
        value = _NOTE_MARK + order.value
        self._notes[start : start + len(value)] = value
        return wire.Outcome(store.batch_upsert_from(names, [address], [len(value)], self._keep))

    def _addresses(self, order: wire.Order) -> list[int]:
        if any(not 0 <= offset <= self._pool_bytes - order.page_bytes for offset in order.offsets):
            raise ValueError("a page that is not in the pool")
        return [self._pool_address + offset for offset in order.offsets]

    def _register(self, address: int, num_bytes: int) -> None:
        code = self._store.register_buffer(address, num_bytes)
        if code != 0:
            raise OSError(f"Mooncake's register_buffer failed with code {code} for {num_bytes} bytes")


def serve(client: MooncakeClient, channel: Connection, number: int) -> NoReturn:
    """Carry out what comes over one channel, until it ends."""
    try:
        while True:
            order = wire.decode_order(channel.recv_bytes())
            try:
                outcome = client.carry_out(order, number)
            except Exception as error:  # told to whoever ordered it; the next order may go well
                outcome = wire.Outcome(error=f"{type(error).__name__}: {error}")
            channel.send_bytes(wire.encode(outcome))
    finally:
        # At once and for all threads: others may be in calls that do not return, and Mooncake's own destructors
        # wait for its master.
        os._exit(0)


def main(arguments: list[str]) -> None:
    pool_fd = int(arguments[0])
    channels = [Connection(int(fd)) for fd in arguments[1:]]
    setup = wire.decode_setup(channels[0].recv_bytes())
    # Nothing in Python ends a `setup` that hangs, since it holds the interpreter lock. This signal's default does.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, setup.deadline_s)
    try:
        client = MooncakeClient(setup, pool_fd, len(channels))
        outcome = wire.Outcome()
    except Exception as error:  # told to who started this process
        outcome = wire.Outcome(error=f"{type(error).__name__}: {error}")
    signal.setitimer(signal.ITIMER_REAL, 0)
    channels[0].send_bytes(wire.encode(outcome))
    if outcome.error:
        os._exit(1)
    for number, channel in enumerate(channels[1:], start=1):
        threading.Thread(target=serve, args=(client, channel, number), daemon=True).start()
    serve(client, channels[0], 0)


if __name__ == "__main__":
    main(sys.argv[1:])
