"""MQTT discovery of Home Assistant: the messages that make one device with its entities. Pure.

The form is that of https://www.home-assistant.io/integrations/mqtt/ ("Device discovery payload"),
which Home Assistant has understood since 2024.11. All entities read one JSON message, the state.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

PREFIX: Final = "homeassistant"
BIRTH: Final = "homeassistant/status"
ONLINE: Final = b"online"
OFFLINE: Final = b"offline"
ON: Final = "ON"
OFF: Final = "OFF"
SOURCES: Final = ("device", "server", "fallback")
# more names than these are text: Home Assistant stores the list of options with the entity
OPTIONS_MAX: Final = 200
# Home Assistant refuses longer states, and an enumeration that holds one of these words has a state
# that it cannot tell from its own
STATE_LENGTH_MAX: Final = 255
RESERVED: Final = ("", "None", "unknown", "unavailable")
_TOPIC: Final = re.compile(r"[^+#\0/]+(/[^+#\0/]+)*")


@dataclass(frozen=True, slots=True)
class Topics:
    """Topics of one device at the broker that Home Assistant listens to.

    Attributes:
        discovery: where the device's description is retained.
        state: one JSON message with the values of all entities.
        availability: `online`, or `offline` by the broker when the agent is gone.
        command: `ON` and `OFF` for the switch of offloading.
        birth: where Home Assistant says `online` when it has started.
    """

    discovery: str
    state: str
    availability: str
    command: str
    birth: str

    @classmethod
    def of(cls, device: str, prefix: str = PREFIX, birth: str = BIRTH) -> Topics:
        """The topics of a device, with Home Assistant's discovery prefix and birth topic."""
        base = f"splitedge/home/{device}"
        return cls(
            discovery=f"{prefix}/device/{object_id(device)}/config",
            state=f"{base}/state",
            availability=f"{base}/availability",
            command=f"{base}/offloading/set",
            birth=birth,
        )


@dataclass(frozen=True, slots=True)
class Described:
    """Facts of a device that its description holds; a change is announced again.

    Attributes:
        device: its id. name: for people.
        bundle: that it runs. class_names: of its answers.
        switchable: whether offloading can be turned on and off, so whether there is a server.
        version: of splitedge.
    """

    device: str
    name: str
    bundle: str
    class_names: Sequence[str]
    switchable: bool
    version: str


def is_topic(text: str) -> bool:
    """Whether a text can be a prefix or a topic: without wildcards and empty levels."""
    return bool(_TOPIC.fullmatch(text)) and len(text) <= 200


def object_id(device: str) -> str:
    """Id of a device in topics and unique ids of Home Assistant."""
    return f"splitedge_{device}"


def discovery_message(about: Described, topics: Topics) -> dict[str, Any]:
    """The device discovery payload, for `Topics.discovery`."""
    return {
        "device": {
            "identifiers": [object_id(about.device)],
            "name": about.name,
            "manufacturer": "splitedge",
            "model": about.bundle.rpartition("/")[0] or about.bundle,
            "sw_version": about.version,
        },
        "origin": {"name": "splitedge", "sw_version": about.version},
        "components": {
            key: {**entity, "unique_id": f"{object_id(about.device)}_{key}"}
            for key, entity in _entities(about, topics).items()
        }
        | {key: {"platform": platform} for key, platform in _removed(about).items()},
        "state_topic": topics.state,
        "availability_topic": topics.availability,
        "payload_available": ONLINE.decode(),
        "payload_not_available": OFFLINE.decode(),
        "qos": 1,
    }


def _entities(about: Described, topics: Topics) -> dict[str, dict[str, Any]]:
    measured = {"platform": "sensor", "state_class": "measurement"}
    diagnostic = {"entity_category": "diagnostic"}
    words = {"platform": "sensor"} | _enumeration(about.class_names)
    entities: dict[str, dict[str, Any]] = {
        "answer": _of("answer", "Answer", words, icon="mdi:tag"),
        "confidence": _of(
            "confidence", "Confidence", measured, unit_of_measurement="%", icon="mdi:gauge"
        ),
        "source": _of(
            "source",
            "Answered by",
            {"platform": "sensor"} | _enumeration(SOURCES),
            icon="mdi:call-split",
        ),
        "exit_rate": _of(
            "exit_rate",
            "Exit rate",
            measured,
            unit_of_measurement="%",
            icon="mdi:location-exit",
        ),
        "latency": _of(
            "latency",
            "Latency",
            measured | diagnostic,
            device_class="duration",
            unit_of_measurement="ms",
        ),
        "bundle": _of(
            "bundle", "Bundle", {"platform": "sensor"} | diagnostic, icon="mdi:package-variant"
        ),
        "problem": _of(
            "problem",
            "Problem",
            {"platform": "binary_sensor"} | diagnostic,
            device_class="problem",
            json_attributes_topic=topics.state,
            json_attributes_template="{{ {'why': value_json.why} | tojson }}",
        ),
    }
    if about.switchable:
        entities["server"] = _of(
            "server",
            "Server",
            {"platform": "binary_sensor"} | diagnostic,
            device_class="connectivity",
        )
        entities["offloading"] = _of(
            "offloading",
            "Offloading",
            {"platform": "switch", "entity_category": "config"},
            command_topic=topics.command,
            payload_on=ON,
            payload_off=OFF,
            icon="mdi:cloud-upload",
        )
    return entities


def _removed(about: Described) -> dict[str, str]:
    """Entities that a run before this one may have had, with the platform of each.

    A component with its platform alone tells Home Assistant to remove it.
    """
    return {} if about.switchable else {"server": "binary_sensor", "offloading": "switch"}


def _of(key: str, name: str, kind: Mapping[str, Any], **more: str) -> dict[str, Any]:
    return {**kind, "name": name, "value_template": f"{{{{ value_json.{key} }}}}", **more}


def _enumeration(words: Sequence[str]) -> dict[str, Any]:
    """The keys that say which states there are; none where Home Assistant would refuse them."""
    fits = len(set(words)) == len(words) <= OPTIONS_MAX and not any(
        word in RESERVED or len(word) > STATE_LENGTH_MAX or word != word.strip() for word in words
    )
    return {"device_class": "enum", "options": list(words)} if fits else {}


def state_text(name: str) -> str:
    """A class name as a state, which Home Assistant bounds in length."""
    return name[:STATE_LENGTH_MAX]


@dataclass(frozen=True, slots=True)
class State:
    """Values of all entities at one moment; None is shown as unknown.

    Attributes:
        confidence: probability of the class in `answer`, by the last answer, in percent.
        exit_rate: in percent. latency_ms: of the last answer.
        source: of the last answer: device, server or fallback.
        server: whether the server answers. offloading: whether it is asked.
        why: what is wrong with the device; empty if nothing is.
    """

    answer: str | None
    confidence: float | None
    source: str | None
    exit_rate: float | None
    latency_ms: float | None
    bundle: str
    server: bool
    offloading: bool
    why: str = ""

    @property
    def face(self) -> tuple[object, ...]:
        """The values whose change is shown at once; the others change with every answer."""
        return self.answer, self.source, self.bundle, self.server, self.offloading, self.why

    def message(self) -> dict[str, Any]:
        """The JSON for `Topics.state`."""
        return {
            "answer": self.answer,
            "confidence": self.confidence,
            "source": self.source,
            "exit_rate": self.exit_rate,
            "latency": self.latency_ms,
            "bundle": self.bundle,
            "server": _switch(self.server),
            "offloading": _switch(self.offloading),
            "problem": _switch(bool(self.why)),
            "why": self.why,
        }


def read_command(payload: bytes) -> bool | None:
    """Whether a command says ON or OFF; None for anything else."""
    return {ON.encode(): True, OFF.encode(): False}.get(payload.strip().upper())


def _switch(on: bool) -> str:
    return ON if on else OFF
