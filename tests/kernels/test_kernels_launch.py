"""Launches through the driver hand a kernel exactly the bytes that it expects, or leave it to Triton."""

from __future__ import annotations

import ctypes
import struct
from types import SimpleNamespace
from typing import Any

import pytest

from mlkv.kernels.launch import DriverLaunch, launch_of

ARGUMENTS = "PPPPiiiiii"
LAID_OUT = [(0, 8), (8, 8), (16, 8), (24, 8), (32, 4), (36, 4), (40, 4), (44, 4), (48, 4), (52, 4)]
SCRATCH = [(56, 8), (64, 8)]
VALUES = (1 << 63, 2, 3, 4, 5, 6, -7, 8, 9, 10)


class Driver:
    """Stands for the CUDA driver: knows where a kernel's parameters are, and keeps what was launched."""

    def __init__(self, parameters: list[tuple[int, int]] | None, status: int = 0) -> None:
        self.launched: list[tuple[tuple[int, ...], bytes]] = []
        self._status = status

        def launch(*arguments: Any) -> int:
            *numbers, _, extra = arguments
            found = (ctypes.c_void_p * 5).from_address(extra)
            assert (found[0], found[2], found[4]) == (1, 2, None), "buffer, its size, end"
            size = ctypes.c_size_t.from_address(found[3] or 0).value
            self.launched.append((tuple(numbers), ctypes.string_at(found[1] or 0, size)))
            return self._status

        def describe(function: int, index: int, offset: Any, size: Any) -> int:
            assert parameters is not None
            if index >= len(parameters):
                return 1
            offset._obj.value, size._obj.value = parameters[index]
            return 0

        def name_error(status: int, name: Any) -> int:
            name._obj.value = b"CUDA_ERROR_OF_THE_TEST"
            return 0

        # Functions, as those of a library, take a declaration of their arguments.
        self.cuLaunchKernel = launch
        self.cuGetErrorString = name_error
        if parameters is not None:
            self.cuFuncGetParamInfo = describe


class Kernel:
    """Stands for a compiled Triton kernel."""

    run = function = 77

    def __init__(self, **unusual: int) -> None:
        self.metadata = SimpleNamespace(num_warps=4, shared=128, num_ctas=1, global_scratch_size=0)
        self.metadata.profile_scratch_size = self.metadata.launch_pdl = 0
        self.metadata.__dict__.update(unusual)
        self.by_triton: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        return lambda *arguments, stream: self.by_triton.append((grid, stream, *arguments))


@pytest.mark.parametrize("scratch", [[], SCRATCH[:1], SCRATCH], ids=["none", "one", "two"])
def test_arguments_lie_where_the_kernel_reads_them(scratch: list[tuple[int, int]]) -> None:
    driver, kernel = Driver(LAID_OUT + scratch), Kernel()
    launch = launch_of(driver, kernel, ARGUMENTS, ("constant",))  # type: ignore[arg-type]
    for stream in (5, 6):
        launch(9, stream, *VALUES)
    assert not kernel.by_triton
    (numbers, packed), (again, _) = driver.launched
    assert numbers == (77, 9, 1, 1, 4 * 32, 1, 1, 128, 5)
    assert again[-1] == 6
    assert len(packed) == 56 + 8 * len(scratch)
    for value, code, (offset, size) in zip(VALUES, ARGUMENTS, LAID_OUT, strict=True):
        assert struct.unpack(code, packed[offset : offset + size]) == (value,)
    assert not any(packed[56:]), "no scratch memory"


@pytest.mark.parametrize(
    ("parameters", "unusual"),
    [
        (None, {}),
        (LAID_OUT[:-1], {}),
        ([*LAID_OUT[:4], (32, 8), *LAID_OUT[5:]], {}),
        ([*LAID_OUT, (56, 4)], {}),
        (LAID_OUT, {"global_scratch_size": 64}),
        (LAID_OUT, {"launch_pdl": 1}),
        (LAID_OUT, {"num_ctas": 2}),
    ],
    ids=["an old driver", "one less", "another size", "no pointer", "scratch", "dependent launch", "cluster"],
)
def test_a_kernel_that_wants_anything_else_is_launched_by_triton(
    parameters: list[tuple[int, int]] | None, unusual: dict[str, int]
) -> None:
    driver, kernel = Driver(parameters), Kernel(**unusual)
    launch_of(driver, kernel, ARGUMENTS, ("constant", 3))(9, 5, *VALUES)  # type: ignore[arg-type]
    assert not driver.launched
    assert kernel.by_triton == [((9, 1, 1), 5, *VALUES, "constant", 3)]


def test_a_refused_launch_is_an_error_that_says_why() -> None:
    launch = DriverLaunch(
        Driver([], status=700),  # type: ignore[arg-type]
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
