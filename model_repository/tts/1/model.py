"""Triton loads the model `tts` from here; its code is in `cosytriton_ensemble.models`."""

from cosytriton_ensemble.models.tts import TritonPythonModel

__all__ = ["TritonPythonModel"]
