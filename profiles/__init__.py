"""Profiles of devices and costs of models: the ground floor, without torch.

Names load when first used: an agent needs the checks of values, not psutil.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from profiles.allocation import (
        Budget,
        Purpose,
        Rule,
        allocate,
        budget_depth,
        fit_to_cut,
        supersfl_depth,
        supersfl_latency_ms,
    )
    from profiles.cost import CostTable, StageCost
    from profiles.device import DeviceProfile, measure_compute_score_gflops, probe
    from profiles.errors import (
        AllocationError,
        InvalidProfileError,
        MeasurementError,
        ProfileError,
        UnknownReferenceError,
    )
    from profiles.link import LinkProfile, measure_link
    from profiles.reference import load_reference, load_sources, reference_names

__all__ = [
    "AllocationError",
    "Budget",
    "CostTable",
    "DeviceProfile",
    "InvalidProfileError",
    "LinkProfile",
    "MeasurementError",
    "ProfileError",
    "Purpose",
    "Rule",
    "StageCost",
    "UnknownReferenceError",
    "allocate",
    "budget_depth",
    "fit_to_cut",
    "load_reference",
    "load_sources",
    "measure_compute_score_gflops",
    "measure_link",
    "probe",
    "reference_names",
    "supersfl_depth",
    "supersfl_latency_ms",
]

_HOME = {
    "AllocationError": "profiles.errors",
    "Budget": "profiles.allocation",
    "CostTable": "profiles.cost",
    "DeviceProfile": "profiles.device",
    "InvalidProfileError": "profiles.errors",
    "LinkProfile": "profiles.link",
    "MeasurementError": "profiles.errors",
    "ProfileError": "profiles.errors",
    "Purpose": "profiles.allocation",
    "Rule": "profiles.allocation",
    "StageCost": "profiles.cost",
    "UnknownReferenceError": "profiles.errors",
    "allocate": "profiles.allocation",
    "budget_depth": "profiles.allocation",
    "fit_to_cut": "profiles.allocation",
    "load_reference": "profiles.reference",
    "load_sources": "profiles.reference",
    "measure_compute_score_gflops": "profiles.device",
    "measure_link": "profiles.link",
    "probe": "profiles.device",
    "reference_names": "profiles.reference",
    "supersfl_depth": "profiles.allocation",
    "supersfl_latency_ms": "profiles.allocation",
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
