"""Tables of agent.toml that are settings of `EdgeAgent`: [agent], [budget], [agreement], [power],
[learn] and [traces].
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from edge_sdk.errors import ConfigurationError
from edge_sdk.records import read_record
from edge_sdk.settings import AgentSettings, Agreement, Budget, Learn, Power, Traces

CONTROLLERS: Final[Mapping[str, type[Budget | Agreement]]] = {
    "budget": Budget,
    "agreement": Agreement,
}
# keys of `AgentSettings` that are tables of their own
TABLES_OF: Final = {
    "controller": "[budget] or [agreement]",
    "power": "[power]",
    "traces": "[traces]",
}
TABLES: Final = ("agent", *CONTROLLERS, "power", "learn", "traces")


def read_agent(tables: Mapping[str, object]) -> AgentSettings:
    """The settings in the tables of this module; absent ones are the defaults.

    An empty table [budget], [agreement], [power], [learn] or [traces] asks for nothing.

    Raises: ConfigurationError naming the table and the key.
    """
    asked = [name for name in CONTROLLERS if tables.get(name)]
    if len(asked) > 1:
        raise ConfigurationError("[budget] and [agreement]: expected one of them, got both")
    plain = tables.get("agent", {})
    for key, tables_of in TABLES_OF.items():
        if isinstance(plain, Mapping) and key in plain:
            raise ConfigurationError(f"[agent]: unknown {key}; use the table {tables_of}")
    settings = read_record(AgentSettings, plain, "[agent]")
    for name in asked:
        controller: Any = read_record(CONTROLLERS[name], tables[name], f"[{name}]")
        settings = replace(settings, controller=controller)
    if tables.get("power"):
        settings = replace(settings, power=read_record(Power, tables["power"], "[power]"))
    if tables.get("learn"):
        settings = replace(settings, learn=read_record(Learn, tables["learn"], "[learn]"))
    if tables.get("traces"):
        settings = replace(settings, traces=read_record(Traces, tables["traces"], "[traces]"))
    return settings
