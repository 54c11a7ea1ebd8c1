from edge_sdk.nets.layers import Norm
from edge_sdk.nets.own.network import use_network
from edge_sdk.nets.registry import NAMES, TOKENS, build
from edge_sdk.nets.supernet import NetSpec, Normalise, Supernet, View

__all__ = [
    "NAMES",
    "TOKENS",
    "NetSpec",
    "Norm",
    "Normalise",
    "Supernet",
    "View",
    "build",
    "use_network",
]
