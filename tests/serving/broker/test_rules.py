"""The broker's decisions as pure functions: who may do what, and what a client may send."""

from __future__ import annotations

import subprocess
import sys

import pytest

from edge_sdk.errors import ConfigurationError, FrameError
from edge_sdk.wire.frames import MQTT_LIMITS
from edge_sdk.wire.topics import PAYLOAD_BYTES
from server.broker import packets, policy
from server.broker.packets import Connect, PacketType, Will
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
    assert packets.decode_length(bytes.fromhex(encoded)) == length


def test_remaining_length_of_five_bytes_is_refused() -> None:
    with pytest.raises(FrameError):
        packets.decode_length(b"\xff\xff\xff\xff")


# CONNECT by hand: name "MQTT", level 4, flags, keep-alive 60, client id "a"
_HEAD = b"\x00\x04MQTT\x04"


def test_connect_is_read_field_by_field() -> None:
    body = _HEAD + b"\xee\x00\x3c\x00\x01a\x00\x01t\x00\x02hi\x00\x01u\x00\x02pw"
    assert packets.connect_level(body) == 4
    assert packets.parse_connect(body) == Connect("a", "u", b"pw", 60, Will("t", b"hi", 1, True))


def test_broker_is_shown_neither_password_nor_keep_alive() -> None:
    shown = packets.encode_connect(Connect("a", "u", b"pw", 60, Will("t", b"hi", 1, True)))
    # flags: user, will retained at QoS 1, clean session; then no keep-alive
    assert shown == b"\x10\x17" + _HEAD + b"\xae\x00\x00\x00\x01a\x00\x01t\x00\x02hi\x00\x01u"


@pytest.mark.parametrize(
    "rest",
    [
        b"\x01\x00\x3c\x00\x01a",  # reserved flag
        b"\x42\x00\x3c\x00\x01a\x00\x02pw",  # password and no user
        b"\x12\x00\x3c\x00\x01a",  # QoS of a will that is not there
        b"\x16\x00\x3c\x00\x01a\x00\x01t\x00\x00",  # will of QoS 2
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


@pytest.mark.parametrize(
    ("first", "body", "kind"),
    [
        (0x30, b"\x00\x01tpayload", PacketType.PUBLISH),
        (0x33, b"\x00\x01t\x00\x07", PacketType.PUBLISH),
        (0x3B, b"\x00\x01t\x00\x07x", PacketType.PUBLISH),
        (0x40, b"\x00\x07", PacketType.PUBACK),
        (0x82, b"\x00\x07\x00\x01#\x02", PacketType.SUBSCRIBE),
        (0xA2, b"\x00\x07\x00\x01#", PacketType.UNSUBSCRIBE),
        (0xC0, b"", PacketType.PINGREQ),
        (0xE0, b"", PacketType.DISCONNECT),
    ],
)
def test_packets_a_client_may_send(first: int, body: bytes, kind: PacketType) -> None:
    assert packets.check_packet(first, body) is kind


@pytest.mark.parametrize(
    ("first", "body"),
    [
        (0x00, b""),  # zero bytes
        (0xF0, b""),
        (0x10, b""),  # a second CONNECT
        (0x20, b"\x00\x00"),  # the server's packets
        (0x90, b"\x00\x07\x00"),
        (0x30, b""),  # no topic
        (0x30, b"\x00\x00x"),
        (0x30, b"\x00\x05t"),
        (0x30, b"\x00\x01+"),
        (0x30, b"\x00\x03a/#"),
        (0x30, b"\x00\x04$SYS"),
        (0x30, b"\x00\x01\xff"),
        (0x34, b"\x00\x01t\x00\x07"),  # QoS 2
        (0x36, b"\x00\x01t\x00\x07"),  # QoS 3
        (0x38, b"\x00\x01t"),  # duplicate at QoS 0
        (0x32, b"\x00\x01t\x00\x00"),  # packet id 0
        (0x32, b"\x00\x01t"),
        (0x41, b"\x00\x07"),  # flags
        (0x40, b"\x00"),
        (0x50, b"\x00\x07"),  # QoS 2's own packets
        (0x80, b"\x00\x07\x00\x01#\x00"),
        (0x82, b"\x00\x07"),  # no filter
        (0x82, b"\x00\x07\x00\x01#"),  # no QoS
        (0x82, b"\x00\x07\x00\x01#\x03"),
        (0x82, b"\x00\x07\x00\x00\x00"),
        (0x82, b"\x00\x00\x00\x01#\x00"),
        (0xC0, b"x"),
        (0xE0, b"x"),
    ],
)
def test_packets_that_end_a_connection(first: int, body: bytes) -> None:
    with pytest.raises(FrameError):
        packets.check_packet(first, body)


def test_limit_is_the_one_of_the_wire() -> None:
    assert MQTT_LIMITS.frame_bytes == PAYLOAD_BYTES


def test_broker_process_loads_no_web_framework_and_no_numbers() -> None:
    heavy = "{'fastapi', 'sqlalchemy', 'torch', 'numpy', 'onnxruntime', 'paho', 'pydantic'}"
    program = f"import sys, server.broker.__main__; sys.exit(str({heavy} & set(sys.modules)))"
    ran = subprocess.run(
        [sys.executable, "-P", "-c", program], capture_output=True, text=True, check=False
    )
    assert ran.stderr.strip() == "set()"
