"""Exports of a small network on the digits, with one, two and three graphs on the device."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import onnx
import orjson
from numpy.typing import NDArray
from onnx import TensorProto, helper

from edge_sdk.manifest import (
    TensorSpec,
)
from edge_sdk.wire.frames import Tensor, pack_request, unpack

Array = NDArray[Any]
INPUT_8X8 = TensorSpec("float32", (1, 8, 8))


@dataclass(frozen=True)
class Digits:
    """A small network on the digits and its exports.

    Attributes:
        net: tiny, cut at depth 2 alone.
        x: (n, 1, 8, 8) float32 raw inputs that it was not trained on.
        models: the server's folder: `digits/1` (one graph on the device), `pair/1` (an exit with an
            extractor of its own, so `exit` and `prefix`), `triple/1` (`back` as well: the server
            stops at the features of its last layer), and nothing else.
        exit_logits, pair_logits, logits: (n, 10) by torch: of the exit head at depth 2, of the
            auxiliary exit of `pair` and `triple`, and of the whole network.
    """

    net: Any
    x: Array
    models: Path
    exit_logits: Array
    pair_logits: Array
    logits: Array


def export_digits(models: Path, train_centrally: Callable[..., None]) -> Digits:
    """Train the network and export it into the folder `models`: takes about 8 s."""
    import torch

    from edge_sdk.nets import build
    from edge_sdk.training.data.load import load_dataset
    from exporters.graphs import DeviceGraphs, own_exit
    from exporters.model import export_model

    torch.set_num_threads(1)
    data = load_dataset("digits").head(600, 200)
    shape = data.x_train.shape[1:]
    net: Any = build("tiny", classes=10, input_shape=shape, mean=data.mean, std=data.std, seed=0)
    train_centrally(net, data.x_train, data.y_train, epochs=10, learning_rate=1e-2)
    layers = torch.nn.Flatten(), torch.nn.Linear(64, 16), torch.nn.ReLU()
    extractor = torch.nn.Sequential(net.normalise, *layers)
    head = torch.nn.Linear(16, 10)
    optimiser = torch.optim.Adam([*layers[1].parameters(), *head.parameters()], 0.02)
    for _ in range(60):
        optimiser.zero_grad()
        logits = head(extractor(torch.from_numpy(data.x_train)))
        loss: Any = torch.nn.functional.cross_entropy(logits, torch.from_numpy(data.y_train))
        loss.backward()
        optimiser.step()

    export_model(
        net,
        data.x_test,
        data.y_test,
        models,
        name="digits",
        version=1,
        class_names=data.class_names,
        depths=(2,),
        int8="never",
    )
    pair = own_exit(net, 2, extractor.eval(), head.eval())
    triple = DeviceGraphs(
        pair.exit, pair.prefix, back=net.head[-1], features=(net.head[-1].in_features,)
    )
    copy_version(models / "digits" / "1", models / "triple" / "1", graphs=triple)
    copy_version(models / "triple" / "1", models / "pair" / "1", drop="back")
    _stop_at_features(models / "triple" / "1" / "segments" / "2-end.onnx")
    with torch.no_grad():
        x = torch.from_numpy(data.x_test)
        z = net.prefix(2)(x)
        return Digits(
            net=net,
            x=data.x_test,
            models=models,
            exit_logits=net.exit_head(2)(z).numpy(),
            pair_logits=head(extractor(x)).numpy(),
            logits=net(x).numpy(),
        )


def copy_version(
    source: Path, target: Path, *, graphs: Any = None, drop: str = "", threshold: float = 0.0
) -> None:
    """The export at `source`, of one bundle, under the name and version that `target` says.

    Args:
        graphs: DeviceGraphs to run in place of the bundle's. drop: one of its graphs to leave out.
        threshold: of its gate, 0 for the one it has.
    """
    shutil.copytree(source, target)
    name, version = target.parts[-2:]
    model = target / "model.json"
    model.write_bytes(_edited(model, name=name, version=version))
    manifest = target / "bundles" / "d2" / "manifest.json"
    manifest.write_bytes(_edited(manifest, bundle=f"{name}/{version}/d2"))
    fields = orjson.loads(manifest.read_bytes())
    if graphs is not None:
        _write_graphs(graphs, fields, manifest.parent)
    if drop:
        (manifest.parent / fields["graphs"].pop(drop)["file"]).unlink()
    fields["gate"]["threshold"] = threshold or fields["gate"]["threshold"]
    manifest.write_bytes(orjson.dumps(fields))


def _edited(path: Path, **fields: str) -> bytes:
    return orjson.dumps(orjson.loads(path.read_bytes()) | fields)


def _write_graphs(graphs: Any, manifest: dict[str, Any], folder: Path) -> None:
    """Put other graphs into a bundle, with the logits that torch gives for its golden inputs."""
    import torch

    from exporters.graphs import write_device_graphs

    specs = write_device_graphs(graphs, INPUT_8X8, folder)
    manifest["graphs"] = {graph: asdict(spec) for graph, spec in specs.items()}
    x = unpack((folder / manifest["golden"]).read_bytes()).tensor("x").array
    with torch.no_grad():
        logits = graphs.exit(torch.tensor(x)).numpy()
    golden = pack_request({}, [Tensor("x", x), Tensor("logits", logits)])
    (folder / manifest["golden"]).write_bytes(golden)


def _stop_at_features(segment: Path) -> None:
    """Take the last layer off a server segment: its input becomes the output `features`."""
    model = onnx.load(segment)
    graph = model.graph
    last = graph.node.pop()
    assert last.op_type == "Gemm"
    for node in graph.node:
        node.output[:] = ["features" if name == last.input[0] else name for name in node.output]
    del graph.output[:]
    features = helper.make_tensor_value_info("features", TensorProto.FLOAT, None)
    graph.output.append(features)
    onnx.save(model, segment)
