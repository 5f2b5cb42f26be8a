"""`cuda.bindings.runtime` without NVIDIA: the device's memory is the host's.

Fresh memory is full of NaN, and work outside of an allocation or on an unknown stream is an error.
"""

from __future__ import annotations

import ctypes
import itertools
from enum import Enum
from typing import Any

import numpy as np

cudaError_t = Enum("cudaError_t", "cudaSuccess cudaErrorMemoryAllocation")  # noqa: N816
cudaMemcpyKind = Enum(  # noqa: N816
    "cudaMemcpyKind", "cudaMemcpyHostToDevice cudaMemcpyDeviceToHost cudaMemcpyDeviceToDevice"
)
OK = cudaError_t["cudaSuccess"]
ALIGNMENT = 256  # bytes, of an address that cudaMalloc gives

streams: set[int] = set()
allocated: dict[int, Any] = {}
limit = 2**40  # bytes of an allocation
_handles = itertools.count(1)


def array(address: int, size: int) -> Any:
    """Bytes of the device; they must lie in one allocation."""
    assert any(a <= address and address + size <= a + memory.nbytes for a, memory in allocated.items())
    return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))


def cudaStreamCreate() -> tuple[Any, int]:  # noqa: N802
    streams.add(handle := next(_handles))
    return OK, handle


def cudaStreamDestroy(stream: int) -> tuple[Any]:  # noqa: N802
    streams.remove(stream)
    return (OK,)


def cudaStreamSynchronize(stream: int) -> tuple[Any]:  # noqa: N802
    assert stream in streams
    return (OK,)


def cudaMalloc(size: int) -> tuple[Any, int]:  # noqa: N802
    if size > limit:
        return cudaError_t["cudaErrorMemoryAllocation"], 0
    memory = np.full(size + ALIGNMENT, 255, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    address = memory.ctypes.data + start
    allocated[address] = memory[start : start + size]
    return OK, address


def cudaFree(devPtr: int) -> tuple[Any]:  # noqa: N802, N803
    del allocated[devPtr]
    return (OK,)


def cudaMemsetAsync(devPtr: int, value: int, count: int, stream: int) -> tuple[Any]:  # noqa: N802, N803
    assert stream in streams
    array(devPtr, count)[:] = value
    return (OK,)


def cudaMemcpyAsync(dst: int, src: int, count: int, kind: Any, stream: int) -> tuple[Any]:  # noqa: N802
    assert stream in streams
    source, target = kind.name.removeprefix("cudaMemcpy").split("To")
    for address, place in ((src, source), (dst, target)):
        assert place == "Host" or len(array(address, count)) == count
    ctypes.memmove(dst, src, count)
    return (OK,)


def cudaGetErrorString(error: Any) -> tuple[Any, bytes]:  # noqa: N802
    return OK, error.name.encode()
