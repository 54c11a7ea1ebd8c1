"""`splitedge export --run`: the graphs that a training run's method deploys.

    method                              on the device               on the server
    shared exits (multi-exit, SplitGP,  prefix and exit head        the stages behind
      SuperSFL with share_exits)
    HARMONY                             prefix and exit head        its own stages behind every cut
    auxiliary models (BESplit),         W_A, which answers, and     the stages behind
      averaged or each device's own     the prefix, for offloads
    own last layers (SplitLPF)          exit, prefix, last layer    the stages up to the features
    no exits (SplitFed, FedAvg, ...)    prefix and a trained exit   the stages behind

Every composition is the one that the run was scored with (docs/decisions/0021).
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from edge_sdk.errors import ConfigurationError
from edge_sdk.gate_form import EVIDENCE, check_evidence, read_gate
from edge_sdk.manifest import BundleManifest, ModelManifest
from edge_sdk.nets import Supernet
from edge_sdk.training.data.dataset import Dataset
from exporters.adopt.deployed import deployed_answers
from exporters.errors import ExportError
from exporters.graphs import DeviceGraphs, own_exit, shared_exit
from exporters.model import check_place, export_model
from exporters.offloads.settings import Narrow
from exporters.parity import run_torch
from exporters.run.heads import train_exits
from exporters.run.network import TrainedRun, load_run
from exporters.run.record import RunRecord, ScoreRecord
from exporters.run.samples import run_samples, training_samples
from exporters.scores import BundleScore, score_bundle

Array = NDArray[Any]
Labels = NDArray[np.int64]
Progress = Callable[[str], None]

# Depths that are offered where clients had the whole network and none was ever cut.
OFFERED: Final = 5


@dataclass(frozen=True, slots=True)
class RunExport:
    """An export that is asked for, and its place.

    Attributes:
        run: folder of the run. data: the user's word for its data; None takes the record's.
        train_exits: samples to train exits on; None trains none.
        depths: to publish; empty for those that the run offers.
        gate: measure of the exits, as text; None for the one that they were trained for.
        codec, bottleneck: as in `exporters.model.export_model`; None for those of the run's recipe.
    """

    run: Path
    out: Path
    name: str
    version: int
    data: str | None = None
    train_exits: str | None = None
    depths: tuple[int, ...] = ()
    int8: Literal["auto", "never"] = "auto"
    gate: str | None = None
    codec: str | None = None
    bottleneck: Narrow | None = None

    def command(self, train_exits: str) -> str:
        """The whole command that trains exits."""
        words = ["splitedge", "export", "--run", str(self.run), "--train-exits", train_exits]
        if self.data is not None:
            words += ["--data", self.data]
        for depth in self.depths:
            words += ["--depth", str(depth)]
        if self.int8 != "auto":
            words += ["--int8", self.int8]
        if self.gate is not None:
            words += ["--gate", self.gate]
        if self.codec is not None:
            words += ["--codec", self.codec]
        if self.bottleneck is not None:
            words += ["--bottleneck", str(self.bottleneck)]
        return shlex.join([*words, "--out", str(self.out), "--name", self.name])


def export_run(
    wanted: RunExport, progress: Progress = lambda _: None
) -> tuple[ModelManifest, dict[str, BundleScore]]:
    """Publish the model of a finished run.

    Returns: its manifest, and the score of each bundle on test samples.
    Raises: ExportError saying what to change, with the command that works where exits are missing;
        ParityError; StorageError.
    """
    check_place(wanted.out, wanted.name, wanted.version)
    trained = load_run(wanted.run)
    record = trained.record
    depths = choose_depths(trained, wanted)
    samples = run_samples(record, wanted.data)
    lacking = [depth for depth in depths if depth not in record.exits]
    if lacking and wanted.train_exits is not None:
        x, y = training_samples(record, wanted.train_exits)
        trained = train_exits(trained, x, y, lacking, progress)
    gate = _gate_of(record, wanted)
    for line in check_scores(trained, samples.x_test, samples.y_test, depths):
        progress(line)
    manifest = export_model(
        trained.halves.device,
        samples.x_held_out,
        samples.y_held_out,
        wanted.out,
        name=wanted.name,
        version=wanted.version,
        class_names=record.class_names,
        depths=depths,
        int8=wanted.int8,
        device=lambda net, depth: graphs_of(trained, net, depth, gate),
        server=trained.halves.server if record.own_server else None,
        codec=record.export.codec if wanted.codec is None else wanted.codec,
        bottleneck=(record.export.bottleneck if wanted.bottleneck is None else wanted.bottleneck),
        unlabelled_x=samples.x_train,
        progress=progress,
    )
    published = wanted.out / wanted.name / manifest.version
    return manifest, _bundle_scores(trained, manifest, published, samples)


def _gate_of(record: RunRecord, wanted: RunExport) -> str:
    """The gate of the exits, as text.

    Raises: ExportError for a measure of other evidence than the network learnt.
    """
    if wanted.gate is None:
        return record.gate
    try:
        for measure in read_gate(record.gate).measures:
            if measure in EVIDENCE:
                check_evidence(read_gate(wanted.gate).measures, EVIDENCE[measure])
    except ConfigurationError as err:
        raise ExportError(f"--gate {wanted.gate}: {err}") from err
    return wanted.gate


def _bundle_scores(
    trained: TrainedRun, manifest: ModelManifest, published: Path, samples: Dataset
) -> dict[str, BundleScore]:
    """The score of each bundle on test samples."""
    x, y = samples.x_test, samples.y_test
    labels: dict[int, Array] = {}
    scores = {}
    for variant in manifest.variants:
        depth = BundleManifest.load(published / "bundles" / variant).depth
        # a network that devices and server share gives one answer, wherever it is cut
        key = depth if trained.record.own_server else 0
        if key not in labels:
            labels[key] = run_torch(trained.halves.whole(depth), x)[0].argmax(axis=1)
        scores[variant] = score_bundle(
            published / "bundles" / variant,
            labels[key],
            x,
            y,
            offload=deployed_answers(published, manifest, variant),
        )
    return scores


def choose_depths(trained: TrainedRun, wanted: RunExport) -> tuple[int, ...]:
    """The depths to publish.

    Raises: ExportError for a depth that the run does not have, and for one without an exit if none
        is to be trained.
    """
    record, cuts = trained.record, trained.halves.device.cuts
    # the stages of a server of its own were trained for the clients' cuts alone
    allowed = record.depths if record.own_server else cuts
    depths = tuple(sorted(set(wanted.depths))) or _offered(record, cuts, wanted)
    for depth in depths:
        if depth not in allowed:
            raise ExportError(
                f"--depth {depth}: expected one of {', '.join(map(str, allowed))},"
                f" {'at which clients were cut' if record.own_server else 'where it can be cut'}"
            )
    lacking = [depth for depth in depths if depth not in record.exits]
    if lacking and wanted.train_exits is None:
        raise ExportError(_refusal(record, lacking, wanted))
    return depths


def graphs_of(trained: TrainedRun, net: Supernet, depth: int, gate: str) -> DeviceGraphs:
    """The modules behind a bundle's graphs.

    Args:
        net: the network with the stages of devices. gate: of its exits, as text.
    """
    record = trained.record
    if record.auxiliary is not None:
        model = trained.auxiliaries[depth]
        graphs = own_exit(
            net,
            depth,
            model.extractor,
            model.head,
            record.run,
            gate=gate,
            own=record.own_auxiliary,
        )
    else:
        graphs = shared_exit(net, depth, gate=gate, run=record.run, own_prefix=record.own_prefix)
    if not record.own_back:
        return graphs
    back = trained.halves.server.suffix(depth).classifier
    return replace(graphs, back=back, features=(back.in_features,))


def check_scores(trained: TrainedRun, x: Array, y: Labels, depths: Sequence[int]) -> list[str]:
    """One line for each score of the record: whether these weights and samples repeat it."""
    lines: list[str] = []
    record = trained.record
    for score in record.scores:
        shared = score.path == "whole" and not record.own_server
        if shared and lines:
            continue  # one network, wherever it is cut
        if not shared and score.depth not in depths:
            continue
        if record.depths:
            net = trained.halves.whole(score.depth) if score.path == "whole" else None
        else:
            net = trained.halves.device
        logits = run_torch(trained.exit(score.depth) if net is None else net, x)[0]
        lines.append(_compared(score, int((logits.argmax(axis=1) == y).sum()), len(y)))
    return lines


def _compared(score: ScoreRecord, right: int, samples: int) -> str:
    what = "device and server" if score.path == "whole" else "the exit"
    here = f"{what} at depth {score.depth}: {right / max(1, samples):.1%} of {samples} test samples"
    if (right, samples) == (score.right, score.samples):
        return f"{here}, as scored after training"
    return (
        f"{here}, but {score.right / max(1, score.samples):.1%} of {score.samples} after training:"
        " other samples, or other rounding of another torch"
    )


def _offered(record: RunRecord, cuts: Sequence[int], wanted: RunExport) -> tuple[int, ...]:
    """The depths of a run where the user names none."""
    if record.exits and wanted.train_exits is None:
        return record.exits
    if record.depths:
        return record.depths
    places = np.linspace(0, len(cuts) - 1, min(OFFERED, len(cuts))).round().astype(int)
    return tuple(cuts[place] for place in places)


def _refusal(record: RunRecord, lacking: Sequence[int], wanted: RunExport) -> str:
    """Sentences that say why there is no exit, with the command that trains one."""
    if record.auxiliary is not None:
        why = "its auxiliary models stayed on the devices"
    elif record.exits:
        why = f"no client trained an exit at depth {lacking[0]}"
    elif record.own_back:
        why = f"{record.method} has no exit heads, and its last layers stay on the devices"
    elif record.own_heads:
        why = f"the clients of {record.method} kept their exit heads (SuperSFL: share_exits = true)"
    else:
        why = f"{record.method} has no exit heads"
    command = wanted.command(wanted.data or record.data.source)
    labels = "with or without" if record.back else "with"
    return (
        f"{wanted.run}: expected an exit at depth {', '.join(map(str, lacking))}, with which a"
        f" device answers, found none: {why}. Samples like the devices', {labels} labels, can train"
        f" it: {command}"
    )
