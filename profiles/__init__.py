"""What a device is and what a model costs: the ground floor, without torch."""

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
