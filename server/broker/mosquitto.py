"""Devices of a running Mosquitto: added and removed by orders to its dynamic security plugin.

admin = MosquittoAdmin(address, credential=credential)
admin.start()
admin.set_device("default", "pi-4", device_credential)
"""

from __future__ import annotations

import json
import secrets
import threading
from collections.abc import Iterable, Sequence
from typing import Any, Final

from edge_sdk.errors import ConfigurationError, LinkError
from edge_sdk.mqtt.link import MqttLink
from edge_sdk.mqtt.messages import Message
from edge_sdk.wire.broker_address import BrokerAddress
from edge_sdk.wire.topics import Kind, Topic, check_id
from server.broker.mosquitto_files import (
    BACKEND,
    CONTROL,
    LOGIN_PREFIX,
    QUERIES,
    RESPONSE,
    device_acls,
    query_acls,
    role_name,
)

# names in one answer of Mosquitto
PAGE: Final = 1000


class MosquittoAdmin:
    """Adds and removes devices on a running Mosquitto; safe from any thread.

    Args:
        credential: password of the user `backend`.
        ca: PEM file to verify a TLS broker with.
        pinned: PEM file of the certificate that the broker must present.
        insecure: send the credential to another machine without encryption.
        timeout_s: how long Mosquitto may take to answer.
    """

    def __init__(
        self,
        address: BrokerAddress,
        *,
        credential: str,
        ca: str | None = None,
        pinned: str | None = None,
        insecure: bool = False,
        timeout_s: float = 5.0,
    ) -> None:
        self._timeout_s = timeout_s
        self._answered = threading.Condition()
        self._waiting: dict[str, dict[str, Any] | None] = {}  # the response by correlation
        self._link = MqttLink(
            address,
            client_id=f"{BACKEND}-admin-{secrets.token_hex(4)}",
            username=BACKEND,
            password=credential,
            ca=ca,
            pinned=pinned,
            insecure=insecure,
        )
        self._link.subscribe(RESPONSE, self._receive)

    def start(self) -> None:
        """Connect and wait until connected.

        Raises: LinkError with the reason.
        """
        self._link.start()
        try:
            self._link.wait_connected(self._timeout_s)
        except LinkError:
            self._link.stop()
            raise

    def wait_connected(self, timeout_s: float) -> None:
        """Wait until connected, after a restart of Mosquitto for example.

        Raises: LinkError with the reason.
        """
        self._link.wait_connected(timeout_s)

    def stop(self) -> None:
        """Disconnect."""
        self._link.stop()

    def set_device(self, fleet: str, device: str, credential: str) -> None:
        """Let a device log in with that credential and use its own topics, and no others.

        A second call replaces the credential.

        Raises: LinkError when Mosquitto does not answer; ConfigurationError when it refuses.
        """
        check_id(device, "device")
        if device == BACKEND:
            raise ConfigurationError(f"device {device}: the server has this name on Mosquitto")
        role = {"rolename": role_name(device), "acls": device_acls(fleet, device)}
        client = {
            "username": device,
            "clientid": device,
            "password": credential,
            "roles": [{"rolename": role_name(device)}],
        }
        self._upsert("Role", role)
        self._upsert("Client", client)

    def remove_device(self, device: str, fleet: str | None = None) -> None:
        """Cut a device at once and refuse it from now on; an unknown device is no error.

        Args:
            fleet: of the device; if it is given, the device's retained status is dropped.

        Raises: LinkError when Mosquitto does not answer; ConfigurationError when it refuses.
        """
        orders = [
            {"command": "disableClient", "username": device},
            {"command": "deleteClient", "username": device},
            {"command": "deleteRole", "rolename": role_name(device)},
        ]
        _check(orders, self._send(orders), fine="not found")
        if fleet is not None:
            self._link.publish(str(Topic(fleet, device, Kind.STATUS)), b"", retain=True)

    def devices(self) -> frozenset[str]:
        """Devices that `set_device` let in, by whichever server, and that were not removed.

        Raises: LinkError when Mosquitto does not answer; ConfigurationError when it refuses.
        """
        clients, roles = self._names("clients"), self._names("roles")
        return frozenset(name for name in clients if role_name(name) in roles)

    def add_backend(self, name: str, credential: str) -> None:
        """Let a backend log in as `LOGIN_PREFIX` and `name`, to take queries and reply.

        Raises: ConfigurationError for a name that is taken; LinkError when Mosquitto does not
            answer.
        """
        self._upsert("Role", {"rolename": QUERIES, "acls": query_acls()})
        user = LOGIN_PREFIX + check_id(name, "name")
        client = {"username": user, "password": credential, "roles": [{"rolename": QUERIES}]}
        create = [{"command": "createClient", **client}]
        errors = self._send(create)
        if errors[0].endswith("already exists"):
            raise ConfigurationError(
                f"login {name}: a backend has it already; take another name, or revoke it first:"
                f" `splitedge server logins revoke {name}`"
            )
        _check(create, errors)

    def remove_backend(self, name: str) -> None:
        """Cut the backends of a login at once and refuse it from now on.

        Raises: ConfigurationError for a login that is not there; LinkError when Mosquitto does not
            answer.
        """
        user = LOGIN_PREFIX + check_id(name, "name")
        if name not in self.backends():
            raise ConfigurationError(
                f"login {name}: no backend has it; `splitedge server logins list` shows all"
            )
        orders = [
            {"command": "disableClient", "username": user},
            {"command": "deleteClient", "username": user},
        ]
        _check(orders, self._send(orders), fine="not found")

    def backends(self) -> list[str]:
        """Names of the logins that `add_backend` made, in order.

        Raises: LinkError when Mosquitto does not answer; ConfigurationError when it refuses.
        """
        users = (user for user in self._names("clients") if user.startswith(LOGIN_PREFIX))
        return sorted(user.removeprefix(LOGIN_PREFIX) for user in users)

    def _names(self, what: str) -> set[str]:
        """Names of all clients or roles."""
        found: set[str] = set()
        while True:
            order = {"command": f"list{what.title()}", "count": PAGE, "offset": len(found)}
            (response,) = self._ask([order])
            _check([order], [response.get("error", "")])
            page = set(map(str, response["data"][what])) - found
            found |= page
            if not page or len(found) >= response["data"]["totalCount"]:
                return found

    def _upsert(self, what: str, values: dict[str, Any]) -> None:
        create = [{"command": f"create{what}", **values}]
        errors = self._send(create)
        if not errors[0].endswith("already exists"):
            _check(create, errors)
            return
        modify = [{"command": f"modify{what}", **values}]
        _check(modify, self._send(modify))

    def _send(self, orders: Sequence[dict[str, Any]]) -> list[str]:
        """The error of each order, "" if it was carried out."""
        return [response.get("error", "") for response in self._ask(orders)]

    def _ask(self, orders: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """The response to each order."""
        tags = [secrets.token_hex(8) for _ in orders]
        tagged = [
            {**order, "correlationData": tag} for order, tag in zip(orders, tags, strict=True)
        ]
        with self._answered:
            self._waiting.update(dict.fromkeys(tags))
        try:
            if not self._link.publish(CONTROL, json.dumps({"commands": tagged}).encode()):
                raise LinkError(f"Mosquitto is away: {self._link.last_error}")
            with self._answered:
                done = self._answered.wait_for(
                    lambda: all(self._waiting[tag] is not None for tag in tags), self._timeout_s
                )
                if not done:
                    raise LinkError(
                        f"Mosquitto did not answer within {self._timeout_s:g} s; "
                        "does it load the dynamic security plugin?"
                    )
                return [self._waiting[tag] or {} for tag in tags]
        finally:
            with self._answered:
                for tag in tags:
                    del self._waiting[tag]

    def _receive(self, message: Message) -> None:
        responses = json.loads(message.payload)["responses"]
        with self._answered:
            for response in responses:
                tag = response.get("correlationData")
                if tag in self._waiting:
                    self._waiting[tag] = response
            self._answered.notify_all()


def _check(orders: Iterable[dict[str, Any]], errors: Iterable[str], fine: str = "\0") -> None:
    for order, error in zip(orders, errors, strict=True):
        if error and not error.endswith(fine):
            raise ConfigurationError(f"Mosquitto refused {order['command']}: {error}")
