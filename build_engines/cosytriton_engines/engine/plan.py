"""A TensorRT plan at work: it is opened, runs feeds, and is compared with the graph it was built from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cosytriton_engines.engine.builder import EngineError, error_logger
from cosytriton_engines.engine.device import Address, Closing, Device
from cosytriton_ensemble.manifest import how_to_make
from cosytriton_ensemble.spec import Feed

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Binding:
    """An input or output of an engine.

    `alias` is the input whose memory an output shares: an updated cache lies where the cache lay.
    `ranges` has the smallest, tuned and largest shape of an input in each profile.
    """

    name: str
    dtype: np.dtype[Any]
    ranges: tuple[tuple[Shape, ...], ...] = ()
    alias: str | None = None

    def fits(self, shape: Shape, profile: int) -> bool:
        """Whether the profile admits the shape of the input."""
        small, _, large = self.ranges[profile]
        return len(shape) == len(small) and all(
            low <= size <= high for low, size, high in zip(small, shape, large, strict=True)
        )

    def distance(self, shape: Shape, profile: int) -> int:
        """How far a shape of the input is from the one that the profile is tuned for."""
        return sum(abs(size - usual) for size, usual in zip(shape, self.ranges[profile][1], strict=True))


class OpenPlan:
    """A plan that TensorRT has taken: its inputs and outputs, and a context for each profile.

    Args:
        plan: the file.
        trt: the module `tensorrt`.
        version_compatible: it was built so; it brings code of the TensorRT that built it.

    Raises:
        EngineError: there is no plan, or it does not fit this GPU or this TensorRT.

    """

    def __init__(self, plan: Path, *, trt: Any, version_compatible: bool = False) -> None:
        self.path, self._logger = plan, error_logger(trt)
        data = plan.read_bytes() if plan.is_file() else b""
        if not data:
            state = "is empty" if plan.is_file() else "is not there"
            raise EngineError(f"The plan {plan} {state}. {how_to_make(plan.absolute())}")
        self._runtime = trt.Runtime(self._logger)
        if version_compatible:
            self._runtime.engine_host_code_allowed = True
        self._engine = self._runtime.deserialize_cuda_engine(data)
        if self._engine is None:
            raise EngineError(
                f"{plan}: TensorRT {trt.__version__} cannot open it on this GPU. A plan runs on the GPU "
                f"model and the version that built it. {how_to_make(plan.absolute())} {self.said()}"
            )
        self._contexts: dict[int, Any] = {}
        self.profiles = int(self._engine.num_optimization_profiles)
        self.inputs, self.outputs = self._bindings(trt)

    def said(self) -> str:
        """The errors that TensorRT has logged."""
        return str(self._logger.said())

    def context(self, profile: int, device: Device) -> Any:
        """The execution context of a profile; it has scratch memory of its own, and is made once."""
        if profile not in self._contexts:
            context = self._engine.create_execution_context()
            if context is None or not context.set_optimization_profile_async(profile, device.stream):
                raise EngineError(f"{self.path}: profile {profile} cannot run. {self.said()}")
            device.wait()
            self._contexts[profile] = context
        return self._contexts[profile]

    def fitting(self, shapes: Mapping[str, Shape]) -> list[int]:
        """The profiles that admit all shapes; `EngineError` where there is none."""
        profiles = range(self.profiles)
        fitting = [p for p in profiles if all(self.inputs[n].fits(s, p) for n, s in shapes.items())]
        if not fitting:
            self._refuse(shapes)
        return fitting

    def nearest(self, shapes: Mapping[str, Shape]) -> int:
        """The profile that admits all shapes and is tuned for the nearest ones, as Triton chooses it."""
        return min(
            self.fitting(shapes),
            key=lambda profile: sum(self.inputs[n].distance(s, profile) for n, s in shapes.items()),
        )

    def enqueue(self, context: Any, device: Device) -> None:
        """Have a context compute, behind what the device was asked before."""
        if not context.execute_async_v3(device.stream):
            raise EngineError(f"{self.path}: the engine did not run. {self.said()}")

    def _bindings(self, trt: Any) -> tuple[dict[str, Binding], dict[str, Binding]]:
        inputs: dict[str, Binding] = {}
        outputs: dict[str, Binding] = {}
        engine = self._engine
        alias_of = getattr(engine, "get_aliased_input_tensor", lambda _name: None)  # since 10.15
        for name in [engine.get_tensor_name(index) for index in range(engine.num_io_tensors)]:
            dtype = np.dtype(trt.nptype(engine.get_tensor_dtype(name)))
            if engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT:
                ranges = (engine.get_tensor_profile_shape(name, index) for index in range(self.profiles))
                inputs[name] = Binding(
                    name, dtype, tuple(tuple(tuple(shape) for shape in sizes) for sizes in ranges)
                )
            else:
                outputs[name] = Binding(name, dtype, alias=alias_of(name) or None)
        return inputs, outputs

    def _refuse(self, shapes: Mapping[str, Shape]) -> None:
        wrong = [
            f"{name} is {shape}, allowed is "
            + " or ".join(f"{small} to {large}" for small, _, large in self.inputs[name].ranges)
            for name, shape in shapes.items()
            if not any(self.inputs[name].fits(shape, index) for index in range(self.profiles))
        ]
        together = "each input fits a profile, but no profile fits all of them"
        raise EngineError(f"{self.path}: no profile admits these shapes: {'; '.join(wrong) or together}.")


class PlanRunner(Closing):
    """Runs feeds through a plan. Not thread-safe; close it, or use it in a `with` statement.

    Args:
        plan: the file.
        trt: the module `tensorrt`.
        cuda: the module `cuda.bindings.runtime`.
        version_compatible: see `OpenPlan`.

    Raises:
        EngineError: the plan cannot be opened, or CUDA refuses.

    """

    def __init__(self, plan: Path, *, trt: Any, cuda: Any, version_compatible: bool = False) -> None:
        self.plan = OpenPlan(plan, trt=trt, version_compatible=version_compatible)
        self._device = Device(cuda)
        self._buffers: dict[str, tuple[Address, int]] = {}  # of each tensor; they grow

    def run(self, feed: Feed) -> Feed:
        """The outputs for a feed, by name.

        Raises:
            EngineError: an input is missing, unknown, of another type or of a size that no profile admits;
                or the engine fails.

        """
        self._check(feed)
        profile = self.plan.nearest({name: array.shape for name, array in feed.items()})
        context = self.plan.context(profile, self._device)
        for name, array in feed.items():
            address = self._buffer(name, array.nbytes)
            self._device.upload(address, np.ascontiguousarray(array))
            if not (context.set_input_shape(name, array.shape) and context.set_tensor_address(name, address)):
                raise EngineError(f"{self.plan.path}: {name} cannot be {array.shape}. {self.plan.said()}")
        outputs = self._place_outputs(context)
        self.plan.enqueue(context, self._device)
        for name, array in outputs.items():
            self._device.download(array, self._buffers[self.plan.outputs[name].alias or name][0])
        self._device.wait()
        return outputs

    def close(self) -> None:
        """Give the GPU's memory back."""
        self._device.close()

    def _check(self, feed: Feed) -> None:
        inputs = self.plan.inputs
        if feed.keys() != inputs.keys():
            raise EngineError(f"{self.plan.path}: given are {sorted(feed)}, inputs are {sorted(inputs)}.")
        for name, array in feed.items():
            if array.dtype != inputs[name].dtype:
                raise EngineError(
                    f"{self.plan.path}: {name} is {array.dtype}, the engine takes {inputs[name].dtype}."
                )

    def _place_outputs(self, context: Any) -> Feed:
        """Give every output its memory, and an array on the host of the shape that it will have."""
        if unknown := context.infer_shapes():
            raise EngineError(f"{self.plan.path}: {unknown} do not say their shapes. {self.plan.said()}")
        outputs: Feed = {}
        for name, binding in self.plan.outputs.items():
            shape = tuple(context.get_tensor_shape(name))
            if min(shape, default=0) < 0:
                raise EngineError(
                    f"{self.plan.path}: the shape {shape} of the output {name} depends on values, which no "
                    "graph of cosytriton does. Export the model again."
                )
            outputs[name] = np.empty(shape, binding.dtype)
            address = self._buffer(binding.alias or name, outputs[name].nbytes)
            context.set_tensor_address(name, address)
        return outputs

    def _buffer(self, name: str, size: int) -> Address:
        address, room = self._buffers.get(name, (0, -1))
        if room >= size:
            return address
        if self._buffers.pop(name, None):  # forgotten first: if there is no memory, it is gone
            self._device.free(address)
        address = self._device.allocate(size)
        self._buffers[name] = address, size
        return address
