"""Mosquitto's files: its configuration, and the logins and roles of its dynamic security plugin.

Each device has one role, with literal topics from `policy.device_rules`.

    write_config(folder, credential=credential)      # then: mosquitto -c FOLDER/mosquitto.conf
"""

from __future__ import annotations

import base64
import getpass
import hmac
import json
import os
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

from edge_sdk.durable import make_folder, write_atomic
from edge_sdk.errors import ConfigurationError
from edge_sdk.wire.address import is_loopback
from edge_sdk.wire.topics import PAYLOAD_BYTES, Kind, all_devices
from server.broker.child import ListenSettings
from server.broker.core.packets import PUBLISH_OVERHEAD_BYTES
from server.broker.core.subscriptions import SHARED_PREFIX
from server.broker.policy import (
    BACKEND_HEARS,
    BACKEND_SAYS,
    Principal,
    device_rules,
)
from server.registry.credentials import mosquitto_hash

CONFIG_NAME: Final = "mosquitto.conf"
SECURITY_NAME: Final = "dynamic-security.json"
BACKEND: Final = "backend"  # user name of the server's own clients
SHARED_GROUP: Final = "splitedge"  # name of the backends' shared subscription
QUERIES: Final = "queries"  # role of logins that take queries and reply, and do nothing else
LOGIN_PREFIX: Final = f"{BACKEND}."  # of their user names; no device's id has a dot
CONTROL: Final = "$CONTROL/dynamic-security/v1"  # the plugin takes orders there
RESPONSE: Final = f"{CONTROL}/response"
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
PROGRAM: Final = "mosquitto"
PROGRAM_FOLDERS: Final = "/usr/sbin:/usr/local/sbin:/opt/homebrew/sbin"  # often not in PATH


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
    listening = ListenSettings(host, port, packet_bytes, certificate, key)
    lines = [
        "# Written by `splitedge server broker-config`; Mosquitto 2.0 or newer.",
        f"user {user or getpass.getuser()}",
        *_common_lines(folder, plugin, listening),
        # each device's last status survives a restart
        "persistence true",
        f"persistence_location {folder / 'data'}/",
        "persistent_client_expiration 1d",
        *_listener_lines(listening),
    ]
    path = folder / CONFIG_NAME
    write_atomic(path, ("\n".join(lines) + "\n").encode())
    return path


def write_managed(
    folder: Path,
    listening: ListenSettings,
    *,
    credential: str,
    devices: Iterable[Principal],
    plugin: Path,
) -> Path:
    """Write the files of a Mosquitto that this server starts; returns the configuration's path.

    The registry is the truth of devices: others than `devices` are dropped. Logins of backends stay
    (`server.roles.logins_cli`). A file that has the right content already is left alone, so a full
    disk is no obstacle then.

    Args:
        credential: password of the server's own user, `backend`.
        devices: those with a `mosquitto_hash`; others cannot log in until an order names them.
    Raises: StorageError.
    """
    make_folder(folder, mode=0o700)
    path = folder / SECURITY_NAME
    logins = _kept_logins(path)
    security = _security(_kept_or_new_hash(path, credential), devices, logins)
    _write_if_new(folder / SECURITY_NAME, json.dumps(security, indent=1).encode())
    lines = [
        "# Written by `splitedge server run` at each start.",
        *(["user root"] if os.geteuid() == 0 else []),  # else it is the user who starts it
        *_common_lines(folder, plugin, listening),
        # devices publish their status again when they connect
        "persistence false",
        "log_timestamp false",
        "log_type information",
        *_listener_lines(listening),
    ]
    _write_if_new(folder / CONFIG_NAME, ("\n".join(lines) + "\n").encode())
    return folder / CONFIG_NAME


def find_mosquitto() -> Path | None:
    """Mosquitto's program, if it is installed."""
    found = shutil.which(PROGRAM) or shutil.which(PROGRAM, path=PROGRAM_FOLDERS)
    return None if found is None else Path(found)


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


def role_name(device: str) -> str:
    """Name of the role of that device alone."""
    return f"device-{device}"


def device_acls(fleet: str, device: str) -> list[dict[str, Any]]:
    """Rules of the role of a device."""
    says, hears = device_rules(fleet, device)
    return [
        *(_acl("publishClientSend", topic) for topic in says),
        *(_acl("publishClientReceive", topic) for topic in hears),
        *(_acl("subscribeLiteral", topic) for topic in hears),
    ]


def _backend_acls() -> list[dict[str, Any]]:
    shared = [f"{SHARED_PREFIX}{SHARED_GROUP}/{heard}" for heard in BACKEND_HEARS]
    # a status only to drop the retained one of a revoked device
    says = (*BACKEND_SAYS, all_devices(Kind.STATUS), CONTROL)
    return [
        *(_acl("publishClientSend", topic) for topic in says),
        *(_acl("publishClientReceive", topic) for topic in (*BACKEND_HEARS, RESPONSE)),
        *(_acl("subscribeLiteral", topic) for topic in (*BACKEND_HEARS, *shared, RESPONSE)),
    ]


def query_acls() -> list[dict[str, Any]]:
    """Rules of the role of backends that take queries alone, by the shared subscription."""
    return [
        _acl("publishClientSend", all_devices(Kind.REPLY)),
        _acl("publishClientReceive", all_devices(Kind.QUERY)),
        _acl("subscribeLiteral", f"{SHARED_PREFIX}{SHARED_GROUP}/{all_devices(Kind.QUERY)}"),
    ]


def _acl(kind: str, topic: str) -> dict[str, Any]:
    return {"acltype": kind, "topic": topic, "priority": 0, "allow": True}


def _check_listener(
    host: str, certificate: Path | None, key: Path | None, *, insecure: bool
) -> None:
    if (certificate is None) != (key is None):
        raise ConfigurationError("broker: TLS needs a certificate and its key, got one of them")
    on_loopback = is_loopback(host)
    if certificate is None and not on_loopback and not insecure:
        raise ConfigurationError(
            f"broker: other machines would reach {host} without encryption; give a certificate and "
            "its key, or --insecure to allow it"
        )


def _common_lines(folder: Path, plugin: Path, listening: ListenSettings) -> Sequence[str]:
    return (
        "per_listener_settings false",
        "allow_anonymous false",
        f"plugin {plugin}",
        f"plugin_opt_config_file {folder / SECURITY_NAME}",
        "# above this the client is cut off; splitedge sends longer messages over HTTP",
        f"max_packet_size {listening.packet_bytes + PUBLISH_OVERHEAD_BYTES}",
        "max_keepalive 300",
        "# one backend receives from every device: the default of 20 in flight would slow it",
        "max_inflight_messages 256",
        "# limits of messages that wait for one client; above them, more are dropped. The first",
        "# holds for QoS 0 too: a device sends a query again when half of its time is gone",
        "max_queued_messages 1000",
        "max_queued_bytes 64000000",
        "set_tcp_nodelay true",
        "sys_interval 0",
        "log_dest stderr",
        "log_type error",
        "log_type warning",
        "log_type notice",
    )


def _listener_lines(listening: ListenSettings) -> list[str]:
    lines = [f"listener {listening.port} {listening.host}", "max_qos 1"]
    if listening.certificate is not None and listening.key is not None:
        lines.append(f"certfile {listening.certificate.absolute()}")
        lines.append(f"keyfile {listening.key.absolute()}")
    return lines


def _keep_or_write_security(path: Path, credential: str) -> None:
    if not path.exists():
        security = _security(mosquitto_hash(credential), ())
        write_atomic(path, json.dumps(security, indent=2).encode(), mode=0o600)
        return
    if _backend_hash(path, credential) is None:
        raise ConfigurationError(
            f"{path}: the user {BACKEND} has another credential there; give that one, or move the "
            "file away and enrol the devices again"
        )


def _kept_or_new_hash(path: Path, credential: str) -> str:
    """The hash of `credential` that the file has: a new one has a new salt, so it would differ."""
    try:
        kept = _backend_hash(path, credential)
    except (OSError, ValueError, LookupError, TypeError):  # no file, or a damaged one
        kept = None
    return kept or mosquitto_hash(credential)


def _kept_logins(path: Path) -> list[dict[str, Any]]:
    """Logins of backends in a security file; none where there is no file, or a damaged one."""
    try:
        clients = json.loads(path.read_bytes())["clients"]
        return [client for client in clients if client["username"].startswith(LOGIN_PREFIX)]
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return []


def _backend_hash(path: Path, credential: str) -> str | None:
    """The hash of the server's own user in a security file, if it is that of `credential`."""
    clients = json.loads(path.read_bytes())["clients"]
    backend = next((client for client in clients if client["username"] == BACKEND), None)
    if backend is None:
        return None
    kept = f"{backend['iterations']}${backend['salt']}${backend['password']}"
    again = mosquitto_hash(credential, base64.b64decode(backend["salt"]))
    return kept if hmac.compare_digest(kept, again) else None


def _write_if_new(path: Path, content: bytes) -> None:
    if not path.is_file() or path.read_bytes() != content:
        write_atomic(path, content, mode=0o600)


def _security(
    backend_hash: str, devices: Iterable[Principal], logins: Sequence[dict[str, Any]] = ()
) -> dict[str, Any]:
    clients = [_client(BACKEND, backend_hash, BACKEND), *logins]
    roles: list[dict[str, Any]] = [
        {"rolename": BACKEND, "acls": _backend_acls()},
        {"rolename": QUERIES, "acls": query_acls()},
    ]
    for device in devices:
        if device.mosquitto_hash is None or device.fleet is None:
            continue
        name = device.client_id
        client = _client(name, device.mosquitto_hash, role_name(name))
        clients.append({**client, "clientid": name})
        roles.append({"rolename": role_name(name), "acls": device_acls(device.fleet, name)})
    return {
        "defaultACLAccess": {
            "publishClientSend": False,
            "publishClientReceive": False,
            "subscribe": False,
            "unsubscribe": True,
        },
        "clients": clients,
        "groups": [],
        "roles": roles,
    }


def _client(username: str, hashed: str, role: str) -> dict[str, Any]:
    iterations, salt, password = hashed.split("$")
    return {
        "username": username,
        "password": password,
        "salt": salt,
        "iterations": int(iterations),
        "roles": [{"rolename": role}],
    }
