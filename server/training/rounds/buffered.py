"""Rounds without a common beginning: the server merges as soon as K results are there (FedBuff).

Every client trains at its own pace from the weights of the merge before it began, so a slow client
delays no other. A result that began s merges ago counts by its discounted change
(server.training.rounds.staleness); beyond `staleness_max` it is refused by name.

FedBuff (Nguyen et al., AISTATS 2022, Alg. 1) with FedAsync's discount, which FedBuff takes over
with a = 1/2.

Differs: FedBuff hands a finished client work at once; here a client begins again with the next
merge, whatever became of its result. So a merge holds at most one result of a client, and K of n
clients always come. The changes are averaged by the method's weights, not by 1/K.

A server with one model for all steps it as it is when a client's features come. Copies are made of
the weights that their client began with. Clients work by a simulated clock or in threads, behind
one seam: server.training.rounds.workers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

from torch import Tensor

from edge_sdk.errors import ConfigurationError
from edge_sdk.training.protocol.messages import Update
from edge_sdk.training.protocol.plan import Plan
from server.training.core.server_state import ServerState
from server.training.core.weighted_mean import Contribution
from server.training.methods.method import Method
from server.training.methods.steps import advances_alone
from server.training.rounds.clients import train_clients
from server.training.rounds.context import ClosedError, RoundContext
from server.training.rounds.lifecycle import close_round, open_round, supervises
from server.training.rounds.round import RoundResult, RoundSettings, RoundUnderWay
from server.training.rounds.staleness import Staleness
from server.training.rounds.transport import Transport
from server.training.rounds.updates import accept_late_updates
from server.training.rounds.workers import Ended, Workers


class BufferedLoop:
    """Runs rounds that are merges of K results.

    Args:
        plans: by client, in the order in which floats are added; depth included.
        transport: with workers in threads its `exchange` is called by several of them, each for a
            client of its own.
        clients: how many there are for the first round, at least; as many as plans where None.
    Raises: ConfigurationError for a method or settings that need a common round.
    """

    def __init__(
        self,
        method: Method,
        plans: Mapping[str, Plan],
        state: ServerState,
        transport: Transport,
        settings: RoundSettings,
        *,
        workers: Workers,
        clients: int | None = None,
    ) -> None:
        self._buffer = _checked_buffer(method, len(plans) if clients is None else clients, settings)
        if method.client.noise is not None and workers.clock_s is None:
            raise ConfigurationError(
                "buffer: with [privacy] rounds have to begin together on real devices, for no row"
                " accounts for those under way at the end; leave one of the two out"
            )
        self._context = RoundContext(method, state, settings)
        self._staleness = Staleness(settings.staleness_max, settings.staleness_power)
        self._workers = workers
        self._seed = 0
        workers.bind(self._work_of)
        self.set_clients(plans, transport)

    def set_clients(self, plans: Mapping[str, Plan], transport: Transport) -> None:
        """Train these clients from the next round on, and reach them by `transport`."""
        self._context.set_clients(plans, transport)

    def paused(self) -> AbstractContextManager[object]:
        """A context in which nothing changes the server's state, whichever client is at work."""
        return self._context.using_state

    def close(self) -> None:
        """Stop clients still working, once the transport waits for no reply any more."""
        self._context.closing.set()
        self._workers.close()

    def run_round(
        self, number: int, seed: int, late: Mapping[str, Update] | None = None
    ) -> RoundResult:
        """Put every client to work, wait for K results, and merge them.

        Fewer are merged where no client is left at work, if they are a quorum of K.

        Args:
            late: updates handed in since the last merge by clients that were not waited for.
        """
        context, workers = self._context, self._workers
        self._seed = seed
        now = open_round(context, number, seed)
        self._staleness.begin(number, now.view.sent)
        ages = accept_late_updates(context, self._staleness, now, late or {})
        for name in context.plans:
            if name not in workers.at_work and name not in now.contributions:
                workers.begin(name, number)
        clock_s, asked = workers.clock_s, []
        while len(now.contributions) < self._buffer and workers.at_work:
            ended = workers.next()
            asked.append(ended.name)
            if self._take_in(now, ended):
                ages[ended.name] = number - ended.then.number
        stale = {name: rounds for name, rounds in ages.items() if rounds}
        result = close_round(context, now, asked, self._buffer, stale)
        for name, update in (late or {}).items():
            if not result.keeps(name):
                workers.settle(name, update.round)
        self._staleness.keep(workers.needed_rounds(number + 1 - self._staleness.limit))
        if clock_s is None or workers.clock_s is None:
            return result
        return replace(result, simulated_s=workers.clock_s - clock_s)

    def state_dict(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """State between two merges, for a checkpoint, as JSON and as tensors.

        The JSON names the clients that may still bring a result. The tensors are the weights that
        they began with.
        """
        fields = self._workers.state_dict() | self._context.suspects.state_dict()
        return fields, self._staleness.state_dict()

    def load_state_dict(self, fields: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Take up what `state_dict` gave.

        Raises: FrameError for other fields or tensors, or those of other clients.
        """
        self._staleness.load_state_dict(tensors)
        self._workers.load_state_dict(fields, self._staleness.rounds)
        self._context.suspects.load_state_dict(fields)

    def _work_of(self, name: str, number: int) -> Callable[[], Ended]:
        """A client's round from the weights of round `number`, to be run by a worker."""
        context = self._context
        sent = self._staleness.sent(number)
        assert sent is not None, "weights are kept while a client works from them"
        supervised = supervises(context, number, self._seed)
        memory = context.state.memory
        then = RoundUnderWay.begin(number, context.plans, sent, memory, supervised)

        def train() -> Ended:
            found: Mapping[str, Contribution] = {}
            context.state.copy_sources[name] = sent
            try:
                found = train_clients(context, then, [name])
            except ClosedError:
                pass  # training ends: nothing waits for this result
            finally:
                del context.state.copy_sources[name]
                context.state.copies.pop(name, None)  # the copy of a client that gave no update
            return Ended(name, then, found)

        return train

    def _take_in(self, now: RoundUnderWay, ended: Ended) -> bool:
        """Take in the result of a client's round; whether it counts."""
        name, then = ended.name, ended.then
        now.add(then)
        if ended.found or then.refused:
            self._workers.settle(name, then.number)
        if not ended.found:
            return False
        rounds = now.number - then.number
        fault = self._staleness.fault(rounds)
        if fault is not None:
            now.refuse(name, fault)
            return False
        for client, brought in ended.found.items():
            now.contributions[client] = self._staleness.rebase(
                brought, then.view.sent, now.view.sent, rounds
            )
        return True


def _checked_buffer(method: Method, clients: int, settings: RoundSettings) -> int:
    """K.

    Raises: ConfigurationError for a method or settings that need a common round.
    """
    buffer = settings.buffer
    if buffer is None or buffer > clients:
        raise ConfigurationError(f"buffer: expected 1 to {clients} (clients), got {buffer}")
    if not advances_alone(method.server_step) or method.batch_share is not None:
        raise ConfigurationError(
            f"buffer: {method.name} needs all participants of a step at once, and here each trains"
            " at its own pace; leave `buffer` out"
        )
    if settings.participation != 1 or settings.cohort is not None:
        raise ConfigurationError(
            "buffer: every client takes part, one at a time; leave `participation` and `cohort` out"
        )
    return buffer
