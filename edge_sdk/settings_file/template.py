"""The settings file that a new device gets: `template.toml`, which shows every key and sets none.

It is apart from the records that read a settings file, so that a device enrols without them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from edge_sdk.durable import write_atomic

SETTINGS_NAME: Final = "agent.toml"
_TEMPLATE: Final = Path(__file__).with_suffix(".toml")


def settings_template() -> str:
    """A settings file that sets nothing, with a comment on every key."""
    return _TEMPLATE.read_text("utf-8")


def write_settings_template(state: Path) -> None:
    """Write the template to the state folder, unless a settings file is there.

    Raises: StorageError.
    """
    path = state / SETTINGS_NAME
    if not path.exists():
        write_atomic(path, settings_template().encode(), mode=0o600)
