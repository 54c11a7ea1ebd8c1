"""The server's HTTP API as a device uses it: enrolment, where things are, big offloads.

Imported only where it is needed: urllib3 costs 2 MB that a running agent mostly does without.
"""

from __future__ import annotations

import contextlib
import hashlib
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import orjson
import urllib3

from edge_sdk.durable import write_atomic
from edge_sdk.errors import EnrolmentError, FrameError, LinkError, StorageError
from edge_sdk.identity import Identity, check_server_url
from edge_sdk.mqtt import BrokerAddress
from edge_sdk.wire.frames import HTTP_LIMITS, decode, encode
from edge_sdk.wire.messages import RETRY_AFTER_MAX_S, Problem, Query, Reply, read_reply
from profiles import DeviceProfile

HEADER_LENGTH: Final = "Inference-Header-Content-Length"
TIMEOUT_S: Final = 10.0
CONNECTION_NAME: Final = "connection.json"
ROOT_NAME: Final = "tuf/root.json"
REFUSED: Final = {429: Problem.OVERLOADED, 503: Problem.NOT_READY, 404: Problem.UNKNOWN_MODEL}


@dataclass(frozen=True, slots=True)
class Connection:
    """Where the fleet's broker is and what it takes."""

    broker: str
    max_packet_bytes: int = 2_000_000

    def address(self, identity: Identity) -> BrokerAddress:
        """The broker's address; one that listens everywhere is where the server is."""
        address = BrokerAddress.parse(self.broker)
        if address.host in ("0.0.0.0", "::"):  # noqa: S104 - read from the server, not bound
            host = urllib3.util.parse_url(identity.server).host or address.host
            return BrokerAddress(host, address.port, address.tls)
        return address

    @classmethod
    def load(cls, state: Path) -> Connection:
        """What enrolment or the last look-up left in the state folder.

        Raises: EnrolmentError if there is nothing.
        """
        try:
            return _connection(orjson.loads((state / CONNECTION_NAME).read_bytes()))
        except (OSError, orjson.JSONDecodeError) as err:
            raise EnrolmentError(f"{state / CONNECTION_NAME}: {err}; enrol again") from err


def enroll(
    server: str,
    token: str,
    state: Path,
    *,
    profile: DeviceProfile,
    name: str | None = None,
    ca: Path | None = None,
) -> Identity:
    """Trade a one-time token for an identity, and keep it in the state folder.

    The part of the token after the dot is the fingerprint of the fleet's TUF root: the root that
    the server sends is checked against it before anything is written.

    Raises: ConfigurationError for the URL, before the token is spent; EnrolmentError with the
        server's reason; LinkError if it cannot be reached.
    """
    check_server_url(server)
    secret, _, fingerprint = token.strip().partition(".")
    body = {"token": secret, "name": name, "profile": profile.to_dict()}
    url = f"{server.rstrip('/')}/api/v1/enroll"
    status, answer = _call("POST", url, ca=ca, body=body)
    if status != 201:
        raise EnrolmentError(f"the server refused to enrol this device: {_reason(answer, status)}")
    root = str(answer["root"]).encode()
    if fingerprint and hashlib.sha256(root).hexdigest()[:32] != fingerprint:
        raise EnrolmentError(
            f"{server}: its root key is not the one this token was made for; "
            "check the address, then make a new token"
        )
    identity = Identity(
        server, str(answer["device"]), str(answer["fleet"]), str(answer["credential"]), ca
    )
    (state / ROOT_NAME).parent.mkdir(parents=True, exist_ok=True)
    write_atomic(state / ROOT_NAME, root)
    _save_connection(state, answer)
    identity.save(state)
    return identity


def connection(
    identity: Identity, state: Path | None = None, *, timeout_s: float = TIMEOUT_S
) -> Connection:
    """Where the broker is now; kept in `state` when given and the disk takes it.

    Raises: LinkError.
    """
    url = identity.url(f"api/v1/devices/{identity.device}/connection")
    called = _call("GET", url, ca=identity.ca, identity=identity, timeout_s=timeout_s)
    answer = _expect(*called, url)
    found = _connection(answer)
    if state is not None:
        with contextlib.suppress(StorageError, EnrolmentError):
            # asked every few seconds while the broker is away: flash wears with each write
            if found != Connection.load(state):
                _save_connection(state, answer)
    return found


def report_profile(identity: Identity, profile: DeviceProfile) -> None:
    """Tell the server what this device is now.

    Raises: LinkError.
    """
    url = identity.url(f"api/v1/devices/{identity.device}/profile")
    _expect(*_call("PUT", url, ca=identity.ca, identity=identity, body=profile.to_dict()), url)


def echo(identity: Identity, payload: bytes) -> None:
    """Send `payload` there and back, for measuring the link.

    Raises: LinkError.
    """
    url = identity.url("api/v1/link/echo")
    response = _request("POST", url, ca=identity.ca, identity=identity, raw=payload)
    if response.status != 200 or response.data != payload:
        raise LinkError(
            f"{url}: expected the same {len(payload)} bytes back, got {response.status}"
        )


def infer(identity: Identity, query: Query, deadline: float) -> Reply:
    """One offload over HTTP, for frames above the broker's limit.

    Args:
        deadline: on the monotonic clock.
    Raises: LinkError if the server cannot be reached in time; FrameError for a bad answer.
    """
    if query.tensor is None:
        raise FrameError("infer: expected a tensor, got a probe")
    header = {
        "id": query.id,
        "parameters": {"deadline_ms": query.deadline_ms, "binary_data_output": True},
    }
    text, parts = encode(header, [query.tensor], key="inputs")
    url = identity.url(f"v2/models/{query.model}/versions/{query.version}/infer")
    response = _request(
        "POST",
        url,
        ca=identity.ca,
        identity=identity,
        raw=b"".join((text, *parts)),
        headers={HEADER_LENGTH: str(len(text))},
        timeout_s=max(deadline - time.monotonic(), 0.001),
    )
    if response.status != 200:
        detail = _reason(_json(response.data), response.status)
        problem = REFUSED.get(response.status, Problem.FAILED)
        seconds = response.headers.get("Retry-After", "")
        retry_after_s = min(float(seconds), RETRY_AFTER_MAX_S) if seconds.isdecimal() else 0.0
        return Reply(query.id, problem=problem, detail=detail, retry_after_s=retry_after_s)
    length = response.headers.get(HEADER_LENGTH)
    reply = read_reply(decode(response.data, None if length is None else int(length), HTTP_LIMITS))
    return Reply(query.id, reply.tensors)


def _connection(answer: Mapping[str, Any]) -> Connection:
    broker = answer.get("broker")
    if not isinstance(broker, dict) or not isinstance(broker.get("url"), str):
        raise LinkError("the server names no broker; is it of the same version?")
    return Connection(broker["url"], int(broker.get("max_packet_bytes", 2_000_000)))


def _save_connection(state: Path, answer: Mapping[str, Any]) -> None:
    write_atomic(state / CONNECTION_NAME, orjson.dumps({"broker": answer["broker"]}))


def _call(
    method: str,
    url: str,
    *,
    ca: Path | None,
    identity: Identity | None = None,
    body: Mapping[str, Any] | None = None,
    timeout_s: float = TIMEOUT_S,
) -> tuple[int, dict[str, Any]]:
    raw = None if body is None else orjson.dumps(body)
    headers = {"Content-Type": "application/json"}
    response = _request(
        method, url, ca=ca, identity=identity, raw=raw, headers=headers, timeout_s=timeout_s
    )
    return response.status, _json(response.data)


def _expect(status: int, answer: dict[str, Any], url: str) -> dict[str, Any]:
    if status != 200:
        raise LinkError(f"{url}: {_reason(answer, status)}")
    return answer


def _request(
    method: str,
    url: str,
    *,
    ca: Path | None,
    identity: Identity | None = None,
    raw: bytes | None = None,
    headers: Mapping[str, str] | None = None,
    timeout_s: float = TIMEOUT_S,
) -> urllib3.BaseHTTPResponse:
    sent = dict(headers or {})
    if identity is not None:
        sent["Authorization"] = identity.authorization
    context = ssl.create_default_context(cafile=ca) if url.startswith("https") else None
    # a pool each: these calls are rare, and none of them should hold a socket between two
    with urllib3.PoolManager(ssl_context=context, retries=False) as pool:
        try:
            return pool.request(
                method,
                url,
                body=raw,
                headers=sent,
                timeout=urllib3.Timeout(total=timeout_s),
                redirect=False,
            )
        except (urllib3.exceptions.HTTPError, OSError) as err:
            raise LinkError(f"{url}: {_cause(err)}") from err


def _cause(err: Exception) -> str:
    inner = getattr(err, "reason", None) or err
    text = str(inner).split(": ", 1)[-1]
    return f"cannot be reached ({text}); is the server running?"


def _json(raw: bytes) -> dict[str, Any]:
    try:
        data = orjson.loads(raw)
    except orjson.JSONDecodeError:
        return {}
    return data if isinstance(data, dict) else {}


def _reason(answer: Mapping[str, Any], status: int) -> str:
    return f"{answer.get('error') or 'no reason given'} (HTTP {status})"
