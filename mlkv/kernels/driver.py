"""The CUDA driver through ctypes: streams, events, and loading the library.

torch has events too. These cost a third as much, and several are recorded for each chunk of a transfer, on the
thread of an engine whose step they prolong. Its streams come from a pool of 32, which all of a process share.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache

_LIBRARY = "libcuda.so.1"
_SUCCESS = 0
_NOT_READY = 600  # CUDA_ERROR_NOT_READY
_DISABLE_TIMING = 2  # CU_EVENT_DISABLE_TIMING
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING: no order with the default stream but by events


@lru_cache(maxsize=1)
def driver() -> ctypes.CDLL:
    """The driver, for calls that take long: other threads run meanwhile. OSError when there is none."""
    return ctypes.CDLL(_LIBRARY)


@lru_cache(maxsize=1)
def quick_driver() -> ctypes.CDLL:
    """The driver, for calls that only queue something. OSError when there is none.

    They keep the interpreter lock: whoever gave it up for a microsecond would wait up to 5 ms to get it back from
    another busy thread.
    """
    return ctypes.PyDLL(_LIBRARY)


def check(library: ctypes.CDLL, status: int, what: str) -> None:
    """Raise RuntimeError unless `status` is success."""
    if status != _SUCCESS:
        name = ctypes.c_char_p()
        library.cuGetErrorString(status, ctypes.byref(name))
        reason = name.value.decode() if name.value else "unknown error"
        raise RuntimeError(f"CUDA driver refused {what}: {reason} ({status})")


def create_stream(library: ctypes.CDLL, priority: int) -> int:
    """Raw handle of a new stream of the current context; lower priorities are more urgent."""
    handle = ctypes.c_void_p()
    status = library.cuStreamCreateWithPriority(ctypes.byref(handle), _NON_BLOCKING, priority)
    check(library, status, "to create a stream")
    assert handle.value is not None
    return handle.value


class StreamEvents:
    """Makes events on streams, given as raw handles; the handles of dropped events are used again.

    All calls need the streams' context to be the thread's current one.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._create = library.cuEventCreate
        self._destroy = library.cuEventDestroy_v2
        self._record = library.cuEventRecord
        self._query_event = library.cuEventQuery
        self._query_stream = library.cuStreamQuery
        self._wait = library.cuStreamWaitEvent
        for function in (self._query_event, self._query_stream, self._destroy):
            function.argtypes = (ctypes.c_void_p,)
        self._record.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
        self._wait.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint)
        self.unused: list[int] = []

    def record(self, stream: int) -> StreamEvent:
        event = StreamEvent(self, self.unused.pop() if self.unused else self._new())
        status = self._record(event.handle, stream)
        if status:
            check(self._library, status, "to record an event")
        return event

    def wait(self, stream: int, event: StreamEvent) -> None:
        """What is queued on the stream from now on begins after the event, however its handle is used later."""
        status = self._wait(stream, event.handle, 0)
        if status:
            check(self._library, status, "to let a stream wait for an event")

    def is_over(self, event: StreamEvent) -> bool:
        return self._is_ready(self._query_event(event.handle), "to query an event")

    def is_idle(self, stream: int) -> bool:
        return self._is_ready(self._query_stream(stream), "to query a stream")

    def close(self) -> None:
        """Destroy what is unused. Events that are still held are left to the end of the process."""
        while self.unused:
            self._destroy(self.unused.pop())

    def _new(self) -> int:
        handle = ctypes.c_void_p()
        check(self._library, self._create(ctypes.byref(handle), _DISABLE_TIMING), "to create an event")
        assert handle.value is not None
        return handle.value

    def _is_ready(self, status: int, what: str) -> bool:
        if status != _SUCCESS and status != _NOT_READY:
            check(self._library, status, what)
        return status == _SUCCESS


class StreamEvent:
    """See `device.Event`."""

    __slots__ = ("_events", "handle")

    def __init__(self, events: StreamEvents, handle: int) -> None:
        self._events = events
        self.handle = handle

    def query(self) -> bool:
        return self._events.is_over(self)

    def __del__(self) -> None:
        self._events.unused.append(self.handle)
