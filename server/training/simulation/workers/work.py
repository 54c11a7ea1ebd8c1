"""Work for a simulation's worker processes, and its results, as values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from edge_sdk.training.protocol.messages import Reply, Request, Weights
from server.training.core.weighted_mean import Contribution
from server.training.rounds.round import RoundUnderWay


@dataclass(frozen=True, slots=True)
class Open:
    """The round whose clients are trained next, server's half included.

    weights: of the whole network as the round starts. memory: the method's.
    """

    round: int
    supervised: bool
    weights: Weights
    memory: dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Train:
    """A client to train for the open round, with what it keeps to itself."""

    name: str
    personal: Weights


@dataclass(frozen=True, slots=True)
class Asked:
    """A request to a client's own half; at the start of a round with what it keeps to itself."""

    name: str
    request: Request
    personal: Weights | None


@dataclass(frozen=True, slots=True)
class Trained:
    """A client's contribution to the round, and the round as that client saw it.

    failure: why it gave no reply, if it gave none.
    """

    name: str
    then: RoundUnderWay
    found: Mapping[str, Contribution]
    personal: Weights
    failure: str | None


@dataclass(frozen=True, slots=True)
class Answered:
    """A client's reply; None where it gave none, for the reason in `failure`.

    personal: what it keeps to itself, once its round has ended.
    """

    name: str
    reply: Reply | None
    personal: Weights | None
    failure: str | None


@dataclass(frozen=True, slots=True)
class Failed:
    """An error that is the simulation's and no client's; the worker ends."""

    why: str


Work = Open | Train | tuple[Asked, ...]
Result = Trained | Answered | Failed
