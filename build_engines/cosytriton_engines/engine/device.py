"""Memory of the GPU and one stream of work on it, through NVIDIA's `cuda-python`.

Its functions return an error code first; here each is checked. Like TensorRT's, its objects are `Any`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType
from typing import Any, Self

from cosytriton_engines.engine.builder import EngineError, imported
from cosytriton_ensemble.spec import Array

MODULE = "cuda.bindings.runtime"
REQUIREMENT = "cuda-python"

Address = int
"""Of memory on the device."""


def cuda_runtime() -> Any:
    """The module `cuda.bindings.runtime`; `EngineError` where it is not installed."""
    return imported(MODULE, f"Run `pip install {REQUIREMENT}` in the version of the machine's CUDA.")


class Closing(ABC):
    """A `with` statement closes it."""

    @abstractmethod
    def close(self) -> None:
        """Give the GPU's memory back."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Device(Closing):
    """The current GPU: what is asked of it is done in this order, and `wait` waits for all of it.

    Args:
        cuda: the module `cuda.bindings.runtime`.

    Raises:
        EngineError: CUDA refuses, here or in any method.

    """

    def __init__(self, cuda: Any) -> None:
        self._cuda = cuda
        self._addresses: set[Address] = set()
        (self._stream,) = self._done(cuda.cudaStreamCreate())

    @property
    def stream(self) -> int:
        """The stream's handle."""
        return int(self._stream)

    def allocate(self, size: int) -> Address:
        """Memory of `size` bytes, aligned to 256 bytes at least, all zero."""
        (address,) = self._done(self._cuda.cudaMalloc(max(1, size)))
        self._addresses.add(address := int(address))
        self.clear(address, size)
        return address

    def free(self, address: Address) -> None:
        """Give memory back that `allocate` gave."""
        self._addresses.remove(address)
        self._done(self._cuda.cudaFree(address))

    def clear(self, address: Address, size: int) -> None:
        """Set `size` bytes to zero."""
        self._done(self._cuda.cudaMemsetAsync(address, 0, size, self._stream))

    def upload(self, address: Address, array: Array) -> None:
        """Copy a C-contiguous array to the device; it may be changed afterwards."""
        kind = self._cuda.cudaMemcpyKind.cudaMemcpyHostToDevice
        self._copy(address, array.ctypes.data, array.nbytes, kind)

    def download(self, array: Array, address: Address) -> None:
        """Copy from the device into a C-contiguous array; it is filled after `wait`."""
        kind = self._cuda.cudaMemcpyKind.cudaMemcpyDeviceToHost
        self._copy(array.ctypes.data, address, array.nbytes, kind)

    def move(self, target: Address, source: Address, size: int) -> None:
        """Copy bytes within the device; the places must not overlap."""
        self._copy(target, source, size, self._cuda.cudaMemcpyKind.cudaMemcpyDeviceToDevice)

    def wait(self) -> None:
        """Return when all is done; an error of earlier work shows here."""
        self._done(self._cuda.cudaStreamSynchronize(self._stream))

    def close(self) -> None:
        """Give all memory back; the device cannot be used any more."""
        for address in tuple(self._addresses):
            self.free(address)
        self._done(self._cuda.cudaStreamDestroy(self._stream))

    def _copy(self, target: int, source: int, size: int, kind: Any) -> None:
        self._done(self._cuda.cudaMemcpyAsync(target, source, size, kind, self._stream))

    def _done(self, answer: tuple[Any, ...]) -> tuple[Any, ...]:
        """What a function gave behind its error code."""
        status, *values = answer
        if status != self._cuda.cudaError_t.cudaSuccess:
            _, text = self._cuda.cudaGetErrorString(status)
            raise EngineError(f"CUDA says: {text.decode()} ({status.name}).")
        return tuple(values)
