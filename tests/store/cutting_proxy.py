"""A proxy between a tier and its server that breaks one connection at a chosen event."""

from __future__ import annotations

import socket
import struct
import threading
from typing import Literal

Event = Literal["connect", "write", "read"]
"""A connection is made; bytes come from the tier; bytes come from the server."""

_CHUNK_BYTES = 1 << 16
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: closing drops what is unsent, and says so to the other side


class CuttingProxy:
    """Passes everything on, but at the `number`-th event of a kind, from 0 on, resets that connection.

    What was to be written is not passed on then; of what was to be read one half is.

    Attributes:
        port: on loopback.
        has_cut: whether the event has come.
    """

    def __init__(self, server_port: int, event: Event, number: int) -> None:
        self._server_port = server_port
        self._event = event
        self._left = number
        self._lock = threading.Lock()
        self._open: list[socket.socket] = []
        self.has_cut = False
        self._is_armed = True
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._accepting = threading.Thread(target=self._accept, daemon=True)
        self._accepting.start()

    def _is_due(self, event: Event) -> bool:
        with self._lock:
            if event != self._event or self.has_cut or not self._is_armed:
                return False
            self._left -= 1
            self.has_cut = self._left < 0
            return self.has_cut

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            if self._is_due("connect"):
                _reset(near)
                continue
            far = socket.create_connection(("127.0.0.1", self._server_port))
            self._open += [near, far]
            threading.Thread(target=self._pass_on, args=(near, far, "write"), daemon=True).start()
            threading.Thread(target=self._pass_on, args=(far, near, "read"), daemon=True).start()

    def _pass_on(self, source: socket.socket, sink: socket.socket, event: Event) -> None:
        try:
            while data := source.recv(_CHUNK_BYTES):
                if self._is_due(event):
                    if event == "read":
                        sink.sendall(data[: len(data) // 2])
                    break
                sink.sendall(data)
        except OSError:
            pass  # the other direction has ended it
        _reset(source)
        _reset(sink)

    def disarm(self) -> None:
        """From now on pass everything on."""
        with self._lock:
            self._is_armed = False

    def __enter__(self) -> CuttingProxy:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)  # wakes `accept`
        self._listener.close()
        self._accepting.join()
        for connection in self._open:
            _reset(connection)


def _reset(connection: socket.socket) -> None:
    try:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # it is closed already
    connection.close()
