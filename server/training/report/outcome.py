"""Outcome of a finished run, for `splitedge export --run`: its weights, and the record of them.

    FOLDER/weights.safetensors    exporters.run.network
    FOLDER/run.json               exporters.run.record

The weights are those that devices share. A simulation has its clients in this process, so it can
leave the mean of what each kept to itself (auxiliary models, last layers). Devices keep theirs.
Everything is scored as it is written, without anybody's personal weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Final

import torch
from torch import nn

from edge_sdk.bundles.namespaces import AUXILIARY, BACK
from edge_sdk.nets.supernet import Supernet
from edge_sdk.training.client.auxiliary import Auxiliary, auxiliary_of
from edge_sdk.training.protocol.messages import Weights
from edge_sdk.training.protocol.weights import load_weights, read_weights
from exporters.composition import Composition
from exporters.run.network import TrainedRun, write_weights
from exporters.run.record import (
    DataRecord,
    NetworkRecord,
    RunRecord,
    ScoredPath,
    ScoreRecord,
)
from server.training.core.weighted_mean import weighted_mean
from server.training.report.evaluate import predicted_labels
from server.training.report.metrics import score
from server.training.report.own_backs import own_back
from server.training.run.run import Row, Run, Simulation

BATCH: Final = 512


def write_outcome(folder: Path, run: Run, rows: Sequence[Row], run_id: str = "") -> RunRecord:
    """Write weights and record of a finished run into its folder.

    Args:
        run_id: by which devices know the personal weights of this run.
    Raises: StorageError.
    """
    trained = trained_run(run, rows, run_id)
    write_weights(folder, trained)
    record = replace(trained.record, scores=tuple(_scores(trained, run)))
    record.write(folder)
    return record


def trained_run(run: Run, rows: Sequence[Row], run_id: str = "") -> TrainedRun:
    """The run's network, as devices and server share it."""
    recipe, method = run.recipe, run.method
    part = method.client
    took_part = _took_part(run, rows)
    depths = () if part.whole else tuple(sorted({plan.depth for plan in run.plans.values()}))
    halves = Composition(run.state.net, run.state.trunk).frozen()
    back = not part.own_back or _set_mean_back(run, halves.server)
    auxiliaries = {}
    if part.shared_auxiliary:
        cuts = {run.plans[name].depth for name in took_part}
        auxiliaries = {cut: _still(run.state.auxiliaries[cut]) for cut in sorted(cuts)}
    elif part.own_auxiliary:
        auxiliaries = _mean_auxiliaries(run, halves.device)
    exits: tuple[int, ...] = tuple(auxiliaries)
    if part.distil is None and part.exit_head and method.share_exits:
        exits = tuple(sorted({run.plans[name].depth for name in took_part}))
    data = recipe.data
    record = RunRecord(
        method=method.name,
        rounds=len(rows),
        network=replace(_network_record(run), backbone_folder=recipe.train.backbone_folder),
        class_names=run.class_names,
        data=DataRecord(
            source=data.word,
            folder=None if data.folder is None else data.folder.absolute(),
            held_out=data.held_out,
            train_max=data.train_max,
            test_max=data.test_max,
            # samples of one test set are the same, however they weigh
            split="local" if data.split == "local" else "global",
        ),
        place="simulation" if isinstance(run, Simulation) else "devices",
        depths=depths,
        exits=exits,
        auxiliary=None if part.distil is None else part.distil.head,
        own_heads=part.exit_head and not method.share_exits,
        own_server=run.state.trunk is not run.state.net,
        own_auxiliary=not part.shared_auxiliary,
        own_back=part.own_back,
        back=back,
        own_prefix=bool(part.personal_share or method.finetune_steps),
        gate=method.gate,
        run=run_id,
        export=recipe.export,
    )
    return TrainedRun(record, halves, auxiliaries)


def _took_part(run: Run, rows: Sequence[Row]) -> list[str]:
    """Clients whose work is in the weights."""
    names = {name for row in rows for name in row["participants"]}
    return [name for name in run.plans if name in names]


def _network_record(run: Run) -> NetworkRecord:
    plan = next(iter(run.plans.values()))
    channels = plan.part.bottleneck
    return NetworkRecord(
        backbone=plan.backbone,
        input_shape=plan.input_shape,
        classes=plan.classes,
        mean=plan.mean,
        std=plan.std,
        seed=plan.seed,
        norm=plan.training.norm,
        bottleneck=None if channels is None else (plan.depth, channels),
    )


def _scores(trained: TrainedRun, run: Run) -> list[ScoreRecord]:
    """Right answers on the test part, of every path that these weights can answer by.

    The networks move to the run's device for that.
    """
    record, halves = trained.record, trained.halves
    for module in (halves.device, halves.server, *trained.auxiliaries.values()):
        module.to(run.device)
    depths = record.depths or (halves.device.L,)
    scores = []
    if record.back:
        one = None
        for depth in depths:
            if record.own_server or one is None:
                net = halves.whole(depth) if record.depths else halves.device
                one = _score("whole", depth, net, run)
            scores.append(replace(one, depth=depth))
    scores += [_score("exit", depth, trained.exit(depth), run) for depth in record.exits]
    return scores


def _score(path: ScoredPath, depth: int, net: nn.Module, run: Run) -> ScoreRecord:
    labels = predicted_labels(net, run.x_test, run.device, BATCH)
    counted = score(labels, run.y_test)
    return ScoreRecord(path, depth, counted.samples, int(counted.correct))


def _set_mean_back(run: Run, server: Supernet) -> bool:
    """Set the last layer to the mean of the clients' own, by their samples.

    Returns: whether there is one; devices keep theirs.
    """
    if not isinstance(run, Simulation):
        return False
    own = {
        name: read_weights(own_back(run, name))
        for name, client in run.clients.items()
        if BACK.select(client.personal)
    }
    if not own:
        return False
    load_weights(server.suffix(min(server.cuts)).classifier, _mean(own, _samples(run)))
    return True


def _mean_auxiliaries(run: Run, net: Supernet) -> dict[int, Auxiliary]:
    """The mean of the clients' auxiliary models, by depth and by their samples."""
    if not isinstance(run, Simulation):
        return {}
    found: dict[int, dict[str, Weights]] = {}
    for name, client in run.clients.items():
        kept = AUXILIARY.select(client.personal)
        if kept:
            found.setdefault(run.plans[name].depth, {})[name] = kept
    models = {}
    for depth, own in sorted(found.items()):
        plan = run.plans[next(iter(own))]
        assert plan.part.distil is not None, "a client with an auxiliary model has a plan for it"
        model = deepcopy(auxiliary_of(net, depth, plan.part.distil.head, plan.seed))
        model.load(AUXILIARY.prefixed(_mean(own, _samples(run))))
        models[depth] = model.eval()
    return models


def _still(model: Auxiliary) -> Auxiliary:
    """A copy on the CPU that answers."""
    return deepcopy(model).cpu().eval()


def _samples(run: Simulation) -> dict[str, int]:
    return {name: client.samples for name, client in run.clients.items()}


def _mean(own: Mapping[str, Weights], samples: Mapping[str, int]) -> Weights:
    """sum n_k * w_k / sum n_k of each tensor, on the CPU."""
    total = float(sum(samples[name] for name in own))
    mean: Weights = {}
    for key, tensor in next(iter(own.values())).items():
        votes = [(float(samples[name]), each[key].cpu()) for name, each in own.items()]
        mean[key] = weighted_mean(torch.zeros_like(tensor, device="cpu"), 0.0, votes, total)
    return mean
