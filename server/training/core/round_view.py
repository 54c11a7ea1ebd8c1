"""The round under way, as the server's parts of a method may know it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from edge_sdk.training.protocol.messages import Weights
from edge_sdk.training.protocol.plan import Plan


@dataclass(slots=True)
class RoundView:
    """One round, as a server step or a weight rule sees it.

    Attributes:
        step: the step under way.
        plans: of all clients.
        sent: every weight as it was when the round started.
        samples: n_k of the participants, as they reported at the start; where merges are robust, at
            most a multiple of the median.
        label_counts: (N,) by client; empty where labels stay on the client.
        memory: the method's own tensors, kept from round to round and in checkpoints. A round that
            does not count leaves them as they were, so a tensor in it is replaced, never changed in
            place. Server steps of buffered rounds see a copy: only `weigh` may write there.
    """

    round: int
    step: int = 0
    plans: Mapping[str, Plan] = field(default_factory=dict)
    sent: Weights = field(default_factory=dict, repr=False)
    samples: Mapping[str, int] = field(default_factory=dict)
    label_counts: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    memory: dict[str, Tensor] = field(default_factory=dict, repr=False)
