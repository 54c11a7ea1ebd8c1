"""Exit heads without labels: pooled features of a cut, and a linear layer that learns what the
whole model answers.

Features are z pooled to a grid of 3 x 3 (fewer where z is wide), at most 2304, or one a channel, at
most 8192. onnxruntime computes them for all cuts in one run of the model. The layer is trained by
soft cross-entropy against the model's own softmax, on standardised features; mean and deviation are
folded into its weights afterwards.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from onnx import NodeProto, TensorProto, helper
from torch import Tensor

from edge_sdk.learning.head import Head
from exporters.adopt.graph.channels import channel_axis, is_volume
from exporters.adopt.graph.cuts import Cut
from exporters.adopt.graph.graph import Addition, Graph, Spec, part, term_weight
from exporters.adopt.graph.split import open_session
from exporters.measure import one_torch_thread

Floats = NDArray[np.float32]
HeadLoss = Callable[[Tensor, Tensor], Tensor]

FEATURES_MAX: Final = 2304  # 256 channels on a grid of 3 x 3
# one position's: neurons and channels have no order to pool by. AlexNet and VGG have 4096.
CHANNELS_MAX: Final = 8192
GRID: Final = 3
LOGITS: Final = "head/logits"
WEIGHT: Final = "head.weight"
BIAS: Final = "head.bias"
_FOLDS: Final = 5
_EPOCHS: Final = 30
_STEPS: Final = (1000, 4000)
_BATCH: Final = 128
_RATE: Final = 1e-2
_DECAY: Final = 1e-4


def pooling(graph: Graph, cut: Cut) -> tuple[Addition, str, int]:
    """Nodes that pool z, the tensor (1, features) they end in, and the number of features."""
    builder = _Pooling(f"head{cut.depth}")
    tensor, shape, features = cut.tensor, cut.shape, cut.values
    axes, channels, most = len(shape), channel_axis(graph, tensor), CHANNELS_MAX
    if axes == 2 and channels == 2:
        tensor, features = builder.tokens(tensor, shape)
    elif axes in (2, 3) or (axes == 4 and is_volume(graph, tensor)):
        if channels != 1:
            others = [axis for axis in range(1, axes + 1) if axis != channels]
            tensor = builder.transposed(tensor, (0, channels, *others))
            shape = (shape[channels - 1], *(shape[axis - 1] for axis in others))
        tensor, features = builder.grid(tensor, shape)
    elif axes > 1:
        most = FEATURES_MAX
    tensor, features = builder.bounded(builder.flat(tensor), features, most)
    specs = {tensor: Spec(TensorProto.FLOAT, (1, features))}
    return Addition(builder.nodes, builder.weights, specs), tensor, features


def head_addition(graph: Graph, cut: Cut, head: Head) -> Addition:
    """The pooling and the linear layer as nodes; they end in `LOGITS`."""
    pooled, tensor, _ = pooling(graph, cut)
    gemm = helper.make_node("Gemm", [tensor, WEIGHT, BIAS], [LOGITS], transB=1)
    weights = [term_weight(WEIGHT, head.weight), term_weight(BIAS, head.bias)]
    specs = {LOGITS: Spec(TensorProto.FLOAT, (1, len(head.bias)))}
    return Addition([*pooled.nodes, gemm], [*pooled.weights, *weights], specs)


class Extractor:
    """One run of the whole model: its logits, and the pooled features of some cuts.

    Args:
        batches: whether the graph takes more than one sample at a time.
    """

    def __init__(self, graph: Graph, cuts: Sequence[Cut], *, batches: bool, threads: int) -> None:
        nodes: list[NodeProto] = []
        weights: list[TensorProto] = []
        outputs = {"logits": graph.output}
        specs: dict[str, Spec] = {}
        for cut in cuts:
            pooled, tensor, _ = pooling(graph, cut)
            nodes += pooled.nodes
            weights += pooled.weights
            specs |= pooled.specs
            outputs[f"features{cut.depth}"] = tensor
        model = part(
            graph,
            ("x", graph.input),
            outputs,
            batch=None if batches else 1,
            addition=Addition(nodes, weights, specs),
        )
        self._session = open_session(model, threads=threads)
        self._names = list(outputs)
        self.batch = 64 if batches else 1

    def __call__(self, x: NDArray[Any]) -> list[Floats]:
        """The logits of a batch and the features of each cut."""
        outputs: list[Floats] = self._session.run(self._names, {"x": x})
        return outputs


def soft_cross_entropy(given: Tensor, teacher: Tensor) -> Tensor:
    """Cross-entropy of (B, N) logits against a teacher's (B, N) probabilities: (), the mean."""
    return torch.nn.functional.cross_entropy(given, teacher)


def train_head(
    features: Floats, logits: Floats, *, seed: int, loss: HeadLoss = soft_cross_entropy
) -> Head:
    """A layer that answers as the model does.

    Args:
        features: (n, features). logits: (n, classes) of the whole model for the same samples.
        loss: of the layer's logits (B, N) and the model's probabilities (B, N): (), the mean.
    """
    with one_torch_thread():  # steps this small gain nothing from a second
        return _train_head(features, logits, seed, loss)


def _train_head(features: Floats, logits: Floats, seed: int, measure: HeadLoss) -> Head:
    mean = features.mean(axis=0)
    deviation = features.std(axis=0)
    # a feature that hardly varies compared with its size carries only rounding noise
    least = 1e-3 * np.maximum(np.abs(mean), deviation.max(initial=1e-12))
    scale = np.where(deviation > least, deviation, np.inf)
    standard = torch.from_numpy(((features - mean) / scale).astype(np.float32))
    teacher = torch.softmax(torch.from_numpy(np.ascontiguousarray(logits)), dim=1)
    generator = torch.Generator().manual_seed(seed)
    layer = torch.nn.Linear(features.shape[1], logits.shape[1])
    torch.nn.init.zeros_(layer.weight)
    torch.nn.init.zeros_(layer.bias)
    optimiser = torch.optim.AdamW(layer.parameters(), lr=_RATE, weight_decay=_DECAY)
    batches = max(1, math.ceil(len(features) / _BATCH))
    steps = min(max(_EPOCHS * batches, _STEPS[0]), _STEPS[1])
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, _RATE, total_steps=steps)
    step = 0
    while step < steps:
        for rows in torch.split(torch.randperm(len(standard), generator=generator), _BATCH):
            optimiser.zero_grad()
            loss = measure(layer(standard[rows]), teacher[rows])
            loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
            optimiser.step()
            schedule.step()
            step += 1
            if step == steps:
                break
    weight = layer.weight.detach().numpy() / scale
    bias = layer.bias.detach().numpy() - weight @ mean
    return Head(weight.astype(np.float32), bias.astype(np.float32))


def crossed_logits(features: Floats, logits: Floats, *, seed: int) -> Floats:
    """Answers of heads to samples that they did not learn from: each of five parts of the samples
    is judged by a head that learnt from the other four.

    Args:
        features: (n, features). logits: (n, classes) of the whole model for the same samples.
    Returns: (n, classes).
    """
    fold = np.random.default_rng([seed, _FOLDS]).permutation(len(features)) % _FOLDS
    answers = np.empty_like(logits)
    for left_out in range(_FOLDS):
        learnt = fold != left_out
        head = train_head(features[learnt], logits[learnt], seed=seed)
        answers[~learnt] = head.logits(features[~learnt])
    return answers


class _Pooling:
    """Collects the nodes that pool one cut."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.nodes: list[Any] = []
        self.weights: list[TensorProto] = []

    def transposed(self, tensor: str, order: Sequence[int]) -> str:
        return self._add("Transpose", [tensor], "transposed", perm=list(order))

    def grid(self, tensor: str, shape: Sequence[int]) -> tuple[str, int]:
        """Average windows that cover every axis behind the channels."""
        axes = len(shape) - 1
        size = GRID
        while size > 1 and shape[0] * size**axes > FEATURES_MAX:
            size -= 1
        cells = [min(size, length) for length in shape[1:]]
        if cells == list(shape[1:]):
            return tensor, math.prod(shape)
        strides = [length // cell for length, cell in zip(shape[1:], cells, strict=True)]
        kernel = [
            length - (cell - 1) * stride
            for length, cell, stride in zip(shape[1:], cells, strides, strict=True)
        ]
        pooled = self._add("AveragePool", [tensor], "pooled", kernel_shape=kernel, strides=strides)
        return pooled, shape[0] * math.prod(cells)

    def tokens(self, tensor: str, shape: Sequence[int]) -> tuple[str, int]:
        """The first token and the mean of all."""
        place = term_weight(f"{self._name}/first", np.array([0], np.int64))
        self.weights.append(place)
        first = self._add("Gather", [tensor, place.name], "token", axis=1)
        swapped = self.transposed(tensor, (0, 2, 1))
        mean = self._add("AveragePool", [swapped], "mean", kernel_shape=[shape[0]])
        joined = [self.flat(first), self.flat(mean)]
        return self._add("Concat", joined, "joined", axis=1), 2 * shape[1]

    def bounded(self, tensor: str, features: int, most: int) -> tuple[str, int]:
        """(1, features) as it is, or means of neighbours where there are too many."""
        if features <= most:
            return tensor, features
        each = math.ceil(features / most)
        cells = math.ceil(features / each)
        shape = term_weight(f"{self._name}/row", np.array([-1, 1, features], np.int64))
        self.weights.append(shape)
        row = self._add("Reshape", [tensor, shape.name], "row_of")
        means = self._add(
            "AveragePool",
            [row],
            "means",
            kernel_shape=[each],
            strides=[each],
            pads=[0, cells * each - features],
        )
        return self.flat(means), cells

    def flat(self, tensor: str) -> str:
        return self._add("Flatten", [tensor], f"flat{len(self.nodes)}", axis=1)

    def _add(self, kind: str, inputs: Sequence[str], name: str, **attributes: Any) -> str:
        made = f"{self._name}/{name}"
        self.nodes.append(helper.make_node(kind, inputs, [made], **attributes))
        return made
