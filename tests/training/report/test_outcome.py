"""The outcome of a run: its weights, read again, are those that were scored."""

from __future__ import annotations

import tomllib
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
import torch
from torch import nn

from edge_sdk.training.streams import Stream
from exporters.errors import ExportError
from exporters.run.export import graphs_of
from exporters.run.network import load_run
from exporters.run.record import RECORD, WEIGHTS, read_run
from server.training.recipe.recipe import read_recipe
from server.training.report.evaluate import Evaluator
from server.training.report.outcome import write_outcome
from server.training.run.run import Row, Simulation
from server.training.simulation.build import build_simulation
from server.training.simulation.run import run_rounds
from tests.training.worlds import SMALL_RUN


def trained(text: str, recipe: str = SMALL_RUN) -> tuple[Simulation, list[Row]]:
    simulation = build_simulation(read_recipe(tomllib.loads(text + recipe)))
    rows: list[Row] = []
    list(run_rounds(simulation, rows))
    return simulation, rows


def right(module: Any, run: Simulation) -> int:
    with torch.no_grad():
        labels = module(torch.from_numpy(run.x_test)).argmax(1).numpy()
    return int((labels == run.y_test).sum())


def test_harmony_leaves_the_network_of_every_depth(tmp_path: Path) -> None:
    run, rows = trained('method = "harmony"\n')
    record = write_outcome(tmp_path, run, rows, "abc")
    assert record == read_run(tmp_path)
    assert (record.depths, record.exits, record.run) == ((1, 3), (1, 3), "abc")
    assert record.own_server
    assert record.own_prefix  # every client adapts its stages after training
    read = load_run(tmp_path)
    run.state.net.eval()
    run.state.trunk.eval()
    for depth in (1, 3):
        assert torch.equal(
            read.halves.whole(depth)(torch.from_numpy(run.x_test)),
            run.state.whole(depth)(torch.from_numpy(run.x_test)),
        )
        for path, module in (
            ("whole", read.halves.whole(depth)),
            ("exit", read.exit(depth)),
        ):
            found = record.score(path, depth)  # type: ignore[arg-type]  # the two names above
            assert found is not None
            assert (found.right, found.samples) == (right(module, run), 100)
    # the path that the report evaluates, depth by depth: two clients of each
    wholes = [record.score("whole", depth) for depth in (1, 3)]
    mean = np.mean([each.right / each.samples for each in wholes if each is not None])
    assert Evaluator(run).accuracy(supervised=True) == pytest.approx(float(mean))


@pytest.mark.parametrize("answers", ["server", "exit"])
def test_harmonys_clients_are_scored_by_what_the_folder_serves(
    tmp_path: Path, answers: str
) -> None:
    """Their own prefix and exit head in front of the stages that an export gives the server.

    After a few steps the server answers all samples, after more of them the exits most.
    """
    more = SMALL_RUN.replace("iterations = 6", "iterations = 50\nmomentum = 0.8")
    run, rows = trained('method = "harmony"\n', SMALL_RUN if answers == "server" else more)
    write_outcome(tmp_path, run, rows)
    served = load_run(tmp_path)
    how = run.method.fine_tuning
    assert how.steps == 3
    scores = Evaluator(run, rho=0.0).clients(supervised=True)
    rates = [score.exit_rate or 0.0 for score in scores]
    assert min(rates) == 0.0 if answers == "server" else max(rates) > 0.5
    for score in scores:
        client, plan = run.clients[score.client], run.plans[score.client]
        prefix = deepcopy(served.halves.device.prefix(plan.depth)).train()
        head = deepcopy(served.halves.device.exit_head(plan.depth)).train()
        generator = Stream.FINE_TUNING.generator(plan.seed, client=score.client)
        optimiser = torch.optim.SGD([*prefix.parameters(), *head.parameters()], how.rate or 0.0)
        for _ in range(how.steps):
            rows_of = generator.permutation(client.samples)[: plan.training.batch]
            x, y = torch.from_numpy(client.x[rows_of]), torch.from_numpy(client.y[rows_of])
            optimiser.zero_grad()
            nn.functional.cross_entropy(head(prefix(x)), y).backward()  # type: ignore[no-untyped-call]  # torch
            optimiser.step()
        mine = np.isin(run.y_test, np.unique(client.y))
        with torch.no_grad():
            z = prefix.eval()(torch.from_numpy(run.x_test[mine]))
            early = head.eval()(z)
            behind = served.halves.server.suffix(plan.depth).eval()(z).argmax(1)
        entropy = torch.special.entr(early.softmax(1)).sum(1)
        assert score.threshold is not None
        exits = entropy < score.threshold
        labels = torch.where(exits, early.argmax(1), behind).numpy()
        assert score.inside.accuracy == pytest.approx((labels == run.y_test[mine]).mean())
        assert score.exit_rate == pytest.approx(float(exits.float().mean()))


def test_a_simulation_leaves_the_mean_of_the_clients_last_layers(tmp_path: Path) -> None:
    run, rows = trained('method = "splitlpf"\n')
    record = write_outcome(tmp_path, run, rows)
    assert record.back
    assert record.exits == ()
    each = [client.personal["back.weight"] for client in run.clients.values()]
    samples = [client.samples for client in run.clients.values()]
    expected = sum(weight * n for weight, n in zip(each, samples, strict=True)) / sum(samples)
    last = load_run(tmp_path).halves.server.suffix(1).classifier.weight
    np.testing.assert_allclose(last.detach().numpy(), expected, rtol=1e-5, atol=1e-7)


def test_a_simulation_leaves_the_mean_of_the_auxiliary_models_of_a_depth(tmp_path: Path) -> None:
    run, rows = trained(
        'method = "besplit"\nmethod_numbers = { auxiliary = "personal" }\n'
        '[parts.weigh]\nmethod = "splitfed-v1"\n'
    )
    record = write_outcome(tmp_path, run, rows)
    assert (record.auxiliary, record.gate, record.exits) == ("global", "vacuity-exp", (1, 3))
    names = [name for name, plan in run.plans.items() if plan.depth == 3]
    key = "auxiliary.extractor.stage3.0.weight"
    samples = [run.clients[name].samples for name in names]
    expected = sum(
        run.clients[name].personal[key] * n for name, n in zip(names, samples, strict=True)
    ) / sum(samples)
    weights = dict(load_run(tmp_path).auxiliaries[3].named_parameters())
    found = weights["extractor.stage3.0.weight"].detach().numpy()
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-7)


def test_a_run_leaves_the_averaged_auxiliary_model_of_each_cut(tmp_path: Path) -> None:
    run, rows = trained('method = "besplit"\n')
    record = write_outcome(tmp_path, run, rows)
    assert (record.auxiliary, record.own_auxiliary, record.exits) == ("global", False, (1, 3))
    read = load_run(tmp_path)
    assert read.record == record
    for depth, model in read.auxiliaries.items():
        for name, tensor in run.state.auxiliaries[depth].state_dict().items():
            assert torch.equal(model.state_dict()[name], tensor)
        graphs = graphs_of(read, read.halves.device, depth, record.gate)
        assert graphs.personal == ()  # no device has one of its own


def test_a_folder_without_a_finished_run_is_told_so(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"finished run with run\.json .*--resume"):
        load_run(tmp_path)
    run, rows = trained('method = "fedavg"\n')
    write_outcome(tmp_path, run, rows)
    table = orjson.loads((tmp_path / RECORD).read_bytes())
    for changed, message in (
        (table | {"format": 9}, "format: expected 1 "),
        (table | {"colour": "red"}, "unknown colour; update splitedge"),
        (table | {"class_names": ["a"]}, "class_names: expected 10"),
        (table | {"scores": [{"path": "whole"}]}, "scores: expected also depth"),
    ):
        (tmp_path / RECORD).write_bytes(orjson.dumps(changed))
        with pytest.raises(ExportError, match=message):
            read_run(tmp_path)
    network = table["network"] | {"classes": 4}
    other = table | {"network": network, "class_names": list("abcd")}
    (tmp_path / RECORD).write_bytes(orjson.dumps(other))
    with pytest.raises(ExportError, match=rf"{WEIGHTS}: does not fit the network of its record"):
        load_run(tmp_path)
