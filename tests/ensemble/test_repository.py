"""The committed model repository is what the declarations say, and Triton's schema reads it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2 as pb

from cosytriton_ensemble.config import config_text
from cosytriton_ensemble.errors import RepositoryError
from cosytriton_ensemble.pipeline import (
    AUDIO_TOKENIZER,
    FLOW,
    NATIVE_STAGES,
    PROMPT_MEL_STAGE,
    SPEAKER_EMBEDDING,
    SPEECH_LM,
    TTS,
    TTS_STREAM,
)
from cosytriton_ensemble.repository import (
    artifacts,
    check_repository,
    is_untrained,
    skeleton,
    write_repository,
)

COMMITTED = Path(__file__).parents[2] / "model_repository"


@pytest.mark.parametrize("name", skeleton())
def test_committed_files_have_not_drifted(name: str) -> None:
    assert (COMMITTED / name).read_text(encoding="utf-8") == skeleton()[name], "run `cosytriton repository`"


def test_nothing_else_is_committed_as_a_model() -> None:
    declared = {name.split("/")[0] for name in skeleton()}
    assert {path.name for path in COMMITTED.iterdir() if path.is_dir()} == declared


def _parsed(model: object) -> pb.ModelConfig:
    return text_format.Parse(config_text(model), pb.ModelConfig())  # type: ignore[arg-type]


def test_native_stages_run_on_tritons_onnxruntime_backend_in_batches() -> None:
    for stage in NATIVE_STAGES:
        config = _parsed(stage)
        assert config.backend == "onnxruntime"
        assert config.default_model_filename == "model.onnx"
        assert config.max_batch_size > 1
        assert config.HasField("dynamic_batching")
        assert [group.kind for group in config.instance_group] == [pb.ModelInstanceGroup.KIND_CPU]


def test_only_the_voice_stages_are_cached() -> None:
    cached = {s.name for s in NATIVE_STAGES if _parsed(s).response_cache.enable}
    assert cached == {SPEAKER_EMBEDDING.name, AUDIO_TOKENIZER.name, PROMPT_MEL_STAGE.name}


def test_streams_are_decoupled_and_tts_is_not() -> None:
    assert _parsed(TTS_STREAM).model_transaction_policy.decoupled
    assert _parsed(SPEECH_LM).model_transaction_policy.decoupled
    steps = {step.model_name for step in _parsed(TTS).ensemble_scheduling.step}
    assert SPEECH_LM.name not in steps, "a decoupled step would make unary requests impossible"
    assert FLOW.name in steps


def test_a_repository_without_its_graphs_is_refused_with_what_is_missing(tmp_path: Path) -> None:
    write_repository(tmp_path)
    with pytest.raises(RepositoryError, match=r"lacks .*flow/1/model\.onnx.*cosytriton export"):
        check_repository(tmp_path)
    for model, name in artifacts().items():
        (tmp_path / model / "1" / name).write_bytes(b"graph")
    check_repository(tmp_path)


@pytest.mark.parametrize("untrained", [True, False])
def test_a_repository_knows_whether_its_sound_is_noise(tmp_path: Path, untrained: bool) -> None:
    assert not is_untrained(tmp_path)
    manifest = tmp_path / "flow" / "1" / "manifest.json"
    manifest.parent.mkdir(parents=True)
    manifest.write_text(json.dumps({"untrained": untrained}))
    assert is_untrained(tmp_path) == untrained
