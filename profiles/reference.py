"""The catalogue of boards; each number has its source.

`catalog/` has one TOML file for each board, with a table of `value` and `source` for each field. A
board that is sold with several amounts of memory has the smallest: what fits it fits all of them.
The figures are for planning and simulation; a real device reports its own (`probe`).
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from profiles.checks import text
from profiles.device import DeviceProfile
from profiles.errors import InvalidProfileError, UnknownReferenceError
from profiles.fields import check_value, exact_keys

NO_ACCELERATOR = "none"  # TOML has no null
_CATALOG = Path(__file__).with_name("catalog")
_SUFFIX = ".toml"


def reference_names() -> tuple[str, ...]:
    """Names of the boards in the catalogue, in alphabetical order."""
    found = (entry.name for entry in _CATALOG.iterdir())
    return tuple(sorted(name.removesuffix(_SUFFIX) for name in found if name.endswith(_SUFFIX)))


def load_reference(name: str) -> DeviceProfile:
    """The board's profile, with the reference link of its file.

    Raises: UnknownReferenceError listing the boards; InvalidProfileError if the board's file has
        something missing or wrong.
    """
    values = {field: entry["value"] for field, entry in _entries(name).items()}
    if values["accelerator"] == NO_ACCELERATOR:
        values["accelerator"] = None
    return DeviceProfile.from_dict({"name": name, **values})


def load_sources(name: str) -> dict[str, str]:
    """Sources of the board's numbers, by field name; `title` names board and variant.

    Raises: as `load_reference` does.
    """
    title = {"title": str(_document(name)["title"])}
    return title | {field: entry["source"] for field, entry in _entries(name).items()}


def _entries(name: str) -> dict[str, Mapping[str, Any]]:
    document = _document(name)
    owner = f"catalogue entry {name}"
    expected = [field.name for field in fields(DeviceProfile) if field.name != "name"]
    exact_keys(owner, document, ["title", *expected])
    entries = {field: exact_keys(owner, document[field], ["value", "source"]) for field in expected}
    for field, entry in entries.items():
        check_value(owner, f"{field}.source", entry["source"], text(1000))
    return entries


def _document(name: str) -> dict[str, Any]:
    if name not in reference_names():
        known = ", ".join(reference_names())
        raise UnknownReferenceError(f"board: expected one of {known}; got {name!r}")
    text = (_CATALOG / f"{name}{_SUFFIX}").read_text(encoding="utf-8")
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as err:
        raise InvalidProfileError(f"catalogue entry {name}: no valid TOML: {err}") from err
