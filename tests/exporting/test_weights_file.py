"""The weights that are exported, and the errors for those that are not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from typer.testing import CliRunner

from edge_sdk.nets import Supernet, build
from exporters.cli import app
from exporters.errors import ExportError
from exporters.graphs import shared_exit
from exporters.weights import WeightsOrigin, check_depths, load_weights, read_origin


def with_exits(net: Supernet, *depths: int) -> dict[str, Tensor]:
    """Its weights, of the exit heads these alone: what a training leaves."""
    kept = tuple(f"exits.{depth}." for depth in depths)
    return {
        name: tensor
        for name, tensor in net.state_dict().items()
        if not name.startswith("exits.") or name.startswith(kept)
    }


def saved(folder: Path, tensors: dict[str, Tensor]) -> Path:
    path = folder / "weights.safetensors"
    save_file(tensors, path)
    return path


def test_only_trained_depths_are_exported(tiny: Supernet, tmp_path: Path) -> None:
    path = saved(tmp_path, with_exits(tiny, 2))
    words = ["--backbone", "tiny", "--data", "digits", "--name", "digits", "--int8", "never"]
    words += ["--weights", str(path), "--out", str(tmp_path / "models"), "--json"]
    run = CliRunner().invoke(app, words)
    assert run.exit_code == 0, run.stderr
    assert [bundle["variant"] for bundle in json.loads(run.stdout)["bundles"]] == ["d2"]
    refused = CliRunner().invoke(app, [*words, "--depth", "2", "--depth", "3"])
    assert isinstance(refused.exception, ExportError)
    assert "no trained exit head at depth 3" in str(refused.exception)
    assert "--depth from 2" in str(refused.exception)


def test_network_gets_what_is_there(tiny: Supernet, tmp_path: Path) -> None:
    net = build("tiny", mean=[1.0], std=[2.0], seed=1)
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    path = saved(tmp_path, with_exits(tiny, 1, 4))
    assert load_weights(net, path) == (1, 4)
    check_depths(path, net, (1, 4), [4, 9])  # 9 is no cut of it, as the export itself says
    for name, tensor in net.state_dict().items():
        untrained = name.startswith(("exits.2.", "exits.3."))
        assert torch.equal(tensor, before[name] if untrained else tiny.state_dict()[name]), name


def test_weights_without_an_exit_head_are_refused(tiny: Supernet, tmp_path: Path) -> None:
    path = saved(tmp_path, with_exits(tiny))
    with pytest.raises(ExportError, match=r"expected a trained exit head.*share_exits = true"):
        load_weights(build("tiny"), path)


def test_half_an_exit_head_is_of_another_network(tiny: Supernet, tmp_path: Path) -> None:
    tensors = with_exits(tiny, 1, 2)
    tensors.pop(next(name for name in tensors if name.startswith("exits.2.")))
    with pytest.raises(ExportError, match="got those of another network; choose"):
        load_weights(build("tiny"), saved(tmp_path, tensors))


def test_weights_of_a_run_with_several_networks_name_the_option_that_takes_them(
    tiny: Supernet, tmp_path: Path
) -> None:
    tensors = with_exits(tiny, 1)
    tensors |= {f"server.{name}": tensor.clone() for name, tensor in tensors.items()}
    with pytest.raises(ExportError, match=rf"of a run that has several; .* --run {tmp_path}$"):
        load_weights(build("tiny"), saved(tmp_path, tensors))


def test_checkpoint_is_told_from_weights(tiny: Supernet, tmp_path: Path) -> None:
    checkpoint = {f"net/{name}": tensor for name, tensor in tiny.state_dict().items()}
    with pytest.raises(ExportError, match="expected a weights file, got a training's checkpoint"):
        load_weights(build("tiny"), saved(tmp_path, checkpoint))


def test_backbone_that_the_weights_are_of_is_named(cnn8: Supernet, tmp_path: Path) -> None:
    path = saved(tmp_path, with_exits(cnn8, *cnn8.cuts))
    with pytest.raises(ExportError, match=r"of cnn6 .* they fit .*cnn8; choose") as caught:
        load_weights(build("cnn6"), path)
    assert "Missing key" not in str(caught.value)


def test_gate_is_what_the_exits_were_trained_for(tiny: Supernet, tmp_path: Path) -> None:
    tensors = with_exits(tiny, 1)
    assert read_origin(saved(tmp_path, tensors)) == WeightsOrigin("entropy", "")
    path = tmp_path / "evidence.safetensors"
    save_file(tensors, path, metadata={"gate": "vacuity", "run": "c0ffee"})
    assert read_origin(path) == WeightsOrigin("vacuity", "c0ffee")
    assert shared_exit(tiny, 1, read_origin(path).gate).gate == "vacuity"
    save_file(tensors, path, metadata={"gate": "surprise"})
    with pytest.raises(ExportError, match=r"gate 'surprise': expected entropy, "):
        read_origin(path)
