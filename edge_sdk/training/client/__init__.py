"""The client half of every method: the same object in a simulation and on a device."""

from edge_sdk.training.client.client import TrainingClient

__all__ = ["TrainingClient"]
