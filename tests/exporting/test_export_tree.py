from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from torch import Tensor, nn

from edge_sdk.errors import StorageError
from edge_sdk.manifest import BundleManifest, ModelManifest
from edge_sdk.nets import Supernet
from edge_sdk.session import Session
from edge_sdk.training.data.load import Dataset
from edge_sdk.wire import frames
from exporters import model as model_module
from exporters.errors import ExportError, ParityError
from exporters.graphs import DeviceGraphs, SharedExit
from exporters.model import export_model
from exporters.versions import next_version
from profiles.cost import CostTable


def export(net: Supernet, data: Dataset, out: Path, **changed: Any) -> ModelManifest:
    arguments: dict[str, Any] = {
        "name": "digits",
        "version": 1,
        "class_names": data.class_names,
        "depths": (4,),
        "int8": "never",
    } | changed
    return export_model(net, data.x_test, data.y_test, out, **arguments)


def names_under(folder: Path) -> list[str]:
    return sorted(
        path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()
    )


def test_tree_holds_what_the_manifests_name_and_nothing_else(tiny_tree: Any) -> None:
    assert names_under(tiny_tree.folder) == [
        "bundles/d2/exit.onnx",
        "bundles/d2/golden.bin",
        "bundles/d2/manifest.json",
        "bundles/d4/exit.onnx",
        "bundles/d4/golden.bin",
        "bundles/d4/manifest.json",
        "model.json",
        "segments/0-2.onnx",
        "segments/2-4.onnx",
        "segments/4-end.onnx",
    ]
    assert tiny_tree.folder.parent.parent.joinpath("digits", "1") == tiny_tree.folder
    assert [path.name for path in tiny_tree.folder.parent.iterdir()] == ["1"]


def test_manifests_read_back_as_they_were_written(tiny_tree: Any) -> None:
    assert ModelManifest.load(tiny_tree.folder) == tiny_tree.manifest
    for variant in tiny_tree.manifest.variants:
        raw = (tiny_tree.folder / "bundles" / variant / "manifest.json").read_bytes()
        assert BundleManifest.from_json(raw).to_json() == raw


def test_model_manifest_says_what_the_network_is(tiny_tree: Any) -> None:
    manifest = tiny_tree.manifest
    assert (manifest.name, manifest.version, manifest.backbone) == ("digits", "1", "tiny")
    assert (manifest.stages, manifest.cuts, manifest.variants) == (5, (2, 4), ("d2", "d4"))
    assert (manifest.input.dtype, manifest.input.shape) == ("float32", (1, 8, 8))
    assert [(segment.entry, segment.exit) for segment in manifest.segments] == [
        (0, 2),
        (2, 4),
        (4, None),
    ]
    # 16 channels on 4x4, then 32 on 2x2 (METHODS, backbones)
    assert [segment.output.shape for segment in manifest.segments] == [
        (16, 4, 4),
        (32, 2, 2),
        (10,),
    ]
    cost = CostTable.from_dict(manifest.cost)
    assert cost.depths == (1, 2, 3, 4)


def test_bundle_manifest_says_what_a_device_needs(tiny_tree: Any) -> None:
    bundle = tiny_tree.bundle("d2")
    assert (bundle.bundle, bundle.depth, bundle.backbone) == ("digits/1/d2", 2, "tiny")
    assert bundle.class_names == tuple("0123456789")
    assert (bundle.smashed.name, bundle.smashed.shape) == ("z2", (16, 4, 4))
    assert bundle.smashed.codec in ("int8", "fp16")
    exit_graph = bundle.graphs["exit"]
    assert {name: spec.shape for name, spec in exit_graph.outputs.items()} == {
        "logits": (10,),
        "z": (16, 4, 4),
    }
    assert bundle.parity["samples"] == len(tiny_tree.data.x_test)
    assert bundle.parity["max_logit_error"] <= 1e-4
    assert bundle.parity["latency_us"] > 0


def test_gate_of_the_bundle_keeps_the_pair_within_half_a_point_of_the_server(
    tiny_tree: Any,
) -> None:
    data = tiny_tree.data
    with torch.no_grad():
        exits, final = tiny_tree.net.eval().forward_exits(torch.from_numpy(data.x_test))
    server = float((final.argmax(1).numpy() == data.y_test).mean())
    for variant, depth in (("d2", 2), ("d4", 4)):
        gate = tiny_tree.bundle(variant).gate
        device = float((exits[depth].argmax(1).numpy() == data.y_test).mean())
        (chosen,) = [point for point in gate.curve if point.threshold == gate.threshold]
        assert chosen.accuracy >= max(server - 0.005, device) - 1e-9
        assert gate.curve[-1].accuracy == pytest.approx(device)


def test_golden_frame_holds_held_out_inputs_and_the_answers_of_the_graph(tiny_tree: Any) -> None:
    golden = frames.unpack((tiny_tree.folder / "bundles/d2/golden.bin").read_bytes())
    x, logits = golden.tensor("x").array, golden.tensor("logits").array
    assert x.shape == (8, 1, 8, 8)
    assert all((x[i] == tiny_tree.data.x_test).all(axis=(1, 2, 3)).any() for i in range(8))
    session = Session(tiny_tree.path("d2"))
    for i in range(8):
        (given,) = session.run(["logits"], {"x": x[i : i + 1]})
        np.testing.assert_array_equal(given[0], logits[i])


def test_no_file_tells_of_the_machine_it_was_made_on(tiny_tree: Any) -> None:
    here = Path(__file__).parents[2]
    for name in names_under(tiny_tree.folder):
        raw = (tiny_tree.folder / name).read_bytes()
        for trace in (str(here).encode(), b"site-packages", b"stack_trace", b".py"):
            assert trace not in raw, name


def test_every_graph_is_sound_and_holds_its_weights_itself(tiny_tree: Any) -> None:
    for path in tiny_tree.folder.rglob("*.onnx"):
        loaded = onnx.load(path, load_external_data=False)
        onnx.checker.check_model(loaded, full_check=True)
        assert all(
            initialiser.data_location != onnx.TensorProto.EXTERNAL
            for initialiser in loaded.graph.initializer
        )


def test_progress_tells_of_every_part(tiny_tree: Any) -> None:
    told = "\n".join(tiny_tree.lines)
    for part in ("0-2.onnx", "4-end.onnx", "d2: ", "d4: ", "published"):
        assert part in told


def test_same_network_gives_the_same_files(tiny_tree: Any, tmp_path: Path) -> None:
    export(tiny_tree.net, tiny_tree.data, tmp_path, depths=(4,))
    again = tmp_path / "digits" / "1"
    # segments 0-4 and 2-4 differ, as the trees were cut at 4 and at 2 and 4
    for name in ("bundles/d4/exit.onnx", "bundles/d4/golden.bin", "segments/4-end.onnx"):
        assert (again / name).read_bytes() == (tiny_tree.folder / name).read_bytes(), name
    first, second = tiny_tree.bundle("d4"), BundleManifest.load(again / "bundles" / "d4")
    for parity in (first.parity, second.parity):
        parity.pop("latency_us")  # measured again
    assert second == first


def test_network_is_left_as_it_was(tiny: Supernet, tiny_tree: Any) -> None:
    tiny.train()
    with pytest.raises(ExportError, match="depths"):
        export(tiny, tiny_tree.data, Path("unused"), depths=(5,))
    assert all(module.training for module in tiny.modules())


def test_a_version_is_never_overwritten(tiny_tree: Any) -> None:
    before = {
        name: (tiny_tree.folder / name).read_bytes() for name in names_under(tiny_tree.folder)
    }
    with pytest.raises(ExportError, match="exists already"):
        export(tiny_tree.net, tiny_tree.data, tiny_tree.folder.parents[1])
    assert before == {
        name: (tiny_tree.folder / name).read_bytes() for name in names_under(tiny_tree.folder)
    }


def test_next_version_follows_the_highest(tmp_path: Path) -> None:
    assert next_version(tmp_path, "digits") == 1
    for name in ("1", "9", "10", ".11-abc", "notes"):
        (tmp_path / "digits" / name).mkdir(parents=True)
    assert next_version(tmp_path, "digits") == 11
    (tmp_path / "digits" / ".12-removed").mkdir()  # a server refuses it from now on
    assert next_version(tmp_path, "digits") == 13


class TracedDifferently(nn.Module):
    """A head that answers otherwise once it is traced: a Python branch on the run, say."""

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.head = head

    def forward(self, z: Tensor) -> Tensor:
        logits: Tensor = self.head(z)
        if torch.compiler.is_exporting():
            return logits + torch.arange(10)
        return logits


def sabotaged(net: Supernet, depth: int) -> DeviceGraphs:
    head = TracedDifferently(net.exit_head(depth))
    return DeviceGraphs(exit=SharedExit(net.prefix(depth), head))


def test_graph_that_answers_otherwise_is_never_published(
    tiny: Supernet, digits: Dataset, tmp_path: Path
) -> None:
    with pytest.raises(ParityError, match=r"d4: expected logits within 0\.0001 of the reference"):
        export(tiny, digits, tmp_path, device=sabotaged)
    assert list((tmp_path / "digits").iterdir()) == []


@pytest.mark.parametrize(
    ("failure", "seen"),
    [
        (KeyboardInterrupt(), KeyboardInterrupt),
        (OSError(28, "No space left on device"), StorageError),
    ],
)
def test_failure_midway_leaves_nothing(
    tiny: Supernet,
    digits: Dataset,
    tmp_path: Path,
    failure: BaseException,
    seen: type[BaseException],
) -> None:
    def fail(line: str) -> None:
        assert line.startswith("segment")
        assert len(names_under(tmp_path)) == 1
        raise failure

    with pytest.raises(seen):
        export(tiny, digits, tmp_path, progress=fail)
    assert list((tmp_path / "digits").iterdir()) == []


def test_version_that_another_export_took_meanwhile_is_kept(tmp_path: Path) -> None:
    work, target = tmp_path / ".1-x", tmp_path / "1"
    for folder, text in ((work, "ours"), (target, "theirs")):
        folder.mkdir()
        (folder / "model.json").write_text(text)
    with pytest.raises(ExportError, match="exists already"):
        model_module._publish(work, target)
    assert (target / "model.json").read_text() == "theirs"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"depths": (5,)}, "some of 1, 2, 3, 4 for tiny"),
        ({"depths": ()}, "some of 1, 2, 3, 4"),
        ({"name": "Digits!"}, "a-z, 0-9"),
        ({"version": 1234567890}, "9 digits"),
        ({"class_names": ("a", "b")}, "expected 10"),
    ],
)
def test_what_cannot_be_published_is_refused_at_once(
    tiny: Supernet, digits: Dataset, tmp_path: Path, changed: dict[str, Any], message: str
) -> None:
    with pytest.raises(ExportError, match=message):
        export(tiny, digits, tmp_path, **changed)
    assert not (tmp_path / "digits").exists()


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        (np.zeros((4, 1, 8, 8)), np.zeros(4, int), "got .* of float64"),
        (np.zeros((4, 8, 8), np.float32), np.zeros(4, int), r"\(n, 1, 8, 8\)"),
        (np.zeros((0, 1, 8, 8), np.float32), np.zeros(0, int), "at least one"),
        (np.zeros((4, 1, 8, 8), np.float32), np.zeros(3, int), r"expected \(4,\)"),
        (np.zeros((4, 1, 8, 8), np.float32), np.full(4, 10), "from 0 to 9"),
        (np.zeros((4, 1, 8, 8), np.float32), np.full(4, -1), "from 0 to 9"),
        (np.zeros((4, 1, 8, 8), np.float32), np.zeros(4), "whole numbers"),
    ],
)
def test_held_out_data_of_the_wrong_form_is_refused(
    tiny: Supernet, digits: Dataset, tmp_path: Path, x: Any, y: Any, message: str
) -> None:
    with pytest.raises(ExportError, match=message):
        export_model(tiny, x, y, tmp_path, name="digits", version=1, class_names=digits.class_names)
