"""Training over a network that delays, repeats and reorders, beside a run without its faults.

The boxes and the clients are the real ones. Time is a number: delays lie around the deadline of
5 s, and nothing waits. The clean run is told which replies came in time, and must end in the same
bits.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, count, cycle, repeat
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from edge_sdk.errors import SplitedgeError
from edge_sdk.training.client import TrainingClient
from edge_sdk.training.protocol.http import Join
from edge_sdk.training.protocol.messages import (
    Features,
    FinishAlone,
    Reply,
    Request,
    Update,
)
from server.training.fleet.box import Message
from server.training.fleet.boxes import Boxes
from server.training.methods.supersfl import supersfl
from server.training.rounds.round import RoundSettings
from tests.training.worlds import World, assert_same

DEADLINE_S = 5.0
NO_REPLY_S = 5.0
SETTINGS = RoundSettings(
    step_deadline_s=DEADLINE_S, round_deadline_s=DEADLINE_S, staleness_max=2, quorum=0.0
)
IN_TIME = (0.0, 0.1, 2.0)
AROUND = (4.9, 4.99, 5.01, 5.1)


@dataclass(slots=True)
class Handled:
    """What a client did: the call whose message it answered (None alone), and what came of it."""

    call: int | None
    round: int
    reply: Reply | None


@dataclass(slots=True)
class Device:
    """A client behind the network, as its session treats it."""

    client: TrainingClient
    last_id: str = ""
    waiting: tuple[int, float] | None = None
    handled: list[Handled] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Fault:
    """Fate of a message: seconds down and up, and of a second copy each; None for no copy."""

    down: float
    up: float
    down_again: float | None = None
    up_again: float | None = None


class BadNetwork:
    """A transport of real boxes, in which time jumps from event to event.

    Attributes:
        faults: fates of the next messages, in turn.
        taken: of each call the replies that counted, as indices into what the client handled.
        late: likewise of each round the updates of earlier rounds.
        counts: replies by outcome.
    """

    def __init__(self, clients: Mapping[str, TrainingClient]) -> None:
        self.boxes = Boxes([], {}, lockstep=True, fetch_s=60.0, silence_s=1e9)
        self.devices = {name: Device(client) for name, client in clients.items()}
        for name, client in clients.items():
            self.boxes.hear(name, 0.0)
            self.boxes.join(name, Join(client.samples, client.x.shape[1:]))
        self.faults: Iterator[Fault] = cycle([Fault(0.0, 0.0)])
        self.taken: list[dict[str, int]] = []
        self.late: list[dict[str, int]] = []
        self.counts: Counter[str] = Counter()
        self._call = -1
        self._now = 0.0
        self._order = count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []

    def exchange(self, requests: Mapping[str, Request], deadline_s: float) -> dict[str, Reply]:
        """Put each request into its box, and let time pass until it is closed."""
        self._call += 1
        end = self._now + deadline_s
        for name, request in requests.items():
            fault = next(self.faults)
            message = Message(f"{self._call}-{name}", request)
            if self.boxes.put(name, message, self._now):
                for delay in (fault.down, fault.down_again):
                    self._later(delay, lambda name=name, fault=fault: self._fetch(name, fault))  # type: ignore[misc]  # mypy has no type for a lambda's default
        while (awaited := self.boxes.awaited(requests, self._now)) and self._now < end:
            self._step(min(end, self.boxes.next_change(awaited)))
        replies = self.boxes.close(requests, deadline_s, self._now)
        self.taken.append({name: self._index(name, reply) for name, reply in replies.items()})
        return replies

    def take_late(self) -> dict[str, Update]:
        """The late updates for the next round."""
        late = self.boxes.take_late()
        self.late.append({name: self._index(name, update) for name, update in late.items()})
        return late

    def pass_time(self, seconds: float) -> None:
        """Let messages arrive between two rounds."""
        end = self._now + seconds
        while self._now < end:
            self._step(end)

    def _step(self, end: float) -> None:
        """The next event, unless it is after `end`."""
        if not self._events or self._events[0][0] > end:
            self._now = end
            return
        self._now, _, happen = heapq.heappop(self._events)
        happen()

    def _later(self, delay: float | None, happen: Callable[[], None]) -> None:
        if delay is not None:
            heapq.heappush(self._events, (self._now + delay, next(self._order), happen))

    def _fetch(self, name: str, fault: Fault) -> None:
        device = self.devices[name]
        self.boxes.hear(name, self._now)
        message = self.boxes.fetch(name, device.last_id)
        if message is None:
            return
        device.last_id, device.waiting = message.id, None
        call = int(message.id.split("-")[0])
        reply = self._handle(device, call, message.request)
        if reply is None:
            self._later(fault.up, lambda: self.boxes.decline(name, message.id, "refused"))
            return
        if isinstance(reply, Features):
            waiting = device.waiting = reply.round, self._now
            self._later(NO_REPLY_S, lambda: self._finish_alone(name, waiting, fault))
        for delay in (fault.up, fault.up_again):
            self._later(delay, lambda: self._arrive(name, message.id, reply))

    def _handle(
        self, device: Device, call: int | None, message: Request | FinishAlone
    ) -> Reply | None:
        try:
            reply: Reply | None = device.client.handle(message)
        except SplitedgeError:
            reply = None
        device.handled.append(Handled(call, message.round, reply))
        return reply

    def _finish_alone(self, name: str, waiting: tuple[int, float], fault: Fault) -> None:
        device = self.devices[name]
        if device.waiting != waiting:
            return
        device.waiting = None
        update = self._handle(device, None, FinishAlone(waiting[0]))
        if update is not None:
            for delay in (fault.up, fault.up_again):
                self._later(delay, lambda: self._arrive(name, "", update))

    def _arrive(self, name: str, identifier: str, reply: Reply) -> None:
        self.boxes.hear(name, self._now)
        outcome = self.boxes.take(name, identifier, reply)
        if outcome == "kept" and isinstance(reply, Update):
            outcome = self.boxes.place(name, reply)
        self.counts[outcome] += 1

    def _index(self, name: str, reply: Reply) -> int:
        handled = self.devices[name].handled
        return next(i for i, one in enumerate(handled) if one.reply is reply)


class CleanNetwork:
    """A transport that gives each client the messages that it handled before, once and in order."""

    def __init__(self, clients: Mapping[str, TrainingClient], seen: BadNetwork) -> None:
        self._clients = clients
        self._seen = seen
        self._requests: list[Mapping[str, Request]] = []
        self._replies: dict[str, list[Reply | None]] = {name: [] for name in clients}

    def exchange(self, requests: Mapping[str, Request], deadline_s: float) -> dict[str, Reply]:
        """The replies that counted in this call."""
        del deadline_s
        self._requests.append(requests)
        taken = self._seen.taken[len(self._requests) - 1]
        return {name: self._reply(name, taken[name]) for name in requests if name in taken}

    def late(self, number: int) -> dict[str, Any]:
        """The late updates that counted in that round."""
        taken = self._seen.late[number - 1]
        return {name: self._reply(name, index) for name, index in taken.items()}

    def _reply(self, name: str, index: int) -> Reply:
        """What the client replied to its message of that index, all before it handled first."""
        replies = self._replies[name]
        for handled in self._seen.devices[name].handled[len(replies) : index + 1]:
            message: Request | FinishAlone = FinishAlone(handled.round)
            if handled.call is not None:
                message = self._requests[handled.call][name]
            try:
                replies.append(self._clients[name].handle(message))
            except SplitedgeError:
                replies.append(None)
        reply = replies[index]
        assert reply is not None
        return reply


def world_of(transport: Callable[[Mapping[str, TrainingClient]], Any]) -> World:
    return World(supersfl(), settings=SETTINGS, transport=transport)


DELAYS = st.sampled_from((*IN_TIME, *AROUND))
COPIES = st.none() | st.sampled_from((0.0, 0.2, 5.05, 9.0))
FAULTS = st.lists(st.builds(Fault, DELAYS, DELAYS, COPIES, COPIES), min_size=1, max_size=9)


class TrainingOverABadNetwork(RuleBasedStateMachine):
    """Rounds whose messages come late, twice and in another order, also in later rounds."""

    @initialize()
    def begin(self) -> None:
        """A fleet of four."""
        made: list[BadNetwork] = []

        def transport(clients: Mapping[str, TrainingClient]) -> BadNetwork:
            made.append(BadNetwork(clients))
            return made[0]

        self.world = world_of(transport)
        self.network = made[0]
        self.rounds = 0
        self.results: list[Any] = []

    @rule(faults=FAULTS)
    def train(self, faults: Sequence[Fault]) -> None:
        """One round."""
        self.rounds += 1
        self.network.faults = cycle(faults)
        late = self.network.take_late()
        self.results.append(self.world.loop.run_round(self.rounds, 0, late))

    @rule(seconds=st.sampled_from((0.1, 4.9, 5.0, 20.0)))
    def wait(self, seconds: float) -> None:
        """No round is under way, and messages arrive."""
        self.network.pass_time(seconds)

    def teardown(self) -> None:
        """Compare with the clean run."""
        if not hasattr(self, "world"):
            return
        check_each_counts_once(self.network)
        made: list[CleanNetwork] = []

        def transport(clients: Mapping[str, TrainingClient]) -> CleanNetwork:
            made.append(CleanNetwork(clients, self.network))
            return made[0]

        clean = world_of(transport)
        for number in range(1, self.rounds + 1):
            clean.loop.run_round(number, 0, made[0].late(number))
        assert_same(self.world.state.read(), clean.state.read())


def check_each_counts_once(network: BadNetwork) -> None:
    """No reply counts twice, none in another call than its own, no round has two updates."""
    for name, device in network.devices.items():
        used = Counter(call[name] for call in network.taken if name in call)
        used.update(late[name] for late in network.late if name in late)
        assert set(used.values()) <= {1}
        for number, call in enumerate(network.taken):
            if name in call:
                handled = device.handled[call[name]]
                assert handled.call == number or isinstance(handled.reply, Update)
        updates = [device.handled[index] for index in used]
        rounds = Counter(one.round for one in updates if isinstance(one.reply, Update))
        assert set(rounds.values()) <= {1}


def test_late_repeated_and_reordered_messages_change_no_bit(thorough: bool) -> None:
    """FAULTS row 9: delays of 4.9 to 5.1 s at a deadline of 5 s; a reply counts once or never."""
    run_state_machine_as_test(
        TrainingOverABadNetwork,
        settings=settings(
            max_examples=300 if thorough else 10, stateful_step_count=6, deadline=None
        ),
    )


@pytest.mark.parametrize("delay", [0.0, 4.9])
def test_what_comes_in_time_trains_as_without_a_network(delay: float) -> None:
    """FAULTS row 9: second copies of all messages, and a delay of 4.9 s, change no bit."""
    made: list[BadNetwork] = []

    def transport(clients: Mapping[str, TrainingClient]) -> BadNetwork:
        made.append(BadNetwork(clients))
        slow = Fault(0.0, delay, 0.0, delay + 0.05)  # of the starts and the first features
        made[0].faults = chain([slow] * 8, repeat(Fault(0.0, 0.0, 5.1, 9.0)))
        return made[0]

    world = world_of(transport)
    for number in (1, 2):
        world.loop.run_round(number, 0, made[0].take_late())
    plain = World(supersfl(), settings=SETTINGS)
    assert_same(world.trained(0), plain.trained(2))
    made[0].pass_time(20.0)
    assert made[0].counts["duplicate"] == made[0].counts["taken"] > 0
    check_each_counts_once(made[0])


def test_a_gradient_just_too_late_is_not_learnt_from() -> None:
    """FAULTS row 9: at 5.1 s the device has finished alone, and its update counts late, once."""
    made: list[BadNetwork] = []

    def transport(clients: Mapping[str, TrainingClient]) -> BadNetwork:
        made.append(BadNetwork(clients))
        return made[0]

    world = world_of(transport)
    network = made[0]
    network.faults = cycle([Fault(0.0, 0.0)] * 4 + [Fault(0.0, 5.1)] * 40)  # all but the starts
    world.loop.run_round(1, 0)
    network.pass_time(20.0)
    assert network.counts["kept"] == 4  # each finished alone, once
    assert network.counts["late"] > 0
    network.faults = cycle([Fault(0.0, 0.0)])
    late = network.take_late()
    assert {update.round for update in late.values()} == {1}
    assert sorted(late) == list("abcd")
    check_each_counts_once(network)
