"""Version numbers of the exported models in a folder, `OUT/NAME/VERSION`.

A number is never used twice, not even after a server removed the version: an empty hidden folder
keeps it.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

_TAKEN: Final = re.compile(r"([0-9]+)|\.([0-9]+)-removed")


def next_version(out: Path, name: str) -> int:
    """One more than the highest version that the model ever had in `out`; 1 if it had none."""
    folder = out / name
    there = folder.iterdir() if folder.is_dir() else ()
    taken = [found for path in there if (found := _TAKEN.fullmatch(path.name))]
    return max((int(found[1] or found[2]) for found in taken), default=0) + 1


def removed_place(folder: Path) -> Path:
    """The folder to which a version moves before it is deleted, and which then keeps its number."""
    return folder.with_name(f".{folder.name}-removed")
