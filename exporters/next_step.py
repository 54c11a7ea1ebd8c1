"""The command that a user types after an export."""

from __future__ import annotations

import shlex
from pathlib import Path


def serving_command(out: Path) -> str:
    """The command that serves the models in a folder: a server reads `models` of its state."""
    if out.resolve().name == "models":
        return shlex.join(["splitedge", "server", "run", "--state", str(out.parent)])
    state = out / "server"
    linked = f"{shlex.join(['mkdir', '-p', str(state)])} && " + shlex.join(
        ["ln", "-s", str(out.resolve()), f"{state}/models"]
    )
    return f"{linked} && {shlex.join(['splitedge', 'server', 'run', '--state', str(state)])}"
