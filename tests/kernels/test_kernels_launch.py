"""Launches through the driver hand a kernel exactly the bytes that it expects, or leave it to Triton."""

from __future__ import annotations

import ctypes
import json
import os
import struct
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mlkv.kernels.launch import DriverLaunch, launch_of

ARGUMENTS = "PPPPiiiiii"
OFFSETS = (0, 8, 16, 24, 32, 36, 40, 44, 48, 52)
TYPES = ["u64 .ptr .global .align 1"] * 4 + ["u32"] * 6
SCRATCH = ["u64 .ptr .global .align 1"] * 2
VALUES = (1 << 63, 2, 3, 4, 5, 6, -7, 8, 9, 10)


COMPILE = """
import json
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from mlkv.kernels import triton_kernels
from mlkv.kernels.launch import parameter_bytes

def parameters(fn, signature, **constants):
    signature.update(dict.fromkeys(constants, "constexpr"))
    source = ASTSource(fn=fn, signature=signature, constexprs=constants)
    kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32))
    print(json.dumps(parameter_bytes(kernel.asm["ptx"])))

numbers = ("num_slices", "num_heads", "head_bytes", "num_parts", "first_part", "items_per_slice")
parameters(
    triton_kernels._move_pages,
    {"slots": "*i64", "pages": "*u8", "sums": "*i64", "table": "*i64", **dict.fromkeys(numbers, "i32")},
    SCATTER=True, ADDRESSES=False, PER_PAGE=False, ALIGNED=True, CHECKSUM=True, PAGE_TOKENS=64, BLOCK_TOKENS=16,
    COLUMNS=5, ENTRIES=2, ROWS=64, ROW_UNITS=64, UNIT_BYTES=4, PADDING_BYTES=0, TILE_ROWS=128, TILE_UNITS=64,
    SUMMED_UNITS=4, SAME_STRIDES=True,
)
parameters(triton_kernels._copy_words, {"source": "*i64", "target": "*i64", "count": "i32"}, BLOCK=1024)
"""


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig as cuda.h declares it."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("num_attributes", ctypes.c_uint),
    )


class Driver:
    """Stands for the CUDA driver: keeps what was launched, as (function, shape and stream, packed arguments)."""

    def __init__(self, status: int = 0, *, is_old: bool = False) -> None:
        self.launched: list[tuple[int, tuple[Any, ...], bytes]] = []
        self._status = status

        def launch(config_address: int, function: int, parameters: None, extra: int) -> int:
            config = LaunchConfig.from_address(config_address)
            assert (config.attributes, config.num_attributes, parameters) == (None, 0, None)
            found = (ctypes.c_void_p * 5).from_address(extra)
            assert (found[0], found[2], found[4]) == (1, 2, None), "buffer, its size, end"
            size = ctypes.c_size_t.from_address(found[3] or 0).value
            shape = (*config.grid, *config.block, config.shared_bytes, config.stream)
            self.launched.append((function, shape, ctypes.string_at(found[1] or 0, size)))
            return self._status

        def name_error(status: int, name: Any) -> int:
            name._obj.value = b"CUDA_ERROR_OF_THE_TEST"
            return 0

        # Functions, as those of a library, take a declaration of their arguments.
        if not is_old:
            self.cuLaunchKernelEx = launch
        self.cuGetErrorString = name_error


class Kernel:
    """Stands for a compiled Triton kernel."""

    run = function = 77

    def __init__(self, types: list[str], **unusual: int) -> None:
        parameters = ",\n".join(f"\t.param .{kind} move_param_{at}" for at, kind in enumerate(types))
        self.asm = {"ptx": f".version 8.7\n.visible .entry move(\n{parameters}\n)\n.reqntid 128\n{{ ret; }}"}
        self.metadata = SimpleNamespace(num_warps=4, shared=128, num_ctas=1, global_scratch_size=0)
        self.metadata.profile_scratch_size = self.metadata.launch_pdl = 0
        self.metadata.__dict__.update(unusual)
        self.by_triton: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        return lambda *arguments, stream: self.by_triton.append((grid, stream, *arguments))


@pytest.mark.parametrize("num_scratch", [0, 1, 2])
def test_arguments_lie_where_the_kernel_reads_them(num_scratch: int) -> None:
    driver, kernel = Driver(), Kernel(TYPES + SCRATCH[:num_scratch])
    launch = launch_of(driver, kernel, ARGUMENTS, ("constant",))  # type: ignore[arg-type]
    for stream in (5, 6):
        launch(9, stream, *VALUES)
    assert not kernel.by_triton
    (function, shape, packed), (_, again, _) = driver.launched
    assert (function, shape) == (77, (9, 1, 1, 4 * 32, 1, 1, 128, 5))
    assert again[-1] == 6
    assert len(packed) == 56 + 8 * num_scratch
    for value, code, offset in zip(VALUES, ARGUMENTS, OFFSETS, strict=True):
        assert struct.unpack_from(code, packed, offset) == (value,)
    assert not any(packed[56:]), "no scratch memory"


@pytest.mark.parametrize(
    ("types", "unusual"),
    [
        ([], {}),
        (TYPES[:-1], {}),
        ([*TYPES[:4], "u64", *TYPES[5:]], {}),
        ([*TYPES, "u32"], {}),
        ([*TYPES, "align 64 .b8"], {}),
        (TYPES, {"global_scratch_size": 64}),
        (TYPES, {"launch_pdl": 1}),
        (TYPES, {"num_ctas": 2}),
    ],
    ids=[
        "none",
        "one less",
        "another size",
        "no pointer",
        "a descriptor",
        "scratch",
        "dependent launch",
        "cluster",
    ],
)
def test_a_kernel_that_wants_anything_else_is_launched_by_triton(
    types: list[str], unusual: dict[str, int]
) -> None:
    driver, kernel = Driver(), Kernel(types, **unusual)
    launch_of(driver, kernel, ARGUMENTS, ("constant", 3))(9, 5, *VALUES)  # type: ignore[arg-type]
    assert not driver.launched
    assert kernel.by_triton == [((9, 1, 1), 5, *VALUES, "constant", 3)]


def test_an_old_driver_is_launched_by_triton() -> None:
    driver, kernel = Driver(is_old=True), Kernel(TYPES)
    launch_of(driver, kernel, ARGUMENTS, ())(9, 5, *VALUES)  # type: ignore[arg-type]
    assert kernel.by_triton == [((9, 1, 1), 5, *VALUES)]


def test_the_real_kernels_compiled_for_a_gpu_take_what_is_packed_for_them(tmp_path: Path) -> None:
    """By the compiler itself, for an H100, in a process of its own: this one's Triton may be the interpreter."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    moving, fetching = map(json.loads, done.stdout.splitlines())
    assert moving == [8, 8, 8, 8, 4, 4, 4, 4, 4, 4, 8, 8]
    assert fetching == [8, 8, 4, 8, 8]


def test_a_refused_launch_is_an_error_that_says_why() -> None:
    launch = DriverLaunch(
        Driver(status=700),  # type: ignore[arg-type]
        1,
        "P",
        num_scratch=0,
        num_threads=32,
        shared_bytes=0,
    )
    with pytest.raises(RuntimeError, match="refused to launch a kernel: CUDA_ERROR_OF_THE_TEST"):
        launch(1, 2, 3)
    with pytest.raises(struct.error):
        launch(1, 2, 1 << 64)
