"""The golden check: a bundle must give, on this device, the answers that its export gave."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from edge_sdk.errors import (
    BundleError,
    FrameError,
    InputError,
    OutOfMemoryError,
    UpdateRefusedError,
)
from edge_sdk.manifest import BundleManifest, GraphSpec, TensorSpec
from edge_sdk.session import Array, Session
from edge_sdk.wire.frames import HTTP_LIMITS, unpack

# Allowed difference of a logit, as a share of the largest golden logit. Between processors fp32
# kernels differ in the order of additions, about 1e-6; int8 kernels also saturate and round
# differently.
TOLERANCE: Final = {"fp32": 1e-3, "int8": 5e-2}


@dataclass(frozen=True, slots=True)
class GoldenReport:
    """Result of the check.

    Attributes:
        samples: number of golden inputs.
        difference: the largest |logit - golden logit|, as a share of the largest golden logit.
    """

    samples: int
    difference: float


def check_golden(folder: Path, sessions: Mapping[str, Session] | None = None) -> GoldenReport:
    """Run the golden inputs of the bundle in `folder` through its graphs.

    Call it in a process that may crash: see `edge_sdk.bundles.trial`.

    Args:
        sessions: its loaded graphs; None loads them.
    Raises: UpdateRefusedError naming the graph, what was expected and what was got.
    """
    try:
        manifest = BundleManifest.load(folder)
        x, golden = read_golden(folder / manifest.golden)
        if sessions is None:
            sessions = {name: Session(folder / g.file) for name, g in manifest.graphs.items()}
        _check_z(manifest)
        for name, graph in manifest.graphs.items():
            if name != "exit":
                _run(sessions[name], name, graph, feeds(graph, x))
        return _compare(sessions["exit"], manifest, x, golden)
    except OutOfMemoryError:
        raise
    except (BundleError, InputError, FrameError) as err:
        raise UpdateRefusedError(str(err)) from err


def takes_overrides(
    folder: Path, manifest: BundleManifest, sessions: Mapping[str, Session], x: Array
) -> bool:
    """Whether other weights reach the graphs, as they do on the CPU.

    Personal weights and learning replace weights of a loaded graph. A compiler of graphs may take
    weights for constants: OpenVINO does, and says nothing.

    Args:
        sessions: of another provider than the CPU; their weights are the file's again afterwards.
        x: (1, ...) one raw input.
    """
    random = np.random.default_rng(0)
    for name, session in sessions.items():
        graph = manifest.graphs[name]
        values = {
            each: random.normal(0, 0.1, shape).astype(np.float32)
            for each, shape in session.overridable.items()
        }
        reference = Session(folder / graph.file)
        for each in (reference, session):
            each.override(values)
        try:
            expected, got = (each.run(None, feeds(graph, x)) for each in (reference, session))
        finally:
            session.override({})
        for want, have in zip(expected, got, strict=True):
            peak = float(np.abs(want).max(initial=1e-6))
            missed = float(np.abs(np.subtract(have, want, dtype=np.float64)).max(initial=0))
            if not missed <= TOLERANCE[graph.precision] * peak:
                return False
    return True


def read_golden(path: Path) -> tuple[Array, Array]:
    """The golden inputs and logits in a bundle's frame file, (n, ...) and (n, classes).

    Raises: UpdateRefusedError, FrameError.
    """
    try:
        frame = unpack(path.read_bytes(), HTTP_LIMITS)
    except OSError as err:
        raise UpdateRefusedError(f"{path.name}: cannot be read ({err.strerror})") from err
    x, logits = frame.tensor("x").array, frame.tensor("logits").array
    if len(x) == 0 or len(x) != len(logits):
        raise UpdateRefusedError(f"{path.name}: {len(x)} inputs and {len(logits)} logits")
    return x, logits


def _check_z(manifest: BundleManifest) -> None:
    """Check that a graph computes the smashed data, in the shape that the server is told."""
    graph = manifest.graphs.get("prefix", manifest.graphs["exit"])
    z = graph.outputs.get("z")
    if z is None or z.shape != manifest.smashed.shape:
        got = "none" if z is None else str(z.shape)
        raise UpdateRefusedError(
            f"{graph.file}: output z: expected {manifest.smashed.shape}, {got}"
        )


def _compare(session: Session, manifest: BundleManifest, x: Array, golden: Array) -> GoldenReport:
    graph = manifest.graphs["exit"]
    peak = float(np.abs(golden).max(initial=1e-6))
    worst = 0.0
    for sample, expected in zip(x, golden, strict=True):
        logits = _run(session, "exit", graph, {"x": sample[None]})["logits"]
        if logits.shape != expected[None].shape:
            raise UpdateRefusedError(
                f"{graph.file}: golden logits of shape {expected.shape}, got {logits.shape[1:]}"
            )
        worst = max(worst, float(np.abs(logits[0] - expected).max()) / peak)
    allowed = TOLERANCE[graph.precision]
    if worst > allowed:
        raise UpdateRefusedError(
            f"{graph.file}: golden logits missed by {worst:.2g} of their size, allowed {allowed:g}"
        )
    return GoldenReport(len(x), worst)


def _run(
    session: Session, name: str, graph: GraphSpec, feeds: dict[str, Array]
) -> Mapping[str, Array]:
    """One run, with its outputs checked against the manifest: names, dtypes, shapes, finite."""
    missing = set(graph.outputs) - set(session.outputs)
    if missing:
        raise UpdateRefusedError(f"{graph.file}: outputs {sorted(missing)} are not in the graph")
    outputs = dict(zip(session.outputs, session.run(None, feeds), strict=True))
    for output, spec in graph.outputs.items():
        value = outputs[output]
        if value.shape != (1, *spec.shape) or value.dtype != np.dtype(spec.dtype):
            raise UpdateRefusedError(
                f"{graph.file}: {name}: {output}: expected {spec.dtype} (1, {_sizes(spec)}), "
                f"got {value.dtype} {value.shape}"
            )
        if value.dtype.kind == "f" and not np.isfinite(value).all():
            raise UpdateRefusedError(f"{graph.file}: {output} is not finite on the golden input")
    return outputs


def feeds(graph: GraphSpec, x: Array) -> dict[str, Array]:
    """The first of the raw inputs `x` for a graph; zeros in place of a reply of the server."""
    return {
        name: x[:1] if name == "x" else np.zeros((1, *spec.shape), np.dtype(spec.dtype))
        for name, spec in graph.inputs.items()
    }


def _sizes(spec: TensorSpec) -> str:
    return ", ".join(str(size) for size in spec.shape)
