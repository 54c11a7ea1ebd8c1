"""Home Assistant's broker as a user writes it: `mqtt://[USER:PASSWORD@]HOST[:PORT]?name=...`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from edge_sdk.errors import ConfigurationError
from edge_sdk.home_assistant.discovery import BIRTH, PREFIX, is_topic
from edge_sdk.pipeline.words import read_word, without_login
from edge_sdk.wire.broker_address import BrokerAddress

KINDS: Final = ("mqtt", "mqtts")
KEYS: Final = ("name", "every", "prefix", "birth", "ca")
EVERY_S: Final = 10
EXAMPLE: Final = "mqtt://USER:PASSWORD@HOST"
_PLACE: Final = re.compile(r"//[^/]+/?")


@dataclass(frozen=True, slots=True)
class HomeAddress:
    """Address of Home Assistant, and how a device appears there.

    Attributes:
        broker: with the login of its URL.
        name: of the device there; None takes its id.
        every_s: time between two reports while the answer stays the same.
        prefix, birth: discovery prefix and topic of the birth message, as set in Home Assistant.
        ca: PEM file of the authority that verifies an mqtts broker; None takes the system's store.
    """

    broker: BrokerAddress
    name: str | None = None
    every_s: int = EVERY_S
    prefix: str = PREFIX
    birth: str = BIRTH
    ca: Path | None = None

    @classmethod
    def parse(cls, text: str, base: Path) -> HomeAddress:
        """Read `mqtt[s]://[USER:PASSWORD@]HOST[:PORT][?key=value&...]`.

        Args:
            base: the path in `ca` starts there.
        Raises: ConfigurationError saying which part is wrong.
        """
        head = text.partition("?")[0]
        if head.partition(":")[0] not in KINDS:
            raise ConfigurationError(
                f"home assistant {without_login(text)}: expected the URL of its broker, as in"
                f" {EXAMPLE}"
            )
        word = read_word(text, KEYS)
        if not _PLACE.fullmatch(word.rest):
            raise word.fault(f"expected a host without a topic, as in {EXAMPLE}")
        for key in ("prefix", "birth"):
            if key in word.options and not is_topic(word.options[key]):
                raise word.fault(f"{key}: expected a topic without + and #")
        ca = word.options.get("ca")
        try:
            broker = BrokerAddress.parse(head.rstrip("/"))
        except ConfigurationError as err:
            if "@" in head:
                raise
            # without one the head may itself be a part of a login
            raise word.fault(f"expected a host and a port, as in {EXAMPLE}") from err
        return cls(
            broker,
            word.options.get("name"),
            word.whole("every", EVERY_S),
            word.options.get("prefix", PREFIX),
            word.options.get("birth", BIRTH),
            None if ca is None else base / Path(ca).expanduser(),
        )
