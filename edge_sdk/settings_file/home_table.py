"""The table [home_assistant] of agent.toml: the device appears in Home Assistant."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HomeTable:
    """Settings of the reports to Home Assistant.

    Attributes:
        broker: URL of its MQTT broker, with options; None reports nothing.
    """

    broker: str | None = None
