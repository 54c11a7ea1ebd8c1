"""`splitedge init`: a project to begin with."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from edge_sdk.cli.output import print_json
from server.options import AsJson

app = typer.Typer(add_completion=False)


@app.command(epilog="Example: splitedge init shed-camera")
def init(
    name: Annotated[
        Path, typer.Argument(metavar="NAME", help="New folder; its name is the model's too.")
    ],
    as_json: AsJson = False,
) -> None:
    """Write a small project that runs as it is: recipe, data, settings of a device, README."""
    from server.project.project import write_project

    written = write_project(name)
    if as_json:
        print_json({"project": str(name), "files": [str(path) for path in written]})
        return
    for path in written:
        typer.echo(name / path)
    typer.echo(f"Next: cd {name}, and type what README.md says")
