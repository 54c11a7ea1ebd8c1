"""Cost of a model: parameters, operations, memory and time of every stage.

Measured once at export and stored with the model. All counts are for float32 and one sample.

Memory is kept in a form that adds up. With `p` parameters of 4 bytes and a batch of `B`:

    inference   4*p  +  B * (input + output activation)         the widest neighbouring pair counts
    training    12*p +  B * (what autograd keeps for backward)   weights, gradients, momentum
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, cast

from profiles.checks import number, one_of, text, whole
from profiles.errors import InvalidProfileError
from profiles.fields import check_fields, check_value, exact_keys, need

WEIGHT_BYTES = 4  # float32
TRAINED_WEIGHT_BYTES = 12  # the weight, its gradient, the optimiser's momentum


@dataclass(frozen=True, slots=True)
class StageCost:
    """Cost of one part of a network: a stage, an exit head, or several parts together.

    Attributes:
        name: for people.
        parameters: trainable values.
        flops: operations for one sample's forward pass; a multiply-add counts 2.
        activation_bytes: its output for one sample: at a cut, the smashed data.
        inference_peak_bytes: 4 * parameters + its input and output for one sample.
        training_peak_bytes: 12 * parameters + all it keeps for the backward pass of one sample,
            its output included (and its input, where no earlier stage holds that).
        latency_ms: one sample's forward pass on the machine that measured.
    """

    name: str
    parameters: int
    flops: int
    activation_bytes: int
    inference_peak_bytes: int
    training_peak_bytes: int
    latency_ms: float

    def __post_init__(self) -> None:
        check_fields(self, "cost", name=text())
        owner, count = f"cost of {self.name}", whole(0)
        check_fields(self, owner, parameters=count, flops=count, activation_bytes=count)
        check_fields(
            self,
            owner,
            inference_peak_bytes=whole(WEIGHT_BYTES * self.parameters),
            training_peak_bytes=whole(TRAINED_WEIGHT_BYTES * self.parameters),
            latency_ms=number(least=0),
        )

    @property
    def inference_sample_bytes(self) -> int:
        """The part of the inference peak that grows with the batch, for one sample."""
        return self.inference_peak_bytes - WEIGHT_BYTES * self.parameters

    @property
    def training_sample_bytes(self) -> int:
        """The part of the training peak that grows with the batch, for one sample."""
        return self.training_peak_bytes - TRAINED_WEIGHT_BYTES * self.parameters

    @classmethod
    def from_dict(cls, data: object) -> StageCost:
        """Read one stage.

        Raises: InvalidProfileError naming the field, what was expected and what was got.
        """
        checked = exact_keys("cost", data, [field.name for field in fields(cls)])
        return cls(**cast("dict[str, Any]", dict(checked)))


@dataclass(frozen=True, slots=True)
class CostTable:
    """Cost of a super-network, stage by stage.

    Attributes:
        stages: all L, in order.
        exits: the exit head at each depth where the network may be cut, 1 .. L; at L the server
            is left with the final head, which may have hidden layers.
        head: the final head, which only the server runs.
        score_gflops: compute score of one core of the machine the latencies were measured on, as
            they were: with one thread.
    """

    stages: tuple[StageCost, ...]
    exits: Mapping[int, StageCost]
    head: StageCost
    score_gflops: float

    def __post_init__(self) -> None:
        need(len(self.stages) >= 2, "cost table", "stages", "at least 2", len(self.stages))
        need(bool(self.exits), "cost table", "exits", "at least one depth", dict(self.exits))
        for depth in self.exits:
            check_value("cost table", "exit depth", depth, whole(1, len(self.stages)))
        check_fields(self, "cost table", score_gflops=number(above=0))

    @property
    def depths(self) -> tuple[int, ...]:
        """The depths at which the network may be cut, ascending."""
        return tuple(sorted(self.exits))

    def prefix(self, depth: int, *, batch: int = 1) -> StageCost:
        """Cost of a device at `depth`: stages 1..depth and the exit head there.

        Parameters, operations and latency add up (the last two for one sample, whatever `batch`);
        `activation_bytes` is one sample's smashed data, not the head's logits. The peaks are for
        `batch` samples at a time:

            inference_peak_bytes = 4 * parameters  + batch * max(in + out over the parts)
            training_peak_bytes  = 12 * parameters + batch * sum(kept for backward over the parts)

        Raises: InvalidProfileError for a depth without exit head, or a batch below 1.
        """
        check_value("cost table", "depth", depth, one_of(self.depths))
        parts = (*self.stages[:depth], self.exits[depth])
        cut = self.stages[depth - 1].activation_bytes
        return _together(f"prefix {depth}", parts, cut, batch)

    def suffix(self, depth: int, *, batch: int = 1) -> StageCost:
        """Cost of the server for smashed data of `depth`: stages depth+1..L and the final head.

        Depth 0 is the whole network without exit heads. Figures as in `prefix`;
        `activation_bytes` is one sample's logits.

        Raises: InvalidProfileError for a depth outside 0 .. L, or a batch below 1.
        """
        check_value("cost table", "depth", depth, whole(0, len(self.stages)))
        parts = (*self.stages[depth:], self.head)
        return _together(f"suffix {depth}", parts, self.head.activation_bytes, batch)

    def latency_ms(self, depth: int, score_gflops: float) -> float:
        """One sample through the prefix and its exit head on a core with that score, ms.

        The measured time, scaled by the ratio of the scores; at the table's own score it is the
        measured time itself.
        """
        check_value("cost table", "score_gflops", score_gflops, number(above=0))
        return self.prefix(depth).latency_ms * self.score_gflops / score_gflops

    def to_dict(self) -> dict[str, Any]:
        """The table as JSON has it; depths become strings."""
        return {
            "stages": [asdict(stage) for stage in self.stages],
            "exits": {str(depth): asdict(self.exits[depth]) for depth in self.depths},
            "head": asdict(self.head),
            "score_gflops": self.score_gflops,
        }

    @classmethod
    def from_dict(cls, data: object) -> CostTable:
        """Read what `to_dict` wrote.

        Raises: InvalidProfileError naming the field, what was expected and what was got.
        """
        checked = exact_keys("cost table", data, [field.name for field in fields(cls)])
        stages, exits = checked["stages"], checked["exits"]
        if not isinstance(stages, Sequence) or isinstance(stages, str):
            raise InvalidProfileError(f"cost table: stages: expected a list, got {stages!r}")
        if not isinstance(exits, Mapping):
            raise InvalidProfileError(f"cost table: exits: expected an object, got {exits!r}")
        return cls(
            stages=tuple(StageCost.from_dict(stage) for stage in stages),
            exits={_depth(key): StageCost.from_dict(exit_) for key, exit_ in exits.items()},
            head=StageCost.from_dict(checked["head"]),
            score_gflops=cast("float", checked["score_gflops"]),
        )


def _together(name: str, parts: Sequence[StageCost], output_bytes: int, batch: int) -> StageCost:
    check_value("cost table", "batch", batch, whole(1))
    parameters = sum(part.parameters for part in parts)
    widest = max(part.inference_sample_bytes for part in parts)
    kept = sum(part.training_sample_bytes for part in parts)
    return StageCost(
        name=name,
        parameters=parameters,
        flops=sum(part.flops for part in parts),
        activation_bytes=output_bytes,
        inference_peak_bytes=WEIGHT_BYTES * parameters + batch * widest,
        training_peak_bytes=TRAINED_WEIGHT_BYTES * parameters + batch * kept,
        latency_ms=sum(part.latency_ms for part in parts),
    )


def _depth(key: object) -> int:
    if isinstance(key, int):
        return key
    digits = str(key)
    need(digits.isascii() and digits.isdecimal(), "cost table", "exits", "depths as keys", key)
    return int(digits)
