"""The text format of Prometheus, version 0.0.4: families of samples to text. Pure.

prometheus-client writes the same. It would take 1.5 MiB of a running agent, and a tenth of a second
at its start (docs/decisions/0040-metrics.md).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"


@dataclass(frozen=True, slots=True)
class Sample:
    """One value of a family, told apart from the others by its labels.

    Attributes:
        suffix: of its name beyond the family's: `_bucket`, `_sum`, `_count` or "".
    """

    value: float
    labels: Mapping[str, str] = field(default_factory=dict)
    suffix: str = ""


@dataclass(frozen=True, slots=True)
class Family:
    """A metric with its samples; the name of a counter ends in `_total`."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    about: str
    samples: Sequence[Sample]


def counter(name: str, about: str, values: Mapping[str, float], label: str) -> Family:
    """A counter with one label."""
    samples = [Sample(value, {label: key}) for key, value in values.items()]
    return Family(name, "counter", about, samples)


def single(
    name: str,
    kind: Literal["counter", "gauge"],
    about: str,
    value: float | None,
) -> Family:
    """A metric without labels; it has no sample if the value is None."""
    return Family(name, kind, about, [] if value is None else [Sample(value)])


def histogram(
    edges: Sequence[float], counts: Sequence[int], total: float, labels: Mapping[str, str]
) -> list[Sample]:
    """The samples of a histogram for one set of labels.

    Args:
        edges: upper bounds of all bins but the last, ascending.
        counts: of the bins, one more than edges. total: sum of what was counted.
    """
    samples, below = [], 0
    for edge, count in zip([*edges, math.inf], counts, strict=True):
        below += count
        samples.append(Sample(below, {**labels, "le": shown(edge)}, "_bucket"))
    return [*samples, Sample(total, labels, "_sum"), Sample(below, labels, "_count")]


def exposition(families: Iterable[Family]) -> bytes:
    """The text of these metrics; those without samples are left out."""
    lines = []
    for family in families:
        if not family.samples:
            continue
        lines.append(f"# HELP {family.name} {_escaped(family.about)}")
        lines.append(f"# TYPE {family.name} {family.kind}")
        for sample in family.samples:
            pairs = ",".join(f'{key}="{_quoted(value)}"' for key, value in sample.labels.items())
            name = (
                f"{family.name}{sample.suffix}{{{pairs}}}" if pairs else family.name + sample.suffix
            )
            lines.append(f"{name} {shown(sample.value)}")
    return ("\n".join(lines) + "\n").encode()


def shown(value: float) -> str:
    """A number as the format has it."""
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return str(int(value)) if value == int(value) and abs(value) < 2**53 else repr(float(value))


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n")


def _quoted(text: str) -> str:
    return _escaped(text).replace('"', r"\"")
