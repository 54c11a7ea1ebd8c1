"""The index of a store: every file in it, with its hash. It is written last, and read first."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Final, Self

import orjson

from edge_sdk.errors import StorageError

INDEX_NAME: Final = "index.json"
FORMAT: Final = 1
PARTS: Final = ("models", "tuf")
_SHA256: Final = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class StoreIndex:
    """The files of one moment.

    Attributes:
        files: SHA-256 in hex by name, relative to the store and to a state folder alike, such as
            `models/digits/1/model.json`.
    """

    files: Mapping[str, str]

    @classmethod
    def from_json(cls, raw: bytes) -> Self:
        """Read an index.

        Raises: StorageError for one that this release cannot read, or a name that leads elsewhere.
        """
        try:
            data = orjson.loads(raw)
            version, files = data["format"], dict(data["files"])
        except (orjson.JSONDecodeError, KeyError, TypeError, ValueError) as err:
            raise StorageError(f"{INDEX_NAME}: cannot be read ({err})") from err
        if version != FORMAT:
            raise StorageError(
                f"{INDEX_NAME}: expected format {FORMAT}, got {version!r}; use the release of the"
                " API that writes it"
            )
        for name, digest in files.items():
            if not _is_fine(name) or not isinstance(digest, str) or not _SHA256.fullmatch(digest):
                raise StorageError(f"{INDEX_NAME}: {name[:200]!r} is no file of a server's state")
        return cls(files)

    def to_json(self) -> bytes:
        """The index as it is written."""
        files = dict(sorted(self.files.items()))
        return orjson.dumps({"format": FORMAT, "files": files}, option=orjson.OPT_INDENT_2)

    def models(self) -> dict[str, dict[str, str]]:
        """The files of each model, by `NAME/VERSION`; their names are relative to its folder."""
        found: dict[str, dict[str, str]] = {}
        for name, digest in self.files.items():
            part, *rest = PurePosixPath(name).parts
            if part == "models":
                model, file = "/".join(rest[:2]), "/".join(rest[2:])
                found.setdefault(model, {})[file] = digest
        return found

    def signed(self) -> dict[str, str]:
        """The signed files, `tuf/...`, in the order in which they are copied."""
        return {name: self.files[name] for name in self.in_order() if name.startswith("tuf/")}

    def in_order(self) -> list[str]:
        """All names: bundles first, then what names them, and at the end the timestamp."""
        return sorted(self.files, key=_place)


def _place(name: str) -> tuple[int, str]:
    if not name.startswith("tuf/metadata/"):
        return 0, name
    return (2 if name.endswith("/timestamp.json") else 1), name


def _is_fine(name: object) -> bool:
    if not isinstance(name, str) or "\\" in name or "\0" in name:
        return False
    parts = name.split("/")
    enough = len(parts) >= (4 if parts[0] == "models" else 3)
    return parts[0] in PARTS and enough and not any(part in ("", ".", "..") for part in parts)
