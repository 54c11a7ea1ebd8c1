"""The nine `light_*.onnx` graphs of the onnx wheel, cut: is prefix and suffix the whole?

    python -m benchmarks.adopt_cuts            every offered cut, batches 1 and 32
    python -m benchmarks.adopt_cuts --every    every cut there is, batch 1; offered ones also at 32

Weights are random (normal with sqrt(2 / fan-in), one-dimensional ones uniform in 0.5 to 1.5). The
oracle is onnxruntime on the whole file, one sample at a time. Differences are shares of the
largest logit.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Final

import numpy as np
import onnx
import typer
from numpy.typing import NDArray
from onnx import numpy_helper

from benchmarks.reports import RESULTS, made_by, provenance, write
from exporters.adopt.classifier import Classifier, load_classifier
from exporters.adopt.graph.cuts import Cut, choose_cuts, find_cuts
from exporters.adopt.graph.graph import part
from exporters.adopt.graph.loading import with_open_reshapes
from exporters.adopt.graph.split import difference, open_session, segment_model

Array = NDArray[Any]

LIGHT: Final = tuple(
    f"light_{name}"
    for name in (
        "bvlc_alexnet", "densenet121", "inception_v1", "inception_v2", "resnet50", "shufflenet",
        "squeezenet", "vgg19", "zfnet512",
    )
)  # fmt: skip
FOLDER: Final = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"
DISTINCT: Final = 2
BATCHES: Final = (1, 32)

app = typer.Typer(add_completion=False)


@dataclass(frozen=True, slots=True)
class Found:
    """Result of the check of one graph.

    Attributes:
        cuts, offered: how many there are, and how many of them adopt offers.
        checked: cuts that were compared. worst: largest difference, a share of the largest logit.
        takes_batches: whether the batch of the segments is open.
    """

    name: str
    cuts: int
    offered: int
    checked: int
    worst: float
    takes_batches: bool
    seconds: float


def randomised(name: str, folder: Path, *, seed: int = 0) -> Path:
    """One of the graphs with random weights, in `folder`."""
    model = onnx.load(FOLDER / f"{name}.onnx")
    random = np.random.default_rng(seed)
    held = {weight.name: weight for weight in model.graph.initializer}
    nodes, weights = [], []
    for node in model.graph.node:
        if node.op_type != "ConstantOfShape":
            nodes.append(node)
            continue
        shape = tuple(map(int, numpy_helper.to_array(held[node.input[0]])))
        if len(shape) == 1:
            values = random.uniform(0.5, 1.5, shape)
        else:
            deviation = np.sqrt(2 / math.prod(shape[1:]))
            values = deviation * random.standard_normal(shape, np.float32)
        weights.append(numpy_helper.from_array(values.astype(np.float32), node.output[0]))
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    model.graph.initializer.extend(weights)
    path = folder / f"{name}.onnx"
    onnx.save(model, path)
    return path


def check_offered(path: Path, *, batches: Sequence[int] = BATCHES) -> Found:
    """Run the segments between offered cuts as a chain, and each from its own entry."""
    return _check(path, batches=batches, every=False)


def _check(path: Path, *, batches: Sequence[int], every: bool) -> Found:
    started = time.perf_counter()
    classifier = load_classifier(path)
    # whether that holds at larger batches is what is checked below
    classifier = replace(classifier, graph=with_open_reshapes(classifier.graph))
    plan = find_cuts(classifier.graph)
    offer = choose_cuts(plan, int(np.prod(classifier.raw.shape)) * 4, None)
    random = np.random.default_rng(1)
    x = random.uniform(-100, 100, (DISTINCT, *classifier.raw.shape)).astype(np.float32)
    expected = _oracle(path, x)
    # samples and classes must differ by far more than is allowed, else equality shows nothing
    assert np.ptp(expected, axis=1).min() > 1e-3 * np.abs(expected).max()
    assert difference(expected[0], expected[1]) > 1e-3
    joints: list[Cut | None] = [None, *offer.cuts]
    ends: list[Cut | None] = [*offer.cuts, None]
    sessions = [
        open_session(segment_model(classifier.graph, entry, end, by_sample=False), threads=2)
        for entry, end in zip(joints, ends, strict=True)
    ]
    worst, batched = 0.0, True
    for batch in batches:
        rows = np.arange(batch) % DISTINCT
        value: Array = np.ascontiguousarray(x[rows])
        for session in sessions:
            (name,) = session.inputs
            value = session.run(None, {name: value})[0]
        batched = batched and value.shape == (batch, classifier.classes)
        worst = max(worst, difference(expected[rows], value))
    checked = plan.cuts if every else offer.cuts
    for cut in checked if every else ():
        worst = max(worst, _one_cut(classifier, cut, x[:1], expected[:1]))
    seconds = time.perf_counter() - started
    return Found(path.stem, len(plan.cuts), len(offer.cuts), len(checked), worst, batched, seconds)


def _one_cut(classifier: Classifier, cut: Cut, x: Array, expected: Array) -> float:
    """Prefix, then suffix, as two models: how far from the whole."""
    graph = classifier.graph
    prefix = open_session(part(graph, ("x", graph.input), {"z": cut.tensor}, batch=1), threads=2)
    suffix = open_session(
        part(graph, ("z", cut.tensor), {"logits": graph.output}, batch=1), threads=2
    )
    (z,) = prefix.run(None, {"x": x})
    (logits,) = suffix.run(None, {"z": z})
    return difference(expected, logits)


def _oracle(path: Path, x: Array) -> Array:
    """The file's logits: a softmax of random weights is 0 or 1, and would hide differences."""
    model = onnx.load(path)
    last = model.graph.node[-1]
    if last.op_type == "Softmax":
        del model.graph.output[:]
        model.graph.output.append(
            onnx.helper.make_tensor_value_info(last.input[0], onnx.TensorProto.FLOAT, None)
        )
    held = {weight.name for weight in model.graph.initializer}
    (name,) = (info.name for info in model.graph.input if info.name not in held)
    session = open_session(model, threads=2)
    rows = [session.run(None, {name: x[i : i + 1]})[0] for i in range(len(x))]
    return np.concatenate(rows).reshape(len(x), -1)


@app.command(epilog="Example: python -m benchmarks.adopt_cuts --every")
def main(
    every: Annotated[bool, typer.Option("--every", help="Check every cut there is.")] = False,
    results: Path = RESULTS,
) -> None:
    """Cut the nine graphs and say how far the parts are from the whole."""
    table = [
        "| graph | cuts | offered | checked | largest difference | seconds |",
        "| --- " * 6 + "|",
    ]
    every_found = []
    for name in LIGHT:
        with TemporaryDirectory() as folder:
            found = _check(randomised(name, Path(folder)), batches=BATCHES, every=every)
        every_found.append(asdict(found))
        table.append(
            f"| {name} | {found.cuts} | {found.offered} | {found.checked} | {found.worst:.1e} |"
            f" {found.seconds:.1f} |"
        )
        print(table[-1], flush=True)
    command = "python -m benchmarks.adopt_cuts" + (" --every" if every else "")
    about = {"command": command, **provenance(), "onnxruntime": version("onnxruntime")}
    about |= {"load": [round(value, 1) for value in os.getloadavg()]}
    text = (
        "Nine architectures of the public zoo with random weights, cut where adopt offers it. The"
        " segments between the cuts ran as a chain, at batches of 1 and 32. The oracle is"
        f" onnxruntime {about['onnxruntime']} on the whole file, one sample at a time. Differences"
        " are shares of the largest logit; 1e-4 is allowed."
    )
    blocks = ["# The parts of nine graphs are the whole", made_by(about), text, "\n".join(table)]
    write(results / "adopt-cuts", {**about, "graphs": every_found}, blocks)


if __name__ == "__main__":
    app()
