"""The broker's decisions as pure functions: who may do what, and what a client may send."""

from __future__ import annotations

import subprocess
import sys

import pytest

from edge_sdk.errors import ConfigurationError, FrameError
from edge_sdk.wire.frames import MQTT_LIMITS
from edge_sdk.wire.topics import PAYLOAD_BYTES
from server.broker import policy
from server.broker.core import packets
from server.broker.core.packets import Connect, PacketType, Will
from server.broker.policy import Principal, credential_sha256

SECRET = credential_sha256("secret")
DEVICE = Principal("pi-1", "device", "lab", SECRET)
BACKEND = Principal("backend", "backend", None, SECRET)
PRINCIPALS = {"pi-1": DEVICE, "backend": BACKEND, "backend-7": DEVICE}


@pytest.mark.parametrize(
    ("client_id", "username", "password", "who"),
    [
        ("pi-1", "pi-1", b"secret", DEVICE),
        ("backend", "backend", b"secret", BACKEND),
        ("backend-x1", "backend", b"secret", BACKEND),
        ("backend-7", "backend", b"secret", None),  # the name of another principal
        ("backendx", "backend", b"secret", None),
        ("pi-1-x", "pi-1", b"secret", None),  # only a backend may have a suffix
        ("pi-2", "pi-1", b"secret", None),
        ("pi-1", "pi-1", b"Secret", None),
        ("pi-1", "pi-1", b"", None),
        ("pi-1", "", b"secret", None),
        ("nobody", "nobody", b"nobody", None),
    ],
)
def test_login_needs_name_password_and_own_client_id(
    client_id: str, username: str, password: bytes, who: Principal | None
) -> None:
    assert policy.authenticate(PRINCIPALS, client_id, username, password) is who


OWN = {name: f"secret of {name}" for name in ("pi-1", "pi-2", "backend")}
KNOWN = {
    name: Principal(
        name,
        "backend" if name == "backend" else "device",
        None if name == "backend" else "lab",
        credential_sha256(secret),
    )
    for name, secret in OWN.items()
}
OWNERS = {one.credential_sha256: name for name, one in KNOWN.items()}


@pytest.mark.parametrize(
    ("client_id", "username", "password", "swapped", "why"),
    [
        ("pi-1", "pi-1", OWN["pi-2"], True, "the credential of pi-2: were two devices"),
        ("pi-9", "pi-9", OWN["backend"], True, "the credential of backend"),
        ("pi-1", "pi-2", OWN["pi-1"], True, "the credential of pi-1"),
        ("pi-1", "pi-2", OWN["pi-2"], False, "another client id; its user name was 'pi-2'"),
        ("pi-1", "pi-1", "guess", False, "wrong credential"),
        ("pi-9", "pi-9", "guess", False, "unknown name"),
        ("pi-1", OWN["pi-1"], "pi-1", False, "pi-1 is in the place of its name"),
        (OWN["pi-1"], "pi-1", "pi-1", False, "pi-1 is in the place of its name"),
        ("pi-1", "Some Text", "guess", False, "its user name was no name of a device"),
    ],
)
def test_refused_login_is_explained_without_a_secret(
    client_id: str, username: str, password: str, swapped: bool, why: str
) -> None:
    given = client_id, username, password.encode()
    assert policy.authenticate(KNOWN, *given) is None
    refusal = policy.refusal(KNOWN, OWNERS, *given)
    assert refusal.swapped == swapped
    assert why in refusal.why
    assert not any(secret in refusal.why + refusal.client_id for secret in OWN.values())


@pytest.mark.parametrize(
    ("principal", "topic", "publish", "subscribe", "receive", "retain"),
    [
        (DEVICE, "splitedge/v1/lab/pi-1/status", True, False, False, True),
        (DEVICE, "splitedge/v1/lab/pi-1/query", True, False, False, False),
        (DEVICE, "splitedge/v1/lab/pi-1/telemetry", True, False, False, False),
        (DEVICE, "splitedge/v1/lab/pi-1/reply", False, True, True, False),
        (DEVICE, "splitedge/v1/lab/pi-1/command", False, True, True, False),
        (DEVICE, "splitedge/v1/lab/pi-2/status", False, False, False, False),
        (DEVICE, "splitedge/v1/barn/pi-1/reply", False, False, False, False),
        (DEVICE, "splitedge/v1/lab/+/reply", False, False, False, False),
        (DEVICE, "#", False, False, False, False),
        (DEVICE, "$share/g/splitedge/v1/lab/pi-1/reply", False, False, False, False),
        (BACKEND, "splitedge/v1/lab/pi-1/query", False, True, True, False),
        (BACKEND, "splitedge/v1/lab/pi-1/reply", True, False, False, False),
        (BACKEND, "splitedge/v1/+/+/query", False, True, False, False),
        (BACKEND, "splitedge/v1/+/+/reply", False, False, False, False),
        (BACKEND, "splitedge/v1/#", False, False, False, False),
        (BACKEND, "$SYS/#", False, False, False, False),
    ],
)
def test_topics_of_a_principal(
    principal: Principal, topic: str, *, publish: bool, subscribe: bool, receive: bool, retain: bool
) -> None:
    assert policy.may_publish(principal, topic) is publish
    assert policy.may_subscribe(principal, topic) is subscribe
    assert policy.may_receive(principal, topic) is receive
    assert policy.may_retain(principal, topic) is retain


def test_rules_written_for_other_brokers_are_the_same_topics() -> None:
    says, hears = policy.device_rules("lab", "pi-1")
    assert set(says) == {
        f"splitedge/v1/lab/pi-1/{kind}" for kind in ("status", "telemetry", "query")
    }
    assert set(hears) == {f"splitedge/v1/lab/pi-1/{kind}" for kind in ("reply", "command")}


@pytest.mark.parametrize(
    ("client_id", "role", "fleet", "digest"),
    [
        ("pi-1", "device", None, SECRET),
        ("backend", "backend", "lab", SECRET),
        ("pi-1", "device", "lab", "secret"),
        ("pi-1", "root", None, SECRET),
    ],
)
def test_principal_that_makes_no_sense_is_refused(
    client_id: str, role: policy.Role, fleet: str | None, digest: str
) -> None:
    with pytest.raises(ConfigurationError):
        Principal(client_id, role, fleet, digest)


def test_principal_ids_fit_into_a_topic() -> None:
    with pytest.raises(FrameError):
        Principal("pi/1", "device", "lab", SECRET)


@pytest.mark.parametrize(
    ("length", "encoded"),
    # the examples of table 2.4 of the standard
    [(0, "00"), (127, "7f"), (128, "8001"), (16_383, "ff7f"), (16_384, "808001"),
     (268_435_455, "ffffff7f")],
)  # fmt: skip
def test_remaining_length_is_coded_as_the_standard_says(length: int, encoded: str) -> None:
    assert packets.encode_length(length).hex() == encoded
    header = packets.parse_header(b"\x30" + bytes.fromhex(encoded), 0)
    assert header == (PacketType.PUBLISH, 0, 1 + len(encoded) // 2, length)


def test_remaining_length_of_five_bytes_is_refused() -> None:
    with pytest.raises(FrameError):
        packets.parse_header(b"\x30\xff\xff\xff\xff", 0)


# CONNECT by hand: name "MQTT", level 4, flags, keep-alive 60, client id "a"
_HEAD = b"\x00\x04MQTT\x04"


def test_connect_is_read_field_by_field() -> None:
    body = _HEAD + b"\xee\x00\x3c\x00\x01a\x00\x01t\x00\x02hi\x00\x01u\x00\x02pw"
    assert packets.connect_level(body) == 4
    assert packets.parse_connect(body) == Connect("a", "u", b"pw", 60, Will("t", b"hi", 1, True))


def test_connect_may_ask_for_a_session_that_is_kept() -> None:
    body = _HEAD + b"\x14\x00\x00\x00\x01a\x00\x01t\x00\x00"
    expected = Connect("a", "", b"", 0, Will("t", b"", 2, False), clean_session=False)
    assert packets.parse_connect(body) == expected


@pytest.mark.parametrize(
    "rest",
    [
        b"\x01\x00\x3c\x00\x01a",  # reserved flag
        b"\x42\x00\x3c\x00\x01a\x00\x02pw",  # password and no user
        b"\x12\x00\x3c\x00\x01a",  # QoS of a will that is not there
        b"\x1e\x00\x3c\x00\x01a\x00\x01t\x00\x00",  # will of QoS 3
        b"\x06\x00\x3c\x00\x01a\x00\x01+\x00\x00",  # will to a wildcard
        b"\x02\x00\x3c\x00\x05a",  # client id cut short
        b"\x02\x00\x3c\x00\x01\xff",  # not UTF-8
        b"\x02\x00\x3c\x00\x01\x00",  # NUL
        b"\x02\x00\x3c\x00\x01aa",  # something after the end
        b"",
    ],
)
def test_malformed_connect_is_refused(rest: bytes) -> None:
    with pytest.raises(FrameError):
        packets.parse_connect(_HEAD + rest)


def read(first: int, body: bytes) -> object:
    """The fields of a whole packet after login."""
    header = packets.parse_header(bytes((first, len(body))), 0)
    assert header is not None
    kind, flags, _, _ = header
    if kind is PacketType.PUBLISH:
        return packets.parse_publish(flags, body)
    if kind is PacketType.SUBSCRIBE:
        return packets.parse_subscribe(body)
    if kind is PacketType.UNSUBSCRIBE:
        return packets.parse_unsubscribe(body)
    return packets.parse_packet_id(kind, body) if body else kind


@pytest.mark.parametrize(
    ("first", "body", "fields"),
    [
        (0x30, b"\x00\x01tpayload", ("t", b"payload", 0, False, 0)),
        (0x33, b"\x00\x01t\x00\x07", ("t", b"", 1, True, 7)),
        (0x3B, b"\x00\x01t\x00\x07x", ("t", b"x", 1, True, 7)),
        (0x34, b"\x00\x01t\x01\x00x", ("t", b"x", 2, False, 256)),
        (0x40, b"\x00\x07", 7),
        (0x50, b"\x00\x07", 7),
        (0x62, b"\x00\x07", 7),
        (0x70, b"\x00\x07", 7),
        (0x82, b"\x00\x07\x00\x01#\x02\x00\x03a/+\x00", (7, [("#", 2), ("a/+", 0)])),
        (0xA2, b"\x00\x07\x00\x01#", (7, ["#"])),
        (0xC0, b"", PacketType.PINGREQ),
        (0xE0, b"", PacketType.DISCONNECT),
    ],
)
def test_packets_a_client_may_send(first: int, body: bytes, fields: object) -> None:
    assert read(first, body) == fields


@pytest.mark.parametrize("length", range(2))
def test_header_that_is_cut_short_waits_for_more(length: int) -> None:
    assert packets.parse_header(b"\x30\x80"[:length], 0) is None


@pytest.mark.parametrize(
    ("first", "body"),
    [
        (0x00, b""),  # zero bytes
        (0xF0, b""),
        (0x20, b"\x00\x00"),  # the server's packets
        (0x90, b"\x00\x07\x00"),
        (0x30, b""),  # no topic
        (0x30, b"\x00\x00x"),
        (0x30, b"\x00\x05t"),
        (0x30, b"\x00\x01+"),
        (0x30, b"\x00\x03a/#"),
        (0x30, b"\x00\x01\xff"),
        (0x36, b"\x00\x01t\x00\x07"),  # QoS 3
        (0x38, b"\x00\x01t"),  # duplicate at QoS 0
        (0x32, b"\x00\x01t\x00\x00"),  # packet id 0
        (0x32, b"\x00\x01t"),
        (0x41, b"\x00\x07"),  # flags
        (0x60, b"\x00\x07"),
        (0x40, b"\x00"),
        (0x40, b"\x00\x00"),
        (0x80, b"\x00\x07\x00\x01#\x00"),
        (0x82, b"\x00\x07"),  # no filter
        (0x82, b"\x00\x07\x00\x01#"),  # no QoS
        (0x82, b"\x00\x07\x00\x01#\x03"),
        (0x82, b"\x00\x07\x00\x00\x00"),
        (0x82, b"\x00\x00\x00\x01#\x00"),
        (0x82, b"\x00\x07\x00\x03#/a\x00"),  # wildcards where they may not stand
        (0x82, b"\x00\x07\x00\x02a+\x00"),
        (0xA2, b"\x00\x07\x00\x03a#b"),
        (0xC0, b"x"),
        (0xE0, b"x"),
    ],
)
def test_packets_that_end_a_connection(first: int, body: bytes) -> None:
    with pytest.raises(FrameError):
        read(first, body)


def test_limit_is_the_one_of_the_wire() -> None:
    assert MQTT_LIMITS.frame_bytes == PAYLOAD_BYTES


def test_broker_process_loads_no_web_framework_and_no_numbers() -> None:
    heavy = "{'fastapi', 'sqlalchemy', 'torch', 'numpy', 'onnxruntime', 'paho', 'pydantic'}"
    program = f"import sys, server.broker.__main__; sys.exit(str({heavy} & set(sys.modules)))"
    ran = subprocess.run(
        [sys.executable, "-P", "-c", program], capture_output=True, text=True, check=False
    )
    assert ran.stderr.strip() == "set()"
