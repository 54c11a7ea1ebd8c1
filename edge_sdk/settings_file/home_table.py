"""The table [home_assistant] of agent.toml: the device appears in Home Assistant."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

TEMPLATE: Final = """\
# [home_assistant] shows this device in Home Assistant (docs/home-assistant.md).
[home_assistant]
# URL of its MQTT broker. Options: name of the device, seconds between two reports (every), and
# prefix, birth, ca.
#broker = "mqtt://USER:PASSWORD@homeassistant.local?name=Door&every=10"
"""


@dataclass(frozen=True, slots=True)
class HomeTable:
    """Settings of the reports to Home Assistant.

    Attributes:
        broker: URL of its MQTT broker, with options; None reports nothing.
    """

    broker: str | None = None
