"""Triton loads the model `speech_lm` from here; its code is in `cosytriton_ensemble.models`."""

from cosytriton_ensemble.models.speech_lm import TritonPythonModel

__all__ = ["TritonPythonModel"]
