"""One bundle: a folder of graphs, golden frame and manifest, written only where parity holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from torch import nn

from edge_sdk.manifest import (
    MANIFEST_NAME,
    BundleManifest,
    Codec,
    GateSpec,
    GraphSpec,
    SmashedSpec,
    TensorSpec,
)
from edge_sdk.session import Session
from edge_sdk.wire.frames import Tensor, pack_response
from exporters.composition import Composition
from exporters.curve import measure_gate
from exporters.graphs import DeviceGraphs, write_device_graphs
from exporters.measure import median_latencies_us, median_latency_us
from exporters.offloads.bottleneck import Bottleneck, write_encoder
from exporters.parity import (
    AUTO,
    CHANGED_AT_MOST,
    LOGIT_TOLERANCE,
    SAMPLES,
    DeviceRun,
    ParityReport,
    choose_codec,
    compare,
    require_back,
    require_fp32,
    require_int8,
    run_torch,
    through,
)
from exporters.quantize import quantize

Array = NDArray[Any]

GOLDEN_NAME: Final = "golden.bin"
GOLDEN_SAMPLES: Final = 8
# MQTT frames hold at most 2,000,000 bytes, so large images get fewer samples
GOLDEN_BYTES: Final = 1_500_000
# int8 must repay its loss of precision; a gain below 5 % may be noise of the measurement
FASTER_THAN: Final = 0.95


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Samples that the model was not trained on, with the whole torch model's logits.

    Attributes:
        x: (n, ...) raw inputs. y: (n,) true classes. logits: (n, N).
    """

    x: Array
    y: NDArray[np.integer[Any]]
    logits: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class BundleSource:
    """Everything that the bundles of one depth are made from, of whatever framework.

    Attributes:
        model: `{name}/{version}`. backbone: name of the network.
        exit_logits: (n, N) that the exit head gives for the held-out samples, by the reference.
        gate: measured on held-out samples.
        write: writes the graphs into an empty folder, and returns what the manifest says of each.
        suffix: the rest of the network, from z (n, ...) to logits (n, N), by the reference.
        run: run of the training that the weights come from; empty where that is not known.
        back: the last layer of a U-shaped method, in torch.
        tolerance: largest absolute difference of a logit from the reference.
        raw_input: whether the server gives the raw input the answer that it gives z.
        codec: the one that is asked for, as `choose_codec` takes it.
        bottleneck: that z passes before it is sent; None for none.
        changed_at_most: share of the final labels that codec and bottleneck may change.
        measure: the gate by the final logits (n, N) of offloads; None keeps `gate`, which takes the
            whole model's.
        measured_x: (n, ...) raw inputs of these offloads; None for the held-out ones.
        notes: what the manifest says of the measurement in addition to its parity.
    """

    model: str
    backbone: str
    depth: int
    class_names: tuple[str, ...]
    held_out: HeldOut
    exit_logits: NDArray[np.float32]
    gate: GateSpec
    write: Callable[[Path], dict[str, GraphSpec]]
    suffix: Callable[[Array], NDArray[np.float32]]
    run: str = ""
    back: nn.Module | None = None
    tolerance: float = LOGIT_TOLERANCE
    raw_input: bool = True
    codec: str = AUTO
    bottleneck: Bottleneck | None = None
    changed_at_most: float = CHANGED_AT_MOST
    measure: Callable[[NDArray[np.float32]], GateSpec] | None = None
    measured_x: Array | None = None
    notes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def sample(self) -> TensorSpec:
        """Dtype and shape of one raw input."""
        return TensorSpec(str(self.held_out.x.dtype), self.held_out.x.shape[1:])

    def answer(self, sent: Array) -> NDArray[np.float32]:
        """The server's logits of what an offload sends: z, or b of the bottleneck."""
        if self.bottleneck is None:
            return self.suffix(sent)
        return self.suffix(run_torch(self.bottleneck.decoder, sent)[0])


def torch_source(
    model: str,
    net: Composition,
    depth: int,
    graphs: DeviceGraphs,
    *,
    class_names: tuple[str, ...],
    held_out: HeldOut,
    codec: str = AUTO,
    bottleneck: Bottleneck | None = None,
    changed_at_most: float = CHANGED_AT_MOST,
) -> BundleSource:
    """The source of a super-network's bundles.

    Args:
        net: in eval mode, on the CPU.
        graphs: the device's modules at this depth.
        held_out: with the logits of the whole network as a device of this depth uses it.
        codec, bottleneck, changed_at_most: as in `BundleSource`.
    """
    sample = TensorSpec(str(held_out.x.dtype), held_out.x.shape[1:])
    reference = run_torch(graphs.exit, held_out.x)[0]
    suffix = net.server.suffix(depth)

    def measure(offloaded: NDArray[np.float32]) -> GateSpec:
        return measure_gate(reference, offloaded, held_out.y, policy=graphs.gate)

    return BundleSource(
        model=model,
        backbone=net.device.name,
        depth=depth,
        class_names=class_names,
        held_out=held_out,
        exit_logits=reference,
        gate=measure(held_out.logits),
        write=lambda folder: write_device_graphs(graphs, sample, folder),
        suffix=lambda z: run_torch(suffix, z)[0],
        run=graphs.run,
        back=graphs.back,
        # a device's own stages, or a server's, would answer z in another way than x
        raw_input=net.server is net.device and not graphs.kept,
        codec=codec,
        bottleneck=bottleneck,
        changed_at_most=changed_at_most,
        measure=measure,
    )


def spread_rows(n: int, count: int) -> NDArray[np.intp]:
    """Indices of at most `count` of n samples, evenly spread: data may be sorted by class."""
    return np.unique(np.linspace(0, n - 1, min(n, count)).astype(np.intp))


def write_fp32(source: BundleSource, folder: Path) -> BundleManifest:
    """Write the bundle `d{depth}` into the empty `folder`.

    Raises: ParityError, ExportError.
    """
    graphs = source.write(folder)
    if source.bottleneck is not None:
        z = graphs["prefix" if "prefix" in graphs else "exit"].outputs["z"].shape
        graphs["bottleneck"] = write_encoder(source.bottleneck, z, folder)
    report, codec, z_shape = _check(source, folder, graphs)
    if source.measure is not None and (source.bottleneck is not None or source.codec != AUTO):
        source = replace(source, gate=_deployed_gate(source, folder, graphs, codec))
        report = replace(report, gate_changes=_gate_changes(source, folder, graphs))
    require_fp32(report, f"d{source.depth}", source.tolerance)
    if source.back is not None:
        require_back(folder, graphs["back"], source.back)
    latency = median_latency_us(folder / graphs["exit"].file, graphs["exit"])
    manifest = BundleManifest(
        bundle=f"{source.model}/d{source.depth}",
        backbone=source.backbone,
        depth=source.depth,
        class_names=source.class_names,
        input=source.sample,
        graphs=graphs,
        smashed=SmashedSpec(f"z{source.depth}", z_shape, codec, source.raw_input),
        gate=source.gate,
        golden=GOLDEN_NAME,
        parity={**report.to_dict(), **source.notes, "latency_us": round(latency, 1)},
        run=source.run,
    )
    _write_manifest(manifest, source, folder)
    return manifest


def write_int8(
    source: BundleSource, fp32: BundleManifest, fp32_folder: Path, folder: Path, calibration: Array
) -> BundleManifest | None:
    """Write the bundle `d{depth}-int8` into the empty `folder`, unless it is no faster.

    Args:
        fp32: the bundle of the same depth, in `fp32_folder`; its gate is taken over.
        calibration: (n, ...) raw inputs.
    Returns: None where its exit graph takes more than 95 % of the fp32 graph's time.
    Raises: ParityError where it is faster but changes too many answers; ExportError.
    """
    graphs = _quantised(fp32.graphs, fp32_folder, folder, calibration)
    exit_file = fp32.graphs["exit"].file
    paths = [fp32_folder / exit_file, folder / exit_file]
    before, after = median_latencies_us(paths, fp32.graphs["exit"])
    if after > FASTER_THAN * before:
        return None
    report, codec, _ = _check(replace(source, gate=fp32.gate), folder, graphs)
    require_int8(report, codec, f"d{source.depth}-int8", source.changed_at_most)
    latencies = {"latency_us": round(after, 1), "fp32_latency_us": round(before, 1)}
    manifest = replace(
        fp32,
        bundle=f"{source.model}/d{source.depth}-int8",
        graphs=graphs,
        smashed=replace(fp32.smashed, codec=codec),
        parity={**report.to_dict(), **source.notes, **latencies},
    )
    _write_manifest(manifest, source, folder)
    return manifest


def _quantised(
    graphs: Mapping[str, GraphSpec], source: Path, target: Path, calibration: Array
) -> dict[str, GraphSpec]:
    """Quantise every graph that takes the raw input; `back` is personal, so it stays fp32."""
    specs = {}
    for name, spec in graphs.items():
        if "x" in spec.inputs:
            quantize(source / spec.file, target / spec.file, calibration, spec.overridable)
            specs[name] = replace(spec, precision="int8")
        else:
            (target / spec.file).write_bytes((source / spec.file).read_bytes())
            specs[name] = spec
    return specs


def _check(
    source: BundleSource, folder: Path, graphs: Mapping[str, GraphSpec]
) -> tuple[ParityReport, Codec, tuple[int, ...]]:
    """Run the graphs as a device does and compare with the reference.

    Returns: the differences, the codec to use, and the shape of one z.
    """
    some = spread_rows(len(source.held_out.x), SAMPLES)
    logits, z = DeviceRun(folder, graphs)(source.held_out.x[some])
    labels = source.held_out.logits[some].argmax(axis=1)
    codec, tried = choose_codec(
        _sent(source, folder, graphs, z),
        source.answer,
        labels,
        source.codec,
        source.changed_at_most,
    )
    report = compare(
        source.exit_logits[some],
        logits,
        source.gate,
        {each.codec: each.changes for each in tried},
        {each.codec: round(each.mean_bytes, 1) for each in tried},
    )
    return report, codec, z.shape[1:]


def _sent(
    source: BundleSource, folder: Path, graphs: Mapping[str, GraphSpec], z: NDArray[np.float32]
) -> NDArray[np.float32]:
    """Tensors that offloads of these samples send, before a codec: z, or b by the own graph."""
    if source.bottleneck is None:
        return z
    session = Session(folder / graphs["bottleneck"].file)
    return np.concatenate([session.run(["b"], {"z": z[row : row + 1]})[0] for row in range(len(z))])


def _deployed_gate(
    source: BundleSource, folder: Path, graphs: Mapping[str, GraphSpec], codec: Codec
) -> GateSpec:
    """The gate by the answers that offloads get, through bottleneck and codec."""
    assert source.measure is not None
    x = source.held_out.x if source.measured_x is None else source.measured_x
    _, z = DeviceRun(folder, graphs)(x)
    return source.measure(source.answer(through(_sent(source, folder, graphs, z), codec)))


def _gate_changes(source: BundleSource, folder: Path, graphs: Mapping[str, GraphSpec]) -> int:
    """Samples that the graph puts on another side of the gate than the reference."""
    some = spread_rows(len(source.held_out.x), SAMPLES)
    logits, _ = DeviceRun(folder, graphs)(source.held_out.x[some])
    return compare(source.exit_logits[some], logits, source.gate, {}).gate_changes


def _write_manifest(manifest: BundleManifest, source: BundleSource, folder: Path) -> None:
    """Write the golden frame and, last, the manifest that names it."""
    sample_bytes = source.held_out.x[0].nbytes
    count = max(1, min(GOLDEN_SAMPLES, GOLDEN_BYTES // sample_bytes))
    x = source.held_out.x[spread_rows(len(source.held_out.x), count)]
    logits, _ = DeviceRun(folder, manifest.graphs)(x)
    golden = pack_response({}, [Tensor("x", x), Tensor("logits", logits)])
    (folder / GOLDEN_NAME).write_bytes(golden)
    (folder / MANIFEST_NAME).write_bytes(manifest.to_json())
