"""Orders to devices: sent at once, when a device comes back, and less and less often."""

from __future__ import annotations

from server.membership.calls import OrderCalls
from server.registry.database import Registry
from server.registry.records import Order
from tests.clock import Clock

ORDER = Order("pi", "rotate", "", 5.0)


def test_an_order_is_sent_at_once_and_when_the_device_comes_back() -> None:
    calls = OrderCalls(Clock())
    assert calls.due([ORDER], heard=(), connected=()) == [ORDER]
    assert calls.due([ORDER], heard=["pi"], connected=()) == []
    assert calls.due([ORDER], heard=(), connected=["pi"]) == [ORDER]
    assert calls.due([], heard=(), connected=["pi"]) == []


def test_an_order_that_is_not_done_is_sent_less_and_less_often() -> None:
    clock = Clock()
    calls = OrderCalls(clock)
    sent = []
    for second in range(200):
        clock.now = float(second)
        if calls.due([ORDER], heard=["pi"], connected=()):
            sent.append(second)
    assert sent == [0, 10, 30, 70, 150]


def test_an_order_that_is_given_again_is_sent_again() -> None:
    calls = OrderCalls(Clock())
    assert calls.due([ORDER], heard=(), connected=())
    later = Order("pi", "rotate", "", 6.0)
    assert calls.due([later], heard=(), connected=()) == [later]


def test_an_order_that_was_carried_out_is_audited_under_its_own_name(registry_url: str) -> None:
    registry = Registry.open(registry_url)
    registry.redeem_token(registry.create_token(), "pi", {})
    registry.reports.note_update("pi", "digits/1/d2", "digits/2/d2", "no space")
    registry.membership.lift("pi", "digits/2/d2")
    registry.membership.ask_to_rotate("pi")
    for order in registry.membership.orders():
        registry.membership.done("pi", order.op, order.argument)
    registry.membership.done("pi", "rotate", "")  # told a second time: nothing is written
    found = {(entry.what, entry.who, entry.detail) for entry in registry.trail.entries(4)}
    assert found == {
        ("quarantine.lift", "operator", "pi digits/2/d2"),
        ("quarantine.lift.done", "pi", "digits/2/d2"),
        ("device.rotate", "operator", "pi"),
        ("device.rotate.done", "pi", ""),
    }
    registry.close()
