"""Devices in one process, each query with its time and its outcome.

    python -P -m benchmarks.load.timed_crowd '[{"url": "mqtt://127.0.0.1:1883", ...}, ...]'

reads a list of `Load`, one for each device, says `ready` once each has had an answer, begins at a
line of its standard input, and prints all queries as JSON. A latency counts from the time when the
query was due.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import orjson

from benchmarks.load.clients import ANSWERED, NO_REPLY, NOT_SENT, Asker, Load, asker_of
from benchmarks.reports import child_environment
from server.processes import ChildProcess

FIRST_S: Final = 30.0  # until each device has had an answer
NOT_SENT_PAUSE_S: Final = 0.05


@dataclass(frozen=True, slots=True)
class Asked:
    """One query.

    Attributes:
        due: on the monotonic clock, which all processes of a machine share.
        took_s: until its outcome.
    """

    due: float
    took_s: float
    outcome: str

    @property
    def end(self) -> float:
        """When it had its outcome."""
        return self.due + self.took_s


class CrowdProcess:
    """A crowd in a process of its own."""

    def __init__(self, loads: Sequence[Load]) -> None:
        text = orjson.dumps(loads).decode()
        command = [sys.executable, "-P", "-m", "benchmarks.load.timed_crowd", text]
        self._process = ChildProcess("the crowd", command, environment=child_environment())
        self._process.expect("ready", "did not start")
        self.pid = self._process.pid

    def go(self) -> float:
        """Begin; the time on the monotonic clock."""
        self._process.write_line("go")
        return time.monotonic()

    def asked(self) -> list[Asked]:
        """Wait for its end; all queries."""
        line = self._process.expect("[", "gave no result")
        self._process.close()
        return [Asked(*each) for each in orjson.loads(line)]


def quantile_ms(asked: Sequence[Asked], share: float) -> float:
    """The time within which so many of the answered queries were answered; NaN without any."""
    taken = [each.took_s for each in asked if each.outcome == ANSWERED]
    return float(np.quantile(taken, share)) * 1e3 if taken else float("nan")


async def _ask(asker: Asker, patience_s: float, due: float) -> Asked:
    try:
        outcome, _ = await asyncio.wait_for(asker.ask(), patience_s)
    except TimeoutError:
        outcome = NO_REPLY
    return Asked(due, time.monotonic() - due, outcome)


async def _first(asker: Asker, load: Load) -> None:
    """Ask until there is an answer: the link has to come up."""
    until = time.monotonic() + FIRST_S
    while (await _ask(asker, load.patience_s, time.monotonic())).outcome != ANSWERED:
        if time.monotonic() > until:
            raise SystemExit(f"{load.device}: no answer in {FIRST_S:g} s")
        await asyncio.sleep(NOT_SENT_PAUSE_S)


async def _closed(asker: Asker, load: Load, until: float, found: list[Asked]) -> None:
    while time.monotonic() < until:
        found.append(await _ask(asker, load.patience_s, time.monotonic()))
        if found[-1].outcome == NOT_SENT:
            await asyncio.sleep(NOT_SENT_PAUSE_S)


async def _open(asker: Asker, load: Load, began: float, found: list[Asked]) -> None:
    async def one(due: float) -> None:
        found.append(await _ask(asker, load.patience_s, due))

    async with asyncio.TaskGroup() as group:
        for number in range(int(load.rate * load.seconds)):
            due = began + number / load.rate
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            group.create_task(one(due))


async def main(loads: Sequence[Load]) -> None:
    """Run all loads at the same time; those of an open loop take turns."""
    askers = [asker_of(load) for load in loads]
    await asyncio.gather(*map(_first, askers, loads))
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.readline)
    began, found = time.monotonic(), list[Asked]()
    async with asyncio.TaskGroup() as group:
        for number, (asker, load) in enumerate(zip(askers, loads, strict=True)):
            if load.rate:
                turn_s = number / len(loads) / load.rate
                group.create_task(_open(asker, load, began + turn_s, found))
                continue
            for _ in range(load.in_flight):
                group.create_task(_closed(asker, load, began + load.seconds, found))
    for asker in askers:
        await asker.close()
    rows = [(each.due, each.took_s, each.outcome) for each in found]
    sys.stdout.write(orjson.dumps(rows).decode() + "\n")


if __name__ == "__main__":
    given = orjson.loads(sys.argv[1])
    asyncio.run(main([Load(**{**each, "shape": tuple(each["shape"])}) for each in given]))
