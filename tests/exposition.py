"""Check of a text for Prometheus: its syntax, and the rules of names of `promtool check metrics`.

The syntax is read by prometheus-client's own parser, the rules are those of
https://prometheus.io/docs/practices/naming.
"""

from __future__ import annotations

import re
from itertools import pairwise

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

NAME = re.compile(r"(splitedge|process|python)_[a-z0-9_]*[a-z0-9]")
BASE_UNITS = ("seconds", "bytes", "joules", "ratio", "info")
OTHER_UNITS = re.compile(
    r"_(ms|us|ns|milliseconds|microseconds|minutes|hours|kilobytes|kb|mb|percent|watts_hours)(_|$)"
)
RESERVED = {"le", "quantile", "job", "instance"}


def families_of(text: str) -> dict[str, Metric]:
    """The families of a text, each of which keeps the rules."""
    assert text.endswith("\n")
    found = {family.name: family for family in text_string_to_metric_families(text)}
    assert found
    for family in found.values():
        _check(family)
    return found


def value_of(families: dict[str, Metric], name: str, **labels: str) -> float:
    """The value of the only sample with that name that has these labels."""
    values = [
        sample.value
        for family in families.values()
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    ]
    assert len(values) == 1, (name, labels, values)
    return float(values[0])


def _check(family: Metric) -> None:
    name = family.name
    assert NAME.fullmatch(name), name
    assert family.documentation.strip(), f"{name} has no help"
    assert family.type in {"counter", "gauge", "histogram"}, (name, family.type)
    assert not OTHER_UNITS.search(name), f"{name}: base units are {BASE_UNITS}"
    assert not name.endswith(("_count", "_sum", "_bucket")), name
    for sample in family.samples:
        if family.type == "counter":
            assert sample.name == f"{name}_total"
            assert sample.value >= 0
        elif family.type == "gauge":
            assert sample.name == name
            assert not name.endswith("_total"), f"{name}: only counters end so"
        allowed = {"le"} if family.type == "histogram" else set()
        assert not (set(sample.labels) & RESERVED) - allowed, sample
    keys = [(sample.name, tuple(sorted(sample.labels.items()))) for sample in family.samples]
    assert len(set(keys)) == len(keys), f"{name}: a sample is there twice"
    if family.type == "histogram":
        _check_histogram(family)


def _check_histogram(family: Metric) -> None:
    series: dict[tuple[tuple[str, str], ...], list[tuple[float, float]]] = {}
    counts = {}
    for sample in family.samples:
        labels = tuple(sorted((key, text) for key, text in sample.labels.items() if key != "le"))
        if sample.name.endswith("_bucket"):
            series.setdefault(labels, []).append((float(sample.labels["le"]), sample.value))
        elif sample.name.endswith("_count"):
            counts[labels] = sample.value
        else:
            assert sample.name == f"{family.name}_sum"
    for labels, buckets in series.items():
        assert all(low < high for (low, _), (high, _) in pairwise(buckets))
        assert all(few <= many for (_, few), (_, many) in pairwise(buckets))
        assert buckets[-1] == (float("inf"), counts[labels])
