"""Measurements on a device: what its bundles take there, and its state as it lives.

`BundleMeasurement` is made by a bundle's trial, `Conditions` by the running agent. Both are sent to
the server as JSON. A reader ignores members that it does not know, so that a newer device can tell
an older server more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, Final, cast

from profiles.checks import number, optional, text, whole
from profiles.errors import InvalidProfileError
from profiles.fields import check_fields, need

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

GRAPHS_MAX: Final = 8
# a median of hours or of exabytes is a mistake, and would outgrow a column of the registry
_MS: Final = number(least=0, most=3_600_000)
_BYTES: Final = whole(0, 1 << 50)


@dataclass(frozen=True, slots=True)
class GraphMeasurement:
    """Measurement of one graph on a device.

    Attributes:
        latency_ms: median time of one run, with one sample and one thread.
        memory_bytes: what loading and running it added to the peak of resident memory, after the
            graphs before it were loaded.
        runs: number of timed runs.
    """

    latency_ms: float
    memory_bytes: int
    runs: int

    def __post_init__(self) -> None:
        check_fields(self, "graph", latency_ms=_MS, memory_bytes=_BYTES, runs=whole(1))

    @classmethod
    def from_dict(cls, data: object) -> GraphMeasurement:
        """Read what `asdict` wrote.

        Raises: InvalidProfileError.
        """
        return cls(**_known("graph", data, _names(cls)))


@dataclass(frozen=True, slots=True)
class BundleMeasurement:
    """Measurement of a bundle on a device.

    Attributes:
        bundle: `{model}/{version}/{variant}`.
        graphs: by name: `exit`, and `prefix` and `back` where the bundle has them.
        score_gflops: compute score of one core of the device at that time: its speed then.
        memory_bytes: what loading and running all graphs added to the peak of resident memory.
    """

    bundle: str
    graphs: Mapping[str, GraphMeasurement]
    score_gflops: float
    memory_bytes: int

    def __post_init__(self) -> None:
        check_fields(self, "measurement", bundle=text())
        owner = f"measurement of {self.bundle}"
        check_fields(self, owner, score_gflops=number(above=0), memory_bytes=_BYTES)
        need("exit" in self.graphs, owner, "graphs", "exit among them", sorted(self.graphs))
        need(len(self.graphs) <= GRAPHS_MAX, owner, "graphs", f"at most {GRAPHS_MAX}", "more")

    @property
    def latency_ms(self) -> float:
        """Median time of the graph that runs for every input, `exit`."""
        return self.graphs["exit"].latency_ms

    def to_dict(self) -> dict[str, Any]:
        """The measurement as JSON has it."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: object) -> BundleMeasurement:
        """Read what `to_dict` wrote.

        Raises: InvalidProfileError naming the field, what was expected and what was got.
        """
        table = _object("measurement", data)
        graphs = _object("measurement: graphs", table.get("graphs"))
        made = {str(name): GraphMeasurement.from_dict(graph) for name, graph in graphs.items()}
        return cls(**_known("measurement", {**table, "graphs": made}, _names(cls)))


@dataclass(frozen=True, slots=True)
class Conditions:
    """Present state of a device, as far as its agent knows it; None for what it does not.

    Attributes:
        bundle: the one that runs.
        memory_available_bytes: for bundles: free memory and what the running bundle takes.
        latency_ms: median time of an answer on the device.
        round_trip_ms: of a small message to the server and back.
        bandwidth_mbps: of the link, 10**6 bits a second, the mean of both directions.
    """

    bundle: str
    memory_available_bytes: int | None = None
    latency_ms: float | None = None
    round_trip_ms: float | None = None
    bandwidth_mbps: float | None = None

    def __str__(self) -> str:
        """One line for a log."""
        memory = self.memory_available_bytes
        told = (
            (None if memory is None else memory / 1e6, ",.0f", "MB of memory for bundles"),
            (self.latency_ms, ".3g", "ms for an answer"),
            (self.round_trip_ms, ".3g", "ms to the server and back"),
            (self.bandwidth_mbps, ".1f", "Mbit/s"),
        )
        known = [f"{value:{form}} {unit}" for value, form, unit in told if value is not None]
        return ", ".join([self.bundle, *known])

    def __post_init__(self) -> None:
        check_fields(
            self,
            "conditions",
            bundle=text(),
            memory_available_bytes=optional(_BYTES),
            latency_ms=optional(_MS),
            round_trip_ms=optional(_MS),
            bandwidth_mbps=optional(number(above=0, most=1e9)),
        )

    def to_dict(self) -> dict[str, Any]:
        """The conditions as JSON has them."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: object) -> Conditions:
        """Read what `to_dict` wrote; what is not there counts as not known.

        Raises: InvalidProfileError naming the field, what was expected and what was got.
        """
        return cls(**_known("conditions", data, _names(cls), needed=("bundle",)))


def _names(record: type[DataclassInstance]) -> list[str]:
    return [field.name for field in fields(record)]


def _known(
    owner: str, data: object, known: Sequence[str], needed: Sequence[str] | None = None
) -> dict[str, Any]:
    """The members of `data` that are known; those that are needed must be there."""
    table, needed = _object(owner, data), needed or known
    missing = [name for name in needed if name not in table]
    need(not missing, owner, "fields", f"all of {', '.join(needed)}", f"without {missing}")
    return {name: table[name] for name in known if name in table}


def _object(owner: str, data: object) -> Mapping[str, object]:
    if not isinstance(data, Mapping):
        raise InvalidProfileError(f"{owner}: expected an object, got {type(data).__name__}")
    return cast("Mapping[str, object]", data)
