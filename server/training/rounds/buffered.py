"""Rounds without a common beginning: the server merges as soon as K results are there (FedBuff).

Every client trains at its own pace from the weights that were there as it began; a slow one holds
nobody up. A result that began s merges ago counts by its change, added to the weights of now:

    theta + (1 + s)^-a * (theta_k - theta_then)        a = 0.5

FedBuff (Nguyen et al., AISTATS 2022, Alg. 1) with FedAsync's polynomial discount (Xie et al., 2019,
5.2), which FedBuff takes over with a = 1/2. Where s exceeds `staleness_max` it is refused by name.

Differs: FedBuff hands a finished client work at once; here it begins anew with the next merge,
whatever became of its result. So a merge holds at most one result of a client, and K of n clients
always come. The changes are averaged by the method's weights, not by 1/K.

Time is simulated: a client's whole round is run when it ends, by a clock that jumps from one end
to the next. A server with one model for all steps it as it is then; copies are made of the weights
that their client began with. Real devices: server.training.rounds.own_pace.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from inspect import isgeneratorfunction
from typing import Any

from torch import Tensor

from edge_sdk.errors import ConfigurationError, FrameError
from edge_sdk.training.protocol.messages import Update
from edge_sdk.training.protocol.plan import Plan
from server.training.core.server_state import ServerState
from server.training.methods.method import Method
from server.training.methods.steps import per_client, shared
from server.training.rounds.loop import RoundLoop
from server.training.rounds.round import RoundResult, RoundSettings, RoundUnderWay
from server.training.rounds.staleness import flatten_by_round, rebase_update, unflatten_by_round
from server.training.rounds.transport import Transport

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Begun:
    """A client at work: the round whose weights it began with, when it ends by the clock."""

    round: int
    ends_s: float


class BufferedEngine(RoundLoop):
    """Rounds that are merges of K results.

    Args:
        seconds: what a client's round takes, by client.

    Attributes:
        clock_s: simulated time since training began.
    """

    def __init__(
        self,
        method: Method,
        plans: Mapping[str, Plan],
        state: ServerState,
        transport: Transport,
        settings: RoundSettings,
        *,
        seconds: Mapping[str, float],
    ) -> None:
        super().__init__(method, plans, state, transport, settings)
        self._buffer = buffer_of(method, len(plans), settings)
        self._seconds = dict(seconds)
        self._begun: dict[str, Begun] = {}
        self.clock_s = 0.0

    def run_round(
        self, number: int, seed: int, late: Mapping[str, Update] | None = None
    ) -> RoundResult:
        """Go on until K results are there, and merge them.

        Fewer are merged where no client is left at work, if they are a quorum of K.

        Args:
            late: none, in a simulation.
        """
        assert not late
        now = self._open(number, seed)
        self._sent[number] = now.view.sent
        for name in self._plans:
            if name not in self._begun:
                self._begun[name] = Begun(number, self.clock_s + self._seconds[name])
        began, stale, asked = self.clock_s, {}, []
        while len(now.contributions) < self._buffer and self._begun:
            name = self._next()
            begun = self._begun.pop(name)
            self.clock_s = begun.ends_s
            asked.append(name)
            rounds = number - begun.round
            if self._hear(now, name, self._since(now, begun.round, seed)) and rounds:
                stale[name] = rounds
        now.contributions = {
            name: now.contributions[name] for name in self._plans if name in now.contributions
        }
        result = self._close(now, asked, self._buffer, stale)
        used = {begun.round for begun in self._begun.values()}
        self._sent = {r: sent for r, sent in self._sent.items() if r in used}
        return replace(result, simulated_s=self.clock_s - began)

    def state_dict(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """The clock and who is at work since when, and the weights these began with."""
        begun = {name: [b.round, b.ends_s] for name, b in self._begun.items()}
        return {"clock_s": self.clock_s, "begun": begun}, flatten_by_round(self._sent)

    def load_state_dict(self, said: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Take up what `state_dict` gave.

        Raises: FrameError where it is no such thing, or of other clients.
        """
        sent = unflatten_by_round(tensors)
        try:
            begun = {name: Begun(int(r), float(ends)) for name, (r, ends) in said["begun"].items()}
            clock_s = float(said["clock_s"])
        except (KeyError, TypeError, ValueError, AttributeError) as err:
            raise FrameError(f"checkpoint: no buffered training ({err})") from err
        if not begun.keys() <= self._plans.keys() or {b.round for b in begun.values()} != set(sent):
            raise FrameError("checkpoint: who is at work does not fit the recipe's clients")
        self._begun, self._sent, self.clock_s = begun, sent, clock_s

    def _next(self) -> str:
        """Who ends first; of several the first in client order."""
        at_work = [name for name in self._plans if name in self._begun]
        return min(at_work, key=lambda name: self._begun[name].ends_s)

    def _since(self, now: RoundUnderWay, number: int, seed: int) -> RoundUnderWay:
        """The round as a client sees it that began with the weights of round `number`."""
        if number == now.number:
            return now
        view = replace(now.view, round=number, sent=self._sent[number])
        supervised = self._supervises(number, seed)
        return replace(now, number=number, supervised=supervised, view=view)

    def _hear(self, now: RoundUnderWay, name: str, then: RoundUnderWay) -> bool:
        """Run a client's round; whether its result counts."""
        self._state.copy_sources[name] = then.view.sent
        try:
            found = self._accept(then, self._train(then, [name]))
        finally:
            del self._state.copy_sources[name]
            self._state.copies.pop(name, None)  # one trained in vain
        rounds, most = now.number - then.number, self._settings.staleness_max
        if name in found and rounds > most:
            now.refuse(name, f"a result {rounds} rounds old: expected at most {most}")
            return False
        for client, brought in found.items():
            share = (1 + rounds) ** -self._settings.staleness_power
            now.contributions[client] = (
                rebase_update(brought, then.view.sent, now.view.sent, share) if rounds else brought
            )
        return bool(found)


def buffer_of(method: Method, clients: int, settings: RoundSettings) -> int:
    """K.

    Raises: ConfigurationError for a method or settings that need a common round.
    """
    buffer, step = settings.buffer, method.server_step
    if buffer is None or buffer > clients:
        raise ConfigurationError(f"buffer: expected 1 to {clients} (clients), got {buffer}")
    alone = step in {None, shared, per_client} or (step is not None and isgeneratorfunction(step))
    if not alone or method.batch_share is not None:
        raise ConfigurationError(
            f"buffer: {method.name} needs all participants of a step at once, and here each trains"
            " at its own pace; leave `buffer` out"
        )
    if settings.participation != 1 or settings.cohort is not None:
        raise ConfigurationError(
            "buffer: every client takes part, one at a time; leave `participation` and `cohort` out"
        )
    return buffer
