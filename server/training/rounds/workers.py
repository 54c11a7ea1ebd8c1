"""Workers of buffered rounds (server.training.rounds.buffered): a clock, or threads.

SimulatedWorkers   by a clock that jumps from one client's end to the next; a client's whole round
                   is run at its end
ThreadedWorkers    real devices, each round in a thread of its own

A real device that is away or falls silent ends its round without a result, and begins again with
the next merge. A result that it finished alone and hands in later counts like any stale one: the
weights that it began with are kept, in checkpoints too, for as long as it may. After a restart no
device is at work. Bytes are counted in the row in which a round ended, so those of rounds under way
at the very end are in none.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Protocol

from edge_sdk.errors import FrameError
from server.training.core.weighted_mean import Contribution
from server.training.rounds.round import RoundUnderWay


@dataclass(frozen=True, slots=True)
class Ended:
    """A client's round that is over.

    then: the round as that client saw it.
    found: its contribution, by client; empty where it brought none, or none that is sound.
    """

    name: str
    then: RoundUnderWay
    found: Mapping[str, Contribution]


# a client and the round that it begins in, to its work, which runs the client's round
WorkOf = Callable[[str, int], Callable[[], Ended]]


class Workers(Protocol):
    """Runs the rounds of clients, each client's one at a time.

    Attributes:
        clock_s: simulated time since training began; None where clients live in real time.
    """

    @property
    def clock_s(self) -> float | None: ...

    @property
    def at_work(self) -> Collection[str]:
        """Clients that have begun a round and not ended it."""

    def bind(self, work_of: WorkOf) -> None:
        """Take the loop's function that makes a client's work; called once, before all others."""

    def begin(self, name: str, number: int) -> None:
        """Put a client to work from the weights of round `number`."""

    def next(self) -> Ended:
        """Wait for the next client that ends.

        Raises: the error that ended its work, where that was the server's own.
        """

    def settle(self, name: str, number: int) -> None:
        """Expect nothing more of a client's round: its result came, or was refused."""

    def needed_rounds(self, oldest: int) -> set[int]:
        """Forget results that can count no more; the rounds with first weights still needed.

        Args:
            oldest: the earliest round of which a result can still count.
        """

    def close(self) -> None:
        """Wait for the clients at work to end."""

    def state_dict(self) -> dict[str, Any]:
        """State of the clients that may still bring a result, as JSON for a checkpoint."""

    def load_state_dict(self, fields: Mapping[str, Any], rounds: Collection[int]) -> None:
        """Take up what `state_dict` gave.

        Args:
            rounds: those with their first weights in the checkpoint.
        Raises: FrameError for other fields, or those of other clients or rounds.
        """


@dataclass(frozen=True, slots=True)
class _Begun:
    """A client at work: the round that it began in, and its end by the clock."""

    round: int
    ends_s: float


class SimulatedWorkers:
    """Clients in this process that take simulated time.

    Args:
        seconds: length of a client's round, by client.
    """

    def __init__(self, seconds: Mapping[str, float]) -> None:
        self._seconds = dict(seconds)
        self._begun: dict[str, _Begun] = {}
        self.clock_s = 0.0

    @property
    def at_work(self) -> Collection[str]:
        return self._begun.keys()

    def bind(self, work_of: WorkOf) -> None:
        self._work_of = work_of

    def begin(self, name: str, number: int) -> None:
        self._begun[name] = _Begun(number, self.clock_s + self._seconds[name])

    def next(self) -> Ended:
        """Run the round of the client that ends first; of several the first in client order."""
        at_work = [name for name in self._seconds if name in self._begun]
        name = min(at_work, key=lambda each: self._begun[each].ends_s)
        begun = self._begun.pop(name)
        self.clock_s = begun.ends_s
        return self._work_of(name, begun.round)()

    def settle(self, name: str, number: int) -> None:
        pass  # a simulated client brings its result when it ends, or none

    def needed_rounds(self, oldest: int) -> set[int]:  # noqa: ARG002 - all rounds are run yet
        return {begun.round for begun in self._begun.values()}

    def close(self) -> None:
        pass

    def state_dict(self) -> dict[str, Any]:
        begun = {name: [each.round, each.ends_s] for name, each in self._begun.items()}
        return {"clock_s": self.clock_s, "begun": begun}

    def load_state_dict(self, fields: Mapping[str, Any], rounds: Collection[int]) -> None:
        try:
            begun = {name: _Begun(int(r), float(end)) for name, (r, end) in fields["begun"].items()}
            clock_s = float(fields["clock_s"])
        except (KeyError, TypeError, ValueError, AttributeError) as err:
            raise FrameError(f"checkpoint: no simulated buffered training ({err})") from err
        known = begun.keys() <= self._seconds.keys()
        if not known or {each.round for each in begun.values()} != set(rounds):
            raise FrameError("checkpoint: the clients at work do not fit the recipe's clients")
        self._begun, self.clock_s = begun, clock_s


class ThreadedWorkers:
    """Real devices, which work while the server merges."""

    clock_s = None

    def __init__(self) -> None:
        self._threads: dict[str, threading.Thread] = {}
        self._ended: SimpleQueue[Ended | _Failed] = SimpleQueue()
        self._expected: set[tuple[str, int]] = set()  # (device, round) begun without a result yet

    @property
    def at_work(self) -> Collection[str]:
        return self._threads.keys()

    def bind(self, work_of: WorkOf) -> None:
        self._work_of = work_of

    def begin(self, name: str, number: int) -> None:
        self._expected.add((name, number))
        thread = threading.Thread(
            target=self._run,
            args=(name, self._work_of(name, number)),
            name=f"training-{name}",
            daemon=True,
        )
        self._threads[name] = thread
        thread.start()

    def next(self) -> Ended:
        ended = self._ended.get()
        del self._threads[ended.name]
        if isinstance(ended, _Failed):
            raise ended.error
        return ended

    def settle(self, name: str, number: int) -> None:
        self._expected.discard((name, number))

    def needed_rounds(self, oldest: int) -> set[int]:
        self._expected = {(name, r) for name, r in self._expected if r >= oldest}
        return {r for _, r in self._expected}

    def close(self) -> None:
        for thread in self._threads.values():
            thread.join()

    def state_dict(self) -> dict[str, Any]:
        return {"owed": sorted(self._expected)}

    def load_state_dict(self, fields: Mapping[str, Any], rounds: Collection[int]) -> None:
        try:
            expected = {(str(name), int(number)) for name, number in fields["owed"]}
        except (KeyError, TypeError, ValueError) as err:
            raise FrameError(f"checkpoint: no buffered training of real devices ({err})") from err
        if {number for _, number in expected} != set(rounds):
            raise FrameError(
                "checkpoint: the weights that are kept do not fit the expected results"
            )
        self._expected = expected

    def _run(self, name: str, work: Callable[[], Ended]) -> None:
        """Run a device's round in its thread."""
        try:
            self._ended.put(work())
        except Exception as err:  # noqa: BLE001 - the thread that merges raises it
            self._ended.put(_Failed(name, err))


@dataclass(frozen=True, slots=True)
class _Failed:
    """A client's round that ended by an error of the server's own."""

    name: str
    error: Exception
