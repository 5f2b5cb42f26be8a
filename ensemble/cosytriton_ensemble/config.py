"""Triton's model configurations, derived from the declarations through Triton's own protobuf schema.

`config.pbtxt` is the profile `cpu`; a model with a graph has `configs/<profile>.pbtxt` for each other one.
Triton takes `config.pbtxt` where it finds no file of the profile.
"""

from __future__ import annotations

from collections.abc import Iterable

from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2 as pb

from cosytriton_ensemble.names import DEVICE, MODEL_FILE, SHRINKAGE
from cosytriton_ensemble.profiles import CPU, FP32_GRAPH, PROFILES, Profile
from cosytriton_ensemble.spec import Dim, Ensemble, Stage, Tensor

MAX_QUEUE = 256  # requests that may wait for a native stage; more are refused as UNAVAILABLE
DEFAULT_MODEL = FP32_GRAPH

_TYPES = {"BYTES": pb.TYPE_STRING}
_HEADER = "# Derived from cosytriton_ensemble/pipeline.py by `cosytriton repository`; do not edit.\n"


def configurations(model: Stage | Ensemble) -> dict[str, str]:
    """Every configuration of a model, by its path below the model's folder."""
    profiles = PROFILES.values() if isinstance(model, Stage) and model.has_graph else (CPU,)
    return {profile.config_file: config_text(model, profile) for profile in profiles}


def config_text(model: Stage | Ensemble, profile: Profile = CPU) -> str:
    """The configuration of a model for a profile."""
    config = _ensemble(model) if isinstance(model, Ensemble) else _stage(model, profile)
    return _HEADER + text_format.MessageToString(config)


def _is_native(stage: Stage) -> bool:
    return stage.backend != "python"


def _stage(stage: Stage, profile: Profile) -> pb.ModelConfig:
    # A CPU computes a batch in the time of its rows one after another: each has its answer earlier alone.
    max_batch = stage.max_batch if profile.gpu else 1
    config = _named(stage.name, stage.inputs, stage.outputs, max_batch)
    if stage.decoupled:
        config.model_transaction_policy.decoupled = True
    if stage.cached:
        config.response_cache.enable = True
    if _is_native(stage):
        _native(config, stage, profile)
        return config
    config.backend = stage.backend
    # A Python model that uses a GPU moves its tensors there itself.
    config.instance_group.add(count=stage.instances, kind=pb.ModelInstanceGroup.KIND_CPU)
    _set_parameters(config, stage.parameters)
    if profile.serves(stage):
        _set_parameters(config, ((MODEL_FILE, profile.artifact_of(stage)), (DEVICE, profile.device)))
    return config


def _native(config: pb.ModelConfig, stage: Stage, profile: Profile) -> None:
    config.backend = profile.backend
    config.default_model_filename = profile.artifact_of(stage)
    kind = pb.ModelInstanceGroup.KIND_GPU if profile.gpu else pb.ModelInstanceGroup.KIND_CPU
    config.instance_group.add(count=stage.instances, kind=kind)
    if (
        profile.backend == "onnxruntime"
    ):  # TensorRT optimizes when it builds, and knows none of the parameters
        config.optimization.graph.level = 1  # every graph optimization of ONNX Runtime
        _set_parameters(config, stage.parameters)
        if not profile.gpu and dict(stage.parameters).get("enable_mem_arena", 1):
            # What a long request alone needs is given back after it, for 2 % of its time.
            _set_parameters(config, ((SHRINKAGE, "cpu:0"),))
    _batch(config.dynamic_batching, stage, profile)
    _warm_up(config.model_warmup.add(), stage)


def _set_parameters(config: pb.ModelConfig, parameters: Iterable[tuple[str, int | str]]) -> None:
    for key, value in parameters:
        config.parameters[key].string_value = str(value)


def _batch(batching: pb.ModelDynamicBatching, stage: Stage, profile: Profile) -> None:
    batching.max_queue_delay_microseconds = stage.queue_delay_us if profile.gpu else 0
    batching.priority_levels, batching.default_priority_level = 2, 2  # `URGENT`, and everything else
    batching.default_queue_policy.max_queue_size = MAX_QUEUE


def _warm_up(warm_up: pb.ModelWarmup, stage: Stage) -> None:
    """One run at the smallest shape when the model loads; zero counts make every row padding."""
    warm_up.name = "smallest"
    warm_up.batch_size = 1
    for tensor in stage.inputs:
        entry = warm_up.inputs[tensor.name]
        entry.data_type = _type(tensor)
        entry.dims.extend(tensor.shape("min"))
        entry.zero_data = True


def _ensemble(ensemble: Ensemble) -> pb.ModelConfig:
    config = _named(ensemble.name, ensemble.inputs, ensemble.outputs, 1)
    config.platform = "ensemble"
    for step in ensemble.steps:
        entry = config.ensemble_scheduling.step.add(model_name=step.stage.name, model_version=-1)
        entry.input_map.update(step.inputs)
        entry.output_map.update(step.outputs)
    return config


def _named(name: str, inputs: Iterable[Tensor], outputs: Iterable[Tensor], max_batch: int) -> pb.ModelConfig:
    config = pb.ModelConfig(name=name, max_batch_size=max_batch)
    for tensor in inputs:
        config.input.add(
            name=tensor.name, data_type=_type(tensor), dims=_dims(tensor), optional=tensor.optional
        )
    for tensor in outputs:
        config.output.add(name=tensor.name, data_type=_type(tensor), dims=_dims(tensor))
    return config


def _type(tensor: Tensor) -> pb.DataType:
    return _TYPES.get(tensor.dtype) or pb.DataType.Value(f"TYPE_{tensor.dtype}")


def _dims(tensor: Tensor) -> list[int]:
    return [-1 if isinstance(d, Dim) else d for d in tensor.dims]
