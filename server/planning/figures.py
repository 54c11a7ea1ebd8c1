"""Per-unit figures that a plan is made of, with the report that each is from.

figures.json beside this module is written by `python -m benchmarks.planning figures`, from the
reports in benchmarks/results, and by nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

import orjson

from edge_sdk.errors import ConfigurationError

FILE: Final = Path(__file__).with_name("figures.json")


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured figure.

    Attributes:
        report: name of its report, without the suffix.
        about: how it follows from the report.
        largest: the largest number of devices, or of queries a second, at which it was measured;
            None for a figure that does not depend on a number.
    """

    value: float
    unit: str
    report: str
    about: str
    largest: float | None = None


@dataclass(frozen=True, slots=True)
class NetworkFigures:
    """Measured figures of one network, cut at one depth.

    Attributes:
        query: payload of an offload in bytes, by codec. reply, bundle: in bytes.
        batch_s: mean seconds of the engine, by rows of a batch.
    """

    depth: int
    query: Mapping[str, float]
    reply: float
    bundle: float
    batch_s: Mapping[int, float]


@dataclass(frozen=True, slots=True)
class Figures:
    """All figures."""

    figures: Mapping[str, Figure]
    networks: Mapping[str, NetworkFigures]

    def __getitem__(self, name: str) -> Figure:
        return self.figures[name]

    def network(self, name: str) -> NetworkFigures:
        """A network's figures.

        Raises: ConfigurationError naming those that there are.
        """
        if name not in self.networks:
            known = ", ".join(self.networks)
            raise ConfigurationError(
                f"network: expected one of {known}, got {name}; for another one give the nearest"
                " of these, and its own --service-ms, --query-bytes and --bundle-bytes"
            )
        return self.networks[name]


@cache
def load_figures(path: Path = FILE) -> Figures:
    """The figures of a file, those that are shipped by default."""
    raw: dict[str, Any] = orjson.loads(path.read_bytes())
    figures = {name: Figure(**fields) for name, fields in raw["figures"].items()}
    networks = {
        name: NetworkFigures(
            **{**fields, "batch_s": {int(rows): s for rows, s in fields["batch_s"].items()}}
        )
        for name, fields in raw["networks"].items()
    }
    return Figures(figures, networks)
