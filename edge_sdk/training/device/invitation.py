"""Waiting for an invitation: the server's command `{"op": "train", "url": ...}` over MQTT."""

from __future__ import annotations

import logging
import queue
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson

from edge_sdk import api
from edge_sdk.errors import SplitedgeError
from edge_sdk.identity import Identity
from edge_sdk.mqtt import Message, MqttLink
from edge_sdk.training.device.trainer_address import INVITATION, resolve_trainer_url
from edge_sdk.wire.topics import Kind, Topic

logger = logging.getLogger(__name__)


def wait_for_invitation(identity: Identity, state: Path) -> str:
    """Wait until this device is invited; the trainer's URL.

    Raises: EnrolmentError if the state folder does not say where the broker is.
    """
    with commands(identity, state) as arrived:
        while True:
            url = _invited(identity, arrived.get())
            if url is not None:
                return url


@contextmanager
def commands(identity: Identity, state: Path) -> Iterator[queue.SimpleQueue[Mapping[str, Any]]]:
    """The server's commands to a device without a running agent, as they arrive.

    Raises: EnrolmentError if the state folder does not say where the broker is.
    """
    try:
        broker = api.locate_broker(identity, state)  # it may have moved since this device enrolled
    except SplitedgeError:
        broker = api.FleetBroker.load(state)
    arrived: queue.SimpleQueue[Mapping[str, Any]] = queue.SimpleQueue()

    def receive(message: Message) -> None:
        command = _read(message.payload)
        if command is not None:
            arrived.put(command)

    link = MqttLink(
        broker.address(identity),
        client_id=identity.device,
        password=identity.credential,
        ca=None if identity.ca is None else str(identity.ca),
        insecure=identity.insecure,
    )
    link.subscribe(str(Topic(identity.fleet, identity.device, Kind.COMMAND)), receive)
    link.start()
    try:
        yield arrived
    finally:
        link.stop()


def _read(payload: bytes) -> Mapping[str, Any] | None:
    try:
        command: Any = orjson.loads(payload)
    except orjson.JSONDecodeError:
        return None
    return command if isinstance(command, dict) else None


def _invited(identity: Identity, command: Mapping[str, Any]) -> str | None:
    if command.get("op") != INVITATION:
        return None
    try:
        return resolve_trainer_url(identity, str(command.get("url")))
    except SplitedgeError as err:
        logger.warning("invitation refused: %s", err)
        return None
