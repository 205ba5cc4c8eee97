"""Launches of compiled Triton kernels through the driver, with arguments that are packed here.

Triton's own launch of a compiled kernel runs some 12 us of Python on the thread of the engine, several times for
each transfer. What it does there that these kernels need - put the arguments at the kernel's offsets and call the
driver - is done here in a third of that. A kernel's assembly says where it expects its parameters; one that wants
anything else than what was packed for it is left to Triton.
"""

from __future__ import annotations

import ctypes
import re
import struct
import threading
from collections.abc import Callable, Sequence
from typing import Any

from mlkv.kernels.driver import check

_WARP_THREADS = 32
_POINTER_BYTES = 8
_CONFIG = struct.Struct("7IPPI0P")
"""CUlaunchConfig: programs and threads, each in three dimensions; bytes of shared memory; stream; attributes."""
_END, _BUFFER_POINTER, _BUFFER_SIZE = 0, 1, 2  # CU_LAUNCH_PARAM_*

Launch = Callable[..., None]
"""Queues a kernel: called with (programs, stream as a raw handle, arguments as plain integers...)."""


class DriverLaunch:
    """A kernel in the current context, launched as a row of programs.

    Args:
        function: handle of the kernel.
        arguments: native `struct` code of each argument.
        num_scratch: pointers after the arguments, for scratch memory that the kernel does not use.
        shared_bytes: shared memory of a program.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        function: int,
        arguments: str,
        *,
        num_scratch: int,
        num_threads: int,
        shared_bytes: int,
    ) -> None:
        self._library = library
        # The call that takes most of its arguments in a structure: converting them cost ctypes a microsecond.
        self._launch = library.cuLaunchKernelEx
        self._launch.argtypes = (ctypes.c_void_p,) * 4
        self._function, self._num_threads, self._shared_bytes = function, num_threads, shared_bytes
        self._config = ctypes.create_string_buffer(_CONFIG.size)
        self._config_address = ctypes.addressof(self._config)
        self._packing = struct.Struct(arguments + "P" * num_scratch)
        self._scratch = (0,) * num_scratch
        self._buffer = ctypes.create_string_buffer(self._packing.size)
        self._size = ctypes.c_size_t(self._packing.size)
        self._extra = (ctypes.c_void_p * 5)(
            _BUFFER_POINTER, ctypes.addressof(self._buffer), _BUFFER_SIZE, ctypes.addressof(self._size), _END
        )
        self._extra_address = ctypes.addressof(self._extra)
        # The driver has read both buffers when the call returns; until then they are of one thread.
        self._lock = threading.Lock()

    def __call__(self, num_programs: int, stream: int, *arguments: int) -> None:
        with self._lock:
            self._packing.pack_into(self._buffer, 0, *arguments, *self._scratch)
            _CONFIG.pack_into(
                self._config, 0, num_programs, 1, 1, self._num_threads, 1, 1, self._shared_bytes, stream, 0, 0
            )
            status = self._launch(self._config_address, self._function, None, self._extra_address)
        if status:
            check(self._library, status, "to launch a kernel")


def launch_of(library: ctypes.CDLL, kernel: Any, arguments: str, constants: Sequence[Any]) -> Launch:
    """How to launch a Triton kernel that was compiled for the current device.

    Args:
        library: the CUDA driver.
        kernel: `triton.compiler.CompiledKernel`.
        arguments: native `struct` code of each argument that is no constant; those come first.
        constants: the others.
    """
    _ = kernel.run  # loads it
    num_scratch = _num_scratch(kernel, arguments)
    if num_scratch is not None and hasattr(library, "cuLaunchKernelEx"):  # drivers of CUDA 11.8 and later
        return DriverLaunch(
            library,
            kernel.function,
            arguments,
            num_scratch=num_scratch,
            num_threads=kernel.metadata.num_warps * _WARP_THREADS,
            shared_bytes=kernel.metadata.shared,
        )

    def launch(num_programs: int, stream: int, *given: int) -> None:
        kernel[num_programs, 1, 1](*given, *constants, stream=stream)

    return launch


def _num_scratch(kernel: Any, arguments: str) -> int | None:
    """How many unused pointers the kernel takes after its arguments; None for a kernel of another kind."""
    metadata = kernel.metadata
    unwanted = ("global_scratch_size", "profile_scratch_size", "launch_cooperative_grid", "launch_pdl")
    if metadata.num_ctas != 1 or any(getattr(metadata, name, None) for name in unwanted):
        return None
    found = parameter_bytes(kernel.asm.get("ptx", ""))
    wanted = [struct.calcsize(code) for code in arguments]
    scratch = found[len(wanted) :]
    if found[: len(wanted)] != wanted or any(size != _POINTER_BYTES for size in scratch):
        return None
    return len(scratch)


def parameter_bytes(ptx: str) -> list[int]:
    """Sizes of a kernel's parameters, each of which begins on a multiple of its own; empty when none are found.

    Args:
        ptx: assembly of the kernel, as `.entry name(.param .u64 ..., .param .u32 ...)`.
    """
    entry = re.search(r"\.entry\s+\w+\s*\(([^)]*)\)", ptx)
    if entry is None:
        return []
    parameters = [re.match(r"\s*\.param\s+\.[bsuf](8|16|32|64)\s", text) for text in entry[1].split(",")]
    return [int(found[1]) // 8 for found in parameters if found] if all(parameters) else []
