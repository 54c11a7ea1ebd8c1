"""Index of a folder of kept inputs: one line for each file, and for each that is gone."""

from __future__ import annotations

from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import orjson

from edge_sdk.errors import ConfigurationError
from edge_sdk.records import read_record

LabelFrom = Literal["correction", "server", ""]

INDEX: Final = "index.jsonl"


@dataclass(frozen=True, slots=True)
class KeptInput:
    """One kept input, as the index has it.

    Attributes:
        id: of the answer.
        file: relative to the folder. size_bytes: of the file.
        label: index of the class; None without a label. class_name: its name, or empty.
        label_from: `correction`, `server`, or empty without a label.
        at: when it was kept, seconds since 1970.
        bundle: that answered. source: of the answer.
        device_label: of the exit head. uncertainty, threshold: of the gate.
    """

    id: str
    file: str
    size_bytes: int
    label: int | None
    class_name: str
    label_from: LabelFrom
    at: float
    bundle: str
    source: str
    device_label: int
    uncertainty: float
    threshold: float


def read_index(folder: Path) -> list[KeptInput]:
    """The inputs that a folder keeps, the oldest first; none if there is no such folder."""
    found: OrderedDict[str, KeptInput] = OrderedDict()
    with suppress(FileNotFoundError):
        for line in (folder / INDEX).read_bytes().splitlines():
            try:
                fields = orjson.loads(line)
                found.pop(fields["id"], None)
                if "gone" not in fields:
                    found[fields["id"]] = read_record(KeptInput, fields, INDEX)
            except (ValueError, KeyError, TypeError, ConfigurationError):
                continue  # a line that a power cut tore
    return [each for each in found.values() if (folder / each.file).is_file()]
