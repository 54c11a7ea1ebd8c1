"""The server's HTTP API as a device uses it: enrolment, the broker's address, large queries.

Imported only where it is needed: urllib3 takes 2 MB, and most agents run without it.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self
from urllib.parse import urlsplit

import orjson

from edge_sdk.durable import check_writable, make_folder, write_atomic
from edge_sdk.errors import (
    ConfigurationError,
    EnrolmentError,
    FrameError,
    LinkError,
    SplitedgeError,
    StorageError,
    shown,
)
from edge_sdk.http import HttpClient, Timeout
from edge_sdk.identity import Identity, check_not_enrolled, check_server_url, host_id
from edge_sdk.settings_file.template import write_settings_template
from edge_sdk.tls import tls_context, tls_context_for
from edge_sdk.wire.broker_address import DEFAULT_PORTS, BrokerAddress
from edge_sdk.wire.clear_text import refuse_clear_text
from edge_sdk.wire.topics import PAYLOAD_BYTES
from edge_sdk.wire.traceparent import TRACEPARENT

if TYPE_CHECKING:
    from edge_sdk.wire.messages import Query, Reply
    from profiles.device import DeviceProfile
    from profiles.measured import BundleMeasurement, Conditions

logger = logging.getLogger(__name__)

TIMEOUT_S: Final = 10.0
CONNECTION_NAME: Final = "connection.json"
ROOT_NAME: Final = "tuf/root.json"
CA_NAME: Final = "ca.pem"
# header of an enrolment by an agent that can wait for the operator's approval
WAITS_HEADER: Final = "Splitedge-Waits-For"
# The longest answer in JSON; that of a query holds tensors, and may be longer.
JSON_BYTES: Final = 2_000_000
# Room on the disk for root, connection and identity, which take less.
ENROLMENT_BYTES: Final = 65_536


@dataclass(frozen=True, slots=True)
class FleetBroker:
    """The fleet's broker: its URL, which can be parsed, and the longest message that it takes."""

    broker: str
    max_packet_bytes: int = PAYLOAD_BYTES

    def address(self, identity: Identity) -> BrokerAddress:
        """The broker's address; a broker that listens everywhere has the server's host."""
        address = BrokerAddress.parse(self.broker)
        if address.host in ("0.0.0.0", "::"):  # noqa: S104 - read from the server, not bound
            host = urlsplit(identity.server).hostname or address.host
            return BrokerAddress(host, address.port, address.tls)
        return address

    @classmethod
    def load(cls, state: Path) -> FleetBroker | None:
        """The broker that enrolment or the last look-up left in the state folder.

        Returns: None where the file is missing or damaged; the server says it again.
        """
        try:
            return cls._kept(state)
        except (OSError, LinkError) as err:
            logger.debug("%s: cannot be read (%s)", state / CONNECTION_NAME, err)
            return None

    @classmethod
    def known(cls, state: Path, identity: Identity) -> FleetBroker:
        """The broker as `load`, or else the usual port on the server's own machine.

        So a device with a damaged file starts and answers, and finds the broker when it asks.
        """
        try:
            return cls._kept(state)
        except (OSError, LinkError) as err:  # said once, while look-ups come every few seconds
            usual, path = cls._usual(identity), state / CONNECTION_NAME
            logger.warning(
                "%s: cannot be read (%s); the broker is first looked for at %s",
                *(path, err, usual.broker),
            )
            return usual

    @classmethod
    def _kept(cls, state: Path) -> FleetBroker:
        return _read_broker(_json((state / CONNECTION_NAME).read_bytes()))

    @classmethod
    def _usual(cls, identity: Identity) -> FleetBroker:
        server = urlsplit(identity.server)
        tls = server.scheme == "https"
        port = DEFAULT_PORTS["mqtts" if tls else "mqtt"]
        return cls(BrokerAddress(server.hostname or "localhost", port, tls).url)


def enroll(
    server: str,
    token: str,
    state: str | Path,
    *,
    profile: DeviceProfile | None = None,
    name: str | None = None,
    ca: str | Path | None = None,
    insecure: bool = False,
) -> Identity:
    """Make this device a member of the server's fleet: once, before the first `EdgeAgent.open`.

        enroll("https://hub.example:8000", token, "/var/lib/splitedge/agent", ca="hub-ca.pem")
        agent = EdgeAgent.open("/var/lib/splitedge/agent")    # fetches the device's bundle first

    Trades a one-time token for an identity, and keeps it in the state folder. The part of the token
    after the dot is the fingerprint of the fleet's TUF root: the root that the server sends is
    checked against it before it is written. The folder also gets an `agent.toml`, whose comments
    name every setting.

    Args:
        server: base URL of its API, `https://host:port`.
        token: from `splitedge server token create`.
        state: the folder of everything the device keeps; made where missing, for its owner only.
        profile: of this device; None measures it, which takes seconds.
        name: wanted device id; None takes the name of this machine.
        ca: PEM file of the only authority to trust, which is copied; None trusts the system's.
        insecure: let the token and the device's credential travel to other machines unencrypted,
            now and later.
    Returns: the device's identity from now on.
    Raises: before the token is spent: ConfigurationError for the URL, for another machine without
        encryption unless `insecure`, for the `ca`, or for a folder that has an identity already;
        StorageError if the folder cannot be written; LinkError if the server cannot be reached.
        EnrolmentError with the server's reason.
    """
    state = Path(state)
    check_server_url(server)
    refuse_clear_text(server, "server", insecure=insecure)
    check_not_enrolled(state)
    authority = None if ca is None else _read_authority(Path(ca))
    if profile is None:
        from profiles.device import probe  # noqa: PLC0415 - psutil, only to enrol

        profile = probe()
    new = not state.exists()
    try:
        # the first answer spends the token, so what may fail on this device fails before it
        make_folder(state, mode=0o700)
        make_folder((state / ROOT_NAME).parent)
        check_writable(state, ENROLMENT_BYTES)
        write_settings_template(state)
        if authority is not None:
            write_atomic(state / CA_NAME, authority)
        kept = None if authority is None else state / CA_NAME
        about = {"name": name or host_id(), "profile": profile.to_dict()}
        return _enroll(server, token, state, about, kept, insecure=insecure)
    except BaseException:
        if new:
            shutil.rmtree(state, ignore_errors=True)
        raise


def locate_broker(
    identity: Identity, state: Path | None = None, *, timeout_s: float = TIMEOUT_S
) -> FleetBroker:
    """Ask the server where the broker is.

    Args:
        state: folder to keep the answer in, if the disk takes it; None keeps nothing.
    Raises: LinkError.
    """
    url = identity.url(f"api/v1/devices/{identity.device}/connection")
    called = _call("GET", url, ca=identity.ca, identity=identity, timeout_s=timeout_s)
    answer = _expect(*called, url)
    found = _read_broker(answer)
    if state is not None:
        with contextlib.suppress(StorageError):
            # asked every few seconds while the broker is away, and flash wears with each write
            if found != FleetBroker.load(state):
                _save_broker(state, answer)
    return found


def is_approved(identity: Identity, *, timeout_s: float = TIMEOUT_S) -> bool:
    """Whether the operator has let this device in; a server that asks for no approval has.

    Raises: LinkError; EnrolmentError if the server does not accept the credential.
    """
    url = identity.url(f"api/v1/devices/{identity.device}/approval")
    status, answer = _call("GET", url, ca=identity.ca, identity=identity, timeout_s=timeout_s)
    if status == 404:  # a server of the release before
        return True
    _check_accepted(status, answer)
    return bool(_expect(status, answer, url).get("approved"))


def new_credential(identity: Identity, *, timeout_s: float = TIMEOUT_S) -> str:
    """Ask the server for a new credential, which is valid beside the one of `identity`.

    Raises: LinkError, also where the server is of a release that makes none; EnrolmentError if it
        does not accept this device.
    """
    url = identity.url(f"api/v1/devices/{identity.device}/credential")
    status, answer = _call("POST", url, ca=identity.ca, identity=identity, timeout_s=timeout_s)
    _check_accepted(status, answer)
    if status != 201 or not isinstance(answer.get("credential"), str):
        raise LinkError(f"{url}: {_reason(answer, status)}")
    return str(answer["credential"])


def confirm_credential(identity: Identity, *, timeout_s: float = TIMEOUT_S) -> None:
    """Make the credential of `identity`, a new one, the only one of this device.

    Raises: LinkError: it may be the only one or not, so confirm again; EnrolmentError if the server
        does not accept it.
    """
    url = identity.url(f"api/v1/devices/{identity.device}/credential/confirm")
    status, answer = _call("POST", url, ca=identity.ca, identity=identity, timeout_s=timeout_s)
    _check_accepted(status, answer)
    if status != 204:
        raise LinkError(f"{url}: {_reason(answer, status)}")


def report_done(identity: Identity, op: str, argument: str = "") -> None:
    """Tell the server that an order is carried out, so that it is not sent again.

    Raises: LinkError.
    """
    url = identity.url(f"api/v1/devices/{identity.device}/orders/done")
    body = {"op": op, "argument": argument}
    status, answer = _call("POST", url, ca=identity.ca, identity=identity, body=body)
    if status != 204:
        raise LinkError(f"{url}: {_reason(answer, status)}")


def report_profile(identity: Identity, profile: DeviceProfile) -> None:
    """Send the server this device's profile of today.

    Raises: LinkError.
    """
    _put(identity, "profile", profile.to_dict())


def report_measurement(identity: Identity, measurement: BundleMeasurement) -> None:
    """Send the server what a bundle takes on this device.

    Raises: LinkError, also where the server is of a release that has no place for it.
    """
    _put(identity, "measurements", measurement.to_dict())


def report_conditions(identity: Identity, conditions: Conditions) -> None:
    """Send the server the present state of this device.

    Raises: LinkError, also where the server is of a release that has no place for it.
    """
    _put(identity, "conditions", conditions.to_dict())


def report_failure(
    identity: Identity, bundle: str, why: str, *, timeout_s: float = TIMEOUT_S
) -> None:
    """Tell the server that a bundle ran out of memory here: it then assigns a smaller one.

    Raises: LinkError, also where the server is of a release that has no place for it.
    """
    url = identity.url(f"api/v1/devices/{identity.device}/failures")
    body = {"bundle": bundle, "why": why}
    called = _call("POST", url, ca=identity.ca, identity=identity, body=body, timeout_s=timeout_s)
    _expect(*called, url)


def report_update(
    identity: Identity, report: Mapping[str, Any], *, timeout_s: float = TIMEOUT_S
) -> None:
    """Send the server the outcome of an update (edge_sdk.bundles.update_report).

    Raises: LinkError.
    """
    url = identity.url(f"api/v1/devices/{identity.device}/update")
    status, answer = _call(
        "PUT", url, ca=identity.ca, identity=identity, body=report, timeout_s=timeout_s
    )
    if status != 204:
        raise LinkError(f"{url}: {_reason(answer, status)}")


def unmeasured_bundles(identity: Identity) -> list[str]:
    """The bundles that the server wants to be measured here, to choose the fastest variant.

    Raises: LinkError, also where the server is of a release that does not ask.
    """
    url = identity.url(f"api/v1/devices/{identity.device}/unmeasured")
    answer = _expect(*_call("GET", url, ca=identity.ca, identity=identity), url)
    bundles = answer.get("bundles")
    if not isinstance(bundles, list) or not all(isinstance(name, str) for name in bundles):
        raise LinkError(f"{url}: expected a list of bundles, got {shown(bundles)}")
    return bundles


class Echo:
    """Sends bytes to the server and back, to measure the link.

        with Echo(identity) as echo:
            link = measure_link(echo)

    All bytes take one connection: setting one up takes several round trips, and the agent's stays.
    """

    def __init__(self, identity: Identity) -> None:
        self._headers = {"Authorization": identity.authorization}
        self._url = identity.url("api/v1/link/echo")
        self._client = _client(self._url, identity.ca)

    def __call__(self, payload: bytes) -> None:
        """Make one round trip.

        Raises: LinkError.
        """
        answer = self._client.request(
            "POST",
            self._url,
            headers=self._headers,
            body=payload,
            timeout=Timeout(total_s=TIMEOUT_S),
            at_most=max(len(payload), JSON_BYTES),
        )
        if answer.status != 200 or answer.body != payload:
            raise LinkError(
                f"{self._url}: expected the same {len(payload)} bytes back, got {answer.status}"
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._client.close()


def infer(
    identity: Identity,
    query: Query,
    deadline: float,
    count: Callable[[int, int], None] | None = None,
) -> Reply:
    """Send one query over HTTP, for frames above the broker's limit.

    Args:
        deadline: on the monotonic clock.
        count: called with the bytes of a body sent and of a body received, each when it happens.
    Returns: the reply, or the problem that the server names.
    Raises: LinkError if the server cannot be reached in time, does not know this device or is
        broken, all of which may pass; FrameError for a bad answer.
    """
    # with numpy, which takes a quarter of an enrolment's time, and only queries need it
    from edge_sdk.wire.answers import HEADER_LENGTH, read_header_length  # noqa: PLC0415
    from edge_sdk.wire.frames import HTTP_LIMITS, decode, encode  # noqa: PLC0415
    from edge_sdk.wire.messages import (  # noqa: PLC0415
        RETRY_AFTER_MAX_S,
        Problem,
        Reply,
        read_reply,
    )

    if query.tensor is None:
        raise FrameError("infer: expected a tensor, got a probe")
    header = {
        "id": query.id,
        "parameters": {"deadline_ms": query.deadline_ms, "binary_data_output": True},
    }
    text, parts = encode(header, [query.tensor], key="inputs")
    headers = {HEADER_LENGTH: str(len(text)), "Authorization": identity.authorization}
    if query.trace is not None:
        headers[TRACEPARENT] = query.trace.traceparent
    url = identity.url(f"v2/models/{query.model}/versions/{query.version}/infer")
    body = b"".join((text, *parts))
    if count is not None:
        count(len(body), 0)
    with _client(url, identity.ca) as client:
        answer = client.request(
            "POST",
            url,
            headers=headers,
            body=body,
            timeout=Timeout(total_s=max(deadline - time.monotonic(), 0.001)),
            at_most=HTTP_LIMITS.frame_bytes,
        )
    if count is not None:
        count(0, len(answer.body))
    if answer.status != 200:
        detail = _reason(_json(answer.body), answer.status)
        problem = {
            404: Problem.UNKNOWN_MODEL,
            429: Problem.OVERLOADED,
            500: Problem.FAILED,  # the same as over MQTT, so that a late query ends in the same way
            503: Problem.NOT_READY,
            504: Problem.EXPIRED,
        }.get(answer.status)
        if problem is None and (answer.status in (401, 403) or answer.status >= 500):
            raise LinkError(f"{url}: {detail}")
        seconds = answer.headers.get("Retry-After", "")
        retry_after_s = min(float(seconds), RETRY_AFTER_MAX_S) if seconds.isdecimal() else 0.0
        problem = problem or Problem.FAILED
        return Reply(query.id, problem=problem, detail=detail, retry_after_s=retry_after_s)
    length = read_header_length(answer.headers.get(HEADER_LENGTH))
    reply = read_reply(decode(answer.body, length, HTTP_LIMITS))
    return Reply(query.id, reply.tensors)


def _enroll(
    server: str,
    token: str,
    state: Path,
    about: Mapping[str, Any],
    ca: Path | None,
    *,
    insecure: bool,
) -> Identity:
    fingerprint = token.strip().partition(".")[2]
    url = f"{server.rstrip('/')}/api/v1/enroll"
    # whole: the server may have had another root since the token was made, and sends that one
    # a server that asks for approval lets in only devices that say that they can wait for it
    waits = {WAITS_HEADER: "approval"}
    body = {"token": token.strip(), **about}
    status, answer = _call("POST", url, ca=ca, body=body, more=waits)
    if status != 201:
        raise EnrolmentError(f"the server refused to enrol this device: {_reason(answer, status)}")
    root = str(answer.get("root")).encode()
    if fingerprint and hashlib.sha256(root).hexdigest()[:32] != fingerprint:
        raise EnrolmentError(
            f"{server}: expected the root key that the token was made for, got another one; "
            "check the address, then make a new token"
        )
    try:
        identity = Identity(
            server,
            str(answer["device"]),
            str(answer["fleet"]),
            str(answer["credential"]),
            ca,
            insecure,
        )
        _read_broker(answer)
    except (KeyError, SplitedgeError) as err:
        raise EnrolmentError(
            f"{server}: its answer names no usable identity ({err}); is the server of the same "
            "version as this device?"
        ) from err
    write_atomic(state / ROOT_NAME, root)
    _save_broker(state, answer)
    identity.save(state)
    return identity


def _check_accepted(status: int, answer: Mapping[str, Any]) -> None:
    if status in (401, 403):
        raise EnrolmentError(f"the server does not accept this device: {_reason(answer, status)}")


def _read_authority(ca: Path) -> bytes:
    tls_context(ca)
    try:
        return ca.read_bytes()
    except OSError as err:
        raise ConfigurationError(f"{ca}: cannot be read ({err.strerror})") from err


def _read_broker(answer: Mapping[str, Any]) -> FleetBroker:
    broker = answer.get("broker")
    if not isinstance(broker, dict) or not isinstance(broker.get("url"), str):
        raise LinkError("the server names no broker; is it of the same version as this device?")
    size = broker.get("max_packet_bytes", PAYLOAD_BYTES)
    if not isinstance(size, int):
        raise LinkError(f"max_packet_bytes: expected a number of bytes, got {shown(size)}")
    try:
        BrokerAddress.parse(broker["url"])
    except ConfigurationError as err:
        raise LinkError(str(err)) from err
    return FleetBroker(broker["url"], size)


def _save_broker(state: Path, answer: Mapping[str, Any]) -> None:
    write_atomic(state / CONNECTION_NAME, orjson.dumps({"broker": answer["broker"]}))


def _call(
    method: str,
    url: str,
    *,
    ca: Path | None,
    identity: Identity | None = None,
    body: Mapping[str, Any] | None = None,
    timeout_s: float = TIMEOUT_S,
    more: Mapping[str, str] | None = None,
) -> tuple[int, dict[str, Any]]:
    headers = {"Content-Type": "application/json", **(more or {})}
    if identity is not None:
        headers["Authorization"] = identity.authorization
    # a client for each call: these are rare, and none should hold a socket until the next
    with _client(url, ca) as client:
        answer = client.request(
            method,
            url,
            headers=headers,
            body=None if body is None else orjson.dumps(body),
            timeout=Timeout(total_s=timeout_s),
            at_most=JSON_BYTES,
        )
    return answer.status, _json(answer.body)


def _put(identity: Identity, what: str, body: Mapping[str, Any]) -> None:
    url = identity.url(f"api/v1/devices/{identity.device}/{what}")
    _expect(*_call("PUT", url, ca=identity.ca, identity=identity, body=body), url)


def _expect(status: int, answer: dict[str, Any], url: str) -> dict[str, Any]:
    if status != 200:
        raise LinkError(f"{url}: {_reason(answer, status)}")
    return answer


def _client(url: str, ca: Path | None) -> HttpClient:
    return HttpClient(tls=tls_context_for(url, ca))


def _json(raw: bytes) -> dict[str, Any]:
    try:
        data = orjson.loads(raw)
    except orjson.JSONDecodeError:
        return {}
    return data if isinstance(data, dict) else {}


def _reason(answer: Mapping[str, Any], status: int) -> str:
    return f"{answer.get('error') or 'no reason given'} (HTTP {status})"
