"""The settings file of a device, `agent.toml` in its state folder.

Each table is a frozen record that checks itself. To add the table [name]:

1. a module `name_table.py` beside this one, with a record whose fields all have defaults;
2. a field of `SettingsFile` here, which names the record; a tuple of records is read from [[name]];
3. each key in `template.toml`, commented out, with a line on what it does.

A path in the file is relative to the state folder: use `state / path`.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, get_args, get_origin, get_type_hints

from edge_sdk.errors import ConfigurationError
from edge_sdk.records import read_record
from edge_sdk.settings import AgentSettings
from edge_sdk.settings_file import agent_tables
from edge_sdk.settings_file.home_table import HomeTable
from edge_sdk.settings_file.keep_table import KeepTable
from edge_sdk.settings_file.serve_table import ServeTable
from edge_sdk.settings_file.stream_table import StreamTable
from edge_sdk.settings_file.template import SETTINGS_NAME

SIZE_MAX: Final = 1_000_000


@dataclass(frozen=True, slots=True)
class SettingsFile:
    """Contents of one settings file, checked.

    Attributes:
        agent: the tables [agent], [budget], [agreement], [power], [learn] and
            [traces].
        serve: the table [serve].
        stream: the table [stream].
        keep: the table [keep].
        home_assistant: the table [home_assistant].
    """

    agent: AgentSettings = field(default_factory=AgentSettings)
    serve: ServeTable = field(default_factory=ServeTable)
    stream: StreamTable = field(default_factory=StreamTable)
    keep: KeepTable = field(default_factory=KeepTable)
    home_assistant: HomeTable = field(default_factory=HomeTable)

    @classmethod
    def load(cls, state: Path) -> SettingsFile:
        """Read `agent.toml` in the state folder; without the file, the defaults.

        Raises: ConfigurationError naming the file, the table, the key, what was expected and what
            was got.
        """
        path = state / SETTINGS_NAME
        try:
            with path.open("rb") as file:
                raw = file.read(SIZE_MAX + 1)
        except FileNotFoundError:
            return cls()
        except OSError as err:
            raise ConfigurationError(f"{path}: cannot be read ({err.strerror})") from err
        try:
            return cls.from_toml(raw)
        except ConfigurationError as err:
            raise ConfigurationError(f"{path}: {err}") from err

    @classmethod
    def from_toml(cls, raw: bytes) -> SettingsFile:
        """Read the file's bytes.

        Raises: ConfigurationError as `load`, without the file's name.
        """
        if len(raw) > SIZE_MAX:
            raise ConfigurationError(f"expected at most {SIZE_MAX} bytes, got more")
        try:
            tables = tomllib.loads(raw.decode())
        except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as err:
            raise ConfigurationError(f"not a TOML file ({err})") from err
        kinds = {name: kind for name, kind in get_type_hints(cls).items() if name != "agent"}
        known = [*agent_tables.TABLES, *kinds]
        strange = sorted(name for name in tables if name not in known)
        if strange:
            listed = ", ".join(f"[{name}]" for name in known)
            raise ConfigurationError(f"unknown {', '.join(strange)}; known tables are {listed}")
        read = {name: _read(kinds[name], tables[name], name) for name in kinds if name in tables}
        return cls(agent=agent_tables.read_agent(tables), **read)


def _read(kind: Any, table: object, name: str) -> Any:
    if get_origin(kind) is not tuple:
        return read_record(kind, table, f"[{name}]")
    if not isinstance(table, list):
        raise ConfigurationError(f"{name}: expected tables [[{name}]], got one [{name}]")
    record = get_args(kind)[0]
    return tuple(
        read_record(record, each, f"[[{name}]] {number}") for number, each in enumerate(table, 1)
    )
