"""Topics: ids, names, and the one policy of who may use which."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from edge_sdk.errors import FrameError
from edge_sdk.wire.topics import (
    FROM_DEVICE,
    TO_DEVICE,
    Kind,
    Topic,
    all_devices,
    check_id,
    may_publish,
    may_receive,
    parse_topic,
)

ids = st.text("abcdefghijklmnopqrstuvwxyz0123456789-", min_size=1, max_size=63)
kinds = st.sampled_from(Kind)
# near misses: the characters that MQTT, shells and regular expressions give a meaning
almost_ids = st.text("ab0-+#/$ \n\0.*éA", max_size=70)


def policy_row(fleet: str, device: str, topic: str) -> tuple[bool, bool]:
    return may_publish(fleet, device, topic), may_receive(fleet, device, topic)


@pytest.mark.parametrize(
    ("kind", "publish", "receive"),
    [
        ("status", True, False),
        ("telemetry", True, False),
        ("query", True, False),
        ("reply", False, True),
        ("command", False, True),
    ],
)
def test_a_device_uses_its_own_topics_in_one_direction(
    kind: str, publish: bool, receive: bool
) -> None:
    assert policy_row("plant", "pi-07", f"splitedge/v1/plant/pi-07/{kind}") == (publish, receive)


def test_each_kind_has_exactly_one_direction() -> None:
    assert set(Kind) == FROM_DEVICE | TO_DEVICE
    assert not FROM_DEVICE & TO_DEVICE


@pytest.mark.parametrize(
    "topic",
    [
        "splitedge/v1/plant/pi-08/{kind}",  # another device
        "splitedge/v1/office/pi-07/{kind}",  # another fleet
        "splitedge/v1/pi-07/plant/{kind}",
        "splitedge/v2/plant/pi-07/{kind}",
        "splitedge/v1/plant/pi-07/{kind}/",
        "splitedge/v1/plant/pi-07/{kind}\n",
        "splitedge/v1/plant/pi-07/{kind}/more",
        "/splitedge/v1/plant/pi-07/{kind}",
        "splitedge/v1/plant/pi-07/ {kind}",
        "splitedge/v1/plant/PI-07/{kind}",
        "splitedge/v1/plant/pi-07/+",
        "splitedge/v1/plant/pi-07/#",
        "splitedge/v1/plant/+/{kind}",
        "splitedge/v1/+/pi-07/{kind}",
        "splitedge/v1/plant/#",
        "splitedge/#",
        "+/+/+/+/+",
        "#",
        "",
        "$SYS/broker/uptime",
        "$share/g/splitedge/v1/plant/pi-07/{kind}",
    ],
)
def test_a_device_uses_no_other_topic_in_any_direction(topic: str) -> None:
    for kind in Kind:
        assert policy_row("plant", "pi-07", topic.format(kind=kind)) == (False, False)


@pytest.mark.parametrize("name", ["+", "#", "", "pi/07", "pi 07", "PI-07", "x" * 64, "pi\n"])
def test_a_device_with_no_valid_id_owns_nothing(name: str) -> None:
    for kind in Kind:
        assert policy_row("plant", name, f"splitedge/v1/plant/{name}/{kind}") == (False, False)
        assert policy_row(name, "pi-07", f"splitedge/v1/{name}/pi-07/{kind}") == (False, False)


@given(ids, ids, ids, ids, kinds)
def test_policy_of_any_pair_is_same_device_and_right_direction(
    fleet: str, device: str, other_fleet: str, other_device: str, kind: Kind
) -> None:
    for at, of in product((fleet, other_fleet), (device, other_device)):
        own = (at, of) == (fleet, device)
        allowed = (own and kind in FROM_DEVICE, own and kind in TO_DEVICE)
        assert policy_row(fleet, device, str(Topic(at, of, kind))) == allowed


@given(ids, ids, kinds)
def test_a_topic_reads_back(fleet: str, device: str, kind: Kind) -> None:
    topic = parse_topic(f"splitedge/v1/{fleet}/{device}/{kind.value}")
    assert (topic.fleet, topic.device, topic.kind) == (fleet, device, kind)
    assert str(topic) == f"splitedge/v1/{fleet}/{device}/{kind.value}"


@given(st.text() | st.lists(almost_ids, min_size=3, max_size=6).map("/".join))
def test_what_is_no_topic_gives_a_frame_error(text: str) -> None:
    for candidate in (text, f"splitedge/v1/{text}", f"splitedge/v1/plant/{text}/query"):
        try:
            topic = parse_topic(candidate)
        except FrameError:
            continue
        assert str(topic) == candidate
        assert check_id(topic.fleet, "fleet")
        assert check_id(topic.device, "device")


@given(almost_ids)
def test_an_id_is_1_to_63_of_the_listed_characters(value: str) -> None:
    sound = 1 <= len(value) <= 63 and set(value) <= set("abcdefghijklmnopqrstuvwxyz0123456789-")
    assume(not sound)
    with pytest.raises(FrameError, match="device: expected 1 to 63 of"):
        check_id(value, "device")


@pytest.mark.parametrize("value", ["a", "-", "pi-07", "0", "x" * 63])
def test_a_sound_id_is_returned(value: str) -> None:
    assert check_id(value, "device") == value


def test_a_long_id_is_not_repeated_whole_in_the_message() -> None:
    with pytest.raises(FrameError) as caught:
        check_id("x" * 60_000, "device")
    assert len(str(caught.value)) < 300


def test_the_server_hears_a_kind_of_every_device() -> None:
    assert all_devices(Kind.QUERY) == "splitedge/v1/+/+/query"
