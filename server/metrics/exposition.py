"""The metrics of one process as Prometheus reads them."""

from __future__ import annotations

from typing import Final

from prometheus_client import CollectorRegistry, Gauge, ProcessCollector
from prometheus_client.exposition import choose_encoder

import edge_sdk

# from half a millisecond to ten seconds: an idle engine answers in the first, a deadline ends there
SECONDS: Final = (
    0.0005,
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
)


def new_registry(program: str) -> CollectorRegistry:
    """A registry with what every program tells: its release, and its memory, CPU and files.

    Args:
        program: `server`, `backend` or `trainer`.
    """
    registry = CollectorRegistry(auto_describe=False)
    ProcessCollector(registry=registry)
    about = Gauge(
        "splitedge_build_info", "Release of the program.", ("program", "version"), registry=registry
    )
    about.labels(program, edge_sdk.__version__).set(1)
    return registry


def exposition(registry: CollectorRegistry, accept: str = "") -> tuple[bytes, str]:
    """The metrics, and their content type.

    Args:
        accept: the header of the request; OpenMetrics is given if it is asked for.
    """
    encode, content_type = choose_encoder(accept)
    return encode(registry), content_type
