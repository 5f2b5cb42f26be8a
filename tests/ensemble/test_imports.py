"""What a model's process loads: each is an interpreter of its own, so that a library counts once for each."""

from __future__ import annotations

import subprocess
import sys

import pytest

CODE = """
import importlib, sys, types
sys.modules["triton_python_backend_utils"] = types.ModuleType("of Triton's stub")
importlib.import_module("cosytriton_ensemble.models." + sys.argv[1])
print(*sys.modules)
"""


@pytest.mark.parametrize(
    ("model", "needless"),
    [
        ("audio_frontend", {"onnxruntime", "grpc", "google.protobuf"}),
        ("text_frontend", {"onnxruntime", "grpc", "google.protobuf"}),
        ("speech_lm", {"grpc", "google.protobuf"}),
        ("tts", {"onnxruntime"}),
    ],
)
def test_a_model_loads_no_library_that_it_does_without(model: str, needless: set[str]) -> None:
    command = [sys.executable, "-c", CODE, model]
    loaded = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert "numpy" in loaded
    assert not needless.intersection(loaded)
