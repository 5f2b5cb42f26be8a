"""The flow: speech tokens to mel, as PyTorch modules with the official key names."""

from cosytriton_export.flow.flow import Flow

__all__ = ["Flow"]
