"""Options that the commands `export` and `adopt` share."""

from __future__ import annotations

from typing import Annotated, Final

import typer

GATE_HELP: Final = (
    "Uncertainty that exits are judged by: entropy, margin, vacuity-exp for a network that learnt"
    " evidence (vacuity for one of 0.1.0), or several: 'all(entropy, margin)', 'any(...)'. Scales,"
    " as in 'all(entropy:0.3, margin:0.2)', are fitted where they are left out."
)
Version = Annotated[
    int | None,
    typer.Option(
        min=0,
        help="Version number; a published version never changes.",
        show_default="the next free",
    ),
]
