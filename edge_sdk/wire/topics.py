"""The MQTT topics, and which of them a device may use.

`splitedge/v1/{fleet}/{device}/{kind}`; ids are `[a-z0-9-]{1,63}`. The access rules of every broker
are generated from one policy: `may_publish` and `may_receive`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from edge_sdk.errors import FrameError, shown

ROOT: Final = "splitedge/v1"
ID_PATTERN: Final = re.compile(r"[a-z0-9-]{1,63}")
# The longest message on any topic; a longer query goes over HTTP. Stands here because the broker's
# process loads no numpy (30 MB), which frames.py needs.
PAYLOAD_BYTES: Final = 2_000_000


class Kind(StrEnum):
    """Kind of the messages on a topic."""

    STATUS = "status"  # device -> server: retained birth, last will offline
    TELEMETRY = "telemetry"  # device -> server: QoS 0
    QUERY = "query"  # device -> server: one offload, at QoS 0 while few are under way
    REPLY = "reply"  # server -> device: its answer, at the QoS of the query
    COMMAND = "command"  # server -> device: look for a bundle, join a round


FROM_DEVICE: Final = frozenset({Kind.STATUS, Kind.TELEMETRY, Kind.QUERY})
TO_DEVICE: Final = frozenset({Kind.REPLY, Kind.COMMAND})


@dataclass(frozen=True, slots=True)
class Topic:
    """A topic: one device, one kind of messages."""

    fleet: str
    device: str
    kind: Kind

    def __str__(self) -> str:
        return f"{ROOT}/{self.fleet}/{self.device}/{self.kind}"


def check_id(value: str, what: str) -> str:
    """Return `value` if it is a valid id in a topic.

    Raises: FrameError naming `what`, the rule and the value.
    """
    if not ID_PATTERN.fullmatch(value):
        raise FrameError(f"{what}: expected 1 to 63 of a-z, 0-9 and '-', got {shown(value)}")
    return value


def parse_topic(text: str) -> Topic:
    """Read a topic name.

    Raises: FrameError if it is no topic of splitedge.
    """
    parts = text.split("/")
    if len(parts) != 5 or "/".join(parts[:2]) != ROOT or parts[4] not in set(Kind):
        raise FrameError(f"topic: expected {ROOT}/FLEET/DEVICE/KIND, got {shown(text)}")
    return Topic(check_id(parts[2], "fleet"), check_id(parts[3], "device"), Kind(parts[4]))


def all_devices(kind: Kind) -> str:
    """The filter for one kind of messages of every device in every fleet."""
    return f"{ROOT}/+/+/{kind}"


def may_publish(fleet: str, device: str, topic: str) -> bool:
    """Whether the device may publish to the topic, also as a last will."""
    return _is_own(fleet, device, topic, FROM_DEVICE)


def may_receive(fleet: str, device: str, topic_filter: str) -> bool:
    """Whether the device may subscribe to the filter: only its own topics, without wildcards."""
    return _is_own(fleet, device, topic_filter, TO_DEVICE)


def _is_own(fleet: str, device: str, text: str, kinds: frozenset[Kind]) -> bool:
    # parsed, not compared as text: a device named "+" would match the filter of every device
    try:
        topic = parse_topic(text)
    except FrameError:
        return False
    return (topic.fleet, topic.device) == (fleet, device) and topic.kind in kinds
