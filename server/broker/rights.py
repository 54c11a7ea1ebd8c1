"""Permissions of devices and backends, as the broker's core asks for them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from server.broker import policy
from server.broker.policy import Principal

_TOPIC_CHARACTERS: Final = 160  # the longest one of ours has 148
_DEVICE_TOPICS: Final = 16  # remembered of a login; it may publish to three
_BACKEND_TOPICS: Final = 4_096


@dataclass(frozen=True, slots=True)
class FleetRights:
    """The rights of a device or a backend, see `policy`.

    A backend sends to many devices, and all of them wait for it: it is always read.

    Attributes:
        trusted: whether it is a backend.
    """

    principal: Principal
    trusted: bool = field(init=False, compare=False)
    _may_publish: dict[str, bool] = field(
        default_factory=dict, init=False, compare=False, repr=False
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "trusted", self.principal.role == "backend")

    @property
    def name(self) -> str:
        """User name of the principal."""
        return self.principal.client_id

    @property
    def held_back(self) -> bool:
        """Whether it is a device."""
        return self.principal.role == "device"

    def may_publish(self, topic: str) -> bool:
        """Decide as `policy.may_publish`, and remember it: this is asked for every message."""
        known = self._may_publish.get(topic)
        if known is not None:
            return known
        allowed = policy.may_publish(self.principal, topic)
        if len(topic) <= _TOPIC_CHARACTERS:
            if len(self._may_publish) >= (_BACKEND_TOPICS if self.trusted else _DEVICE_TOPICS):
                self._may_publish.clear()
            self._may_publish[topic] = allowed
        return allowed

    def may_subscribe(self, topic_filter: str) -> bool:
        """Decide as `policy.may_subscribe`."""
        return policy.may_subscribe(self.principal, topic_filter)

    def may_retain(self, topic: str) -> bool:
        """Decide as `policy.may_retain`."""
        return policy.may_retain(self.principal, topic)
