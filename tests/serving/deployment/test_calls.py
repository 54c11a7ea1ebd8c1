"""Which devices are called to update, and when."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from edge_sdk.wire.topics import Kind
from server.deployment.calls import CALL_AGAIN_MOST_S, CALL_AGAIN_S, UpdateCalls
from server.deployment.heartbeats import HEARTBEAT_BYTES, Heartbeats, News
from server.registry.records import Device, DeviceReport


class Turns:
    """Turns of the housekeeping with two devices, at times that a test sets."""

    def __init__(self) -> None:
        self.now = 0.0
        self.running = {"pi-1": "cnn/1/d1", "pi-2": "vit/1/d1"}
        self.refused: dict[str, str] = {}
        self.targets = {"barn": "cnn/1", "shed": "vit/1"}
        self._calls = UpdateCalls(lambda: self.now)
        self.devices = [_device("pi-1", "barn"), _device("pi-2", "shed")]
        assert self.turn() == []

    def turn(
        self,
        *heard: str,
        connected: tuple[str, ...] = (),
        pinned: Mapping[str, str] | None = None,
    ) -> list[str]:
        """The devices that are called in this turn."""
        reports = {
            device: DeviceReport(device, bundle, self.refused.get(device))
            for device, bundle in self.running.items()
        }
        self._calls.came_back(connected)
        targets = {
            device.id: self.targets[device.fleet]
            for device in self.devices
            if device.fleet in self.targets
        }
        due = self._calls.due(self.devices, targets, reports, (*heard, *connected), pinned)
        return [device.id for device in due]


def _device(name: str, fleet: str, bundle: str | None = None) -> Device:
    return Device(name, fleet, "", {}, None, bundle, 0.0, None, None)


def test_a_fleet_is_called_when_its_version_changes_and_no_other() -> None:
    turns = Turns()
    turns.targets["barn"] = "cnn/2"
    assert turns.turn() == ["pi-1"]
    assert turns.turn() == []
    turns.targets["barn"] = "cnn/1"  # rolled back
    assert turns.turn() == ["pi-1"]


def test_a_device_is_called_while_it_runs_another_depth_than_it_was_given() -> None:
    turns = Turns()
    turns.devices[0] = replace(turns.devices[0], bundle="cnn/1/d2")
    assert turns.turn("pi-1") == ["pi-1"]  # it reports cnn/1/d1
    turns.now += CALL_AGAIN_S
    turns.refused["pi-1"] = "cnn/1/d2"
    assert turns.turn("pi-1") == []
    turns.devices[0] = replace(turns.devices[0], bundle="cnn/1/d3")
    assert turns.turn("pi-1") == ["pi-1"]
    turns.now += CALL_AGAIN_MOST_S
    turns.running["pi-1"] = "cnn/1/d3"
    assert turns.turn("pi-1") == []


def test_a_pinned_device_does_not_follow_its_fleet() -> None:
    turns = Turns()
    pinned = {"pi-1": "vit/7/d1"}
    turns.targets["barn"] = "cnn/2"
    turns.devices[0] = replace(turns.devices[0], bundle="vit/7/d1")
    turns.running["pi-1"] = "vit/7/d1"
    assert turns.turn("pi-1", pinned=pinned) == []
    turns.running["pi-1"] = "cnn/1/d1"
    assert turns.turn("pi-1", pinned=pinned) == ["pi-1"]


def test_a_fleet_that_gets_its_first_model_is_called() -> None:
    turns = Turns()
    del turns.targets["barn"]
    assert turns.turn() == []
    turns.targets["barn"] = "cnn/1"
    assert turns.turn() == ["pi-1"]


def test_a_new_fleet_is_called_only_if_its_device_enrolled_without_a_model() -> None:
    turns = Turns()
    turns.devices.append(_device("pi-3", "yard"))
    turns.devices.append(_device("pi-4", "yard", "cnn/1/d2"))
    turns.targets["yard"] = "cnn/1"
    assert turns.turn() == ["pi-3"]


def test_a_device_that_was_away_is_called_when_it_comes_back() -> None:
    turns = Turns()
    turns.targets["barn"] = "cnn/2"
    assert turns.turn() == ["pi-1"]  # in vain
    turns.now += CALL_AGAIN_S
    assert turns.turn() == []  # never heard from: nobody is there
    assert turns.turn(connected=("pi-1",)) == ["pi-1"]
    assert turns.turn("pi-1", "pi-2") == []
    turns.running["pi-1"] = "cnn/2/d1"
    turns.now += CALL_AGAIN_MOST_S
    assert turns.turn("pi-1", "pi-2") == []


def test_a_device_that_stays_behind_is_called_less_and_less_often() -> None:
    turns = Turns()
    turns.targets["barn"] = "cnn/2"
    times = []
    for second in range(200):
        turns.now = float(second)
        if turns.turn("pi-1"):
            times.append(second)
    assert times == [0, 10, 30, 70, 150]  # pauses of 10, 20, 40, 80 s


def test_a_device_that_refused_the_version_is_left_alone() -> None:
    turns = Turns()
    turns.targets["barn"] = "cnn/2"
    assert turns.turn("pi-1") == ["pi-1"]
    turns.refused["pi-1"] = "cnn/2/d1"
    turns.now += CALL_AGAIN_MOST_S
    assert turns.turn("pi-1") == []
    turns.targets["barn"] = "cnn/3"
    assert turns.turn("pi-1") == ["pi-1"]


# what devices say


def test_news_is_taken_once() -> None:
    heartbeats = Heartbeats()
    heartbeats.note("pi-1")
    heartbeats.note_message(Kind.STATUS, "pi-2", b'{"status": "online"}')
    heartbeats.note_message(Kind.STATUS, "pi-3", b'{"status": "offline"}')
    heartbeats.note_message(Kind.TELEMETRY, "pi-4", b'{"bundle": "cnn/1/d1", "depth": 1}')
    taken = heartbeats.take()
    assert taken.seen == {"pi-1", "pi-2", "pi-3", "pi-4"}
    assert (taken.connected, taken.running) == ({"pi-2"}, {"pi-4": "cnn/1/d1"})
    assert {device: content for device, (_, content) in taken.heartbeats.items()} == {
        "pi-4": {"bundle": "cnn/1/d1", "depth": 1}
    }
    assert heartbeats.take() == News()


def test_the_last_word_of_a_device_decides_whether_it_went_away() -> None:
    heartbeats = Heartbeats()
    words = {"online": b'{"status": "online"}', "offline": b'{"status": "offline"}'}
    for device, said in (("stays", "offline online"), ("goes", "online offline")):
        for word in said.split():
            heartbeats.note_message(Kind.STATUS, device, words[word])
    for device in ("asks", "beats"):
        heartbeats.note_message(Kind.STATUS, device, words["offline"])
    heartbeats.note("asks")
    heartbeats.note_message(Kind.TELEMETRY, "beats", b"{}")
    taken = heartbeats.take()
    assert (taken.gone, taken.connected) == ({"goes"}, {"stays", "goes"})


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xff",
        b"[]",
        b'{"bundle": 3}',
        b'{"bundle": "../../etc"}',
        b'{"bundle": "cnn/1/d1"}' + b" " * HEARTBEAT_BYTES,
    ],
)
def test_a_message_that_cannot_be_read_is_a_sign_of_life_alone(payload: bytes) -> None:
    heartbeats = Heartbeats()
    heartbeats.note_message(Kind.TELEMETRY, "pi-1", payload)
    taken = heartbeats.take()
    assert (taken.seen, taken.running) == ({"pi-1"}, {})
