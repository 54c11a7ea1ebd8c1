"""The state and the seams that all rounds of one training share."""

from __future__ import annotations

import threading
from collections.abc import Mapping

from edge_sdk.bundles import namespaces
from edge_sdk.errors import ConfigurationError
from edge_sdk.training.protocol.messages import Reply, Request, Weights
from edge_sdk.training.protocol.plan import Plan, without_last_layer
from server.training.core.server_state import ServerState
from server.training.methods.method import Method
from server.training.rounds.round import RoundSettings, RoundUnderWay
from server.training.rounds.suspects import Suspects
from server.training.rounds.transport import Transport


class RoundContext:
    """The method, the server's state, and the clients of the rounds to come.

    Raises: ConfigurationError for late updates with a method that they would bias.

    Attributes:
        plans: by client, in the order in which floats are added.
        using_state: held by whatever reads or changes `state`, since clients may be trained in
            several threads.
        closing: set when training ends while clients are still at work.
    """

    def __init__(self, method: Method, state: ServerState, settings: RoundSettings) -> None:
        if method.client.dynamic and (settings.buffer is not None or settings.staleness_max):
            raise ConfigurationError(
                f"round: {method.name}'s clients commit their term with each update, so one that"
                " counts late, or less, biases all later rounds: expected staleness_max = 0, and no"
                " buffer"
            )
        self.method = method
        self.state = state
        self.settings = settings
        self.suspects = Suspects(state, settings)
        self.using_state = threading.RLock()
        self.closing = threading.Event()
        self.plans: dict[str, Plan] = {}
        self._transport: Transport | None = None

    def set_clients(self, plans: Mapping[str, Plan], transport: Transport) -> None:
        """Train these clients from the next round on, and reach them by `transport`.

        Raises: ConfigurationError if the method needs rounds that are counted in batches.
        """
        name = self.method.name
        if self.method.batch_share is not None and not all(
            p.training.iterations for p in plans.values()
        ):
            raise ConfigurationError(
                f"{name}: shares each batch out, so rounds are counted in batches:"
                " expected train.iterations"
            )
        self.plans = dict(plans)
        self._transport = transport
        with self.using_state:
            self.state.hold_auxiliaries(self.plans.values())

    def exchange(
        self, now: RoundUnderWay, requests: Mapping[str, Request], deadline_s: float
    ) -> dict[str, Reply]:
        """Replies in the order of the requests; the bytes of both are counted in `now`.

        Raises: ClosedError once training ends.
        """
        assert self._transport is not None, "clients are set before the first round"
        for request in requests.values():
            now.traffic.sent(request)
        replies = self._transport.exchange(requests, deadline_s) if requests else {}
        in_order = {name: replies[name] for name in requests if name in replies}
        for reply in in_order.values():
            now.traffic.received(reply)
        if self.closing.is_set():
            raise ClosedError
        return in_order

    def start_weights(self, now: RoundUnderWay, name: str) -> Weights:
        """The weights that a client starts the round from."""
        plan = self.plans[name]
        exit_head = plan.part.exit_head and self.method.share_exits
        return trained_part(now.view.sent, plan, exit_head=exit_head)

    def first_weights(self, name: str) -> Weights:
        """First weights of the parts that stay on a client, under `first.…`.

        A client takes them for parts that it does not have yet. They travel in each round, since
        only the client knows what it has.
        """
        plan, own = self.plans[name], []
        if plan.part.exit_head and not self.method.share_exits:
            own.append(namespaces.exit_head(plan.depth))
        if plan.part.own_back:
            own.append(namespaces.BACK)
        return namespaces.FIRST.prefixed(
            {
                key: tensor
                for key, tensor in self.state.first.items()
                if any(namespace.holds(key) for namespace in own)
            }
        )


class ClosedError(Exception):
    """Training ends while a client is at work."""


def trained_part(weights: Weights, plan: Plan, *, exit_head: bool) -> Weights:
    """The weights that a client trains by its plan: stages, exit head, averaged auxiliary model."""
    starts = [f"stage{stage}." for stage in range(1, plan.depth + 1)]
    if plan.part.whole:
        starts += ["stage", "head."]
    if exit_head:
        starts.append(f"exit{plan.depth}.")
    if plan.part.shared_auxiliary:
        starts.append(f"{namespaces.auxiliary(plan.depth).name}.")
    found = {name: t for name, t in weights.items() if name.startswith(tuple(starts))}
    return without_last_layer(found, plan) if plan.part.own_head else found
