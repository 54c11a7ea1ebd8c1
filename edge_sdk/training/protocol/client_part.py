"""The client's half of a method, as data.

A method fills in a ClientPart, the plan carries it to the device, and the client composes its round
from it (edge_sdk.training.client.client_round).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Literal, get_args

from edge_sdk.checks import check_fields, need
from edge_sdk.errors import ConfigurationError
from edge_sdk.records import added
from edge_sdk.training.formulas.evidential_loss import EvidentialLoss
from profiles.checks import Check, flag, is_whole, number, one_of, optional, share, whole

Fusion = Literal["server", "tpgf", "no_loss", "no_depth", "equal", "fixed"]
FUSIONS: Final = get_args(Fusion)
OutputKind = Literal["logits", "embeddings"]
AuxiliaryHead = Literal["global", "exit"]
LastLayer = Literal["server", "client"]

_UNCUT: Final = "nothing is cut: the client trains the whole network"
_ADAPTS: Final = "the client adapts (meta)"
# (part, excluded by, where and why). All other parts of a client combine.
EXCLUSIONS: Final = (
    ("exit_head", "whole", "the client trains the whole network"),
    ("distil", "whole", "the client trains the whole network"),
    ("back", "whole", "the client trains the whole network"),
    ("bottleneck", "whole", _UNCUT),
    ("inversion", "whole", _UNCUT),
    ("views", "whole", _UNCUT),
    ("frozen", "whole", _UNCUT),
    ("frozen", "exit_head", "an exit head trains with its prefix"),
    ("inversion", "meta", f"{_ADAPTS}: features come from adapted copies of the prefix"),
    ("back", "meta", f"{_ADAPTS}: the adaptation answers the server's outputs"),
    ("back", "exit_head", 'there is an exit head; meta with head = "client" has both'),
    ("noise", "views", "a second view leaves the client too, which noise does not cover"),
    ("noise", "meta", f"{_ADAPTS}: noise does not cover its answers to the server"),
    ("noise", "inversion", "a guard against inversion trains, which noise does not cover"),
)
# parts of a client that trains the whole network, and what stands for none of each
_OF_WHOLE: Final = {"dynamic": 0.0, "calibration": 0.0, "own_network": None, "own_head": False}

_EIGHTS: Final = Check(
    "a multiple of 8 from 8 to 512",
    lambda value: is_whole(value) and value % 8 == 0 and 8 <= value <= 512,
)


@dataclass(frozen=True, slots=True)
class Distillation:
    """Training of a client's own auxiliary model (BESplit, Eq. 18).

    Attributes:
        head: the model's head: `global` pools over the whole map, as in the paper; `exit` is built
            like the network's own exit head, which keeps more of a small map.
        client_share: lam_C, weight of the relations between the prefix's features.
        server_share: lam_G, weight of the server's answers.
        tau: temperature of both terms.
        anneal_rounds: T of a server of the release before, which names no `evidence`.
        evidence: the loss of the answers; None for that of the release before, softplus with all of
            the divergence.
        averaged: whether the server averages the model over the clients of a cut; else it is the
            client's own and never sent.
    """

    head: AuxiliaryHead = "global"
    client_share: float = 0.2
    server_share: float = 0.3
    tau: float = 5.0
    anneal_rounds: int = 10
    evidence: EvidentialLoss | None = field(default=None, metadata=added())
    averaged: bool = field(default=False, metadata=added())

    @property
    def loss(self) -> EvidentialLoss:
        """The numbers of L_evid."""
        return self.evidence or EvidentialLoss("softplus", 1.0, self.anneal_rounds)

    def __post_init__(self) -> None:
        check_fields(
            self,
            "distil",
            head=one_of(get_args(AuxiliaryHead)),
            client_share=number(least=0),
            server_share=number(least=0),
            tau=number(above=0),
            anneal_rounds=whole(1),
            averaged=flag,
        )


@dataclass(frozen=True, slots=True)
class Inversion:
    """A guard against inversion: a decoder on the client tries to reconstruct the inputs from the
    features, and the prefix is trained against it (SCALA, section 5.7, after ResSFL).

    The prefix's loss gains `weight * max(0, SSIM - threshold)`.

    Attributes:
        threshold: similarity of a reconstruction that does no harm yet.
        width: channels inside the decoder, a multiple of 8.
        learning_rate: the decoder's (Adam's).
    """

    weight: float = 0.3
    threshold: float = 0.5
    width: int = 16
    learning_rate: float = 1e-3

    def __post_init__(self) -> None:
        check_fields(
            self,
            "inversion",
            weight=number(least=0),
            threshold=share,
            width=_EIGHTS,
            learning_rate=number(above=0),
        )


@dataclass(frozen=True, slots=True)
class PersonalBack:
    """A last linear layer that the client trains and keeps to itself    SplitLPF

    Attributes:
        dropout: share of the embeddings that is left out in training.
        learning_rate: the layer's own; None for the plan's.
        follow_accuracy: lower the rate as the client's accuracy grows
            (edge_sdk.training.client.personal_head).
    """

    dropout: float = 0.5
    learning_rate: float | None = None
    follow_accuracy: bool = True

    def __post_init__(self) -> None:
        check_fields(
            self,
            "back",
            dropout=number(least=0, below=1),
            learning_rate=optional(number(above=0)),
            follow_accuracy=flag,
        )


@dataclass(frozen=True, slots=True)
class MetaAdaptation:
    """Adaptation of copies of a client's prefix and head before each batch (HARMONY;
    edge_sdk.training.client.adaptation).

    Attributes:
        steps: M, plain SGD steps of the adaptation. rate: their learning rate.
        early: draw the second view's depth for each batch; False takes the cut.
        head: where the last linear layer is: on the server, or on the client alone.
        noise: squared norm of the noise on the client's answers, as a share of the largest
            gradient's (edge_sdk.training.formulas.gradient_noise); 0 for none.
    """

    steps: int = 3
    rate: float = 0.01
    early: bool = True
    head: LastLayer = "server"
    noise: float = 0.0

    def __post_init__(self) -> None:
        check_fields(
            self,
            "meta",
            steps=whole(0),
            rate=number(above=0),
            early=flag,
            head=one_of(get_args(LastLayer)),
            noise=number(least=0),
        )


@dataclass(frozen=True, slots=True)
class Noise:
    """Limits and Gaussian noise on what leaves the client (edge_sdk.training.protocol.noise).

    Attributes:
        feature_clip: largest L2 norm of one sample's smashed data; None for no limit.
        feature_sigma: standard deviation of the noise, as a multiple of that limit.
        update_clip, update_sigma: the same for the change of all weights in a round.
    """

    feature_clip: float | None = None
    feature_sigma: float = 0.0
    update_clip: float | None = None
    update_sigma: float = 0.0

    def __post_init__(self) -> None:
        limit, multiple = optional(number(above=0)), number(least=0)
        check_fields(self, feature_clip=limit, feature_sigma=multiple)
        check_fields(self, update_clip=limit, update_sigma=multiple)
        for clip, sigma in (("feature_clip", "feature_sigma"), ("update_clip", "update_sigma")):
            limited = getattr(self, clip) is not None or not getattr(self, sigma)
            need(limited, clip, "a limit where there is noise", getattr(self, clip))


@dataclass(frozen=True, slots=True)
class ClientPart:
    """The client's half of a method.

    Attributes:
        whole: the client trains the whole network and no server step takes place (FedAvg).
        exit_head: the client trains an exit head at its depth.
        fusion: how the client's and the server's gradients of the prefix are joined; `server`
            takes the server's alone.
        exit_share: g of fusion `fixed`: the prefix learns by g * own + (1 - g) * the server's
            gradient, the exit head by g * own. Without the server's answer, both by own in full.
        clip: largest L2 norm of the client's own gradient over its whole prefix, or without an
            exit head of all that the prefix steps by; None for no limit.
        personal_share: lambda: the client starts from lambda * its own last weights +
            (1 - lambda) * the average; 0 takes the average.
        prox_mu: FedProx's pull towards the round's start; 0 for none.
        dynamic: alpha of FedDyn: that pull, and a linear term that the client keeps from round to
            round; 0 for none.
        calibration: tau of FedLC's calibrated logits; 0 for plain cross-entropy.
        own_network: lambda of Ditto: the client also trains a whole network of its own, pulled
            towards the round's start by that weight; None for none.
        own_head: whether the last layer of a client that trains the whole network stays on the
            client (FedPer).
        frozen: whether the prefix keeps the weights that the server sends (PFSL).
        distil: the auxiliary model that the client trains too; None for none.
        bottleneck: channels to which the cut is narrowed (edge_sdk.nets.bottleneck); None leaves
            the backbone's own.
        inversion: the guard against inversion; None for none.
        back: the last layer, if it is the client's own; the server's step asks for its loss.
        noise: noise on what leaves the client; None for none.
        meta: adaptation before each batch; the server's step asks for its loss. None for none.
        views: whether a second view of other samples travels too, for contrastive alignment
            (edge_sdk.training.client.second_view).
        evidence_rounds: T of a server of the release before whose exit heads learn evidence, as
            softplus with all of the divergence.
        evidence: the loss of an exit head that learns evidence, so that a gate can use vacuity
            (BESplit, Eq. 5); None, as `evidence_rounds`, for one that learns by cross-entropy.
    """

    whole: bool = False
    exit_head: bool = False
    fusion: Fusion = "server"
    exit_share: float = 0.5
    clip: float | None = None
    personal_share: float = 0.0
    prox_mu: float = 0.0
    distil: Distillation | None = None
    bottleneck: int | None = None
    inversion: Inversion | None = None
    back: PersonalBack | None = None
    noise: Noise | None = None
    meta: MetaAdaptation | None = None
    views: bool = False
    evidence_rounds: int | None = None
    evidence: EvidentialLoss | None = field(default=None, metadata=added())
    dynamic: float = field(default=0.0, metadata=added())
    calibration: float = field(default=0.0, metadata=added())
    own_network: float | None = field(default=None, metadata=added())
    own_head: bool = field(default=False, metadata=added())
    frozen: bool = field(default=False, metadata=added())

    @property
    def exit_evidence(self) -> EvidentialLoss | None:
        """The loss of an exit head that learns evidence; None where it learns by cross-entropy."""
        if self.evidence is not None or self.evidence_rounds is None:
            return self.evidence
        return EvidentialLoss("softplus", 1.0, self.evidence_rounds)

    @property
    def answers(self) -> OutputKind | None:
        """Outputs of the server that the client answers with a gradient; None if none."""
        if self.back is not None or (self.meta is not None and self.meta.head == "client"):
            return "embeddings"
        return None if self.meta is None else "logits"

    @property
    def own_auxiliary(self) -> bool:
        """Whether the client has an auxiliary model that it keeps to itself."""
        return self.distil is not None and not self.distil.averaged

    @property
    def shared_auxiliary(self) -> bool:
        """Whether the client trains an auxiliary model that the server averages."""
        return self.distil is not None and self.distil.averaged

    @property
    def own_back(self) -> bool:
        """Whether the network's last layer is the client's own."""
        return self.own_head or self.answers == "embeddings"

    def __post_init__(self) -> None:
        check_fields(
            self,
            whole=flag,
            exit_head=flag,
            fusion=one_of(FUSIONS),
            exit_share=share,
            clip=optional(number(above=0, infinite=True)),
            personal_share=share,
            prox_mu=number(least=0),
            bottleneck=optional(whole(1)),
            views=flag,
            evidence_rounds=optional(whole(1)),
            dynamic=number(least=0),
            calibration=number(least=0),
            own_network=optional(number(least=0)),
            own_head=flag,
            frozen=flag,
        )
        for part, none in _OF_WHOLE.items():
            need(
                self.whole or getattr(self, part) == none,
                part,
                "none where the client trains a part of the network alone",
                getattr(self, part),
            )
        need(
            self.exit_head or self.fusion == "server",
            "fusion",
            "server where there is no exit head",
            self.fusion,
        )
        need(
            self.exit_head or self.exit_evidence is None,
            "evidence",
            "none where no exit head learns evidence",
            self.exit_evidence,
        )
        need(
            self.meta is None or (self.exit_head and self.fusion == "fixed"),
            "meta",
            "an exit head and fusion fixed with it",
            (self.exit_head, self.fusion),
        )
        for part, other, where in EXCLUSIONS:
            if getattr(self, part) and getattr(self, other):
                raise ConfigurationError(f"{part}: expected none where {where}")
