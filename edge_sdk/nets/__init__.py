from edge_sdk.nets.registry import NAMES, build
from edge_sdk.nets.supernet import Normalise, Supernet, View

__all__ = ["NAMES", "Normalise", "Supernet", "View", "build"]
