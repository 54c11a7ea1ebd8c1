"""Your own Mosquitto: its configuration, and its devices while it runs.

Mosquitto's dynamic security plugin keeps clients and roles in its own file, and takes orders on an
MQTT topic. Each device has one role, with literal topics from `policy.device_rules`.

    write_config(folder, credential=credential)      # then: mosquitto -c FOLDER/mosquitto.conf
    admin = MosquittoAdmin(address, credential=credential)
    admin.start()
    admin.set_device("default", "pi-4", device_credential)
"""

from __future__ import annotations

import base64
import getpass
import hashlib
import hmac
import json
import secrets
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

from edge_sdk.durable import make_folder, write_atomic
from edge_sdk.errors import ConfigurationError, LinkError
from edge_sdk.mqtt import BrokerAddress, Message, MqttLink, loopback
from edge_sdk.wire.topics import PAYLOAD_BYTES, check_id
from server.broker.packets import PUBLISH_OVERHEAD_BYTES
from server.broker.policy import BACKEND_HEARS, BACKEND_SAYS, SHARED_PREFIX, device_rules

CONFIG_NAME: Final = "mosquitto.conf"
SECURITY_NAME: Final = "dynamic-security.json"
BACKEND: Final = "backend"  # user name of the server's own clients
SHARED_GROUP: Final = "splitedge"  # name of the backends' shared subscription
PLUGIN_NAME: Final = "mosquitto_dynamic_security.so"
PLUGIN_FOLDERS: Final = (
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib/arm-linux-gnueabihf",
    "/usr/lib64",
    "/usr/lib",
    "/usr/local/lib",
    "/opt/homebrew/lib",
)

_CONTROL: Final = "$CONTROL/dynamic-security/v1"
_RESPONSE: Final = f"{_CONTROL}/response"
_SALT_BYTES: Final = 12  # the plugin of Mosquitto 2.0 takes no other length
_ITERATIONS: Final = 101  # the plugin's own; a 256-bit random credential needs no stretching


def write_config(
    folder: Path,
    *,
    credential: str,
    host: str = "127.0.0.1",
    port: int = 1883,
    certificate: Path | None = None,
    key: Path | None = None,
    insecure: bool = False,
    plugin: Path | None = None,
    packet_bytes: int = PAYLOAD_BYTES,
    user: str | None = None,
) -> Path:
    """Write Mosquitto's files into `folder`, and return the path of its configuration.

    Devices that Mosquitto already keeps there stay; the rest is written again.

    Args:
        credential: password of the server's own user, `backend`.
        host, port: address on which Mosquitto listens.
        certificate, key: PEM files for TLS; needed off loopback unless `insecure`.
        plugin: path of `mosquitto_dynamic_security.so`; by default the usual folders are searched.
        packet_bytes: longest message.
        user: account that Mosquitto runs as when root starts it; by default the current user.
    Raises: ConfigurationError for a missing plugin, an unencrypted listener off loopback, half a
        TLS pair, or a folder in which `backend` has another credential.
    """
    _check_listener(host, certificate, key, insecure=insecure)
    plugin = plugin or find_plugin()
    if not plugin.is_file():
        raise ConfigurationError(f"Mosquitto's plugin: no file {plugin}; give the right path")
    folder = folder.absolute()
    make_folder(folder / "data", mode=0o700)
    _keep_or_write_security(folder / SECURITY_NAME, credential)
    lines = [
        "# Written by `splitedge server broker-config`; Mosquitto 2.0 or newer.",
        f"user {user or getpass.getuser()}",
        "per_listener_settings false",
        "allow_anonymous false",
        f"plugin {plugin}",
        f"plugin_opt_config_file {folder / SECURITY_NAME}",
        "# above this the client is cut off; splitedge sends longer messages over HTTP",
        f"max_packet_size {packet_bytes + PUBLISH_OVERHEAD_BYTES}",
        "max_keepalive 300",
        "# one backend receives from every device: the default of 20 in flight would slow it",
        "max_inflight_messages 256",
        "# limits of messages that wait for one client; above them, messages are dropped",
        "max_queued_messages 1000",
        "max_queued_bytes 64000000",
        "set_tcp_nodelay true",
        "# each device's last status survives a restart",
        "persistence true",
        f"persistence_location {folder / 'data'}/",
        "persistent_client_expiration 1d",
        "sys_interval 0",
        "log_dest stderr",
        "log_type error",
        "log_type warning",
        "log_type notice",
        f"listener {port} {host}",
        "max_qos 1",
    ]
    if certificate is not None and key is not None:
        lines += [f"certfile {certificate.absolute()}", f"keyfile {key.absolute()}"]
    path = folder / CONFIG_NAME
    write_atomic(path, ("\n".join(lines) + "\n").encode())
    return path


def find_plugin() -> Path:
    """Mosquitto's dynamic security plugin.

    Raises: ConfigurationError naming the folders that were searched.
    """
    for folder in PLUGIN_FOLDERS:
        path = Path(folder) / PLUGIN_NAME
        if path.is_file():
            return path
    raise ConfigurationError(
        f"{PLUGIN_NAME}: found in none of {', '.join(PLUGIN_FOLDERS)}; install Mosquitto 2.0 or "
        "newer, or give the plugin's path"
    )


class MosquittoAdmin:
    """Adds and removes devices on a running Mosquitto; safe from any thread.

    Args:
        credential: password of the user `backend`.
        ca: PEM file to verify a TLS broker with.
        timeout_s: how long Mosquitto may take to answer.
    """

    def __init__(
        self,
        address: BrokerAddress,
        *,
        credential: str,
        ca: str | None = None,
        timeout_s: float = 5.0,
    ) -> None:
        self._timeout_s = timeout_s
        self._answered = threading.Condition()
        self._waiting: dict[str, str | None] = {}  # by correlation; the error, "" once done
        self._link = MqttLink(
            address,
            client_id=f"{BACKEND}-admin-{secrets.token_hex(4)}",
            username=BACKEND,
            password=credential,
            ca=ca,
        )
        self._link.subscribe(_RESPONSE, self._receive)

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
        role = {"rolename": _role(device), "acls": _device_acls(fleet, device)}
        client = {
            "username": device,
            "clientid": device,
            "password": credential,
            "roles": [{"rolename": _role(device)}],
        }
        self._upsert("Role", role)
        self._upsert("Client", client)

    def remove_device(self, device: str) -> None:
        """Cut a device at once and refuse it from now on; an unknown device is no error.

        Raises: LinkError when Mosquitto does not answer; ConfigurationError when it refuses.
        """
        orders = [
            {"command": "disableClient", "username": device},
            {"command": "deleteClient", "username": device},
            {"command": "deleteRole", "rolename": _role(device)},
        ]
        _check(orders, self._send(orders), fine="not found")

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
        tags = [secrets.token_hex(8) for _ in orders]
        tagged = [
            {**order, "correlationData": tag} for order, tag in zip(orders, tags, strict=True)
        ]
        with self._answered:
            self._waiting.update(dict.fromkeys(tags))
        try:
            if not self._link.publish(_CONTROL, json.dumps({"commands": tagged}).encode()):
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
                return [self._waiting[tag] or "" for tag in tags]
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
                    self._waiting[tag] = response.get("error", "")
            self._answered.notify_all()


def _check(orders: Iterable[dict[str, Any]], errors: Iterable[str], fine: str = "\0") -> None:
    for order, error in zip(orders, errors, strict=True):
        if error and not error.endswith(fine):
            raise ConfigurationError(f"Mosquitto refused {order['command']}: {error}")


def _role(device: str) -> str:
    return f"device-{device}"


def _device_acls(fleet: str, device: str) -> list[dict[str, Any]]:
    says, hears = device_rules(fleet, device)
    return [
        *(_acl("publishClientSend", topic) for topic in says),
        *(_acl("publishClientReceive", topic) for topic in hears),
        *(_acl("subscribeLiteral", topic) for topic in hears),
    ]


def _backend_acls() -> list[dict[str, Any]]:
    shared = [f"{SHARED_PREFIX}{SHARED_GROUP}/{heard}" for heard in BACKEND_HEARS]
    return [
        *(_acl("publishClientSend", topic) for topic in (*BACKEND_SAYS, _CONTROL)),
        *(_acl("publishClientReceive", topic) for topic in (*BACKEND_HEARS, _RESPONSE)),
        *(_acl("subscribeLiteral", topic) for topic in (*BACKEND_HEARS, *shared, _RESPONSE)),
    ]


def _acl(kind: str, topic: str) -> dict[str, Any]:
    return {"acltype": kind, "topic": topic, "priority": 0, "allow": True}


def _check_listener(
    host: str, certificate: Path | None, key: Path | None, *, insecure: bool
) -> None:
    if (certificate is None) != (key is None):
        raise ConfigurationError("broker: TLS needs a certificate and its key, got one of them")
    on_loopback = loopback(BrokerAddress(host, 0))
    if certificate is None and not on_loopback and not insecure:
        raise ConfigurationError(
            f"broker: other machines would reach {host} without encryption; give a certificate and "
            "its key, or --insecure to allow it"
        )


def _keep_or_write_security(path: Path, credential: str) -> None:
    if not path.exists():
        write_atomic(path, json.dumps(_security(credential), indent=2).encode(), mode=0o600)
        return
    clients = json.loads(path.read_bytes())["clients"]
    backend = next((client for client in clients if client["username"] == BACKEND), None)
    if backend is None or not _verifies(backend, credential):
        raise ConfigurationError(
            f"{path}: the user {BACKEND} has another credential there; give that one, or move the "
            "file away and enrol the devices again"
        )


def _security(credential: str) -> dict[str, Any]:
    salt = secrets.token_bytes(_SALT_BYTES)
    return {
        "defaultACLAccess": {
            "publishClientSend": False,
            "publishClientReceive": False,
            "subscribe": False,
            "unsubscribe": True,
        },
        "clients": [
            {
                "username": BACKEND,
                "password": _hash(credential, salt, _ITERATIONS),
                "salt": base64.b64encode(salt).decode(),
                "iterations": _ITERATIONS,
                "roles": [{"rolename": BACKEND}],
            }
        ],
        "groups": [],
        "roles": [{"rolename": BACKEND, "acls": _backend_acls()}],
    }


def _verifies(client: dict[str, Any], credential: str) -> bool:
    salt = base64.b64decode(client["salt"])
    return hmac.compare_digest(client["password"], _hash(credential, salt, client["iterations"]))


def _hash(credential: str, salt: bytes, iterations: int) -> str:
    """PBKDF2-HMAC-SHA512, 64 bytes, base64: what the plugin keeps."""
    derived = hashlib.pbkdf2_hmac("sha512", credential.encode(), salt, iterations)
    return base64.b64encode(derived).decode()
