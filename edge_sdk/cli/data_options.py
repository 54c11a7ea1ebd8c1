"""Options of commands that read DATA."""

from __future__ import annotations

from typing import Annotated

import typer

HELD_OUT = 0.1

HeldOut = Annotated[
    float,
    typer.Option(
        min=0,
        max=0.9,
        help="Share of the samples that is not trained on, as the recipe's held_out.",
    ),
]
Resize = Annotated[
    str | None,
    typer.Option(
        metavar="HxW",
        help="Size of the pictures of a folder, in pixels.",
        show_default="their own, if all have the same",
    ),
]
