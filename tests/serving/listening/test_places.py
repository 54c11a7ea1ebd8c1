"""Places of connections: who gets one, and who gives way."""

from __future__ import annotations

from functools import partial

from hypothesis import given
from hypothesis import strategies as st

from server.listening.places import CROWD, GRACE_S, Place, Places
from server.listening.source import source_network
from tests.clock import Clock


class World:
    """Places, and the names of connections that had to go, in order."""

    def __init__(self, most: int, strangers_most: int = 100) -> None:
        self.clock = Clock()
        self.places = Places(most, strangers_most, clock=self.clock)
        self.gone: list[str] = []

    def take(self, name: str, address: str = "10.0.0.1") -> Place:
        """A place that must be there."""
        place = self.places.take(address, lambda: self.gone.append(name))
        assert place is not None
        return place


def test_oldest_stranger_gives_way_where_all_places_are_taken() -> None:
    """FAULTS row 22."""
    world = World(3)
    world.places.prove(world.take("device"))
    world.take("silent 1")
    world.take("silent 2")
    world.take("new")
    assert world.gone == ["silent 1"]
    assert world.places.taken == 3


def test_strangers_of_one_source_are_bounded_and_devices_of_that_source_get_in() -> None:
    """FAULTS row 22: the attacker and the honest devices share an address."""
    world = World(1_000, strangers_most=2)
    device = world.take("device")
    world.places.prove(device)
    world.take("silent 1")
    world.take("silent 2")
    world.clock.now = GRACE_S
    world.take("device 2")
    assert world.gone == ["silent 1"]
    world.take("elsewhere", "10.0.0.2")
    assert world.gone == ["silent 1"]
    assert not device.left


def test_strangers_of_the_last_second_stay_unless_there_is_a_crowd() -> None:
    world = World(1_000, strangers_most=2)
    for number in range(2 * CROWD):
        world.take(str(number))
    assert world.gone == []
    world.take("one too many")
    assert world.gone == ["0"]


def test_source_with_most_strangers_gives_way_first() -> None:
    world = World(4)
    world.take("other", "10.0.0.2")
    for number in range(3):
        world.take(f"many {number}", "10.0.0.1")
    world.take("new", "10.0.0.3")
    assert world.gone == ["many 0"]


def test_idle_connection_gives_way_and_one_at_work_never_does() -> None:
    world = World(2)
    works, waits = world.take("works"), world.take("waits")
    for place in (works, waits):
        world.places.prove(place)
        world.places.idle(place)
    world.places.busy(works)
    world.places.prove(world.take("new"))
    assert world.gone == ["waits"]
    assert world.places.take("10.0.0.9", lambda: None) is None
    assert world.places.refused == 1


def test_sources_are_addresses_and_ipv6_networks() -> None:
    assert source_network("::ffff:10.0.0.1") == source_network("10.0.0.1") == "10.0.0.1"
    assert source_network("2001:db8::1") == source_network("2001:db8::2") == "2001:db8::/64"
    assert source_network("2001:db8:0:1::1") != source_network("2001:db8::1")
    assert source_network("fe80::1%eth0") == "fe80::/64"
    assert source_network("") == ""


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["take", "prove", "idle", "busy", "leave"]),
            st.integers(0, 9),
            st.floats(0, 2),
        ),
        max_size=60,
    )
)
def test_places_are_never_more_than_allowed_and_are_given_back(
    events: list[tuple[str, int, float]],
) -> None:
    clock, taken = Clock(), dict[int, Place]()
    places = Places(4, 2, clock=clock)
    cut: list[list[Place]] = []
    for what, number, wait_s in events:
        clock.now += wait_s
        if what == "take":
            mine: list[Place] = []
            place = places.take(f"10.0.0.{number % 3}", partial(cut.append, mine))
            if place is not None:
                mine.append(place)
                if number in taken:
                    places.leave(taken[number])
                taken[number] = place
        elif number in taken:
            getattr(places, what)(taken[number])
        assert 0 <= places.taken <= 4
    assert all(place.left for mine in cut for place in mine)
    for place in taken.values():
        places.leave(place)
    assert places.taken == 0
    for number in range(4):
        assert places.take(f"10.1.0.{number}", lambda: None) is not None
