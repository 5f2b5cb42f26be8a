"""Triton's `config.pbtxt`, derived from the declarations through Triton's own protobuf schema."""

from __future__ import annotations

from collections.abc import Iterable

from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2 as pb

from cosytriton_ensemble.spec import Dim, Ensemble, Stage, Tensor

MAX_QUEUE = 256  # requests that may wait for a native stage; more are refused as UNAVAILABLE
DEFAULT_MODEL = "model.onnx"

_TYPES = {"BYTES": pb.TYPE_STRING}
_HEADER = "# Derived from cosytriton_ensemble/pipeline.py by `cosytriton repository`; do not edit.\n"


def config_text(model: Stage | Ensemble) -> str:
    """The `config.pbtxt` of a model for the profile `cpu`."""
    config = _ensemble(model) if isinstance(model, Ensemble) else _stage(model)
    return _HEADER + text_format.MessageToString(config)


def _stage(stage: Stage) -> pb.ModelConfig:
    config = _named(stage.name, stage.inputs, stage.outputs, stage.max_batch)
    config.backend = stage.backend
    config.instance_group.add(count=stage.instances, kind=pb.ModelInstanceGroup.KIND_CPU)
    if stage.decoupled:
        config.model_transaction_policy.decoupled = True
    for key, value in stage.parameters:
        config.parameters[key].string_value = str(value)
    if stage.cached:
        config.response_cache.enable = True
    if stage.backend == "onnxruntime":
        config.default_model_filename = DEFAULT_MODEL
        config.optimization.graph.level = 1  # every graph optimization of ONNX Runtime
        _batch(config.dynamic_batching, stage)
        _warm_up(config.model_warmup.add(), stage)
    return config


def _batch(batching: pb.ModelDynamicBatching, stage: Stage) -> None:
    batching.max_queue_delay_microseconds = stage.queue_delay_us
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
