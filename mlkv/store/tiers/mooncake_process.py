"""The tier's end of Mooncake's client process: starts it, gives it orders, and kills it when it hangs."""

from __future__ import annotations

import os
import queue
import signal
import socket
import subprocess
import sys
import time
from multiprocessing.connection import Connection

from mlkv.errors import TierUnavailable
from mlkv.store.tiers import mooncake_wire as wire

_MODULE = "mlkv.store.tiers.mooncake_client"


class MooncakeProcess:
    """A running client that has joined the store. Thread-safe.

    Attributes:
        is_usable: whether it has neither ended nor been killed.
    """

    def __init__(self, setup: wire.Setup, pool_fd: int, num_channels: int) -> None:
        """Start it, and wait until it has joined the store.

        Raises TierUnavailable when it has not within `setup.deadline_s`; it is gone then.
        """
        self._where = f"mooncake://{setup.master}"
        pairs = [socket.socketpair() for _ in range(num_channels)]
        theirs = [there.fileno() for _, there in pairs]
        self._channels: queue.SimpleQueue[Connection] = queue.SimpleQueue()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", _MODULE, str(pool_fd), *map(str, theirs)],
                stdin=subprocess.DEVNULL,
                # Mooncake logs each page that fails there. What is worth knowing comes back as a code, and its
                # own MC_LOG_DIR keeps the rest.
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(pool_fd, *theirs),
                start_new_session=True,  # a Ctrl-C is for who uses the store, not for it
                cwd="/",
                env=_environment(),
            )
        except OSError as error:
            for here, _ in pairs:
                here.close()
            raise TierUnavailable(
                f"{self._where}: its client process cannot be started: {error.strerror}"
            ) from error
        finally:
            for _, there in pairs:
                there.close()
        for here, _ in pairs:
            self._channels.put(Connection(here.detach()))
        self.is_usable = True
        outcome = self._exchange(wire.encode(setup), setup.deadline_s, "has not joined the store")
        if outcome.error:
            self.kill()
            if outcome.error.startswith("ModuleNotFoundError"):
                outcome.error = "the package is missing: pip install 'mlkv[mooncake]'"
            raise TierUnavailable(f"{self._where}: {outcome.error}")

    def order(self, order: wire.Order, deadline_s: float) -> wire.Outcome:
        """Have it do something. Once this returned, it touches no page for it any more.

        Raises TierUnavailable if it failed, or died, or had no answer by the deadline; it is killed then, since
        nothing else ends what it is doing.
        """
        outcome = self._exchange(wire.encode(order), deadline_s, f"did not come back from {order.operation!r}")
        if outcome.error:
            raise TierUnavailable(f"{self._where}: {outcome.error}")
        return outcome

    def kill(self) -> None:
        """End it now, and every order with it."""
        self.is_usable = False
        self._process.kill()
        self._process.wait()

    def _exchange(self, message: bytes, deadline_s: float, complaint: str) -> wire.Outcome:
        give_up_at = time.monotonic() + deadline_s
        try:
            channel = self._channels.get(timeout=deadline_s)
        except queue.Empty:
            raise TierUnavailable(f"{self._where}: all its channels are busy") from None
        try:
            channel.send_bytes(message)
            if channel.poll(max(0.0, give_up_at - time.monotonic())):
                return wire.decode_outcome(channel.recv_bytes())
        except (OSError, EOFError):
            self.kill()
            raise TierUnavailable(
                f"{self._where}: its client process has ended ({_how_ended(self._process.returncode)})"
            ) from None
        finally:
            # Also when it is of no more use: whoever waits for one learns from it that the process is gone.
            self._channels.put(channel)
        self.kill()
        raise TierUnavailable(
            f"{self._where}: its client process {complaint} within {deadline_s:g} s; it was ended"
        )


def _environment() -> dict[str, str]:
    """Ours, with the same import path however it came about."""
    paths = [os.path.abspath(entry) for entry in sys.path]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths))}


def _how_ended(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"
