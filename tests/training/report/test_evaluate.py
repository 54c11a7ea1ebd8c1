"""Evaluation: the named path answers, on the global test set and for each client."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import recall_score
from torch import nn

from server.training.recipe.recipe import read_recipe
from server.training.report.evaluate import Evaluator
from server.training.report.outcome import trained_run
from server.training.report.own_backs import own_back
from server.training.report.report import report_of
from server.training.report.thresholds import THRESHOLDS
from server.training.run.run import Simulation
from server.training.simulation.build import build_simulation
from server.training.simulation.run import run_rounds


def simulation_of(
    method: str,
    *,
    rounds: int = 1,
    data: dict[str, Any] | None = None,
    train: dict[str, Any] | None = None,
    **rest: Any,
) -> Simulation:
    recipe = {
        "method": method,
        "data": {"name": "digits", "clients": 4, "partition": "quantity", "train_max": 400}
        | {"numbers": {"per_client": 5}}
        | (data or {}),
        "train": {"backbone": "tiny", "rounds": rounds, "learning_rate": 0.1, "batch": 32}
        | {"depth": 2}
        | (train or {}),
        **rest,
    }
    return build_simulation(read_recipe(recipe))


@pytest.mark.parametrize("method", ["fedavg", "splitfed-v1", "splitlpf", "ditto"])
def test_accuracy_by_class_is_sklearns_recall(method: str) -> None:
    simulation = simulation_of(method, data={"test_max": 300})
    rows: list[Any] = []
    list(run_rounds(simulation, rows))
    evaluator = Evaluator(simulation)
    found = evaluator.by_class(supervised=True)
    assert list(found) == list(simulation.class_names)
    counts = np.bincount(simulation.y_test, minlength=10)
    each = np.array([found[name] for name in simulation.class_names])
    whole = evaluator.accuracy(supervised=True)
    assert (counts @ each) / counts.sum() == pytest.approx(whole)
    if method == "fedavg":
        labels = evaluator.labels(simulation.state.net)
        recall = recall_score(simulation.y_test, labels, average=None, labels=range(10))
        assert each == pytest.approx(recall)


def test_a_class_without_a_test_sample_has_no_accuracy() -> None:
    simulation = simulation_of("fedavg")
    kept = simulation.y_test != 3
    simulation = replace(simulation, x_test=simulation.x_test[kept], y_test=simulation.y_test[kept])
    found = Evaluator(simulation).by_class(supervised=True)
    assert found["3"] is None
    assert all(value is not None for name, value in found.items() if name != "3")


def zero_head(depth: int = 2, likes: int | None = None) -> dict[str, torch.Tensor]:
    """An exit head that is unsure (entropy ln 10), or sure of one class."""
    bias = torch.zeros(10)
    if likes is not None:
        bias[likes] = 100.0
    # tiny's exits pool to 2 x 2 and are flattened before the linear layer
    shapes = {1: 8, 2: 16, 3: 32, 4: 32}
    return {
        f"exit{depth}.2.weight": torch.zeros(10, 4 * shapes[depth]),
        f"exit{depth}.2.bias": bias,
    }


def head_names(simulation: Simulation, depth: int) -> list[str]:
    return [name for name in simulation.state.read() if name.startswith(f"exit{depth}.")]


def test_full_accuracy_is_that_of_the_whole_network() -> None:
    simulation = simulation_of("fedavg", rounds=2, train={"learning_rate": 0.3})
    for _ in run_rounds(simulation, []):
        pass
    net = simulation.state.net.eval()
    right = 0
    for x, label in zip(simulation.x_test, simulation.y_test, strict=True):
        with torch.no_grad():
            right += int(net(torch.from_numpy(x)[None]).argmax()) == label
    assert Evaluator(simulation).accuracy(supervised=False) == right / len(simulation.y_test)


def test_exits_are_evaluated_with_each_clients_own_head() -> None:
    simulation = simulation_of("supersfl")
    assert set(zero_head()) == set(head_names(simulation, 2))
    for likes, client in enumerate(simulation.clients.values()):
        client.personal = zero_head(likes=likes)
    shares = [float((simulation.y_test == likes).mean()) for likes in range(4)]
    evaluator = Evaluator(simulation)
    assert evaluator.accuracy(supervised=False) == pytest.approx(np.mean(shares), abs=1e-12)
    assert evaluator.exits()[2] == pytest.approx(np.mean(shares), abs=1e-12)


def test_exits_stand_alone_only_while_the_server_has_never_supervised() -> None:
    evaluator = Evaluator(simulation_of("supersfl"))
    assert evaluator.path(supervised=False) == "exits"
    assert evaluator.path(supervised=True) == "full"
    # without an exit head, or without a server step, there is one path only
    assert Evaluator(simulation_of("splitfed-v1")).path(supervised=False) == "full"
    assert Evaluator(simulation_of("fedavg")).path(supervised=False) == "full"


def test_a_client_is_tested_on_its_classes_and_on_rho_times_as_many_others() -> None:
    simulation = simulation_of("fedavg", evaluate={"rho": 0.4})
    for client, found in zip(
        simulation.clients.values(), Evaluator(simulation).clients(supervised=False), strict=True
    ):
        own = int(np.isin(simulation.y_test, np.unique(client.y)).sum())
        assert found.inside.samples == own
        assert found.outside.samples == round(0.4 * own)


def test_a_client_is_tested_by_its_own_class_shares() -> None:
    """The accuracy of each class counts as often as the class is among the client's samples."""
    data = {"partition": "udds", "numbers": {}, "split": "own-mix"}
    simulation = simulation_of(
        "splitfed-v1", rounds=2, data=data, train={"learning_rate": 0.3}, evaluate={"rho": 0.1}
    )
    for _ in run_rounds(simulation, []):
        pass
    evaluator = Evaluator(simulation)
    right = evaluator.labels(simulation.state.whole(2)) == simulation.y_test
    by_class = [right[simulation.y_test == label].mean() for label in range(10)]
    assert np.ptp(by_class) > 0.1
    for found in evaluator.clients(supervised=True):
        client = simulation.clients[found.client]
        shares = np.bincount(client.y, minlength=10) / client.samples
        assert found.inside.accuracy == pytest.approx(shares @ by_class)
        # what is out of distribution is not in the mix
        assert found.outside.samples == min(
            round(0.1 * found.inside.samples), len(simulation.y_test) - found.inside.samples
        )


def test_a_client_of_nearly_all_classes_is_tested_on_the_others_there_are() -> None:
    data = {"partition": "dirichlet", "numbers": {"concentration": 100.0}, "train_max": None}
    simulation = simulation_of("fedavg", data=data, evaluate={"rho": 0.4})
    for found in Evaluator(simulation).clients(supervised=False):
        assert (found.inside.samples, found.outside.samples) == (len(simulation.y_test), 0)


def test_a_gate_that_never_opens_gives_the_servers_answers() -> None:
    simulation = simulation_of("multi-exit", evaluate={"rho": 0.4})
    # entropy ln 10 = 2.303 is above the loosest threshold, 2.3
    simulation.state.write(zero_head())
    full = Evaluator(simulation)
    wholes = full._right_of_wholes()
    for name, found in zip(simulation.clients, full.clients(supervised=True), strict=True):
        expected = wholes[name]
        test = full._tests[name]
        assert found.exit_rate == 0
        assert found.inside.correct == expected[test.id].sum()
        assert found.outside.correct == expected[test.ood].sum()


def test_a_gate_opens_where_the_exit_knows_better() -> None:
    simulation = simulation_of("multi-exit", evaluate={"rho": 0.4})
    with torch.no_grad():  # a server that always says 9, and exits that are sure of 0
        head = simulation.state.net.head
        last = [module for module in head.modules() if isinstance(module, nn.Linear)][-1]
        last.weight.zero_()
        last.bias.copy_(torch.nn.functional.one_hot(torch.tensor(9), 10).float())
    simulation.state.write(zero_head(likes=0))
    evaluator = Evaluator(simulation)
    for name, found in zip(simulation.clients, evaluator.clients(supervised=True), strict=True):
        test = evaluator._tests[name]
        labels = simulation.y_test[np.concatenate([test.id, test.ood])]
        zeros, nines = int((labels == 0).sum()), int((labels == 9).sum())
        # every exit's entropy is 0: either all leave by it or, were the grid empty, none
        assert zeros != nines
        assert found.inside.correct + found.outside.correct == zeros
        assert found.exit_rate == 1
        assert found.threshold == max(THRESHOLDS)


def test_thresholds_follow_the_number_of_classes(tmp_path: Any) -> None:
    x, y = np.random.default_rng(0).random((40, 1, 8, 8)).astype(np.float32), np.arange(40) % 2
    np.savez(tmp_path / "two.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    data = {"name": "two.npz", "folder": str(tmp_path), "partition": "iid", "numbers": {}}
    simulation = simulation_of("multi-exit", data=data)
    scale = np.log(2) / np.log(10)
    for found in Evaluator(simulation).clients(supervised=True):
        assert found.threshold in [pytest.approx(point * scale) for point in THRESHOLDS]


def test_a_personal_model_is_lambda_of_its_own_and_the_rest_the_average() -> None:
    simulation = simulation_of("splitgp", method_numbers={"personal_share": 0.9})
    for _ in run_rounds(simulation, []):
        pass
    name, client = next(iter(simulation.clients.items()))
    prefix, head = Evaluator(simulation)._pair(name)
    shared, own = simulation.state.read(), client.personal
    expected = 0.9 * own["stage1.0.weight"] + 0.1 * shared["stage1.0.weight"]
    assert torch.allclose(prefix.state_dict()["stage1.0.weight"], expected, atol=1e-7)
    expected = 0.9 * own["exit2.2.bias"] + 0.1 * shared["exit2.2.bias"]
    assert torch.allclose(head.state_dict()["2.bias"], expected, atol=1e-7)


def test_fine_tuning_fits_a_client_to_its_own_classes() -> None:
    def inside(steps: int) -> float:
        simulation = simulation_of(
            "splitgp",
            rounds=3,
            data={"numbers": {"per_client": 5}},
            train={"learning_rate": 0.2},
            method_numbers={"finetune_steps": steps, "personal_share": 0.2},
        )
        for _ in run_rounds(simulation, []):
            pass
        return float(
            np.mean([c.inside.accuracy for c in Evaluator(simulation).clients(supervised=True)])
        )

    assert inside(100) > inside(0) + 0.1


def test_evaluating_changes_nothing() -> None:
    data = {"partition": "iid", "numbers": {}}
    simulation = simulation_of("splitgp", data=data, method_numbers={"finetune_steps": 3})
    for _ in run_rounds(simulation, []):
        pass
    before = simulation.state.read()
    kept = {name: dict(client.personal) for name, client in simulation.clients.items()}
    simulation.state.net.train()
    nothing: dict[str, Any] = {
        "participants": [],
        "missing": [],
        "refused": {},
        "bytes_by_kind": {},
    }
    nothing |= {"seconds": 0.0, "bytes_up": 0, "bytes_down": 0}
    report_of(simulation, [{"supervised": True} | nothing])
    assert simulation.state.net.training
    after = simulation.state.read()
    assert all(torch.equal(before[key], after[key]) for key in before)
    for name, client in simulation.clients.items():
        assert all(torch.equal(kept[name][key], client.personal[key]) for key in kept[name])


def test_fairness_is_that_of_the_clients_in_the_report() -> None:
    simulation = simulation_of(
        "splitfed-v1", rounds=2, train={"learning_rate": 0.3}, evaluate={"rho": 0.4}
    )
    rows: list[dict[str, Any]] = []
    for _ in run_rounds(simulation, rows):
        pass
    report = report_of(simulation, rows)
    right = [
        (c["accuracy_id"] * c["tested_id"] + c["accuracy_ood"] * c["tested_ood"])
        / (c["tested_id"] + c["tested_ood"])
        for c in report["each_client"]
    ]
    final = report["final"]
    assert final["jain"] == pytest.approx(100 * sum(right) ** 2 / (4 * sum(s * s for s in right)))
    assert final["std"] == pytest.approx(np.std(right))
    inside = [c["accuracy_id"] for c in report["each_client"]]
    assert final["accuracy_id"] == pytest.approx(np.mean(inside))


def test_backs_are_each_client_s_own_on_the_shared_network() -> None:
    simulation = simulation_of("splitlpf", data={"test_max": 200})
    for sure_of, client in enumerate(simulation.clients.values()):
        bias = torch.zeros(10)
        bias[sure_of] = 1e6
        client.personal |= {"back.weight": torch.zeros(10, 64), "back.bias": bias}
    evaluator = Evaluator(simulation)
    assert evaluator.path(supervised=True) == evaluator.answers(supervised=True) == "backs"
    # each client answers one class to everything
    shares = [float((simulation.y_test == sure_of).mean()) for sure_of in range(4)]
    assert evaluator.accuracy(supervised=True) == pytest.approx(np.mean(shares))
    for sure_of, score in enumerate(evaluator.clients(supervised=True)):
        right = score.inside.correct + score.outside.correct
        known = np.unique(simulation.clients[score.client].y)
        expected = int((simulation.y_test == sure_of).sum())
        assert right == expected if sure_of in known else right <= expected


def test_a_refit_fits_each_back_to_the_average_of_all() -> None:
    """Tests, the exported mean and the devices (client.fine_tuning) have the same layers."""
    simulation = simulation_of(
        "splitlpf",
        rounds=3,
        data={"partition": "udd", "numbers": {}},
        train={"learning_rate": 0.1, "momentum": 0.9, "epochs": 4, "batch": 16},
    )
    for _ in run_rounds(simulation, []):
        pass
    kept = {name: dict(client.personal) for name, client in simulation.clients.items()}

    def accuracy(epochs: int) -> float:
        method = replace(simulation.method, refit_epochs=epochs)
        scores = Evaluator(replace(simulation, method=method)).clients(supervised=True)
        return float(np.mean([score.inside.accuracy for score in scores]))

    assert accuracy(3) > accuracy(0) + 0.05
    for name, client in simulation.clients.items():
        assert all(torch.equal(kept[name][key], client.personal[key]) for key in kept[name])
    method = replace(simulation.method, refit_epochs=2)
    run = replace(simulation, method=method)
    backs = {name: own_back(run, name).weight for name in run.clients}
    samples = {name: client.samples for name, client in run.clients.items()}
    mean = sum(samples[name] * back for name, back in backs.items()) / sum(samples.values())
    exported = trained_run(run, [{"participants": list(backs)}]).halves.server
    torch.testing.assert_close(exported.suffix(2).classifier.weight, mean)


def test_before_its_first_round_a_client_s_back_is_that_of_the_seed() -> None:
    simulation = simulation_of("splitlpf", data={"test_max": 200})
    evaluator = Evaluator(simulation)
    x = torch.from_numpy(simulation.x_test)
    with torch.no_grad():
        right = simulation.state.net.eval()(x).argmax(1).numpy() == simulation.y_test
    assert evaluator.accuracy(supervised=False) == pytest.approx(right.mean())


@pytest.mark.parametrize("own_rate", [False, True])
def test_a_back_is_refitted_at_the_rate_of_the_last_round(own_rate: bool) -> None:
    def back(rate: float, decay: float) -> torch.Tensor:
        numbers = {"refit_epochs": 1, "dropout": 0.0} | ({"back_rate": rate} if own_rate else {})
        train = {"learning_rate": 0.1 if own_rate else rate, "decay": decay}
        simulation = simulation_of("splitlpf", rounds=3, train=train, method_numbers=numbers)
        return own_back(simulation, "client-0").weight

    # the third round's rate is a quarter of the first one's
    assert torch.equal(back(0.1, 0.5), back(0.025, 1.0))
    assert not torch.equal(back(0.1, 0.5), back(0.1, 1.0))


def test_fine_tuning_is_at_the_rate_of_the_last_round_or_at_one_of_its_own() -> None:
    def weights(rate: float, decay: float, **numbers: float) -> torch.Tensor:
        simulation = simulation_of(
            "splitgp",
            rounds=3,
            train={"learning_rate": rate, "decay": decay},
            method_numbers={"finetune_steps": 2, **numbers},
        )
        prefix, _ = Evaluator(simulation)._personalised("client-0")
        weight: torch.Tensor = prefix.state_dict()["stage1.0.weight"]
        return weight

    assert torch.equal(weights(0.1, 0.5), weights(0.025, 1.0))
    own = weights(0.1, 0.5, finetune_rate=0.2)
    assert torch.equal(own, weights(0.1, 1.0, finetune_rate=0.2))
    assert not torch.equal(own, weights(0.1, 0.5))
