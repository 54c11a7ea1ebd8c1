"""First weights from a file: what is taken, what is said, and what reaches the clients."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from edge_sdk.bundles import namespaces
from edge_sdk.errors import ConfigurationError
from edge_sdk.nets import Supernet, build, use_network
from server.training.recipe.recipe import read_recipe
from server.training.run.first_weights import load_first_weights
from server.training.simulation.build import build_simulation
from server.training.simulation.run import run_rounds


def own(classes: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, classes)
    )


OWN = f"{__name__}:own"


@pytest.fixture(autouse=True)
def _named() -> None:
    use_network(OWN)


def tiny(seed: int = 5) -> Supernet:
    return build("tiny", seed=seed, mean=[1.0], std=[2.0])


def test_a_trainings_weights_are_taken_and_the_datas_normalisation_kept(tmp_path: Path) -> None:
    before = tiny(1)
    save_file(before.state_dict(), tmp_path / "w.safetensors")
    net = build("tiny", seed=2, mean=[7.0], std=[3.0])
    first = load_first_weights(net, tmp_path / "w.safetensors")
    assert net.normalise.mean.tolist() == [7.0]
    for name, tensor in before.state_dict().items():
        if not name.startswith("normalise."):
            assert torch.equal(net.state_dict()[name], tensor), name
    assert torch.equal(first["exit1.2.weight"], before.exit_head(1).state_dict()["2.weight"])
    assert torch.equal(first["back.weight"], before.suffix(1).classifier.weight)


def test_what_a_file_lacks_or_has_in_another_shape_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tensors = build("tiny", seed=1, classes=7).state_dict()
    del tensors["exits.2.2.bias"], tensors["stages.0.0.bias"]
    save_file({**tensors, "other": torch.zeros(1)}, tmp_path / "w.safetensors")
    net = tiny()
    drawn = tiny().state_dict()
    with caplog.at_level(logging.WARNING):
        first = load_first_weights(net, tmp_path / "w.safetensors")
    said = caplog.text
    assert "of another shape, drawn by the seed: exits.1.2.bias ((7,), not (10,))" in said
    assert "missing, drawn by the seed: exits.2.2.bias, stages.0.0.bias" in said
    assert "not in this network, left out: other" in said
    assert first == {}
    assert torch.equal(net.state_dict()["stages.0.0.bias"], drawn["stages.0.0.bias"])
    assert torch.equal(net.state_dict()["stages.1.0.weight"], tensors["stages.1.0.weight"])


def test_a_users_own_state_dict_is_understood(tmp_path: Path) -> None:
    module = own(10)
    save_file(module.state_dict(), tmp_path / "mine.safetensors")
    net = build(OWN, classes=10, input_shape=(1, 8, 8), seed=3)
    first = load_first_weights(net, tmp_path / "mine.safetensors")
    x = torch.rand(4, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(net.eval()(x), module.eval()(x))
    assert set(first) == {"back.weight", "back.bias"}  # the module has no exits


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "found none; put it there"),
        (b"no tensors", "expected a safetensors file"),
        ({"a.weight": torch.zeros(1)}, r"expected weights of tiny .* got a\.weight"),
        ({"stages.0.0.bias": torch.full((8,), torch.nan)}, "expected finite values"),
    ],
    ids=["no file", "another format", "another network", "not finite"],
)
def test_a_file_that_gives_no_weights_is_refused(
    content: object, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "w.safetensors"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif isinstance(content, dict):
        save_file(content, path)
    with pytest.raises(ConfigurationError, match=message):
        load_first_weights(tiny(), path)


@pytest.mark.parametrize(
    ("method", "parts"), [("supersfl", ["exit2"]), ("splitlpf", ["back"]), ("fedavg", [])]
)
def test_parts_that_stay_on_clients_start_from_the_file_too(
    method: str, parts: list[str], tmp_path: Path
) -> None:
    """With a learning rate of almost nothing, they still have its values after a round."""
    begun = tiny(1)
    save_file(begun.state_dict(), tmp_path / "w.safetensors")
    recipe = read_recipe(
        {
            "method": method,
            "data": {"name": "digits", "clients": 2, "train_max": 64, "test_max": 10},
            "train": {
                "backbone": "tiny",
                "rounds": 2,
                "iterations": 1,
                "batch": 16,
                "depth": 2,
                "learning_rate": 1e-12,
                "start": str(tmp_path / "w.safetensors"),
            },
        }
    )
    simulation = build_simulation(recipe)
    rounds = run_rounds(simulation, [])
    next(rounds)
    kept = simulation.clients["client-0"].personal
    values = {
        **namespaces.exit_head(2).prefixed(begun.exit_head(2).state_dict()),
        **namespaces.BACK.prefixed(begun.suffix(2).classifier.state_dict()),
    }
    for part in parts:
        assert any(key.startswith(f"{part}.") for key in kept)
    for key in (key for key in kept if key in values):
        torch.testing.assert_close(kept[key], values[key])
    # what the client has is its own from then on, whatever the server sends along
    for key in kept:
        kept[key] = kept[key] + 1
    expected = {key: tensor.clone() for key, tensor in kept.items() if key in values}
    next(rounds)
    for key, tensor in expected.items():
        torch.testing.assert_close(kept[key], tensor)
