"""Profiles: which artifact of each stage a machine serves, and on what.

A profile is a `--model-config-name` of Triton: `cpu` is each model's `config.pbtxt`, the others lie in
`<model>/configs/<profile>.pbtxt`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from cosytriton_ensemble.errors import InputError
from cosytriton_ensemble.spec import Stage

Precision = Literal["fp32", "fp16", "int8"]
Device = Literal["cpu", "cuda", "tensorrt"]
"""What computes a Python model's graph: ONNX Runtime on the CPU, on a GPU, or TensorRT."""

FP32_GRAPH = "model.onnx"
FP16_GRAPH = "model.fp16.onnx"  # typed half precision
INT8_GRAPH = "model.int8.onnx"  # the forms that ONNX Runtime runs fastest on a CPU
QDQ_GRAPH = "model.qdq.onnx"  # symmetric Q/DQ around half precision, as TensorRT wants it

_MODEL, _TEXT_ENCODER = "model.", "text_encoder."


@dataclass(frozen=True, slots=True)
class Profile:
    """One way to serve the repository.

    Attributes:
        name: what `serve --profile` and `build --profile` are given.
        precision: of the weights.
        gpu: whether a GPU computes.
        graph: the ONNX file that is served, or that the plan is built from.
        plan: the TensorRT plan that is served, None where ONNX Runtime serves the graph.

    """

    name: str
    precision: Precision
    gpu: bool
    graph: str
    plan: str | None = None

    @property
    def backend(self) -> Literal["onnxruntime", "tensorrt"]:
        """Triton's backend of the native stages."""
        return "onnxruntime" if self.plan is None else "tensorrt"

    @property
    def device(self) -> Device:
        """What computes the graphs of Python models."""
        if self.plan is not None:
            return "tensorrt"
        return "cuda" if self.gpu else "cpu"

    @property
    def config_file(self) -> str:
        """A model's configuration of this profile, below the model's folder."""
        return "config.pbtxt" if self.name == CPU.name else f"configs/{self.name}.pbtxt"

    def graph_of(self, stage: Stage) -> str:
        """File name of a stage's ONNX graph; a stage without learned weights stays FP32."""
        return self.graph if stage.learned else FP32_GRAPH

    def serves(self, stage: Stage) -> bool:
        """Whether the profile has an artifact of the stage."""
        return stage.has_graph and (stage.planned or self.plan is None)

    def artifact_of(self, stage: Stage) -> str:
        """File name of what is served for a stage: its plan, or its graph."""
        return self.plan if self.plan is not None else self.graph_of(stage)


CPU = Profile("cpu", "fp32", gpu=False, graph=FP32_GRAPH)
CPU_INT8 = Profile("cpu_int8", "int8", gpu=False, graph=INT8_GRAPH)
GPU = Profile("gpu", "fp32", gpu=True, graph=FP32_GRAPH)
GPU_FP16 = Profile("gpu_fp16", "fp16", gpu=True, graph=FP16_GRAPH, plan="model.fp16.plan")
GPU_INT8 = Profile("gpu_int8", "int8", gpu=True, graph=QDQ_GRAPH, plan="model.int8.plan")

PROFILES = {profile.name: profile for profile in (CPU, CPU_INT8, GPU, GPU_FP16, GPU_INT8)}


def profile_named(name: str) -> Profile:
    """Look a profile up by its name; InputError when there is none."""
    if name not in PROFILES:
        raise InputError(f"There is no profile {name!r}; known are {', '.join(PROFILES)}.")
    return PROFILES[name]


def profile_of(artifact: str) -> Profile | None:
    """The profile that a file is built for; None for what the export writes."""
    built = (profile for profile in PROFILES.values() if profile.graph != FP32_GRAPH)
    return next((profile for profile in built if artifact in (profile.graph, profile.plan)), None)


def text_encoder_of(model: str) -> str:
    """File name of the text encoder beside a language model's graph or plan, where its family has one."""
    return _TEXT_ENCODER + model.removeprefix(_MODEL)


def model_of(file: str) -> str:
    """File name of the artifact whose manifest lists a file: itself, or the model that it lies beside."""
    owner = file.removesuffix(".data")
    return _MODEL + owner.removeprefix(_TEXT_ENCODER) if owner.startswith(_TEXT_ENCODER) else owner
