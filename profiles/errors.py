"""Errors of this package, as one tree.

    ProfileError
    ├── InvalidProfileError     a profile, cost table, budget or argument with a wrong value
    ├── UnknownReferenceError   a board that the catalogue does not have; lists its boards
    ├── MeasurementError        a measurement without a usable result
    └── AllocationError         the shallowest prefix does not fit the device

This package is the ground floor: it imports nothing of `edge_sdk`.
"""

from __future__ import annotations


class ProfileError(Exception):
    """Base of all errors that this package raises on purpose; the text says what to do next."""


class InvalidProfileError(ProfileError, ValueError):
    """A wrong value; names the field, what was expected and what was got."""


class UnknownReferenceError(ProfileError, LookupError):
    """The catalogue does not have this board."""


class MeasurementError(ProfileError):
    """A measurement without a usable result."""


class AllocationError(ProfileError):
    """The shallowest prefix does not fit the device; the text says by how much."""
