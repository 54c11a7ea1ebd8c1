"""Export of a trained super-network: the whole tree of files that a server serves, or nothing."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from edge_sdk.durable import make_folder, storage_error, sync_file, sync_folder
from edge_sdk.errors import ManifestError
from edge_sdk.manifest import DecoderSpec, ModelManifest, SegmentSpec, TensorSpec, check_bundle_name
from edge_sdk.nets import Supernet
from exporters.bundle import (
    BundleSource,
    HeldOut,
    spread_rows,
    torch_source,
    write_fp32,
    write_int8,
)
from exporters.composition import Composition
from exporters.errors import ExportError
from exporters.graphs import DeviceGraphs, shared_exit, write_segments
from exporters.measure import measure_cost
from exporters.offloads.bottleneck import (
    LEARNT_MOST,
    Bottleneck,
    channel_axis,
    fit_bottleneck,
    write_decoder,
)
from exporters.offloads.settings import Narrow
from exporters.parity import (
    AUTO,
    CHANGED_AT_MOST,
    SAMPLES,
    SMALLEST,
    require_segments,
    run_torch,
)
from exporters.quantize import CALIBRATION_SAMPLES

Array = NDArray[Any]
Progress = Callable[[str], None]

MODEL_NAME: Final = "model.json"
DTYPES: Final = ("uint8", "float32")


def export_model(
    net: Supernet,
    held_out_x: Array,
    held_out_y: NDArray[np.integer[Any]],
    out: Path,
    *,
    name: str,
    version: int,
    class_names: Sequence[str],
    calibration_x: Array | None = None,
    depths: Sequence[int] | None = None,
    int8: Literal["auto", "never"] = "auto",
    device: Callable[[Supernet, int], DeviceGraphs] = shared_exit,
    server: Supernet | None = None,
    codec: str = AUTO,
    bottleneck: Narrow = "never",
    unlabelled_x: Array | None = None,
    progress: Progress = lambda _: None,
) -> ModelManifest:
    """Write `{out}/{name}/{version}`: server segments, one or two bundles a depth, costs.

    The tree is written to a hidden folder and renamed at the end, so it is never there in part.

    Args:
        net: trained; not changed.
        held_out_x: (n, *input_shape) raw, uint8 or float32 as a device's sensor gives it.
        held_out_y: (n,) true classes. The gate's curve is measured on all n, parity on 1,000.
        class_names: one a class.
        calibration_x: raw samples that set the int8 ranges; by default 128 of the held-out ones.
        depths: the depths to publish; by default every cut of the network.
        int8: `auto` adds `d{depth}-int8` where its answers agree and it was measured to be faster.
        device: makes the graphs of a bundle; some methods run more than one on the device. If it
            makes a `back`, the server's segments end in front of the last layer.
        server: the network whose stages the server runs, where it is not `net` (HARMONY).
        codec: of offloads, as `exporters.parity.choose_codec` takes it.
        bottleneck: a number of channels, or `auto`, puts a bottleneck at each cut
            (exporters.offloads.bottleneck); the codec is then the smallest that keeps its answers.
        unlabelled_x: (n, *input_shape) raw samples that a bottleneck learns from.
        progress: called with one line about each finished step.
    Raises: ExportError for data or a target that does not fit; ParityError, its subclass, if a
        graph does not reproduce the network; StorageError.
    """
    cuts = _check_depths(net, depths)
    _check_data(net, held_out_x, held_out_y, class_names)
    check_place(out, name, version)
    halves = Composition(net, net if server is None else server).frozen()
    net = halves.device
    graphs = {depth: device(net, depth) for depth in cuts}
    calibration = None
    if int8 == "auto":
        usable = held_out_x if calibration_x is None else calibration_x
        calibration = usable[spread_rows(len(usable), CALIBRATION_SAMPLES)]

    def write(work: Path) -> ModelManifest:
        features = any(each.back is not None for each in graphs.values())
        segments = _write_segments(
            halves, cuts, held_out_x, work / "segments", progress, features=features
        )
        variants: list[str] = []
        decoders: list[DecoderSpec] = []
        logits = _Logits(halves, held_out_x)
        for depth in cuts:
            narrow = None
            if bottleneck != "never":
                learn_x = held_out_x if unlabelled_x is None else unlabelled_x
                narrow = _bottleneck(
                    halves, depth, bottleneck, (learn_x, held_out_x, logits.of(depth)), progress
                )
            if narrow is not None:
                some = held_out_x[spread_rows(len(held_out_x), SAMPLES)]
                z = run_torch(net.prefix(depth), some)[0]
                decoders.append(write_decoder(narrow[0], depth, z, work / "segments")[0])
            source = torch_source(
                f"{name}/{version}",
                halves,
                depth,
                graphs[depth],
                class_names=tuple(class_names),
                held_out=HeldOut(held_out_x, held_out_y, logits.of(depth)),
                codec=SMALLEST if narrow is not None and codec == AUTO else codec,
                bottleneck=None if narrow is None else narrow[0],
                changed_at_most=CHANGED_AT_MOST if narrow is None else narrow[1],
            )
            variants += write_bundles(source, work / "bundles", calibration, progress)
        progress("measuring what each stage costs")
        return ModelManifest(
            name=name,
            version=str(version),
            backbone=net.name,
            stages=net.L,
            cuts=cuts,
            class_names=tuple(class_names),
            input=_sample(held_out_x),
            segments=segments,
            variants=tuple(variants),
            cost=measure_cost(net, held_out_x).to_dict(),
            decoders=tuple(decoders),
        )

    return write_tree(out, name, version, write, progress)


def check_place(out: Path, name: str, version: int) -> None:
    """Refuse a name or version that cannot be published, before anything takes time.

    Raises: ExportError, also where that version exists already.
    """
    _check_name(name, version)
    if (out / name / str(version)).exists():
        raise _taken(out / name / str(version))


def write_tree(
    out: Path,
    name: str,
    version: int,
    write: Callable[[Path], ModelManifest],
    progress: Progress = lambda _: None,
) -> ModelManifest:
    """Make `{out}/{name}/{version}` in a hidden folder next to its place, and rename it at the end.

    Args:
        write: writes segments and bundles into an empty folder, and returns the manifest.
        progress: called with one line at the end.
    Raises: StorageError; ExportError where that version exists already; what `write` raises.
    """
    target = out / name / str(version)
    make_folder(target.parent)
    work = Path(mkdtemp(prefix=f".{version}-", dir=target.parent))
    try:
        manifest = write(work)
        (work / MODEL_NAME).write_bytes(manifest.to_json())
        _publish(work, target)
    except OSError as err:
        raise storage_error(target, _bytes_under(work), err) from err
    finally:
        shutil.rmtree(work, ignore_errors=True)  # renamed away, unless the export failed
    progress(f"{target}: published")
    return manifest


def _bottleneck(
    net: Composition,
    depth: int,
    wanted: int | Literal["auto"],
    samples: tuple[Array, Array, NDArray[np.float32]],
    progress: Progress,
) -> tuple[Bottleneck, float] | None:
    """The bottleneck of a depth, as `fit_bottleneck` returns it.

    Args:
        samples: raw inputs to learn from, held-out ones, and the network's logits of these.
    """
    learn_x, held_out_x, logits = samples
    prefix, suffix = net.device.prefix(depth), net.server.suffix(depth)
    learn_x = learn_x[spread_rows(len(learn_x), LEARNT_MOST)]
    some = spread_rows(len(held_out_x), SAMPLES)
    z, z_held = (run_torch(prefix, x)[0] for x in (learn_x, held_out_x[some]))
    return fit_bottleneck(
        z,
        channel_axis(z.shape[1:], net.device.input_shape),
        suffix,
        (z_held, logits[some].argmax(axis=1)),
        wanted=wanted,
        depth=depth,
        progress=progress,
    )


class _Logits:
    """Logits of the whole network for the same samples, by the depth of the device.

    They are computed once where devices and server trained one network.
    """

    def __init__(self, net: Composition, x: Array) -> None:
        self._net, self._x = net, x
        self._one: NDArray[np.float32] | None = None

    def of(self, depth: int) -> NDArray[np.float32]:
        """(n, N)."""
        if self._net.server is not self._net.device:
            return run_torch(self._net.whole(depth), self._x)[0]
        if self._one is None:
            self._one = run_torch(self._net.device, self._x)[0]
        return self._one


def _write_segments(
    net: Composition,
    cuts: tuple[int, ...],
    held_out: Array,
    folder: Path,
    progress: Progress,
    *,
    features: bool,
) -> tuple[SegmentSpec, ...]:
    folder.mkdir()
    segments = []
    for segment in write_segments(net, _sample(held_out), folder, cuts, features=features):
        segments.append(segment)
        progress(f"segment {segment.file} of {len(cuts) + 1}")
    x = held_out[spread_rows(len(held_out), SAMPLES)]

    def z_at(depth: int, x: Array) -> NDArray[np.float32]:
        return run_torch(net.device.prefix(depth), x)[0]

    def reference(entry: int) -> NDArray[np.float32]:
        depth = entry or cuts[0]  # raw inputs pass the stages of the shallowest device
        return run_torch(net.segment(depth, None, features=features), z_at(depth, x))[0]

    error = require_segments(folder, segments, z_at, x, reference)
    progress(f"segments give torch's {'features' if features else 'logits'} within {error:.1e}")
    return tuple(segments)


def write_bundles(
    source: BundleSource, folder: Path, calibration: Array | None, progress: Progress
) -> list[str]:
    """Write `d{depth}`, and `d{depth}-int8` where it answers alike and is faster, into `folder`.

    Args:
        calibration: raw inputs that set the int8 ranges; None leaves int8 out.
    Returns: the variants that were written.
    Raises: ParityError, ExportError.
    """
    variant = f"d{source.depth}"
    (folder / variant).mkdir(parents=True)
    fp32 = write_fp32(source, folder / variant)
    progress(
        f"{variant}: logits within {fp32.parity['max_logit_error']:.1e} of the reference,"
        f" {fp32.parity['latency_us']:.0f} us a run, smashed data as {fp32.smashed.codec}"
    )
    if calibration is None:
        return [variant]
    quantised = f"{variant}-int8"
    (folder / quantised).mkdir()
    reason = f"{quantised}: no faster than fp32"
    try:
        made = write_int8(source, fp32, folder / variant, folder / quantised, calibration)
    except ExportError as err:  # other answers, or a graph that cannot be quantised
        made, reason = None, str(err)
    if made is None:
        shutil.rmtree(folder / quantised)
        progress(f"left out: {reason}")
        return [variant]
    progress(
        f"{quantised}: {made.parity['latency_us']:.0f} us a run,"
        f" fp32 {made.parity['fp32_latency_us']:.0f}"
    )
    return [variant, quantised]


def _publish(work: Path, target: Path) -> None:
    """Sync every byte to the disk, then give the folder its name."""
    for path in sorted(work.rglob("*")):
        if path.is_dir():
            sync_folder(path)
        else:
            sync_file(path)
    work.chmod(0o755)  # mkdtemp made it for this user alone; the server may run as another
    sync_folder(work)
    try:
        work.rename(target)
    except OSError as err:
        if target.exists():  # another export took the version meanwhile
            raise _taken(target) from err
        raise
    sync_folder(target.parent)


def _taken(target: Path) -> ExportError:
    return ExportError(f"{target}: exists already; versions never change, take the next one")


def _bytes_under(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _check_depths(net: Supernet, depths: Sequence[int] | None) -> tuple[int, ...]:
    cuts = net.cuts if depths is None else tuple(sorted(set(depths)))
    if not cuts or not set(cuts) <= set(net.cuts):
        allowed = ", ".join(map(str, net.cuts))
        raise ExportError(f"depths: expected some of {allowed} for {net.name}, got {list(cuts)}")
    return cuts


def _check_data(
    net: Supernet, x: Array, y: NDArray[np.integer[Any]], class_names: Sequence[str]
) -> None:
    if str(x.dtype) not in DTYPES or x.shape[1:] != net.input_shape or not len(x):
        raise ExportError(
            f"held-out inputs: expected (n, {', '.join(map(str, net.input_shape))}) of"
            f" {' or '.join(DTYPES)}, at least one, got {x.shape} of {x.dtype}"
        )
    inside = y.shape == x.shape[:1] and y.dtype.kind in "iu" and 0 <= y.min() <= y.max()
    if not inside or y.max() >= net.classes:
        raise ExportError(
            f"held-out labels: expected ({len(x)},) whole numbers from 0 to {net.classes - 1},"
            f" got {y.shape} of {y.dtype}"
        )
    if len(class_names) != net.classes:
        raise ExportError(
            f"class names: expected {net.classes}, one a class, got {len(class_names)}"
        )


def _check_name(name: str, version: int) -> None:
    try:
        check_bundle_name(f"{name}/{version}/d1")
    except ManifestError as err:
        raise ExportError(
            f"expected a name of a-z, 0-9 and '-' and a version of up to 9 digits,"
            f" got {name!r} and {version!r}"
        ) from err


def _sample(x: Array) -> TensorSpec:
    return TensorSpec(str(x.dtype), x.shape[1:])
