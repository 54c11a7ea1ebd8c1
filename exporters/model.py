"""Export of a trained super-network: the whole tree of files that a server serves, or nothing."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from copy import deepcopy
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from edge_sdk.durable import make_folder, storage_error, sync_file, sync_folder
from edge_sdk.errors import ManifestError
from edge_sdk.manifest import ModelManifest, SegmentSpec, TensorSpec, check_bundle_name
from edge_sdk.nets import Supernet
from exporters.bundle import (
    BundleSource,
    HeldOut,
    spread_rows,
    torch_source,
    write_fp32,
    write_int8,
)
from exporters.errors import ExportError
from exporters.graphs import DeviceGraphs, shared_exit, write_segments
from exporters.measure import measure_cost
from exporters.parity import SAMPLES, require_segments, run_torch
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
        device: makes the graphs of a bundle; some methods run more than one on the device.
        progress: called with one line about each finished step.
    Raises: ExportError for data or a target that does not fit; ParityError, its subclass, if a
        graph does not reproduce the network; StorageError.
    """
    cuts = _check_depths(net, depths)
    _check_data(net, held_out_x, held_out_y, class_names)
    check_place(out, name, version)
    net = deepcopy(net).cpu().eval()
    held_out = HeldOut(held_out_x, held_out_y, run_torch(net, held_out_x)[0])
    calibration = None
    if int8 == "auto":
        usable = held_out_x if calibration_x is None else calibration_x
        calibration = usable[spread_rows(len(usable), CALIBRATION_SAMPLES)]

    def write(work: Path) -> ModelManifest:
        segments = _write_segments(net, cuts, held_out, work / "segments", progress)
        variants: list[str] = []
        for depth in cuts:
            source = torch_source(
                f"{name}/{version}",
                net,
                depth,
                device(net, depth),
                class_names=tuple(class_names),
                held_out=held_out,
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


def next_version(out: Path, name: str) -> int:
    """One more than the highest version of that model in `out`; 1 if there is none."""
    folder = out / name
    there = folder.iterdir() if folder.is_dir() else ()
    versions = [int(path.name) for path in there if path.name.isascii() and path.name.isdecimal()]
    return max(versions, default=0) + 1


def _write_segments(
    net: Supernet, cuts: tuple[int, ...], held_out: HeldOut, folder: Path, progress: Progress
) -> tuple[SegmentSpec, ...]:
    folder.mkdir()
    segments = []
    for segment in write_segments(net, _sample(held_out.x), folder, cuts):
        segments.append(segment)
        progress(f"segment {segment.file} of {len(cuts) + 1}")
    some = spread_rows(len(held_out.x), SAMPLES)
    x, logits = held_out.x[some], held_out.logits[some]
    error = require_segments(
        folder, segments, lambda depth, x: run_torch(net.prefix(depth), x)[0], x, logits
    )
    progress(f"segments give torch's logits within {error:.1e}")
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
