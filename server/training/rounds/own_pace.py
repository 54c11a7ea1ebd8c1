"""Buffered rounds (server.training.rounds.buffered) with real devices, each at work in its own
thread.

    begin     with every merge all who are not at work, from the weights of now
    at work   the engine's round of that one device; whoever uses the server's state locks it
    merge     as soon as K results are there, discounted or refused by staleness as in simulation

A device that is away or falls silent is named in the row and asked again with the next merge;
nobody waits for it. What it finished alone and hands in later counts like any stale result, by its
change: the weights it began with are kept, in checkpoints too, for as long as it may.

After a restart nobody is at work. Bytes are counted in the row in which a device's round ended, so
those of rounds under way at the very end are in none.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from queue import SimpleQueue
from typing import Any

from torch import Tensor

from edge_sdk.errors import ConfigurationError, FrameError
from edge_sdk.training.protocol.messages import Reply, Request, Update, Weights
from edge_sdk.training.protocol.plan import Plan
from server.training.core.server_state import ServerState
from server.training.core.weighted_mean import Contribution
from server.training.methods.method import Method
from server.training.rounds.buffered import buffer_of
from server.training.rounds.loop import RoundLoop, outlying
from server.training.rounds.reply_checks import samples_fault
from server.training.rounds.round import RoundResult, RoundSettings, RoundUnderWay
from server.training.rounds.staleness import flatten_by_round, rebase_update, unflatten_by_round
from server.training.rounds.transport import Transport

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Ended:
    """A device's round that is over.

    found: what it brought; empty where that was nothing, or nothing sound.
    error: of the server's own, which ends the training.
    """

    name: str
    then: RoundUnderWay
    found: Mapping[str, Contribution]
    error: Exception | None = None


class OwnPaceEngine(RoundLoop):
    """Rounds that are merges of K results, from devices that work while it merges.

    Args:
        transport: its `exchange` is called by several threads, each for a device of its own.
        devices: that are there for the first round, at least.
    """

    def __init__(
        self,
        method: Method,
        plans: Mapping[str, Plan],
        state: ServerState,
        transport: Transport,
        settings: RoundSettings,
        *,
        devices: int,
    ) -> None:
        super().__init__(method, plans, state, transport, settings)
        self._buffer = buffer_of(method, devices, settings)
        if method.client.noise is not None:
            raise ConfigurationError(
                "buffer: with [privacy] rounds have to begin together on real devices, for no row"
                " accounts for those under way at the end; leave one of the two out"
            )
        self._at_work: dict[str, threading.Thread] = {}
        self._ended: SimpleQueue[Ended] = SimpleQueue()
        self._closing = threading.Event()
        self._owed: set[tuple[str, int]] = set()  # (device, round) begun, and nothing came yet

    def run_round(
        self, number: int, seed: int, late: Mapping[str, Update] | None = None
    ) -> RoundResult:
        """Have everybody at work, wait until K results are there, and merge them.

        Fewer are merged where no device is left at work, if they are a quorum of K.

        Args:
            late: updates handed in since the last merge by devices that nobody waited for.
        """
        with self._using_state:
            now = self._open(number, seed)
        self._sent[number] = now.view.sent
        ages = self._hear_late(now, late or {})
        for name in self._plans:
            if name not in self._at_work and name not in now.contributions:
                self._begin(now, name)
        asked = []
        while len(now.contributions) < self._buffer and self._at_work:
            ended = self._ended.get()
            del self._at_work[ended.name]
            asked.append(ended.name)
            if self._hear(now, ended):
                ages[ended.name] = number - ended.then.number
        now.contributions = {
            name: now.contributions[name] for name in self._plans if name in now.contributions
        }
        with self._using_state:
            stale = {name: rounds for name, rounds in ages.items() if rounds}
            result = self._close(now, asked, self._buffer, stale)
        self._forget(number + 1)
        return result

    def close(self) -> None:
        """Leave what is under way, once the transport waits for nobody any more."""
        self._closing.set()
        for thread in self._at_work.values():
            thread.join()

    def state_dict(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Who may still bring what, and the weights it began with."""
        return {"owed": sorted(self._owed)} | self._said(), flatten_by_round(self._sent)

    def load_state_dict(self, said: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Take up what `state_dict` gave.

        Raises: FrameError where it is no such thing.
        """
        sent = unflatten_by_round(tensors)
        try:
            owed = {(str(name), int(number)) for name, number in said["owed"]}
        except (KeyError, TypeError, ValueError) as err:
            raise FrameError(f"checkpoint: no training at devices' own pace ({err})") from err
        if {number for _, number in owed} != set(sent):
            raise FrameError("checkpoint: what is owed does not fit the weights that are kept")
        self._outlying = outlying(said)
        self._owed, self._sent = owed, sent

    # in the devices' threads

    def _work(self, then: RoundUnderWay, name: str) -> None:
        """That device's round, from its weights to what it brings."""
        found: Mapping[str, Contribution] = {}
        error = None
        self._state.copy_sources[name] = then.view.sent
        try:
            found = self._accept(then, self._train(then, [name]))
        except _ClosingError:
            logger.debug("round=%d client=%s left", then.number, name)
        except Exception as err:  # noqa: BLE001 - the thread that merges raises it
            error = err
        finally:
            del self._state.copy_sources[name]
            self._state.copies.pop(name, None)  # one trained in vain
        self._ended.put(Ended(name, then, found, error))

    def _exchange(
        self, now: RoundUnderWay, requests: Mapping[str, Request], deadline_s: float
    ) -> dict[str, Reply]:
        replies = super()._exchange(now, requests, deadline_s)
        if self._closing.is_set():
            raise _ClosingError
        return replies

    # in the thread that merges

    def _begin(self, now: RoundUnderWay, name: str) -> None:
        samples: dict[str, int] = {}
        counts: dict[str, tuple[int, ...]] = {}
        memory = dict(now.view.memory)
        view = replace(now.view, samples=samples, label_counts=counts, memory=memory)
        then = RoundUnderWay(
            now.number, now.supervised, view, {}, samples=samples, label_counts=counts
        )
        self._owed.add((name, now.number))
        thread = threading.Thread(
            target=self._work, args=(then, name), name=f"training-{name}", daemon=True
        )
        self._at_work[name] = thread
        thread.start()

    def _hear(self, now: RoundUnderWay, ended: Ended) -> bool:
        """Take in a round that is over; whether its result counts."""
        if ended.error is not None:
            raise ended.error
        name, then = ended.name, ended.then
        now.ledger.add(then.ledger)
        now.missed += then.missed
        now.codings += then.codings
        now.samples |= then.samples
        now.label_counts |= then.label_counts
        now.refused |= then.refused
        now.suspects |= then.suspects
        if ended.found or then.refused:
            self._owed.discard((name, then.number))
        rounds, most = now.number - then.number, self._settings.staleness_max
        if ended.found and rounds > most:
            now.refuse(name, f"a result {rounds} rounds old: expected at most {most}")
            return False
        self._count(now, ended.found, then.view.sent, rounds)
        return bool(ended.found)

    def _hear_late(self, now: RoundUnderWay, late: Mapping[str, Update]) -> dict[str, int]:
        """Add what was handed in unasked, within the limit; how many rounds late, by client."""
        ages = {}
        for name, update in late.items():
            rounds, most = now.number - update.round, self._settings.staleness_max
            sent = self._sent.get(update.round)
            if name not in self._plans:
                continue
            if rounds > most:
                now.refuse(name, f"an update {rounds} rounds late: expected at most {most}")
                continue
            if sent is None:
                now.refuse(
                    name, f"an update of round {update.round}: it is not known to have begun"
                )
                continue
            fault = samples_fault(update.samples, self._settings.samples_max)
            if fault is not None:
                now.refuse(name, fault)
                continue
            now.samples[name] = update.samples
            # as its device sees it; number stays, for the copy of one that began anew is not its
            then = replace(now, view=replace(now.view, sent=sent))
            found = self._accept(then, {name: update})
            self._owed.discard((name, update.round))
            self._recall(now, name, update.round)
            self._count(now, found, sent, rounds)
            if found:
                logger.info("round=%d client=%s update merged %d late", now.number, name, rounds)
                ages[name] = rounds
        return ages

    def _count(
        self, now: RoundUnderWay, found: Mapping[str, Contribution], sent: Weights, rounds: int
    ) -> None:
        share = (1 + rounds) ** -self._settings.staleness_power
        for client, brought in found.items():
            now.contributions[client] = (
                rebase_update(brought, sent, now.view.sent, share) if rounds else brought
            )

    def _forget(self, number: int) -> None:
        """Keep the weights that something began with which may still count in that round."""
        most = self._settings.staleness_max
        self._owed = {(name, r) for name, r in self._owed if number - r <= most}
        rounds = {r for _, r in self._owed}
        self._sent = {r: sent for r, sent in self._sent.items() if r in rounds}


class _ClosingError(Exception):
    """Training ends while a device is at work."""
