"""The numbers of training that a recipe gives, a plan carries and the server shares."""

from __future__ import annotations

from dataclasses import dataclass, field

from edge_sdk.checks import check_fields
from edge_sdk.manifest import FEATURE_CODECS, FeatureCodec
from edge_sdk.nets.layers import Norm
from edge_sdk.nets.memory_format import MEMORY_FORMATS, MemoryFormat
from edge_sdk.nets.precision import PRECISIONS, Precision
from edge_sdk.records import added
from profiles.checks import number, one_of, optional, whole


@dataclass(frozen=True, slots=True)
class Training:
    """Numbers of training, on a client and on the server.

    Attributes:
        learning_rate, momentum, weight_decay: of SGD (edge_sdk.training.formulas.sgd).
        batch: samples of one step.
        epochs: passes over a client's samples in a round, where there are no `iterations`.
        iterations: batches of a round, drawn from an endless stream of reshuffled samples.
        norm: normalisation layers of the network (edge_sdk.nets); None for the backbone's own.
        codec: of features.
        memory_format: how maps lie in memory (edge_sdk.nets.memory_format); `auto` takes what a
            short measurement finds faster, on each machine for itself.
        precision: of layers in training (edge_sdk.nets.precision).
    """

    learning_rate: float
    batch: int
    epochs: int = 1
    iterations: int | None = None
    norm: Norm | None = None
    momentum: float = 0.0
    weight_decay: float = 0.0
    codec: FeatureCodec = "fp32"
    memory_format: MemoryFormat = field(default="auto", metadata=added())
    precision: Precision = field(default="fp32", metadata=added())

    def __post_init__(self) -> None:
        check_fields(
            self,
            learning_rate=number(above=0),
            batch=whole(1),
            epochs=whole(1),
            iterations=optional(whole(1)),
            momentum=number(least=0, below=1),
            weight_decay=number(least=0),
            codec=one_of(FEATURE_CODECS),
            memory_format=one_of(MEMORY_FORMATS),
            precision=one_of(PRECISIONS),
        )
