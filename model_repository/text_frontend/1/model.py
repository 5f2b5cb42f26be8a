"""Triton loads the model `text_frontend` from here; its code is in `cosytriton_ensemble.models`."""

from cosytriton_ensemble.models.text_frontend import TritonPythonModel

__all__ = ["TritonPythonModel"]
