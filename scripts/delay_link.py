"""Two network devices joined by a link that delays every frame; for kernels without `tc netem`.

    python scripts/delay_link.py FIRST SECOND DELAY_MS

Makes two TAP devices of these names, prints "ready", and carries frames between them until it is ended. Once
made, they may be moved into network namespaces. Needs root.
"""

from __future__ import annotations

import fcntl
import os
import select
import struct
import sys
import time
from collections import deque

# From linux/if_tun.h.
_TUNSETIFF = 0x400454CA
_IFF_TAP = 0x0002
_IFF_NO_PI = 0x1000

_FRAME_BYTES = 65536
_MAX_QUEUED = 4096  # frames under way in each direction; more are dropped, as a full link does
_WAKE_EARLY_S = 0.0001  # a timed wait may end this late, so the rest is spun


def open_tap(name: str) -> int:
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TAP | _IFF_NO_PI))
    return fd


def relay(first: int, second: int, delay_s: float) -> None:
    peer = {first: second, second: first}
    under_way: deque[tuple[float, int, bytes]] = deque()  # in order of their time of arrival
    while True:
        wait_s = None if not under_way else max(0.0, under_way[0][0] - time.perf_counter() - _WAKE_EARLY_S)
        for fd in select.select([first, second], [], [], wait_s)[0]:
            try:
                frame = os.read(fd, _FRAME_BYTES)
            except OSError:  # the device is down at the moment
                continue
            if len(under_way) < 2 * _MAX_QUEUED:
                under_way.append((time.perf_counter() + delay_s, peer[fd], frame))
        while under_way and under_way[0][0] <= time.perf_counter():
            _, fd, frame = under_way.popleft()
            try:
                os.write(fd, frame)
            except OSError:  # the device is down at the moment: the frame is lost
                continue


def main() -> None:
    first, second, delay_ms = sys.argv[1:]
    devices = open_tap(first), open_tap(second)
    print("ready", flush=True)
    relay(*devices, float(delay_ms) / 1e3)


if __name__ == "__main__":
    main()
