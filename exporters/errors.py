"""Errors of an export, as one tree.

SplitedgeError (edge_sdk.errors)
└── ExportError             the model, its data or the target folder does not allow an export
    └── ParityError             a graph does not reproduce the torch model, so it is not published
"""

from __future__ import annotations

from edge_sdk.errors import SplitedgeError


class ExportError(SplitedgeError):
    """The model, its data or the target folder does not allow an export."""


class ParityError(ExportError):
    """A graph does not reproduce the torch model; the text says what differs, and by how much."""
