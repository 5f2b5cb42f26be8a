"""Every configuration is read back by Triton's own schema and says what was declared."""

from __future__ import annotations

import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2 as pb

from cosytriton_ensemble.config import config_text, configurations
from cosytriton_ensemble.families import COSYVOICE2, FAMILIES, Family
from cosytriton_ensemble.pipeline import PIPELINES, pipeline_of
from cosytriton_ensemble.profiles import CPU, GPU, PROFILES, Profile
from cosytriton_ensemble.protocol import request_message
from cosytriton_ensemble.spec import Dim, Ensemble, Stage, Tensor

EVERY_PROFILE = pytest.mark.parametrize("profile", PROFILES.values(), ids=list(PROFILES))
EVERY_FAMILY = pytest.mark.parametrize("family", FAMILIES.values(), ids=list(FAMILIES))
TYPES = {
    "FP32": pb.TYPE_FP32,
    "INT32": pb.TYPE_INT32,
    "INT64": pb.TYPE_INT64,
    "BOOL": pb.TYPE_BOOL,
    "BYTES": pb.TYPE_STRING,
}


def parsed(model: Stage | Ensemble, profile: Profile = CPU) -> pb.ModelConfig:
    return text_format.Parse(config_text(model, profile), pb.ModelConfig())


def models_of(family: Family) -> list[Stage | Ensemble]:
    pipeline = pipeline_of(family)
    return [*pipeline.native_stages, *pipeline.python_stages, *pipeline.ensembles]


@EVERY_FAMILY
def test_tensors_have_their_names_types_and_shapes(family: Family) -> None:
    for model in models_of(family):
        config = parsed(model)
        assert config.name == model.name
        for declared, given in ((model.inputs, config.input), (model.outputs, config.output)):
            assert [(t.name, t.data_type, list(t.dims)) for t in given] == [
                (t.name, TYPES[t.dtype], [-1 if isinstance(d, Dim) else d for d in t.dims]) for t in declared
            ]
        optional = {tensor.name for tensor in config.input if tensor.optional}
        assert optional == {tensor.name for tensor in model.inputs if tensor.optional}


@EVERY_FAMILY
def test_native_stages_run_on_tritons_onnxruntime_backend(family: Family) -> None:
    for stage in pipeline_of(family).native_stages:
        config = parsed(stage)
        assert config.backend == "onnxruntime"
        assert config.default_model_filename == "model.onnx"
        assert [group.kind for group in config.instance_group] == [pb.ModelInstanceGroup.KIND_CPU]


@EVERY_PROFILE
@EVERY_FAMILY
def test_only_a_gpu_gathers_requests_to_batches_and_waits_for_them(family: Family, profile: Profile) -> None:
    for stage in pipeline_of(family).native_stages:
        config = parsed(stage, profile)
        delay = config.dynamic_batching.max_queue_delay_microseconds
        assert (config.max_batch_size, delay) == ((8, 2_000) if profile.gpu else (1, 0))


@EVERY_PROFILE
@EVERY_FAMILY
def test_what_names_no_priority_lets_urgent_requests_pass(family: Family, profile: Profile) -> None:
    message = request_message("flow", {}, "1", urgent=True)
    for stage in pipeline_of(family).native_stages:
        batching = parsed(stage, profile).dynamic_batching
        urgent = message.parameters["priority"].uint64_param
        assert 1 <= urgent < batching.default_priority_level <= batching.priority_levels
    assert "priority" not in request_message("flow", {}, "1").parameters


# What each profile serves: backend, kind of its instances, file of a stage with weights, and without.
SERVED = {
    "cpu": ("onnxruntime", pb.ModelInstanceGroup.KIND_CPU, "model.onnx", "model.onnx"),
    "cpu_int8": ("onnxruntime", pb.ModelInstanceGroup.KIND_CPU, "model.int8.onnx", "model.onnx"),
    "gpu": ("onnxruntime", pb.ModelInstanceGroup.KIND_GPU, "model.onnx", "model.onnx"),
    "gpu_fp16": ("tensorrt", pb.ModelInstanceGroup.KIND_GPU, "model.fp16.plan", "model.fp16.plan"),
    "gpu_int8": ("tensorrt", pb.ModelInstanceGroup.KIND_GPU, "model.int8.plan", "model.int8.plan"),
}
DEVICES = {"cpu": "cpu", "cpu_int8": "cpu", "gpu": "cuda", "gpu_fp16": "tensorrt", "gpu_int8": "tensorrt"}


@EVERY_PROFILE
@EVERY_FAMILY
def test_a_profile_decides_what_of_a_native_stage_is_served_and_where(
    family: Family, profile: Profile
) -> None:
    backend, kind, learned, unlearned = SERVED[profile.name]
    pipeline = pipeline_of(family)
    for stage in pipeline.native_stages:
        config = parsed(stage, profile)
        assert config.backend == backend
        assert [group.kind for group in config.instance_group] == [kind]
        assert config.default_model_filename == (unlearned if stage is pipeline.prompt_mel else learned)


@EVERY_PROFILE
@EVERY_FAMILY
def test_nothing_else_of_a_native_stage_differs_but_what_onnxruntime_alone_knows(
    family: Family, profile: Profile
) -> None:
    for stage in pipeline_of(family).native_stages:
        config, usual = parsed(stage, profile), parsed(stage, GPU if profile.gpu else CPU)
        assert config.HasField("optimization") == (config.backend == "onnxruntime")
        if config.backend == "tensorrt":
            assert not config.parameters
            for field in ("optimization", "parameters"):
                usual.ClearField(field)
        for field in ("backend", "instance_group", "default_model_filename"):
            config.ClearField(field)
            usual.ClearField(field)
        assert config == usual


@EVERY_PROFILE
@EVERY_FAMILY
def test_the_language_model_stays_a_python_model_and_is_told_its_graph_and_device(
    family: Family, profile: Profile
) -> None:
    config = parsed(pipeline_of(family).speech_lm, profile)
    assert config.backend == "python"
    assert config.parameters["model_file"].string_value == SERVED[profile.name][2]
    assert config.parameters["device"].string_value == DEVICES[profile.name]
    assert config.parameters["slots"].string_value == "8"


@EVERY_FAMILY
def test_a_model_with_a_graph_has_a_file_for_each_profile_and_the_others_one_for_all(family: Family) -> None:
    pipeline = pipeline_of(family)
    others = [f"configs/{name}.pbtxt" for name in ("cpu_int8", "gpu", "gpu_fp16", "gpu_int8")]
    for model in models_of(family):
        graph = model in pipeline.graph_stages
        assert list(configurations(model)) == ["config.pbtxt", *(others if graph else [])]
        assert configurations(model)["config.pbtxt"] == config_text(model)
        for profile in PROFILES.values():  # Triton falls back to `config.pbtxt`
            assert configurations(model).get(profile.config_file, config_text(model)) == config_text(
                model, profile
            )


@EVERY_FAMILY
def test_native_stages_warm_up_with_every_input_at_its_smallest(family: Family) -> None:
    for stage in pipeline_of(family).native_stages:
        (warm_up,) = parsed(stage).model_warmup
        assert {name: tuple(entry.dims) for name, entry in warm_up.inputs.items()} == {
            tensor.name: tensor.shape("min") for tensor in stage.inputs
        }


@EVERY_FAMILY
def test_only_the_stages_of_a_voice_are_cached(family: Family) -> None:
    pipeline = pipeline_of(family)
    cached = {model.name for model in models_of(family) if parsed(model).response_cache.enable}
    assert cached == {
        stage.name for stage in (pipeline.speaker_embedding, pipeline.audio_tokenizer, pipeline.prompt_mel)
    }


@EVERY_FAMILY
def test_streams_are_decoupled_and_tts_answers_once(family: Family) -> None:
    decoupled = {m.name for m in models_of(family) if parsed(m).model_transaction_policy.decoupled}
    assert decoupled == {"speech_lm", "tts_stream"}


@EVERY_FAMILY
def test_python_models_are_told_their_family(family: Family) -> None:
    for stage in pipeline_of(family).python_stages:
        config = parsed(stage)
        assert config.backend == "python"
        assert config.parameters["family"].string_value == family.name


def test_an_ensemble_runs_its_steps() -> None:
    voice_encoder = pipeline_of(COSYVOICE2).voice_encoder
    config = parsed(voice_encoder)
    assert config.platform == "ensemble"
    steps = config.ensemble_scheduling.step
    assert [step.model_name for step in steps] == [step.stage.name for step in voice_encoder.steps]
    assert dict(steps[-1].input_map) == dict(voice_encoder.steps[-1].inputs)


def test_clients_ask_every_family_alike() -> None:
    """The rates and the padding differ, names and types of what crosses the border do not."""

    def signature(tensors: tuple[Tensor, ...]) -> list[tuple[str, str, int, bool]]:
        return [(t.name, t.dtype, len(t.dims), t.optional) for t in tensors]

    for asked in ("voice_encoder", "tts", "tts_stream"):
        models = [getattr(pipeline, asked) for pipeline in PIPELINES.values()]
        for model in models:
            assert signature(model.inputs) == signature(models[0].inputs)
            assert signature(model.outputs) == signature(models[0].outputs)


def test_settings_are_text_that_a_model_reads() -> None:
    stage = Stage("s", (), (), backend="python", parameters=(("slots", 8), ("family", "cosyvoice2")))
    values = {key: value.string_value for key, value in parsed(stage).parameters.items()}
    assert values == {"slots": "8", "family": "cosyvoice2"}
