from edge_sdk.nets.layers import Norm
from edge_sdk.nets.registry import NAMES, build
from edge_sdk.nets.supernet import NetSpec, Normalise, Supernet, View

__all__ = ["NAMES", "NetSpec", "Norm", "Normalise", "Supernet", "View", "build"]
