"""What can go wrong in profiles, as one tree.

    ProfileError
    ├── InvalidProfileError     a profile, cost table, budget or argument that cannot be right
    ├── UnknownReferenceError   no such board in the catalogue; names those there are
    ├── MeasurementError        a measurement gave nothing that can be used
    └── AllocationError         not even the shallowest prefix fits the device

This is the ground floor: nothing here knows of `edge_sdk.errors`.
"""

from __future__ import annotations


class ProfileError(Exception):
    """Base of every error this package raises on purpose; its text says what to do next."""


class InvalidProfileError(ProfileError, ValueError):
    """A value that cannot be right; names the field, what was expected and what was got."""


class UnknownReferenceError(ProfileError, LookupError):
    """No such board in the catalogue."""


class MeasurementError(ProfileError):
    """A measurement gave nothing that can be used."""


class AllocationError(ProfileError):
    """Not even the shallowest prefix fits the device; says by how much it misses."""
