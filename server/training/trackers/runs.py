"""A training's report as trackers of experiments take it: parameters, and figures by step."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import orjson

from edge_sdk.errors import ConfigurationError, StorageError
from server.training.report.report import REPORT

_OF_ROUND: Final = ("accuracy", "loss", "bytes_up", "bytes_down", "seconds", "processor_s")
_COUNTED: Final = ("participants", "missing", "refused")
_OF_ENERGY: Final = ("joules", "watts", "watts_per_point", "co2_g")


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """One training.

    Attributes:
        name: of its folder.
        parameters: the recipe's values by dotted name, as `train.learning_rate`.
        rounds: number of each round, and its figures by name.
        final: figures after the last round by name, those of classes as `class/NAME`.
        digest: SHA-256 of the report, in hex: a report that is exported again is known by it.
        written_at: UTC seconds since 1970.
    """

    name: str
    parameters: Mapping[str, str]
    rounds: Sequence[tuple[int, Mapping[str, float]]]
    final: Mapping[str, float]
    digest: str
    written_at: float

    @property
    def last_round(self) -> int:
        """Number of the last round; 0 for a training without one."""
        return self.rounds[-1][0] if self.rounds else 0


def find_runs(folder: Path) -> list[TrackedRun]:
    """The training in a folder, or those in its folders, as comparisons and sweeps leave them.

    Raises: ConfigurationError where there is none; StorageError for a report that cannot be read.
    """
    if (folder / REPORT).is_file():
        return [read_run(folder)]
    found = sorted(path.parent for path in folder.glob(f"*/{REPORT}"))
    if not found:
        raise ConfigurationError(
            f"{folder}: expected {REPORT} of a training in it or in its folders; give the --out of"
            " `splitedge simulate`, `splitedge train`, `splitedge compare` or `splitedge sweep`"
        )
    return [read_run(each) for each in found]


def read_run(folder: Path) -> TrackedRun:
    """The training whose report is in the folder.

    Raises: StorageError.
    """
    path = folder / REPORT
    try:
        raw, written_at = path.read_bytes(), path.stat().st_mtime
        report: Mapping[str, Any] = orjson.loads(raw)
        return TrackedRun(
            folder.resolve().name,
            dict(_flat(report["recipe"])),
            [(row["round"], dict(_of_round(row))) for row in report["rounds"]],
            dict(_of_end(report["final"], report.get("energy") or {})),
            hashlib.sha256(raw).hexdigest(),
            written_at,
        )
    except (OSError, orjson.JSONDecodeError, KeyError, TypeError, AttributeError) as err:
        raise StorageError(f"{path}: expected the report of a training ({err!r})") from err


def _of_round(row: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    yield from _numbers((name, row.get(name)) for name in _OF_ROUND)
    yield from _numbers((name, len(row.get(name) or ())) for name in _COUNTED)


def _of_end(final: Mapping[str, Any], energy: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    yield from _numbers(final.items())
    by_class = final.get("accuracy_by_class") or {}
    yield from _numbers((f"class/{name}", value) for name, value in by_class.items())
    yield from _numbers((name, energy.get(name)) for name in _OF_ENERGY)


def _numbers(values: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, float]]:
    """Finite numbers alone: a figure that is not defined is null in a report."""
    for name, value in values:
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if number and math.isfinite(value):
            yield name, float(value)


def _flat(table: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, str]]:
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{before}{key}.")
        elif value is not None:
            text = value if isinstance(value, str) else orjson.dumps(value).decode()
            yield f"{before}{key}", text
