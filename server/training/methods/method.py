"""A method: a frozen record of functions for named seams. The neutral record is plain SplitFed.

Each paper is one file in `methods/` that builds such a record out of a recipe's numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from edge_sdk.checks import check_fields
from edge_sdk.errors import ConfigurationError
from edge_sdk.gate_form import VACUITY, check_evidence, read_gate
from edge_sdk.manifest import GatePolicy
from edge_sdk.training.formulas.evidential_loss import EvidentialLoss
from edge_sdk.training.protocol.client_part import ClientPart, OutputKind
from edge_sdk.training.protocol.fine_tuning import EPOCHS_MAX, FineTuning
from profiles.checks import number, optional, whole
from server.training.core.server_state import Trunk
from server.training.core.weighted_mean import Correction, WeightRule, by_samples
from server.training.methods.formulas.batch_share import BatchShare
from server.training.methods.formulas.contrastive import Alignment
from server.training.methods.steps import ServerStep, needs_labels, per_client

Labels = Literal["sent", "derivable", "private"]


@dataclass(frozen=True, slots=True)
class Method:
    """A training method by its seams.

    Attributes:
        name: as in a recipe.
        labels: whether the server gets the labels: `sent`, `derivable` from what is sent, or
            `private`, which needs a measured attack that fails.
        client: the client's half, as its plan describes it.
        server_step: the server's answer to features; None where it has none (FedAvg).
        trunk: whether the server trains stages of its own (server.training.core.server_state).
        batch_share: how a batch is shared out among the participants of a round; None gives each
            client its plan's batch.
        weigh: aggregation weights of the participants, on both sides of the cut.
        server_weight: lambda, the server's own weight in aggregation.
        correct: changes the average before it becomes the server's weights (FedDyn); None leaves
            it.
        share_exits: whether exit heads are averaged and sent out, or stay on their clients.
        gives_outputs: whether the server step returns its logits with the gradients.
        keeps_records: whether the server step keeps client records in the method's memory.
        reads_records: whether the weights are made from such records.
        align: how the server's stages learn from the clients' second views; None if they do not.
        evidence: the loss by which exit heads learn evidence, where exits are gated by vacuity;
            None where they learn by cross-entropy and are gated by entropy.
        judged_by: gate of the exits as text (edge_sdk.gate_form); None for the measure that they
            learn: vacuity for evidence, else entropy.
        asks: the outputs that the server step can have its clients score.
        finetune_steps: SGD steps of each client on its own data after training.
        finetune_rate: learning rate of these steps; None for the client's own.
        refit_epochs: passes of each client over its own data after training, which fit its own last
            layer to the averaged network.
    """

    name: str
    labels: Labels = "sent"
    client: ClientPart = field(default_factory=ClientPart)
    server_step: ServerStep | None = per_client
    trunk: Trunk = "shared"
    batch_share: BatchShare | None = None
    weigh: WeightRule = by_samples
    server_weight: float = 0.0
    correct: Correction | None = None
    share_exits: bool = False
    finetune_steps: int = 0
    finetune_rate: float | None = None
    refit_epochs: int = 0
    gives_outputs: bool = False
    keeps_records: bool = False
    reads_records: bool = False
    align: Alignment | None = None
    evidence: EvidentialLoss | None = None
    judged_by: GatePolicy | None = None
    asks: tuple[OutputKind, ...] = ()

    @property
    def fine_tuning(self) -> FineTuning:
        """Personalisation of each client after training."""
        return FineTuning(self.finetune_steps, self.finetune_rate, self.refit_epochs)

    @property
    def gate(self) -> GatePolicy:
        """The gate of the exits, as text."""
        learnt = "entropy" if self.evidence is None else VACUITY[self.evidence.activation]
        return self.judged_by or learnt

    def __post_init__(self) -> None:
        step = self.server_step
        if self.labels != "sent" and step is not None and needs_labels(step):
            raise ConfigurationError(
                f"{self.name}: its server step needs labels, and labels = {self.labels!r} keeps"
                " them on the clients"
            )
        asked = () if self.judged_by is None else read_gate(self.judged_by).measures
        if (learnt := self.evidence) is not None:
            check_evidence(asked, learnt.activation)
        check_fields(
            self,
            server_weight=number(least=0),
            finetune_steps=whole(0),
            finetune_rate=optional(number(above=0)),
            refit_epochs=whole(0, EPOCHS_MAX),
        )
