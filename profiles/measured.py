"""Measurements on a device: what its bundles take there, and how it fares as it lives.

`BundleMeasurement` is made by a bundle's trial, `Conditions` by the running agent. Both are sent to
the server as JSON. A reader ignores members that it does not know, so that a newer device can tell
an older server more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final, cast

from profiles.checks import number, optional, text, whole
from profiles.errors import InvalidProfileError
from profiles.fields import check_fields, need

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
        return _read(cls, "graph", data, ("latency_ms", "memory_bytes", "runs"))


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
        fields = _object("measurement", data)
        graphs = _object("measurement: graphs", fields.get("graphs"))
        made = {str(name): GraphMeasurement.from_dict(graph) for name, graph in graphs.items()}
        known = ("bundle", "graphs", "score_gflops", "memory_bytes")
        return _read(cls, "measurement", {**fields, "graphs": made}, known)


@dataclass(frozen=True, slots=True)
class Conditions:
    """How a device fares now, as far as its agent knows; None for what it does not.

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
        known = tuple(cls.__dataclass_fields__)
        return _read(cls, "conditions", _object("conditions", data), known, needed=("bundle",))


def _read(
    kind: Any, owner: str, data: object, known: tuple[str, ...], needed: tuple[str, ...] = ()
) -> Any:
    fields = _object(owner, data)
    missing = [name for name in needed or known if name not in fields]
    need(not missing, owner, "fields", f"all of {', '.join(needed or known)}", f"without {missing}")
    return kind(**{name: fields[name] for name in known if name in fields})


def _object(owner: str, data: object) -> Mapping[str, object]:
    if not isinstance(data, Mapping):
        raise InvalidProfileError(f"{owner}: expected an object, got {type(data).__name__}")
    return cast("Mapping[str, object]", data)
