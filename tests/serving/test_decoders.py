"""Every decoder of bytes from outside, on damaged bytes: typed errors, and memory that stays flat.

The decoders' own tests look closely at what is refused and why; this one counts.
"""

from __future__ import annotations

import gc
import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import psutil
import pytest
import torch

from edge_sdk.errors import SplitedgeError
from edge_sdk.manifest import BundleManifest, ModelManifest
from edge_sdk.training.protocol.messages import (
    EndRound,
    Features,
    Feedback,
    Ready,
    StartRound,
    Step,
    Update,
    from_bytes,
    to_bytes,
)
from edge_sdk.wire import frames
from edge_sdk.wire.frames import Tensor
from edge_sdk.wire.messages import read_query, read_reply
from server.bench.models import export_random
from server.broker.core.broker import Broker
from server.broker.core.connection import Closing
from server.broker.core.limits import BrokerLimits
from tests.training.plans import flat_plan

WARM_UP = 0.2  # share of the damaged bytes after which memory is measured for the first time


@dataclass(frozen=True)
class Decoder:
    """A decoder, and sound bytes for it."""

    good: list[bytes]
    decode: Callable[[bytes], object]


def query(raw: bytes) -> None:
    read_query(frames.unpack(raw))


def reply(raw: bytes) -> None:
    read_reply(frames.unpack(raw))


def over_http(raw: bytes) -> None:
    length = min(len(raw), int.from_bytes(raw[:1], "big"))
    frames.decode(raw[1:], length, frames.HTTP_LIMITS)


class Anyone:
    """Rights of a client that may do everything, so that all of the broker is reached."""

    name = "pi-1"
    trusted = held_back = False

    def may_publish(self, topic: str) -> bool:
        return True

    may_subscribe = may_retain = may_publish


class Peer:
    """A client of one broker, whose state lasts from one connection to the next."""

    def __init__(self) -> None:
        self._broker = Broker(lambda _: Anyone(), BrokerLimits(), lambda _: None)
        self._now = 0.0

    def send(self, raw: bytes) -> None:
        """Log in, and then send these bytes; a SplitedgeError where the broker ends it."""
        self._now += 0.1
        self._broker.tick(self._now)
        connection = self._broker.opened("127.0.0.1", self._now)
        for data in (LOGIN, raw):
            self._broker.receive(connection, data, self._now)
            while self._broker.work(connection, self._now) is not None:
                self._now += 0.01
        connection.take_output()
        cut = connection.closing is not Closing.NOT or connection.ended
        self._broker.closed(connection, self._now)
        if cut:
            raise SplitedgeError("cut")


def text(value: str) -> bytes:
    return len(value).to_bytes(2, "big") + value.encode()


def packet(first: int, body: bytes = b"") -> bytes:
    return bytes((first, len(body))) + body


LOGIN = packet(0x10, text("MQTT") + b"\x04\x02\x00\x3c" + text("pi-1"))
MQTT = [
    packet(0x82, b"\x00\x01" + text("splitedge/v1/+/pi-1/#") + b"\x01"),
    packet(0xA2, b"\x00\x02" + text("splitedge/v1/+/pi-1/#")),
    packet(0x33, text("splitedge/v1/lab/pi-1/status") + b"\x00\x03online"),
    packet(0x34, text("splitedge/v1/lab/pi-1/query") + b"\x00\x04" + bytes(40)),
    packet(0x62, b"\x00\x04") + packet(0x40, b"\x00\x05") + packet(0x50, b"\x00\x06"),
    packet(0xC0) + packet(0xE0),
]


def training_messages() -> list[bytes]:
    plan = flat_plan(
        backbone="tiny",
        input_shape=(1, 8, 8),
        classes=10,
        mean=(0.1,),
        std=(2.5,),
        depth=2,
        learning_rate=0.1,
        batch=8,
    )
    features = torch.ones(2, 4, dtype=torch.uint8)
    return [
        to_bytes(message)
        for message in (
            StartRound(3, plan, {"stage1.0.weight": torch.ones(2, 1, 3, 3)}),
            Step(3, 1, Feedback(torch.ones(2, 4), 0.5)),
            EndRound(3),
            Ready(3, 10, 2, (1, 9)),
            Features(3, 0, features, torch.tensor([1, 2]), 0.1, torch.ones(2, 2)),
            Update(3, {"stage1.0.bias": torch.ones(2)}, 10, 0.5, 2, 2),
        )
    ]


@pytest.fixture(scope="module")
def decoders(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Decoder]:
    folder, _ = export_random("tiny", (1, 8, 8), (2,), tmp_path_factory.mktemp("models"))
    x = [Tensor("x", np.ones((1, 1, 8, 8), np.float32)), Tensor("z2", np.ones(4, np.int8))]
    asked = {"id": "a", "parameters": {"deadline_ms": 5.0}}
    wire = [frames.pack_request(asked, x[:1]), frames.pack_request(asked, x)]
    wire += [
        frames.pack(asked, x, key="outputs"),
        frames.pack({"error": "full"}, [], key="outputs"),
    ]
    manifests = [path.read_bytes() for path in sorted(folder.rglob("manifest.json"))]
    return {
        "query": Decoder(wire, query),
        "reply": Decoder(wire, reply),
        "HTTP body": Decoder([bytes((len(raw) & 127,)) + raw[4:] for raw in wire], over_http),
        "MQTT packets": Decoder(MQTT, Peer().send),
        "MQTT login": Decoder([LOGIN], Peer().send),
        "training message": Decoder(training_messages(), from_bytes),
        "bundle manifest": Decoder(manifests, BundleManifest.from_json),
        "model manifest": Decoder([(folder / "model.json").read_bytes()], ModelManifest.from_json),
    }


VALUES: tuple[object, ...] = (None, [], {}, -1, 1e308, "x" * 50, 2**64, "\0")
JUNK = [json.dumps(value).encode() for value in VALUES]


def damaged(draw: random.Random, raw: bytes) -> bytes:
    """The bytes with one to three places changed."""
    for _ in range(draw.randint(1, 3)):
        at, end = sorted(draw.randrange(len(raw) + 1) for _ in range(2))
        match draw.randrange(6):
            case 0 if at < len(raw):
                raw = raw[:at] + bytes([raw[at] ^ 1 << draw.randrange(8)]) + raw[at + 1 :]
            case 1:
                raw = raw[:at]
            case 2:
                raw = raw[:at] + draw.randbytes(draw.randint(1, 8)) + raw[at:]
            case 3:
                raw = raw[:end] + raw[at:]
            case 4:
                raw = raw[:at] + raw[end:]
            case _:
                raw = raw[:at] + draw.choice(JUNK) + raw[at:]
    return raw


def resident_mb() -> float:
    gc.collect()
    return float(psutil.Process().memory_info().rss) / 1e6


def test_no_damaged_bytes_crash_a_decoder_or_stay_in_memory(
    decoders: Mapping[str, Decoder], *, thorough: bool, reached: Callable[..., None]
) -> None:
    """FAULTS row 26: every decoder in turn, 100,000 times in `make faults`."""
    count = 102_000 if thorough else 2_000
    draw, refused, before = random.Random(26), 0, 0.0
    turns = list(decoders.items())
    crashes: list[str] = []
    for number in range(count):
        if number == int(WARM_UP * count):
            before = resident_mb()
        name, decoder = turns[number % len(turns)]
        raw = damaged(draw, draw.choice(decoder.good))
        try:
            decoder.decode(raw)
        except SplitedgeError:
            refused += 1
        except Exception as err:  # noqa: BLE001 - any other error is what is looked for
            crashes.append(f"{name}: {err!r} of {raw[:200]!r}")
    growth_mb = resident_mb() - before
    reached(
        "decoders",
        f"{count:,} generated frames at {len(turns)} decoders, {refused:,} refused,"
        f" {len(crashes)} crashes, {growth_mb:.1f} MB growth",
        frames=count,
        crashes=len(crashes),
        growth_mb=growth_mb,
    )
    assert not crashes, "\n".join(crashes[:10])
    assert 0.2 * count < refused < 0.99 * count  # both kinds were there
    assert growth_mb < 20
