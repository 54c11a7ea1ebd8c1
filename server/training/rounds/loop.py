"""The round loop: every method, in simulation and with real devices.

All participants of a round begin together, from the same weights. Where clients do not meet in a
server step, rounds may be run in cohorts, so that memory does not grow with the participants: a
cohort's contributions wait on the disk until the last cohort has been heard.

A client with an unsound reply is out for the rest of the round and named in the result. That reply
is not used; a server with one model for all may have stepped on earlier, sound batches.

Rounds without a common beginning: server.training.rounds.buffered.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

from torch import Tensor

from edge_sdk.training.protocol.messages import Update
from edge_sdk.training.protocol.plan import Plan
from server.training.core.server_state import ServerState
from server.training.core.spool import Spool
from server.training.methods.method import Method
from server.training.rounds.clients import TrainClients, train_clients
from server.training.rounds.context import RoundContext
from server.training.rounds.lifecycle import choose_clients, close_round, open_round
from server.training.rounds.round import RoundResult, RoundSettings, RoundUnderWay
from server.training.rounds.staleness import Staleness
from server.training.rounds.transport import Transport
from server.training.rounds.updates import accept_late_updates


class RoundLoop:
    """Runs rounds of a method in lockstep.

    Args:
        plans: by client, in the order in which floats are added; depth included.
        state: the server's network; changed by every round.
        train: trains a group of clients.
        folder: where contributions wait on the disk while rounds run in cohorts; the system's
            temporary folder where None.
    """

    def __init__(
        self,
        method: Method,
        plans: Mapping[str, Plan],
        state: ServerState,
        transport: Transport,
        settings: RoundSettings | None = None,
        *,
        train: TrainClients = train_clients,
        folder: Path | None = None,
    ) -> None:
        self._train = train
        self._settings = settings or RoundSettings()
        self._context = RoundContext(method, state, self._settings)
        self._staleness = Staleness(self._settings.staleness_max, self._settings.staleness_power)
        self._folder = folder
        self.set_clients(plans, transport)

    def set_clients(self, plans: Mapping[str, Plan], transport: Transport) -> None:
        """Train these clients from the next round on, and reach them by `transport`."""
        self._context.set_clients(plans, transport)

    def paused(self) -> AbstractContextManager[object]:
        """A context between two rounds in which nothing changes the server's state."""
        return self._context.using_state

    def close(self) -> None:
        """Stop clients still working. A no-op here: lockstep rounds leave none."""

    def run_round(
        self,
        number: int,
        seed: int,
        late: Mapping[str, Update] | None = None,
        before_merge: Callable[[RoundUnderWay], None] | None = None,
    ) -> RoundResult:
        """Run one round; the same number and seed give the same weights.

        Args:
            late: updates of earlier rounds that came since the last one. A client that gives an
                update of this round too is heard with that.
            before_merge: called with the round once all contributions are there; it leaves them and
                the server's state as they are.
        Raises: StorageError if contributions cannot be kept on the disk.
        """
        context, limit = self._context, self._settings.staleness_max
        with ExitStack() as stack:
            now = open_round(context, number, seed)
            self._staleness.begin(number, now.view.sent)
            self._staleness.keep(range(number - limit, number + 1))
            asked = choose_clients(context, number, seed)
            size = self._settings.cohort or len(asked)
            if size < len(asked):
                now.spool = stack.enter_context(Spool(self._folder))
            for first in range(0, len(asked), size):
                now.contributions |= self._train(context, now, asked[first : first + size])
                context.state.copies.clear()  # copies of clients that gave no update
            stale = accept_late_updates(context, self._staleness, now, late or {})
            if before_merge is not None:
                with context.using_state:
                    before_merge(now)
            return close_round(context, now, asked, len(asked), stale)

    def state_dict(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """State between two rounds, for a checkpoint, as JSON and as tensors.

        The JSON names the outliers with updates that may still come late. The tensors are the first
        weights of all rounds with such updates.
        """
        sent = self._staleness.state_dict() if self._settings.staleness_max else {}
        return self._context.suspects.state_dict(), sent

    def load_state_dict(self, fields: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Take up what `state_dict` gave.

        Raises: FrameError for other fields or tensors.
        """
        self._context.suspects.load_state_dict(fields)
        self._staleness.load_state_dict(tensors)
