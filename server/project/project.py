"""A new project: a folder with a recipe, a data hook, the settings of a device and a README."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Final

from edge_sdk.durable import make_folder, write_atomic
from edge_sdk.errors import ConfigurationError
from edge_sdk.wire.topics import ID_PATTERN

# where each file of server/project/files goes
FILES: Final = {
    "README.md": "README.md",
    "recipe.toml": "recipe.toml",
    "my_data.py.txt": "my_data.py",
    "agent.toml": "device/agent.toml",
    "gitignore.txt": ".gitignore",
}
PLACE: Final = "@NAME@"


def write_project(folder: Path) -> list[Path]:
    """Write a project that runs as it is.

    Args:
        folder: new or empty; its last part is the name of the model.
    Returns: the files, relative to the folder.
    Raises: ConfigurationError for a name that no model can have, or a folder that holds something;
        StorageError.
    """
    name = folder.absolute().name
    if not ID_PATTERN.fullmatch(name):
        raise ConfigurationError(
            f"init: expected a name of 1 to 63 of a-z, 0-9 and '-', got {name!r}; the model will"
            " have it"
        )
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
        raise ConfigurationError(f"{folder}: it is not empty; give the name of a new folder")
    written = []
    for source, target in FILES.items():
        text = files("server.project").joinpath("files", source).read_text("utf-8")
        make_folder((folder / target).parent)
        write_atomic(folder / target, text.replace(PLACE, name).encode())
        written.append(Path(target))
    return written
