"""Accuracy of a simulation's networks, on the global test set and for every client.

    full     the whole network: how most methods are evaluated
    exits    every client's prefix and exit head: the only trained path while the server has never
             supervised
    gated    the exit head where its uncertainty is below a threshold, else the server: methods
             that train and share their exits together with the rest (multi-exit, SplitGP)
    backs    the whole network with each client's own last layer: SplitLPF, FedPer
    own      a whole network of each client's own: Ditto; on the global test set the average is
             tested

docs/methods/common.md.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from typing import Any, Final, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from edge_sdk.gate_form import read_gate
from edge_sdk.training.client.auxiliary import Auxiliary, build_auxiliary
from edge_sdk.training.client.fine_tuning import fine_tune
from edge_sdk.training.data.load import Array
from edge_sdk.training.protocol.weights import load_weights, split_exit_head
from server.training.recipe.partition import RhoTest, own_mix, rho_tests
from server.training.report.client_scores import ClientScore, GatedScore, by_choice, gated_client
from server.training.report.metrics import Score, benign_rate, score
from server.training.report.own_backs import base_of, own_back, own_network
from server.training.report.thresholds import (
    PairAnswers,
    Right,
    chosen_thresholds,
    right_answers,
    threshold_grid,
)
from server.training.report.uncertainty import uncertainty_of
from server.training.run.run import Simulation

AnswerPath = Literal["full", "exits", "gated", "backs", "own"]

BATCH: Final = 128  # 512 took 120 MiB more on cnn6 and was no faster
# Drift, as a share of a client's own test samples.
_DRIFT: Final = {"without_drift": 0.0, "with_drift": 1.0}


class Evaluator:
    """Measures a simulation in its present state.

    Args:
        rho: share of out-of-distribution samples in clients' tests; None for the recipe's.
    """

    def __init__(self, run: Simulation, rho: float | None = None) -> None:
        self._run = run
        self._tests = _tests(run, run.recipe.evaluate.rho if rho is None else rho)

    @property
    def tests(self) -> Mapping[str, RhoTest]:
        """Test samples of every client."""
        return self._tests

    def path(self, *, supervised: bool) -> AnswerPath:
        """Path that answers the global test set: exits while the server has never supervised."""
        method = self._run.method
        if method.server_step is not None and method.client.exit_head and not supervised:
            return "exits"
        return "backs" if method.client.own_back else "full"

    def answers(self, *, supervised: bool) -> AnswerPath:
        """Path that answers a client's test samples."""
        path = self.path(supervised=supervised)
        if self._run.method.client.own_network is not None:
            return "own"
        return "gated" if path != "exits" and self._run.method.share_exits else path

    def accuracy(self, *, supervised: bool) -> float:
        """Accuracy on the global test set, by the path that was trained."""
        path = self.path(supervised=supervised)
        each = self._right(path).values()
        if path == "full":
            # in whole numbers: networks that clients share change no bit of the mean
            return sum(int(right.sum()) for right in each) / sum(map(len, each))
        return float(np.mean([right.mean() for right in each]))

    def by_class(self, *, supervised: bool) -> dict[str, float | None]:
        """Share of right answers to the global test set's samples of each class, by class name.

        The path is that of `accuracy`, and each figure the mean over the clients. None for a class
        without a test sample.
        """
        y_test = self._run.y_test
        each = list(self._right(self.path(supervised=supervised)).values())
        found: dict[str, float | None] = {}
        for label, name in enumerate(self._run.class_names):
            rows = np.flatnonzero(y_test == label)
            means = [float(right[rows].mean()) for right in each] if len(rows) else []
            found[name] = statistics.fmean(means) if means else None
        return found

    def exit_accuracy(self) -> float:
        """Accuracy of exits on the global test set: the mean over clients, each with its head."""
        return float(np.mean([right.mean() for right in self._right("exits").values()]))

    def exits(self) -> dict[int, float]:
        """Accuracy of exits on the global test set by depth: mean over the clients of a depth."""
        if not self._run.method.client.exit_head:
            return {}
        by_depth: dict[int, list[float]] = {}
        for name, right in self._right("exits").items():
            by_depth.setdefault(self._run.plans[name].depth, []).append(float(right.mean()))
        return {depth: float(np.mean(each)) for depth, each in sorted(by_depth.items())}

    def clients(self, *, supervised: bool) -> list[ClientScore]:
        """Scores of every client on its own test samples."""
        answers = self.answers(supervised=supervised)
        if answers == "gated":
            return self._gated_scores()
        right = self._right(answers)
        return [self._score(name, right[name]) for name in self._tests]

    def drift(self, *, supervised: bool) -> dict[str, Any] | None:
        """Accuracy of clients with and without drift, whatever the recipe's `rho`.

        HARMONY, Table 5 (Out-of-Client). Without drift each client is tested on its own samples,
        with drift on these and as many of the other clients', drawn with replacement. Both are
        means over clients. A gate's threshold is the same on both sides, except the oracle's.

        Returns: None where all clients are tested on samples of one common test set, which has no
            data of other clients apart (`split = "local"` splits it by client).
        """
        run = self._run
        if not run.tests:
            return None
        found = {
            side: Evaluator(run, rho).clients(supervised=supervised) for side, rho in _DRIFT.items()
        }
        accuracies = {
            side: {score.client: score.accuracy for score in scores}
            for side, scores in found.items()
        }
        each = {name: {side: accuracies[side][name] for side in _DRIFT} for name in run.tests}
        choices: dict[str, dict[str, float]] = {}
        for side, scores in found.items():
            for choice, chosen in by_choice(scores).items():
                mean = statistics.fmean(score.accuracy for score in chosen)
                choices.setdefault(choice, {})[side] = mean
        means = {side: statistics.fmean(found.values()) for side, found in accuracies.items()}
        return means | {"by_threshold": choices or None, "each": each}

    def auxiliary(self) -> dict[str, Any] | None:
        """Accuracy of clients' auxiliary models on the global test set, and their BMR if asked for.

        BESplit-A; BESplit-G is the whole network's accuracy. A client answers by the model of its
        cut, or by its own; one that has not taken part yet has no own model and is left out.

        Returns: None for a method without auxiliary models, or before the first was trained.
        """
        run, malignant = self._run, self._run.recipe.data.malignant
        accuracies: dict[str, float] = {}
        rates: list[float] = []
        for names, model in self._auxiliary_models():
            labels = self.labels(model)
            accuracies |= dict.fromkeys(names, score(labels, run.y_test).accuracy)
            rates += [benign_rate(labels, run.y_test, malignant)] * len(names)
        if not accuracies:
            return None
        return {
            "accuracy": statistics.fmean(accuracies.values()),
            "bmr": statistics.fmean(rates) if malignant else None,
            "each": accuracies,
        }

    def benign_rate(self) -> float:
        """BMR of the whole network on the global test set: the mean over the clients' cuts.

        NaN where the recipe names no malignant class, or the test set has no sample of one.
        """
        run = self._run
        depths = {plan.depth for plan in run.plans.values() if not plan.part.whole}
        wholes = [run.state.whole(depth) for depth in sorted(depths)] or [run.state.net]
        return statistics.fmean(
            benign_rate(self.labels(whole), run.y_test, run.recipe.data.malignant)
            for whole in wholes
        )

    def labels(self, model: nn.Module) -> NDArray[np.int64]:
        """(n_test,) labels that a network from raw inputs to logits gives the global test set."""
        return predicted_labels(model, self._run.x_test, self._run.device)

    def _right(self, path: AnswerPath) -> dict[str, Right]:
        """(n_test,) whether each client's answers by that path are right, by client."""
        match path:
            case "full":
                return self._right_of_wholes()
            case "backs":
                return self._right_of_backs()
            case "own":
                return self._right_of_own()
            case _:
                return self._right_of_exits()

    def _right_of_wholes(self) -> dict[str, Right]:
        """Right answers of a client's prefix and the server together."""
        run, found = self._run, dict[int, Right]()
        # where the server has no stages of its own, every cut is of one network
        alike = run.state.trunk is run.state.net
        depths = {name: 0 if alike else plan.depth for name, plan in run.plans.items()}
        for depth in sorted(set(depths.values())):
            net = run.state.whole(depth) if depth else run.state.net
            found[depth] = self.labels(net) == run.y_test
        return {name: found[depth] for name, depth in depths.items()}

    def _right_of_exits(self) -> dict[str, Right]:
        """Right answers of each client's exit."""
        right = {}
        for prefix, heads in self._exits():
            answers: dict[str, list[Tensor]] = {name: [] for name in heads}
            with _evaluating(prefix), _evaluating(nn.ModuleList(heads.values())):
                for x in _batches(self._run.x_test, self._run.device):
                    z = prefix(x)
                    for name, head in heads.items():
                        answers[name].append(head(z).argmax(1).cpu())
            for name, each in answers.items():
                right[name] = torch.cat(each).numpy() == self._run.y_test
        return {name: right[name] for name in self._run.clients}

    def _right_of_backs(self) -> dict[str, Right]:
        """Right answers of the whole network with each client's own last layer."""
        run, right = self._run, {}
        for depth in sorted({plan.depth for plan in run.plans.values()}):
            backs: dict[str, nn.Module] = {
                name: own_back(run, name) for name, plan in run.plans.items() if plan.depth == depth
            }
            base = base_of(run, depth)
            answers: dict[str, list[Tensor]] = {name: [] for name in backs}
            with _evaluating(base):
                for x in _batches(self._run.x_test, self._run.device):
                    embeddings = base(x)
                    for name, back in backs.items():
                        answers[name].append(back(embeddings).argmax(1).cpu())
            for name, each in answers.items():
                right[name] = torch.cat(each).numpy() == run.y_test
        return {name: right[name] for name in run.clients}

    def _right_of_own(self) -> dict[str, Right]:
        """Right answers of each client's own network, one network at a time."""
        run = self._run
        return {name: self.labels(own_network(run, name)) == run.y_test for name in run.clients}

    def _exits(self) -> Iterator[tuple[nn.Module, dict[str, nn.Module]]]:
        """Prefixes with their exit heads; a client with a personal prefix comes alone."""
        plans = self._run.plans
        if any(plan.part.personal_share for plan in plans.values()):
            for name in plans:
                prefix, head = self._pair(name)
                yield prefix, {name: head}
            return
        for depth in sorted({plan.depth for plan in plans.values()}):
            names = [name for name, plan in plans.items() if plan.depth == depth]
            prefix = self._run.state.net.prefix(depth)
            yield prefix, {name: self._pair(name)[1] for name in names}

    def _auxiliary_models(self) -> Iterator[tuple[list[str], Auxiliary]]:
        """Auxiliary models, each with its clients: those of a cut where it is averaged."""
        run = self._run
        if run.method.client.shared_auxiliary:
            for depth, model in sorted(run.state.auxiliaries.items()):
                yield [name for name, plan in run.plans.items() if plan.depth == depth], model
        elif run.method.client.own_auxiliary:
            for name, client in run.clients.items():
                model = build_auxiliary(run.plans[name]).to(run.device)
                if model.load(client.personal):
                    yield [name], model

    def _score(self, name: str, right: Right) -> ClientScore:
        run, test = self._run, self._tests[name]
        return ClientScore(
            name,
            run.plans[name].depth,
            run.clients[name].samples,
            _counted(right[test.id], test.weights),
            _counted(right[test.ood]),
        )

    def _gated_scores(self) -> list[ClientScore]:
        """Every client's own pair: exit below a threshold, else the server.

        Of each client there are figures for each threshold of the grid, not its answers: these
        would take a gigabyte for 10,000 clients.
        """
        run = self._run
        grid = threshold_grid(run.method.gate, len(run.class_names))
        held_out: dict[str, list[float]] = {}
        tested: dict[str, dict[float, GatedScore]] = {}
        for name, test in self._tests.items():
            networks = (*self._personalised(name), self._suffix(name))
            rows = np.concatenate([test.id, test.ood])
            answers = self._pair_answers(networks, (run.x_test, run.y_test), rows)
            if test.weights is not None:
                weights = np.concatenate([test.weights, np.ones(len(test.ood))])
                answers = replace(answers, weights=weights)
            tested[name] = {point: _gated(answers, point, test) for point in grid}
            own = run.held_out.get(name, rows[:0])
            if len(own):
                data = (run.x_held_out, run.y_held_out)
                held_out[name] = right_answers(grid, self._pair_answers(networks, data, own))
        right = {
            name: [(each.inside + each.outside).correct for each in found.values()]
            for name, found in tested.items()
        }
        chosen = chosen_thresholds(grid, held_out, right)
        return [
            gated_client(
                name,
                run.plans[name].depth,
                run.clients[name].samples,
                {choice: found[each[name]] for choice, each in chosen.items()},
            )
            for name, found in tested.items()
        ]

    def _pair_answers(
        self,
        networks: tuple[nn.Module, nn.Module, nn.Module],
        data: tuple[Array, NDArray[np.int64]],
        rows: NDArray[np.int64],
    ) -> PairAnswers:
        """Answers of a prefix, its exit head and the network after it to those rows of the data."""
        (prefix, head, suffix), (x, y), run = networks, data, self._run
        exit_logits = [torch.zeros(0, len(run.class_names))]
        server_labels = [torch.zeros(0, dtype=torch.int64)]
        with _evaluating(suffix), _evaluating(prefix), _evaluating(head):
            for some in _batches(x, run.device, rows=rows):
                z = prefix(some)
                exit_logits.append(head(z).cpu())
                server_labels.append(suffix(z).argmax(1).cpu())
        logits, labels = torch.cat(exit_logits), y[rows]
        return PairAnswers(
            uncertainty_of(read_gate(run.method.gate), logits).numpy(),
            logits.argmax(1).numpy() == labels,
            torch.cat(server_labels).numpy() == labels,
        )

    def _suffix(self, name: str) -> nn.Module:
        """Network after the client's cut: the server's, or with the client's own last layer."""
        run, plan = self._run, self._run.plans[name]
        suffix = run.state.trunk.suffix(plan.depth)
        if not run.method.client.own_back:
            return suffix
        return nn.Sequential(suffix.neck, own_back(run, name))

    def _personalised(self, name: str) -> tuple[nn.Module, nn.Module]:
        """A client's prefix and exit head, fine-tuned on its own data for the method's steps."""
        run = self._run
        pair = self._pair(name)
        how, rounds = run.method.fine_tuning, run.recipe.train.rounds
        fine_tune(run.clients[name], run.last_plan(name), pair, how, rounds)
        return pair

    def _pair(self, name: str) -> tuple[nn.Module, nn.Module]:
        """Copies of a client's prefix and exit head, as they start its next round."""
        run = self._run
        client, plan, net = run.clients[name], run.plans[name], run.state.net
        prefix, head = deepcopy(net.prefix(plan.depth)), deepcopy(net.exit_head(plan.depth))
        sent = run.state.weights(plan.depth, whole=False, exit_head=run.method.share_exits)
        stages, own = split_exit_head(client.start_weights(plan, sent), plan.depth)
        load_weights(prefix, stages)
        if own:
            load_weights(head, own)
        return prefix, head


def predicted_labels(
    model: nn.Module, x: Array, device: torch.device, batch: int = BATCH
) -> NDArray[np.int64]:
    """(n,) labels that a network from raw inputs to logits gives; its mode stays as it was.

    Args:
        x: (n, ...) raw inputs.
    """
    with _evaluating(model):
        found = [model(part).argmax(1).cpu() for part in _batches(x, device, batch)]
    labels: NDArray[np.int64] = torch.cat(found).numpy()
    return labels


def _batches(
    x: Array,
    device: torch.device,
    batch: int = BATCH,
    rows: NDArray[np.int64] | None = None,
) -> Iterator[Tensor]:
    """The inputs in order, or `rows` of them."""
    for at in range(0, len(x) if rows is None else len(rows), batch):
        some = x[at : at + batch] if rows is None else x[rows[at : at + batch]]
        yield torch.from_numpy(np.ascontiguousarray(some)).to(device)


def _tests(run: Simulation, rho: float) -> dict[str, RhoTest]:
    """Test samples of every client.

    A client that lacks few classes may have fewer OOD samples than rho asks for: then it has all of
    them. Where each client has tests of its own, rho is the share of drift added to them.
    """
    if run.tests:
        return {
            name: replace(test, ood=test.ood[: round(rho * len(test.id))])
            for name, test in run.tests.items()
        }
    tests = {}
    for number, (name, client) in enumerate(run.clients.items()):
        known = np.isin(run.y_test, np.unique(client.y))
        inside, outside = int(known.sum()), int((~known).sum())
        most = outside / inside if inside else 0.0
        everything = [np.arange(client.samples)]
        seed = run.recipe.seed + number  # rho_tests keys its draw by the place in the list
        (found,) = rho_tests(client.y, everything, run.y_test, min(rho, most), seed)
        if run.recipe.data.split == "own-mix":
            found = replace(found, weights=own_mix(client.y, run.y_test[found.id]))
        tests[name] = found
    return tests


def _gated(answers: PairAnswers, threshold: float, test: RhoTest) -> GatedScore:
    """The pair with that threshold, on the test samples in and out of its distribution."""
    right, inside = answers.right(threshold), len(test.id)
    return GatedScore(
        threshold,
        answers.exit_rate(threshold),
        _counted(right[:inside], test.weights),
        _counted(right[inside:]),
    )


def _counted(right: Right, weights: NDArray[np.float64] | None = None) -> Score:
    return Score(int(right.sum()) if weights is None else float(right @ weights), len(right))


@contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients inside; the former mode after."""
    training = module.training
    module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        module.train(training)
