"""`splitedge agent kept …` and `splitedge agent correct`: inputs kept, answers corrected."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from edge_sdk.cli.agent_options import STATE_DEFAULT, AsJson, State
from edge_sdk.cli.output import print_json, print_table

app = typer.Typer(
    help="Inputs that this device keeps: see [keep] in agent.toml, or `agent run --keep`.",
    epilog="Example: splitedge agent kept list --state ./pi",
    no_args_is_help=True,
)

Folder = Annotated[
    Path | None,
    typer.Argument(help="Folder of kept inputs; default: that of agent.toml.", show_default=False),
]


@app.command("list", epilog="Example: splitedge agent kept list ./kept --json")
def list_kept(folder: Folder = None, state: State = STATE_DEFAULT, as_json: AsJson = False) -> None:
    """Show how many inputs are kept of each class, and where their labels come from."""
    from edge_sdk.kept.folder import LABELLED
    from edge_sdk.kept.index import read_index

    place = _folder(folder, state)
    kept = read_index(place)
    if as_json:
        print_json({"folder": str(place), "inputs": [asdict(each) for each in kept]})
        return
    if not kept:
        typer.echo(f"{place}: no inputs are kept")
        return
    counts = Counter((each.class_name, each.label_from) for each in kept)
    from rich.table import Table

    table = Table("class", "label from", "inputs")
    for (name, label_from), count in sorted(counts.items()):
        table.add_row(name or "unlabelled", label_from or "none", str(count))
    print_table(table)
    size_mb = sum(each.size_bytes for each in kept) / 1e6
    newest = max((each.at for each in kept), default=None)
    since = "" if newest is None else f", the newest of {_when(newest)}"
    typer.echo(f"{place}: {len(kept)} inputs, {size_mb:.3g} MB{since}")
    if any(each.label is not None for each in kept):
        typer.echo(f"use them as DATA: {place / LABELLED}")


@app.command(epilog="Example: splitedge agent kept clear ./kept --yes")
def clear(
    folder: Folder = None,
    state: State = STATE_DEFAULT,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Delete the kept inputs. Other files in the folder stay. Stop the agent first."""
    from edge_sdk.kept import folder as kept
    from edge_sdk.kept.index import read_index

    place = _folder(folder, state)
    if not yes:
        count = len(read_index(place))
        typer.confirm(f"delete {count} inputs in {place}?", abort=True)
    typer.echo(f"{place}: {kept.clear(place)} inputs deleted")


def correct(
    identifier: Annotated[str, typer.Argument(metavar="ID", help="`id` of the answer.")],
    label: Annotated[str, typer.Argument(help="Name of the right class, or its number from 0.")],
    state: State = STATE_DEFAULT,
) -> None:
    """Tell the running agent the right label of one of its newest answers.

    The agent keeps the input with this label, if it was told to keep inputs.
    """
    from edge_sdk.errors import InputError, LinkError
    from edge_sdk.service.client import RunningAgent

    running = RunningAgent.find(state)
    if running is None:
        raise LinkError(f"{state}: no agent runs here; start it with `splitedge agent run`")
    try:
        known = running.correct(identifier, label)
    except InputError:  # no class has that name
        if not (label.isascii() and label.isdecimal()):
            raise
        known = running.correct(identifier, int(label))
    if not known:
        raise InputError(
            f"{identifier}: no answer of this id is remembered; the newest 512 are, or fewer if"
            " they take more than 8 MB, and each can be corrected once"
        )
    typer.echo(f"{identifier}: {label}")


def _folder(folder: Path | None, state: Path) -> Path:
    from edge_sdk.errors import ConfigurationError
    from edge_sdk.settings_file.settings_file import SettingsFile

    if folder is not None:
        return folder
    named = SettingsFile.load(state).keep.folder
    if named is None:
        raise ConfigurationError(
            f"{state}: agent.toml names no folder of kept inputs; give it, as in"
            " `splitedge agent kept list ./kept`"
        )
    return state / named


def _when(at: float) -> str:
    """A time for people, in the time zone of this device."""
    return f"{datetime.fromtimestamp(at, UTC).astimezone():%Y-%m-%d %H:%M}"
