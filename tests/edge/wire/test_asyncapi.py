"""docs/asyncapi.yaml and the code say the same of topics and messages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, Final

import jsonschema_rs
import numpy as np
import orjson
import pytest
import yaml

from edge_sdk.answers.heartbeat import heartbeat_content
from edge_sdk.answers.status import Counters, Status
from edge_sdk.answers.tally import AnswerTally
from edge_sdk.gate.controllers import AgreementReport
from edge_sdk.membership.orders import LIFT, ROTATE
from edge_sdk.offload import offloader
from edge_sdk.offload.availability import Presence
from edge_sdk.training.device.trainer_address import INVITATION
from edge_sdk.wire.codecs import encode
from edge_sdk.wire.frames import PREFIX_BYTES, Tensor
from edge_sdk.wire.messages import Problem, Query, Reply, pack_query, pack_reply
from edge_sdk.wire.rows import stack
from edge_sdk.wire.topics import FROM_DEVICE, PAYLOAD_BYTES, ROOT, TO_DEVICE, Kind
from server.training.fleet.invite import Inviter

DOCUMENT: Final[Mapping[str, Any]] = yaml.safe_load(
    (Path(__file__).parents[3] / "docs" / "asyncapi.yaml").read_text()
)
SCHEMAS: Final = DOCUMENT["components"]["schemas"]
STATUS: Final = Status("pi-1", "digits/1/d1", 1, 0.5, None, "present", "", 10)


def check(message: object, name: str) -> None:
    """Check a message by the document's schema of that name."""
    schema = {**DOCUMENT, "$ref": f"#/components/schemas/{name}"}
    jsonschema_rs.validator_for(schema).validate(message)


def header(frame: bytes) -> Any:
    """The JSON of a frame, read as the document says."""
    size = int.from_bytes(frame[:4], "big")
    return orjson.loads(frame[4 : 4 + size])


def heartbeat(status: Status) -> Any:
    """A heartbeat as it is sent."""
    content = heartbeat_content(
        status, AnswerTally(2.3), run="a1", uptime_s=1.0, round_trip_ms=None
    )
    return orjson.loads(orjson.dumps(content))


def test_channels_are_the_topics_and_directions_the_policy() -> None:
    channels = {name: channel["address"] for name, channel in DOCUMENT["channels"].items()}
    assert channels == {str(kind): f"{ROOT}/{{fleet}}/{{device}}/{kind}" for kind in Kind}
    said: dict[str, set[str]] = {"send": set(), "receive": set()}
    for operation in DOCUMENT["operations"].values():
        kind = operation["channel"]["$ref"].rpartition("/")[2]
        said[operation["action"]].add(kind)
        assert operation["bindings"]["mqtt"] == {
            "qos": 0 if kind in (Kind.TELEMETRY, Kind.QUERY) else 1,
            "retain": kind == Kind.STATUS,
        }
    assert said == {"send": set(FROM_DEVICE), "receive": set(TO_DEVICE)}
    assert f"{PAYLOAD_BYTES:,} bytes" in DOCUMENT["info"]["description"]
    assert PREFIX_BYTES == 4


Z = np.zeros((1, 4), np.float32)


@pytest.mark.parametrize(
    "query",
    [
        Query("q", None, None, None, 500.0),
        Query("q", "digits", "1", Tensor("x", np.zeros((1, 1, 8, 8), np.uint8))),
        Query("q", "digits", None, Tensor("z2", np.zeros((1, 4), np.float16)), 20.0),
        Query("q", "digits", "1", Tensor("z2", *encode(Z, "int4-channel"))),
        *(
            Query("q", "digits", "1", stack([Tensor("z2", *encode(Z, codec)) for _ in range(3)]))
            for codec in ("int8", "int8-channel")
        ),
    ],
)
def test_queries_are_as_described(query: Query) -> None:
    check(header(pack_query(query)), "query")


def test_replies_are_as_described() -> None:
    logits = {"logits": np.zeros((1, 10), np.float32)}
    check(header(pack_reply(Reply("q", logits), "digits", "1")), "reply")
    for problem in Problem:
        check(header(pack_reply(Reply("q", problem=problem, detail="why"), "", "")), "reply")
    problems = SCHEMAS["reply"]["properties"]["parameters"]["properties"]["problem"]
    assert problems["enum"] == list(Problem)


def test_heartbeats_are_as_described() -> None:
    check(heartbeat(STATUS), "telemetry")
    report = AgreementReport(float("-inf"), None, 0.02, 0.95, 0, 0, 0)
    for status in (
        Status("pi-1", "digits/1/d1", 1, float("-inf"), "t", "away", "why", 0, agreement=report),
        Status(
            "pi", "m/1/d1", 1, 0.5, None, "unknown", "", 0, counters=Counters(late_waiting=None)
        ),
    ):
        check(heartbeat(status), "telemetry")
    described = SCHEMAS["telemetry"]["properties"]
    assert set(described) == set(heartbeat(STATUS))
    assert set(described["counters"]["properties"]) == {one.name for one in fields(Counters)}
    assert set(described["presence"]["enum"]) == {one.value for one in Presence}


def test_status_messages_are_as_described() -> None:
    for word in ("online", "offline"):
        check(orjson.loads(offloader._status(word)), "status")


def test_commands_are_as_described() -> None:
    invitation = Inviter("http://127.0.0.1:1", "s" * 43, "http://127.0.0.1:2", None)._body
    commands = [
        {"op": "update"},
        orjson.loads(invitation),
        {"op": ROTATE, "argument": ""},
        {"op": LIFT, "argument": "digits/1/d1"},
    ]
    for command in commands:
        check(command, "command")
    described = {one["properties"]["op"]["const"] for one in SCHEMAS["command"]["oneOf"]}
    assert described == {"update", INVITATION, ROTATE, LIFT}


@pytest.mark.parametrize(
    ("message", "name"),
    [
        ({"status": "asleep"}, "status"),
        ({"op": "train"}, "command"),
        ({"id": "q"}, "query"),
        ({"id": "q", "parameters": {"problem": "sad", "retry_after_s": 0}}, "reply"),
        ({**heartbeat(STATUS), "more": 1}, "telemetry"),
    ],
)
def test_other_messages_are_not(message: object, name: str) -> None:
    with pytest.raises(jsonschema_rs.ValidationError):
        check(message, name)
