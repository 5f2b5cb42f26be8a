"""Triton loads the model `tts_stream` from here; its code is in `cosytriton_ensemble.models`."""

from cosytriton_ensemble.models.tts_stream import TritonPythonModel

__all__ = ["TritonPythonModel"]
