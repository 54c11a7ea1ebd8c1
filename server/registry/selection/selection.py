"""The choice of some devices: by fleet, by tag, by name, or all of them."""

from __future__ import annotations

from dataclasses import dataclass

from server.registry.records import Device
from server.registry.transactions import check_id


@dataclass(frozen=True, slots=True)
class Selection:
    """Devices that fulfil all that is given; without anything, every device.

    Attributes:
        fleet: the one that they belong to.
        tag: one that they carry.
        device: the only one.
    Raises: BadRequestError for what is no id.
    """

    fleet: str | None = None
    tag: str | None = None
    device: str | None = None

    def __post_init__(self) -> None:
        for what, value in self.given.items():
            check_id(value, what)

    @property
    def given(self) -> dict[str, str]:
        """The parts that are given, by name."""
        named = {"fleet": self.fleet, "tag": self.tag, "device": self.device}
        return {what: value for what, value in named.items() if value is not None}

    def matches(self, device: Device) -> bool:
        """Whether the device is one of those chosen; a device that was shut out never is."""
        return (
            device.active
            and self.fleet in (None, device.fleet)
            and self.device in (None, device.id)
            and (self.tag is None or self.tag in device.tags)
        )

    def __str__(self) -> str:
        return " ".join(f"{what}={value}" for what, value in self.given.items()) or "all devices"
