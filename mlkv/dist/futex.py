"""Sleeping until a word of shared memory changes (Linux futex), for ranks that must share their cores."""

from __future__ import annotations

import ctypes
import errno
import mmap
import platform

_SYSCALL = {"x86_64": 202, "aarch64": 98}  # the number of futex, from the kernel's tables
_WAIT, _WAKE = 0, 1  # from linux/futex.h, not of the private kind: waiters are other processes
_ALL = 0x7FFFFFFF
_HALF = 0xFFFFFFFF
_HEADER_WORD = 0  # never changes


class _Timespec(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


class WordWaits:
    """Waits for aligned 64-bit words of a mapping, and wake-ups of those who wait. Little-endian only.

    The kernel compares the word and puts the waiter to sleep in one step, so a change between the waiter's look
    and its sleep is not missed.
    """

    def __init__(self, memory: mmap.mmap, number: int) -> None:
        self._number = ctypes.c_long(number)
        self._anchor = ctypes.c_char.from_buffer(memory)  # keeps the mapping where it is
        self._base = ctypes.addressof(self._anchor)
        self._call = ctypes.CDLL(None, use_errno=True).syscall

    @classmethod
    def of(cls, memory: mmap.mmap) -> WordWaits | None:
        """None where this machine is of another kind, or its kernel or a sandbox does not allow it."""
        number = _SYSCALL.get(platform.machine())
        if number is None:
            return None
        waits = cls(memory, number)
        other = int.from_bytes(memory[8 * _HEADER_WORD : 8 * _HEADER_WORD + 4], "little") ^ 1
        if waits.wait(_HEADER_WORD, other, 0.0) == errno.EAGAIN:
            return waits
        waits.close()
        return None

    def wait(self, at: int, seen: int, timeout_s: float) -> int:
        """Sleep while the lower half of word `at` is that of `seen`, for `timeout_s` (less than 1 s) at most.

        Returns 0 or the errno that tells why it did not sleep on.
        """
        timeout = _Timespec(0, int(timeout_s * 1e9))
        address, half = ctypes.c_void_p(self._base + 8 * at), ctypes.c_uint32(seen & _HALF)
        if self._call(self._number, address, _WAIT, half, ctypes.byref(timeout), None, 0) == 0:
            return 0
        return ctypes.get_errno()

    def wake(self, at: int) -> None:
        """Wake all that wait for word `at`. After the word was written."""
        self._call(self._number, ctypes.c_void_p(self._base + 8 * at), _WAKE, _ALL, None, None, 0)

    def close(self) -> None:
        """Let the mapping go. No use after that."""
        del self._anchor
