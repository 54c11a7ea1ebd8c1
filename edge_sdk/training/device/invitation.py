"""Waiting for an invitation: the server's command `{"op": "train", "url": ...}` over MQTT."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import orjson

from edge_sdk import api
from edge_sdk.bundles.store import BundleStore
from edge_sdk.errors import SplitedgeError
from edge_sdk.identity import Identity
from edge_sdk.membership.orders import Membership
from edge_sdk.mqtt.link import MqttLink
from edge_sdk.mqtt.messages import Message
from edge_sdk.training.device.trainer_address import INVITATION, resolve_trainer_url
from edge_sdk.wire.broker_address import BrokerAddress
from edge_sdk.wire.topics import Kind, Topic

logger = logging.getLogger(__name__)

# While the broker is away, it is looked for after this time, and less and less often.
LOOK_S: Final = 3.0
LOOK_MOST_S: Final = 30.0


def wait_for_invitation(identity: Identity, state: Path) -> str:
    """Wait until this device is invited; the trainer's URL.

    Raises: ConfigurationError for a certificate file that cannot be used.
    """
    with CommandLink(identity, state) as link:
        while True:
            url = _invited(identity, link.arrived.get())
            if url is not None:
                return url


class CommandLink:
    """The server's commands to a device without a running agent, from `__enter__` to `__exit__`.

    It carries out what concerns the identity, as a running agent does: the order to replace the
    credential. It goes on with one that another process replaced, and where the broker moved to.

    Attributes:
        arrived: the commands, as they arrive.
    """

    def __init__(self, identity: Identity, state: Path) -> None:
        self.arrived: queue.SimpleQueue[Mapping[str, Any]] = queue.SimpleQueue()
        self._state = state
        self._membership = Membership(
            state, identity, changed=self._open, lift=BundleStore(state).lift
        )
        self._changing = threading.Lock()
        self._ended = threading.Event()
        self._link: MqttLink | None = None
        self._address: BrokerAddress | None = None
        self._watcher = threading.Thread(target=self._watch, name="splitedge-commands", daemon=True)

    def __enter__(self) -> Self:
        """Connect.

        Raises: ConfigurationError for a certificate file that cannot be used.
        """
        self._open(self._membership.identity)
        self._watcher.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ended.set()
        self._watcher.join()
        with self._changing:
            if self._link is not None:
                self._link.stop()

    def _open(self, identity: Identity) -> None:
        """Connect with that identity, in the place of the link before."""
        try:
            broker = api.locate_broker(identity, self._state)  # it may have moved
        except SplitedgeError:
            broker = api.FleetBroker.known(self._state, identity)
        self._connect(identity, broker.address(identity))

    def _connect(self, identity: Identity, address: BrokerAddress) -> None:
        link = MqttLink(
            address,
            client_id=identity.device,
            password=identity.credential,
            ca=None if identity.ca is None else str(identity.ca),
            insecure=identity.insecure,
        )
        link.subscribe(str(Topic(identity.fleet, identity.device, Kind.COMMAND)), self._receive)
        with self._changing:
            if self._ended.is_set():
                return
            if self._link is not None:
                self._link.stop()
            self._link, self._address = link, address
            link.start()

    def _receive(self, message: Message) -> None:
        command = _read(message.payload)
        if command is not None:
            self._membership.follow(command)
            self.arrived.put(command)

    def _watch(self) -> None:
        """Look for a new credential, and for the broker, while the link is down."""
        pause_s = LOOK_S
        while not self._ended.wait(pause_s):
            if self._link is None or self._link.connected:
                pause_s = LOOK_S
                continue
            pause_s = min(2 * pause_s, LOOK_MOST_S)
            try:
                identity = self._membership.look()
                address = api.locate_broker(identity, self._state).address(identity)
                if address != self._address:
                    self._connect(identity, address)
            except SplitedgeError as err:
                logger.debug("broker not located: %s", err)


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
