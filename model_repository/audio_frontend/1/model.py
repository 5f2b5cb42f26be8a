"""Triton loads the model `audio_frontend` from here; its code is in `cosytriton_ensemble.models`."""

from cosytriton_ensemble.models.audio_frontend import TritonPythonModel

__all__ = ["TritonPythonModel"]
