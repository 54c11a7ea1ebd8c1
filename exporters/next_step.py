"""The step that a user takes after an export."""

from __future__ import annotations

import shlex
from pathlib import Path

from edge_sdk.state import is_held


def next_step(out: Path) -> str:
    """The command that brings the models of a folder to devices.

    A server reads the folder `models` of its state. One that runs takes a new model by itself;
    otherwise the command starts one, with a link to `out` in its state where `out` lies elsewhere.
    """
    folder = out.resolve()
    beside = folder.parent if out.name in ("", "..") else out.parent
    if folder.name == "models":
        return _serving(beside)
    # a state folder beside `out`: within it, a server would take the state for a model
    state = beside / "server"
    if not _may_serve(state, folder):
        state = beside / f"{folder.name}-server"
    if (state / "models").exists():
        return _serving(state)
    make = shlex.join(["mkdir", "-p", str(state)])
    link = shlex.join(["ln", "-s", str(folder), str(state / "models")])
    return f"{make} && {link}{'; ' if is_held(state, 'server') else ' && '}{_serving(state)}"


def _may_serve(state: Path, folder: Path) -> bool:
    models = state / "models"
    return state.resolve() != folder and (not models.exists() or models.resolve() == folder)


def _serving(state: Path) -> str:
    if is_held(state, "server"):
        return (
            "the running server takes it by itself; on a device: splitedge agent update --state DIR"
        )
    return shlex.join(["splitedge", "server", "run", "--state", str(state)])
