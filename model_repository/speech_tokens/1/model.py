"""Triton loads the model `speech_tokens` from here; its code is in `cosytriton_ensemble.models`."""

from cosytriton_ensemble.models.speech_tokens import TritonPythonModel

__all__ = ["TritonPythonModel"]
