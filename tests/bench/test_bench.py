"""`cosytriton bench --quick`, from the checkpoint to the pages, through a real server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cosytriton_bench.errors import BenchError
from cosytriton_bench.results import Results
from cosytriton_bench.sessions import Decoding
from cosytriton_bench.stages import check, difference
from cosytriton_bench.worker import EagerProcess
from cosytriton_ensemble.cli import main
from cosytriton_export.checkpoint import Checkpoint
from cosytriton_export.environment import prepare_torch

VOICE = ("speaker_embedding", "audio_tokenizer", "prompt_mel")
STAGES = (
    *VOICE,
    "flow",
    "vocoder",
    "lm_prefill",
    "lm_decode_b2",
)
SERVED = ("unary", "unary:cpu", "first_audio", "overhead", "rtf", "ready", "memory", "encode_again")
CROWD = ("long_unary:cpu", "long_stream:cpu", "rate_2", "first_audio_loaded")


def test_everything_is_measured_and_written(
    tiny_checkpoint: Checkpoint,
    tiny_repository: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    request: pytest.FixtureRequest,
) -> None:
    profile = request.config.getoption("--profile")
    command = ["bench", str(tiny_checkpoint.path), "--quick", "--profile", profile]
    assert main([*command, "--repository", str(tiny_repository), "--output", str(tmp_path)]) == 0
    results = Results.read(tmp_path / "results.json")
    ours = {f"{case}/{profile}" for case in (*STAGES, *SERVED, *CROWD)}
    theirs = {f"{case}/eager" for case in (*STAGES, "unary", "first_audio", "memory")}
    assert ours | theirs <= results.figures.keys()
    assert all(figure.median > 0 for name, figure in results.figures.items() if "overhead" not in name)
    flow = next(row for row in results.roofline if row["case"] == "flow")
    assert flow["fp32"] + flow["int8"] > 0
    assert 0 < flow["reached"] < 1
    printed = capsys.readouterr().out
    assert "D3 rtf" in printed
    assert "D1 lm_decode_b1_fp32" in printed
    assert all((tmp_path / f"results.{kind}").stat().st_size > 1000 for kind in ("md", "html"))


def test_the_baseline_computes_what_the_graph_does(
    tiny_checkpoint: Checkpoint, tiny_repository: Path
) -> None:
    prepare_torch()
    import torch

    from cosytriton_bench.torch_lm import ExportedLM, logits_of

    model = Decoding.open(tiny_repository / "speech_lm" / "1" / "model.onnx", rows=1, threads=1)
    prompt, fed = model.prompt(20, 10), [model.spec.speech_offset + 3, model.spec.speech_offset]
    with torch.no_grad():
        wanted = logits_of(ExportedLM(tiny_checkpoint), prompt.tolist(), fed)
    assert difference(wanted, model.logits(prompt, fed)) < 1e-5


def test_another_checkpoint_than_the_repositorys_is_refused() -> None:
    outputs = [np.ones((1, 4), np.float32), np.ones((1, 1), np.int32)]
    check("flow", outputs, [outputs[0] + 1e-3, outputs[1]])
    for given in (
        [outputs[0] * 1.1, outputs[1]],
        [outputs[0], outputs[1] + 1],
        [outputs[0] * np.nan, outputs[1]],
    ):
        with pytest.raises(BenchError, match=r"flow: output \d of the FP32 graph differs"):
            check("flow", outputs, given)


def test_the_end_of_pytorch_is_an_error(tmp_path: Path) -> None:
    with EagerProcess(tmp_path / "absent", 1, None) as eager, pytest.raises(BenchError, match="has ended"):
        eager.call("about")


@pytest.mark.parametrize(
    ("wanted", "given", "error"),
    [
        ([1.0, -4.0], [1.0, -4.2], 0.05),
        ([0.1, 0.2], [0.1, 0.3], 0.1),
        ([1, 2, 3, 4], [1, 2, 3, 5], 0.25),
        ([1.0], [1.0, 2.0], np.inf),
    ],
)
def test_a_difference_is_relative(wanted: list[Any], given: list[Any], error: float) -> None:
    assert difference(np.array(wanted), np.array(given)) == pytest.approx(error)
