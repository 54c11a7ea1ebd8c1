"""Views of a super-network: they compute the same, share its tensors and have its mode."""

from __future__ import annotations

import copy
import subprocess
import sys
from functools import cache
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from edge_sdk.errors import ConfigurationError
from edge_sdk.nets import NAMES, Normalise, Supernet, build

SMALLEST = {
    "densenet121": (3, 32, 32),
    "resnet18": (1, 28, 28),
    "resnet50": (3, 32, 32),
    "vit_b": (3, 32, 32),
    "vit_s": (3, 32, 32),
}


@cache
def trained_like(name: str) -> Supernet:
    """In eval mode, with normalisation and BatchNorm statistics that are not neutral."""
    net = build(name, input_shape=SMALLEST.get(name), seed=0)
    generator = torch.Generator().manual_seed(1)
    net.normalise.mean += 0.25
    net.normalise.std *= 2
    for part in net.modules():
        if isinstance(part, nn.BatchNorm1d | nn.BatchNorm2d):
            assert part.running_mean is not None
            assert part.running_var is not None
            part.running_mean.normal_(std=0.1, generator=generator)
            part.running_var.uniform_(0.5, 1.5, generator=generator)
    return net.eval()


def batch(net: Supernet, size: int = 2) -> Tensor:
    return torch.randn(size, *net.input_shape, generator=torch.Generator().manual_seed(2))


# Cutting leaves every operation as it was, so only what a library does with sizes could differ.
@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_parts_answer_as_the_whole_and_the_single_pass_at_every_cut(name: str) -> None:
    net = trained_like(name)
    x = batch(net)
    whole = net(x)

    exits, logits = net.forward_exits(x)

    assert whole.shape == (2, net.classes)
    torch.testing.assert_close(logits, whole)
    assert tuple(exits) == net.cuts
    for depth in net.cuts:
        z = net.prefix(depth)(x)
        torch.testing.assert_close(net.suffix(depth)(z), whole)
        torch.testing.assert_close(net.exit_head(depth)(z), exits[depth])


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_segments_in_a_row_are_the_whole(name: str) -> None:
    net = trained_like(name)
    x = batch(net)
    z = x
    for start, stop in pairwise([0, *net.cuts, None]):
        assert start is not None
        z = net.segment(start, stop)(z)

    torch.testing.assert_close(z, net(x))


@pytest.mark.parametrize("name", NAMES)
def test_views_hold_the_very_tensors_of_the_supernet(name: str) -> None:
    net = trained_like(name)
    own = {id(parameter) for parameter in net.parameters()}
    whole = [id(parameter) for parameter in net.segment(0, None).parameters()]

    assert set(whole) <= own
    for depth in net.cuts:
        parts = [*net.prefix(depth).parameters(), *net.suffix(depth).parameters()]
        assert [id(parameter) for parameter in parts] == whole
    exits = {id(p) for depth in net.cuts for p in net.exit_head(depth).parameters()}
    assert own == set(whole) | exits


def test_a_step_on_a_view_is_a_step_on_the_supernet() -> None:
    net = build("tiny", seed=0)
    x = batch(net)
    view, before = net.prefix(2), net(x)
    weight = net.stages[1].get_parameter("0.weight")
    address = weight.data_ptr()

    optimiser = torch.optim.SGD(view.parameters(), lr=0.5)
    view(x).square().sum().backward()
    optimiser.step()

    assert view.get_parameter("stage2.0.weight").data_ptr() == weight.data_ptr() == address
    assert not torch.equal(net(x), before)
    assert torch.equal(net.suffix(2)(view(x)), net(x))


def test_a_stage_has_one_name_in_every_view() -> None:
    net = build("tiny", seed=0)

    assert [name for name, _ in net.prefix(2).named_children()] == ["normalise", "stage1", "stage2"]
    assert [name for name, _ in net.segment(2, 3).named_children()] == ["stage3"]
    assert [name for name, _ in net.suffix(3).named_children()] == ["stage4", "stage5", "head"]


@pytest.mark.parametrize("name", ["cnn6", "cnn8", "alexnet"])
def test_a_cut_at_the_last_stage_leaves_the_head(name: str) -> None:
    net = trained_like(name)
    assert [part for part, _ in net.suffix(net.L).named_children()] == ["head"]


def test_making_a_view_changes_no_mode() -> None:
    net = build("resnet18", seed=0, input_shape=(1, 28, 28))
    for mode in (True, False):
        net.train(mode)
        views = [net.prefix(2), net.suffix(2), net.segment(2, 4), net.segment(0, None)]
        assert all(view.training is mode for view in views)
        assert all(part.training is mode for part in net.modules())


def test_a_view_follows_the_mode_of_its_supernet() -> None:
    net = build("resnet18", seed=0, input_shape=(1, 28, 28)).eval()
    views = [net.prefix(2), net.suffix(2)]

    net.train()
    assert all(view.training for view in views)
    net.eval()
    assert not any(view.training for view in views)


def test_the_mode_of_a_view_is_set_on_the_shared_parts_alone() -> None:
    net = build("resnet18", seed=0, input_shape=(1, 28, 28))
    view = net.prefix(2).eval()

    assert not view.training
    assert not any(part.training for stage in net.stages[:2] for part in stage.modules())
    assert all(part.training for stage in net.stages[2:] for part in stage.modules())


def statistics(net: Supernet) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in net.named_buffers() if "running" in name}


def test_batch_statistics_move_through_views_in_train_mode_only() -> None:
    net = build("resnet18", seed=0, input_shape=(1, 28, 28)).eval()
    x = batch(net, 4)
    before = statistics(net)

    net.suffix(2)(net.prefix(2)(x))
    assert all(torch.equal(before[name], now) for name, now in statistics(net).items())

    net.train()
    net.prefix(2)(x)
    moved = {name for name, now in statistics(net).items() if not torch.equal(before[name], now)}
    assert moved == {name for name in before if name.startswith(("stages.0.", "stages.1."))}


def test_a_copied_view_shares_nothing() -> None:
    net = build("tiny", seed=0)
    twin = copy.deepcopy(net.prefix(2))
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()

    assert all(parameter.abs().sum() > 0 for parameter in net.prefix(2).parameters())


@pytest.mark.parametrize("depth", [0, 1, 6, -1])
def test_a_depth_that_is_no_cut_is_refused_with_the_cuts(depth: int) -> None:
    net = build("cnn8", seed=0)
    for use in (net.prefix, net.suffix, net.exit_head):
        with pytest.raises(ConfigurationError, match=r"cnn8: .* one of 2, 3, 4, 5; got"):
            use(depth)


@pytest.mark.parametrize(("a", "b"), [(3, 2), (2, 2), (0, 1), (1, 2), (2, 0), (2, 9)])
def test_an_impossible_segment_is_refused(a: int, b: int) -> None:
    with pytest.raises(ConfigurationError):
        build("cnn8", seed=0).segment(a, b)


@pytest.mark.parametrize("exits", [{}, {0: nn.Identity()}, {2: nn.Identity()}])
def test_a_supernet_without_a_place_to_cut_is_refused(exits: dict[int, nn.Module]) -> None:
    with pytest.raises(ConfigurationError, match=r"mine .* depths 1\.\.1"):
        Supernet(
            name="mine",
            input_shape=(1, 4, 4),
            stages=[nn.Identity()],
            exits=exits,
            head=nn.Identity(),
            classes=2,
        )


def test_a_supernet_of_given_parts_gives_the_sums_worked_out_by_hand() -> None:
    double, add_up = nn.Conv1d(1, 1, 1, bias=False), nn.Linear(2, 2, bias=False)
    nn.init.constant_(double.weight, 2.0)
    nn.init.ones_(add_up.weight)
    net = Supernet(
        name="mine",
        input_shape=(1, 2),
        stages=[double, nn.ReLU()],
        exits={1: nn.Flatten()},
        head=nn.Sequential(nn.Flatten(), add_up),
        classes=2,
        normalise=Normalise([1.0], [0.5]),
    )

    exits, logits = net.forward_exits(torch.tensor([[[0, 3]]], dtype=torch.uint8))

    # (0 - 1) / 0.5 = -2, doubled -4; (3 - 1) / 0.5 = 4, doubled 8; ReLU leaves 0 and 8.
    assert exits[1].tolist() == [[-4.0, 8.0]]
    assert logits.tolist() == [[8.0, 8.0]]


def test_raw_bytes_are_normalised_per_channel_without_wrapping_around() -> None:
    x = torch.tensor([[[[50, 200]], [[0, 255]]]], dtype=torch.uint8)

    y = Normalise([100.0, 5.0], [50.0, 2.0])(x)

    assert y.dtype == torch.float32
    assert y.tolist() == [[[[-1.0, 2.0]], [[-2.5, 125.0]]]]


def test_without_mean_and_std_inputs_pass_unchanged() -> None:
    net = build("tiny", seed=0)
    x = batch(net)
    assert torch.equal(net.normalise(x), x)
    assert torch.equal(net.normalise(x.double()), x)


def test_mean_and_std_travel_in_the_state() -> None:
    net = build("alexnet", seed=0, mean=(1, 2, 3), std=(4, 5, 6))
    state = net.state_dict()
    assert state["normalise.mean"].tolist() == [1, 2, 3]
    assert state["normalise.std"].tolist() == [4, 5, 6]

    twin = build("alexnet", seed=1)
    twin.load_state_dict(state)
    x = batch(net)
    assert torch.equal(twin(x), net(x))


def test_mean_alone_or_std_alone_leaves_the_other_neutral() -> None:
    x = torch.full((1, 1, 8, 8), 6.0)
    assert build("tiny", mean=(2,), seed=0).normalise(x).unique().tolist() == [4.0]
    assert build("tiny", std=(2,), seed=0).normalise(x).unique().tolist() == [3.0]


def test_a_normalisation_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="3 mean"):
        build("alexnet", mean=(0.5,))
    with pytest.raises(ConfigurationError, match="3 std"):
        build("alexnet", mean=(0, 0, 0), std=(1,))
    with pytest.raises(ConfigurationError, match="above 0"):
        build("tiny", std=(0,))
    with pytest.raises(ConfigurationError, match="as many std"):
        Normalise([0.0, 0.0], [1.0])


def test_an_unknown_backbone_is_refused_with_the_known_names() -> None:
    with pytest.raises(ConfigurationError) as caught:
        build("resnet19")
    assert all(name in str(caught.value) for name in (*NAMES, "resnet19"))


def test_fewer_than_two_classes_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="at least 2 classes"):
        build("tiny", classes=1)


@pytest.mark.parametrize("name", ["tiny", "cnn8", "mobilenetv2", "har_cnn"])
def test_one_seed_gives_the_same_weights_every_time(name: str) -> None:
    shape = SMALLEST.get(name)
    first = build(name, input_shape=shape, seed=7).state_dict()
    torch.rand(3)
    again = build(name, input_shape=shape, seed=7).state_dict()
    other = build(name, input_shape=shape, seed=8).state_dict()

    assert first.keys() == again.keys()
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert not all(torch.equal(first[key], other[key]) for key in first)


def test_a_seed_leaves_the_global_generator_alone() -> None:
    state = torch.get_rng_state()
    build("tiny", seed=7)
    assert torch.equal(torch.get_rng_state(), state)


def test_without_a_seed_weights_come_from_the_global_generator() -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        drawn = build("tiny").state_dict()
    seeded = build("tiny", seed=7).state_dict()
    assert all(torch.equal(drawn[key], seeded[key]) for key in drawn)


def test_importing_edge_sdk_loads_nothing_heavy() -> None:
    heavy = "{'torch', 'fastapi', 'sqlalchemy', 'tuf', 'typer'}"
    code = f"import sys, edge_sdk; print(sorted({heavy} & sys.modules.keys()))"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("depth", [1, 4])
def test_embeddings_and_classifier_together_are_the_suffix(depth: int) -> None:
    net = build("tiny", classes=3, seed=0)
    suffix, z = net.suffix(depth), net.prefix(depth)(torch.rand(2, 1, 8, 8))
    embeddings = suffix.neck(z)
    assert embeddings.shape == (2, suffix.classifier.in_features)
    assert torch.equal(suffix.classifier(embeddings), suffix(z))
    inside = {id(parameter) for parameter in suffix.parameters()}
    parts = [*suffix.neck.parameters(), *suffix.classifier.parameters()]
    assert {id(parameter) for parameter in parts} == inside
