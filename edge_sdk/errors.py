"""Errors on a device, as one tree.

    SplitedgeError
    ├── ConfigurationError      settings that cannot work; edit them
    ├── InputError              an input of the wrong shape, dtype or value
    ├── BundleError             the model files on this device
    │   ├── ManifestError           a manifest with something missing or wrong
    │   ├── NoBundleError           no bundle has been installed yet
    │   ├── OutOfMemoryError        no memory to load a graph or to run it
    │   └── UpdateRefusedError      a new bundle was refused; the old one keeps running
    ├── StorageError            a disk that is full or read-only
    ├── EnrolmentError          the server refused to enrol this device
    ├── LinkError               the server or broker cannot be reached
    ├── StateInUseError         another agent runs on this state folder
    ├── HiddenPackageError      a user's file hides one of our packages
    └── FrameError              bytes from a peer that are not a valid frame
        ├── FrameTooLargeError      larger than a declared limit
        └── NotFiniteError          numbers that reached infinity or NaN

A server that cannot be reached is normal for a device: `predict` never raises LinkError.
"""

from __future__ import annotations

import reprlib
from typing import Final

_REPR: Final = reprlib.Repr()
_REPR.maxlevel = 3
_REPR.maxstring = _REPR.maxother = 100


def shown(value: object) -> str:
    """`value` as an error quotes it: at most 200 characters.

    A value from a peer may be long or deep. `repr` exhausts the stack on a thousand nested lists,
    which fit in two kilobytes of JSON.
    """
    return _REPR.repr(value)[:200]


class SplitedgeError(Exception):
    """Base of all errors that splitedge raises on purpose; the text says what to do next."""


class ConfigurationError(SplitedgeError):
    """Settings that cannot work, alone or together."""


class InputError(SplitedgeError, ValueError):
    """An input of the wrong shape, dtype or value; names expected and got."""


class BundleError(SplitedgeError):
    """Something is wrong with the model files on this device."""


class ManifestError(BundleError):
    """A manifest with something missing or wrong."""


class NoBundleError(BundleError):
    """No bundle has been installed on this device yet."""


class OutOfMemoryError(BundleError, MemoryError):
    """The device has no memory to load a graph or to run it; a smaller bundle may have enough."""


class UpdateRefusedError(BundleError):
    """A new bundle was refused; the one installed before keeps running."""


class WrongAnswersError(UpdateRefusedError):
    """A trial in which the golden inputs did not get the golden answers; it would fail again."""


class TrialTimeoutError(UpdateRefusedError):
    """A trial that was not finished in its time; another one soon after would wait as long."""


class StorageError(SplitedgeError):
    """The disk is full or read-only; the text says how much space is needed and available.

    `needed_bytes` and `available_bytes` are None if the disk has enough space.
    """

    def __init__(
        self,
        message: str,
        *,
        needed_bytes: int | None = None,
        available_bytes: int | None = None,
    ) -> None:
        super().__init__(message)
        self.needed_bytes = needed_bytes
        self.available_bytes = available_bytes


class EnrolmentError(SplitedgeError):
    """The server refused to enrol this device."""


class LinkError(SplitedgeError):
    """The server or broker cannot be reached."""


class StateInUseError(SplitedgeError):
    """Another agent already runs on this state folder."""


class HiddenPackageError(SplitedgeError, ImportError):
    """A user's file has the name of one of our packages, and Python finds it first."""


class FrameError(SplitedgeError):
    """Bytes from a peer that are not a valid frame."""


class FrameTooLargeError(FrameError):
    """A frame, header or tensor that is larger than its declared limit."""


class NotFiniteError(FrameError):
    """A peer's weights, features or gradients hold infinity or NaN: its training diverges."""
