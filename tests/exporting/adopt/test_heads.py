from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from onnx import helper
from torch import nn

from edge_sdk.gate.gate import uncertainties
from edge_sdk.gate_form import read_gate
from edge_sdk.learning.head import Head
from edge_sdk.manifest import GateSpec
from edge_sdk.training.data.load import Dataset
from exporters.adopt.classifier import load_classifier
from exporters.adopt.graph.channels import channel_axis
from exporters.adopt.graph.cuts import choose_cuts, find_cuts
from exporters.adopt.graph.graph import part
from exporters.adopt.graph.split import device_model, open_session
from exporters.adopt.heads import (
    CHANNELS_MAX,
    FEATURES_MAX,
    LOGITS,
    Extractor,
    crossed_logits,
    head_addition,
    train_head,
)
from exporters.adopt.narrowing import narrowed_axis
from exporters.adopt.operating import Judged, agreed_threshold, agreement_gate, figures_at
from tests.exporting.adopt.conftest import export_by_torchscript


def test_head_learns_what_the_model_answers_without_labels() -> None:
    random = np.random.default_rng(0)
    features = (5 + 3 * random.normal(size=(600, 12))).astype(np.float32)
    teacher = (features @ random.normal(size=(12, 4))).astype(np.float32)
    head = train_head(features, teacher, seed=0)
    agrees = head.logits(features).argmax(axis=1) == teacher.argmax(axis=1)
    assert agrees.mean() > 0.97


def test_same_seed_gives_the_same_head() -> None:
    random = np.random.default_rng(0)
    features = random.normal(size=(200, 5)).astype(np.float32)
    teacher = random.normal(size=(200, 3)).astype(np.float32)
    first, again = (train_head(features, teacher, seed=7) for _ in range(2))
    np.testing.assert_array_equal(first.weight, again.weight)


def test_crossed_answers_come_from_heads_that_did_not_see_the_sample() -> None:
    # more features than samples and answers by chance: a head can only remember what it saw
    random = np.random.default_rng(0)
    features = random.normal(size=(60, 100)).astype(np.float32)
    teacher = 9 * np.eye(2, dtype=np.float32)[random.integers(0, 2, 60)]
    seen = train_head(features, teacher, seed=0).logits(features)
    crossed = crossed_logits(features, teacher, seed=0)
    assert (seen.argmax(axis=1) == teacher.argmax(axis=1)).mean() == 1
    # 60 tosses of a coin: 3.9 standard deviations
    assert abs((crossed.argmax(axis=1) == teacher.argmax(axis=1)).mean() - 0.5) < 0.25


def test_feature_that_never_changes_is_left_out() -> None:
    random = np.random.default_rng(0)
    features = np.concatenate([random.normal(size=(200, 3)), np.full((200, 1), 9.0)], axis=1)
    teacher = random.normal(size=(200, 2)).astype(np.float32)
    head = train_head(features.astype(np.float32), teacher, seed=0)
    np.testing.assert_array_equal(head.weight[:, 3], 0)


def test_pooled_features_are_windows_that_cover_all(small_onnx: object, digits: Dataset) -> None:
    graph = load_classifier(small_onnx).graph  # type: ignore[arg-type]  # a fixture's path
    cuts = [cut for cut in find_cuts(graph).cuts if cut.shape == (8, 8, 8)]
    x = digits.x_test[:5]
    extract = Extractor(graph, cuts, batches=True, threads=1)
    logits, features, *_ = extract(x)
    assert logits.shape == (5, 10)
    # 8 values in 3 windows: stride 2, so each is 4 wide
    head = Head(np.eye(72, dtype=np.float32)[:10], np.zeros(10, np.float32))
    model = device_model(graph, cuts[0], head_addition(graph, cuts[0], head), LOGITS)
    given, z = open_session(model).run(["logits", "z"], {"x": x[:1]})
    expected = [
        z[0, channel, 2 * row : 2 * row + 4, 2 * column : 2 * column + 4].mean()
        for channel in range(8)
        for row in range(3)
        for column in range(3)
    ]
    np.testing.assert_allclose(features[0], expected, atol=1e-5)
    np.testing.assert_allclose(given[0], expected[:10], atol=1e-5)


def features_at(path: Path, shape: tuple[int, ...], x: np.ndarray) -> tuple[Any, Any]:
    """z and the features of the last cut of that shape."""
    graph = load_classifier(path).graph
    cut = [each for each in find_cuts(graph).cuts if each.shape == shape][-1]
    (z,) = open_session(part(graph, ("x", graph.input), {"z": cut.tensor}, batch=None)).run(
        None, {"x": x}
    )
    _, features = Extractor(graph, [cut], batches=True, threads=1)(x)
    assert features.shape[1] <= (CHANNELS_MAX if len(shape) < 4 else FEATURES_MAX)
    return z, features


def test_volumes_of_three_axes_are_pooled_to_a_grid(make_graph: Callable[..., Path]) -> None:
    random = np.random.default_rng(0)
    weights = {
        "w": random.normal(size=(2, 1, 3, 3, 3)).astype(np.float32),
        "v": random.normal(size=(2, 10)).astype(np.float32),
    }
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], pads=[1] * 6),
        helper.make_node("Relu", ["c"], ["h"]),
        helper.make_node("ReduceMean", ["h"], ["m"], axes=[2, 3, 4], keepdims=0),
        helper.make_node("MatMul", ["m", "v"], ["y"]),
    ]
    path = make_graph(nodes, weights=weights, given=("n", 1, 6, 9, 8))
    x = random.normal(size=(3, 1, 6, 9, 8)).astype(np.float32)
    z, features = features_at(path, (2, 6, 9, 8), x)
    # 6, 9 and 8 values in 3 windows each: 2, 3 and 4 wide, and of the last two windows overlap
    expected = [
        z[1, channel, 2 * i : 2 * i + 2, 3 * j : 3 * j + 3, 2 * k : 2 * k + 4].mean()
        for channel in range(2)
        for i in range(3)
        for j in range(3)
        for k in range(3)
    ]
    np.testing.assert_allclose(features[1], expected, atol=1e-5)


@pytest.mark.parametrize("shape", [(4096,), (9000,), (1, 1, 2500), (2, 2500), (2, 5000)])
def test_features_of_any_form_are_bounded(
    make_graph: Callable[..., Path], shape: tuple[int, ...]
) -> None:
    random = np.random.default_rng(0)
    count = int(np.prod(shape))
    weights = {
        "w": random.normal(size=(64, count)).astype(np.float32),
        "s": np.array([-1, *shape]),
        "v": random.normal(size=(count, 10)).astype(np.float32),
    }
    nodes = [
        helper.make_node("Flatten", ["x"], ["f"]),
        helper.make_node("MatMul", ["f", "w"], ["m"]),
        helper.make_node("Reshape", ["m", "s"], ["z"]),
        helper.make_node("Flatten", ["z"], ["g"]),
        helper.make_node("MatMul", ["g", "v"], ["y"]),
    ]
    path = make_graph(nodes, weights=weights)
    x = random.normal(size=(3, 1, 8, 8)).astype(np.float32)
    z, features = features_at(path, shape, x)
    if len(shape) == 2:  # tokens: the first, and the mean of all
        z = np.concatenate([z[:, 0], z.mean(axis=1)], axis=1)
    z = z.reshape(3, -1)
    each = 1 if z.shape[1] <= 8192 else 2  # neighbours, of which the mean is taken
    expected = [z[:, start : start + each].mean(axis=1) for start in range(0, z.shape[1], each)]
    np.testing.assert_allclose(features, np.transpose(expected), atol=1e-4)


def test_tokens_behind_a_class_token_are_pooled_as_tokens(make_graph: Callable[..., Path]) -> None:
    """The class token is made for each sample of a batch, from its size alone."""
    random = np.random.default_rng(0)
    sizes = {"k": (8, 1, 4, 4), "token": (1, 1, 8), "w": (8, 8), "v": (8, 10)}
    weights = {name: random.normal(size=size).astype(np.float32) for name, size in sizes.items()}
    weights |= {"flat": np.array([0, 8, -1]), "zero": np.array([0]), "tail": np.array([1, 8])}
    weights["first"] = np.array(0)
    nodes = [
        helper.make_node("Conv", ["x", "k"], ["c"], strides=[4, 4]),
        helper.make_node("Reshape", ["c", "flat"], ["rows"]),
        helper.make_node("Transpose", ["rows"], ["patches"], perm=[0, 2, 1]),
        helper.make_node("Shape", ["x"], ["sizes"]),
        helper.make_node("Gather", ["sizes", "zero"], ["batch"], axis=0),
        helper.make_node("Concat", ["batch", "tail"], ["wanted"], axis=0),
        helper.make_node("Expand", ["token", "wanted"], ["tokens"]),
        helper.make_node("Concat", ["tokens", "patches"], ["h"], axis=1),
        helper.make_node("MatMul", ["h", "w"], ["m"]),
        helper.make_node("Relu", ["m"], ["r"]),
        helper.make_node("Add", ["h", "r"], ["s"]),
        helper.make_node("Gather", ["s", "first"], ["g"], axis=1),
        helper.make_node("MatMul", ["g", "v"], ["y"]),
    ]
    path = make_graph(nodes, weights=weights)
    x = random.normal(size=(3, 1, 8, 8)).astype(np.float32)
    z, features = features_at(path, (5, 8), x)
    expected = np.concatenate([z[:, 0], z.mean(axis=1)], axis=1)
    np.testing.assert_allclose(features, expected, atol=1e-5)
    classifier = load_classifier(path)
    axes = {cut.shape: narrowed_axis(classifier, cut) for cut in find_cuts(classifier.graph).cuts}
    assert axes == {(8, 2, 2): 1, (8, 4): 1, (4, 8): 2, (5, 8): 2, (8,): 1}


def test_map_whose_channels_are_shuffled_is_cut_as_a_map(make_graph: Callable[..., Path]) -> None:
    """ShuffleNetV2 writes (channels, height, width) as (2, channels / 2, height, width) for two
    nodes: of the same size, and no volume.
    """
    random = np.random.default_rng(0)
    weights = {
        "w": random.normal(size=(40, 1, 3, 3)).astype(np.float32),
        "u": random.normal(0, 0.1, (40, 40, 3, 3)).astype(np.float32),
        "v": random.normal(size=(40, 10)).astype(np.float32),
        "two": np.array([-1, 2, 20, 12, 12]),
        "one": np.array([-1, 40, 12, 12]),
    }
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], pads=[1] * 4),
        helper.make_node("Reshape", ["c", "two"], ["r"]),
        helper.make_node("Transpose", ["r"], ["t"], perm=[0, 2, 1, 3, 4]),
        helper.make_node("Reshape", ["t", "one"], ["s"]),
        helper.make_node("Conv", ["s", "u"], ["d"], pads=[1] * 4, strides=[2, 2]),
        helper.make_node("ReduceMean", ["d"], ["m"], axes=[2, 3], keepdims=0),
        helper.make_node("MatMul", ["m", "v"], ["y"]),
    ]
    path = make_graph(nodes, weights=weights, given=("n", 1, 12, 12))
    graph = load_classifier(path).graph
    plan = find_cuts(graph)
    early = [cut for cut in plan.cuts if cut.values == 40 * 12 * 12]
    assert [cut.shape for cut in early] == [(40, 12, 12), (2, 20, 12, 12), (20, 2, 12, 12),
                                            (40, 12, 12)]  # fmt: skip
    (offered,) = choose_cuts(plan, 40 * 12 * 12, None).cuts[:1]
    assert offered == early[-1]
    x = random.normal(size=(3, 1, 12, 12)).astype(np.float32)
    z, features = features_at(path, (40, 12, 12), x)
    np.testing.assert_allclose(features, grid_of(z), atol=1e-5)
    axes = {cut.tensor: channel_axis(graph, cut.tensor) for cut in early}
    assert axes == {"net/c": 1, "net/r": 2, "net/t": 1, "net/s": 1}
    # asked for by its depth, the split one gives means of neighbours: 5,760 values, by threes
    z, features = features_at(path, (20, 2, 12, 12), x)
    np.testing.assert_allclose(features, z.reshape(3, 1920, 3).mean(axis=2), atol=1e-5)


def grid_of(maps: np.ndarray) -> np.ndarray:
    """Means of 3 x 3 windows of (n, channels, 3 k, 3 m) maps."""
    count, channels, height, width = maps.shape
    windows = maps.reshape(count, channels, 3, height // 3, 3, width // 3)
    means: np.ndarray = windows.mean(axis=(3, 5)).reshape(count, -1)
    return means


def test_maps_of_blocks_with_their_channels_last_are_pooled_as_maps(
    make_graph: Callable[..., Path],
) -> None:
    """As ConvNeXt writes a block: channels last for its dense layers, and first again."""
    random = np.random.default_rng(0)
    sizes = {"k": (8, 1, 3, 3), "a": (8, 16), "b": (16, 8), "d": (6, 8, 3, 3), "v": (6, 10)}
    weights = {name: random.normal(0, 0.3, size).astype(np.float32) for name, size in sizes.items()}
    weights |= {"scale": np.ones(8, np.float32)}
    nodes = [
        helper.make_node("Conv", ["x", "k"], ["c"], pads=[1] * 4),
        helper.make_node("Transpose", ["c"], ["last"], perm=[0, 2, 3, 1]),
        helper.make_node("LayerNormalization", ["last", "scale"], ["n"]),
        helper.make_node("MatMul", ["n", "a"], ["m"]),
        helper.make_node("Relu", ["m"], ["r"]),
        helper.make_node("MatMul", ["r", "b"], ["o"]),
        helper.make_node("Transpose", ["o"], ["first"], perm=[0, 3, 1, 2]),
        helper.make_node("Add", ["first", "c"], ["s"]),
        helper.make_node("Conv", ["s", "d"], ["e"]),
        helper.make_node("GlobalAveragePool", ["e"], ["p"]),
        helper.make_node("Flatten", ["p"], ["f"]),
        helper.make_node("MatMul", ["f", "v"], ["y"]),
    ]
    path = make_graph(nodes, weights=weights, given=("n", 1, 9, 12))
    graph = load_classifier(path).graph
    named = {name: channel_axis(graph, f"net/{name}") for name in ("last", "n", "o", "first", "s")}
    assert named == {"last": 3, "n": 3, "o": 3, "first": 1, "s": 1}
    x = random.normal(size=(3, 1, 9, 12)).astype(np.float32)
    z, features = features_at(path, (8, 9, 12), x)
    np.testing.assert_allclose(features, grid_of(z), atol=1e-5)


@pytest.mark.parametrize("turned", [False, True])
def test_tokens_that_a_layer_mixes_keep_their_channels(
    make_graph: Callable[..., Path], *, turned: bool
) -> None:
    """MLP-Mixer's dense layers over the tokens are products of matrices along another axis."""
    random = np.random.default_rng(0)
    sizes = {"k": (6, 1, 4, 4), "w": (4, 4), "v": (6, 10)}
    weights = {name: random.normal(size=size).astype(np.float32) for name, size in sizes.items()}
    weights |= {"flat": np.array([-1, 6, 4]), "scale": np.ones(6, np.float32)}
    added = ["mixed", "tokens"] if turned else ["tokens", "mixed"]
    nodes = [
        helper.make_node("Conv", ["x", "k"], ["c"], strides=[4, 4]),
        helper.make_node("Reshape", ["c", "flat"], ["rows"]),
        helper.make_node("Transpose", ["rows"], ["tokens"], perm=[0, 2, 1]),
        helper.make_node("LayerNormalization", ["tokens", "scale"], ["n"]),
        helper.make_node("Transpose", ["n"], ["t"], perm=[0, 2, 1]),
        helper.make_node("MatMul", ["t", "w"], ["m"]),
        helper.make_node("Transpose", ["m"], ["mixed"], perm=[0, 2, 1]),
        helper.make_node("Add", added, ["s"]),
        helper.make_node("ReduceMean", ["s"], ["g"], axes=[1], keepdims=0),
        helper.make_node("MatMul", ["g", "v"], ["y"]),
    ]
    graph = load_classifier(make_graph(nodes, weights=weights)).graph
    assert [channel_axis(graph, f"net/{name}") for name in ("c", "tokens", "s")] == [1, 2, 2]


def test_tokens_of_a_text_keep_their_channels(tmp_path: Path) -> None:
    """Residuals lead from the last block to the table of words, which has its channels last."""

    class Text(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(32, 8)
            self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
            self.head = nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            scores: torch.Tensor = self.head(self.block(self.words(x.long())).mean(1))
            return scores

    path = export_by_torchscript(Text().eval(), torch.zeros(3, 12), tmp_path / "text.onnx")
    graph = load_classifier(path).graph
    tokens = [cut for cut in find_cuts(graph).cuts if cut.shape == (12, 8)]
    assert len(tokens) >= 3
    assert {channel_axis(graph, cut.tensor) for cut in tokens} == {2}


def test_maps_behind_a_group_norm_of_one_group_are_pooled_as_maps(tmp_path: Path) -> None:
    """The norm is a reshape to one channel, an instance norm, and a reshape back."""
    net = nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.GroupNorm(1, 16), nn.ReLU()),
        *(nn.Conv2d(16, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 10)),
    )
    path = export_by_torchscript(net.eval(), torch.zeros(3, 1, 8, 8), tmp_path / "norm.onnx")
    graph = load_classifier(path).graph
    maps = [cut for cut in find_cuts(graph).cuts if len(cut.shape) == 3]
    assert {cut.shape for cut in maps} >= {(16, 8, 8), (8, 6, 6)}
    kept = [cut for cut in maps if cut.shape[0] in (8, 16)]
    assert {channel_axis(graph, cut.tensor) for cut in kept} == {1}


def test_picture_with_its_channels_last_is_pooled_as_a_picture(
    make_graph: Callable[..., Path],
) -> None:
    """Cuts in front of the first layer, as a graph of Keras has them."""
    random = np.random.default_rng(0)
    sizes = {"k": (4, 3, 3, 3), "v": (4, 10)}
    weights = {name: random.normal(size=size).astype(np.float32) for name, size in sizes.items()}
    weights["all"] = np.array(255, np.float32)
    nodes = [
        helper.make_node("Div", ["x", "all"], ["s"]),
        helper.make_node("Transpose", ["s"], ["t"], perm=[0, 3, 1, 2]),
        helper.make_node("Conv", ["t", "k"], ["c"]),
        helper.make_node("GlobalAveragePool", ["c"], ["p"]),
        helper.make_node("Flatten", ["p"], ["f"]),
        helper.make_node("MatMul", ["f", "v"], ["y"]),
    ]
    graph = load_classifier(make_graph(nodes, weights=weights, given=("n", 6, 9, 3))).graph
    assert [channel_axis(graph, f"net/{name}") for name in ("s", "t", "c")] == [3, 1, 1]


def logits_of(confidence: list[float], label: int = 0) -> np.ndarray:
    rows = np.zeros((len(confidence), 3), np.float32)
    rows[:, label] = confidence
    return rows


def test_threshold_is_the_loosest_that_keeps_the_agreement() -> None:
    # from sure to unsure; the third and the last answer otherwise than the whole model
    exits = logits_of([9, 8, 7, 6, 5, 4, 3, 2, 1, 0.5])
    whole = logits_of([1.0] * 10)
    whole[[2, 9]] = [0, 1, 0]
    judged = Judged(exits, whole, None)
    at = {share: figures_at(agreement_gate("entropy", judged, share), judged)
          for share in (0.5, 0.8, 0.85, 0.9)}  # fmt: skip
    assert at[0.5].exit_rate == 1.0
    assert at[0.8].exit_rate == 1.0  # 8 of 10
    assert at[0.85].exit_rate == 0.9  # 8 of 9
    assert at[0.9].exit_rate == pytest.approx(0.2)  # 2 of 2; 3 of 4 ... 8 of 9 are less
    assert at[0.85].agreement == pytest.approx(8 / 9)
    assert at[0.85].hybrid_agreement == pytest.approx(0.9)


def test_nothing_exits_where_no_threshold_agrees() -> None:
    exits, whole = logits_of([5, 4, 3]), logits_of([1, 1, 1], label=1)
    judged = Judged(exits, whole, None)
    assert agreed_threshold("margin", judged, 0.5) == 0
    figures = figures_at(GateSpec("margin", 0.0), judged)
    assert (figures.exit_rate, figures.agreement, figures.hybrid_agreement) == (0, 1, 1)


def test_hybrid_figures_are_of_the_answers_that_offloads_get() -> None:
    exits = logits_of([9, 8, 0.1, 0.1, 0.1, 0.1])
    whole = logits_of([1.0] * 6)
    labels = np.array([0, 1, 0, 0, 0, 1])
    judged = Judged(exits, whole, labels)
    gate = GateSpec("margin", 0.5)  # the first two exit
    answers = np.array([9, 9, 0, 0, 0, 1])  # the last offload gets another label than by the whole
    asked: list[list[int]] = []

    def offload(rows: Any) -> Any:
        asked.append(rows.tolist())
        return answers[rows]

    figures = figures_at(gate, judged, offload)
    assert asked == [[2, 3, 4, 5]]
    assert figures.exit_rate == pytest.approx(1 / 3)
    assert figures.agreement == 1
    assert figures.hybrid_agreement == pytest.approx(5 / 6)
    # right: the first exit, and all four offloads
    assert figures.hybrid_accuracy == pytest.approx(5 / 6)
    assert figures.whole_accuracy == pytest.approx(4 / 6)
    # two of the four stand for all: the first and the last of them
    some = figures_at(gate, judged, offload, most=2)
    assert asked[1] == [2, 5]
    assert some.hybrid_agreement == pytest.approx(1 / 3 + 2 / 3 * 1 / 2)
    # the whole model is right on 3 of 4; of the two asked, one more is right: 3/4 + 1/2, at most 1
    assert some.hybrid_accuracy == pytest.approx(1 / 3 * 1 / 2 + 2 / 3)
    one = figures_at(gate, judged, offload, most=1)
    assert asked[2] == [2]  # answered as the whole model does: so all offloads are as good as its
    assert one.hybrid_accuracy == pytest.approx(1 / 3 * 1 / 2 + 2 / 3 * 3 / 4)


def test_curve_holds_the_chosen_threshold_and_is_against_labels_where_there_are_some() -> None:
    exits, whole = logits_of([5, 4, 3, 2]), logits_of([1, 1, 1, 1])
    labels = np.array([0, 0, 1, 1])
    gate = agreement_gate("entropy", Judged(exits, whole, labels), 1.0)
    (point,) = [each for each in gate.curve if each.threshold == gate.threshold]
    assert (point.exit_rate, point.exit_accuracy, point.accuracy) == (1, 0.5, 0.5)
    bare = agreement_gate("entropy", Judged(exits, whole, None), 1.0)
    assert [each.exit_accuracy for each in bare.curve if each.threshold == bare.threshold] == [1]


def test_scales_of_a_composed_gate_are_fitted_where_the_agreement_is_kept() -> None:
    rng = np.random.default_rng(5)
    exits = (3 * rng.normal(size=(400, 6))).astype(np.float32)
    whole = exits.copy()
    unsure = uncertainties("entropy", exits) > 0.7
    whole[unsure] = np.roll(whole[unsure], 1, axis=1)  # the whole model answers otherwise there
    judged = Judged(exits, whole, None)
    share = (uncertainties("entropy", exits) < agreed_threshold("entropy", judged, 0.9)).mean()
    assert 0.2 < share < 0.9
    gate = agreement_gate("all(entropy, margin)", judged, 0.9)
    for term in read_gate(gate.policy).terms:
        assert term.scale is not None
        below = (uncertainties(term.kind, exits) < term.scale).mean()
        assert below == pytest.approx(share, abs=0.01)  # a scale has four digits
    figures = figures_at(gate, judged)
    assert figures.agreement is not None
    assert figures.agreement >= 0.9
    assert figures.exit_rate > 0
