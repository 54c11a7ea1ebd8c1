"""How good a simulation's networks are, on the global test set and for every client.

    full     the whole network: what most methods are judged by
    exits    every client's prefix and exit head: all there is where the server never supervised
    gated    the exit head where its uncertainty is below a threshold, else the server: methods
             that train and share their exits together with the rest (multi-exit, SplitGP)
    backs    the whole network with each client's own last layer: SplitLPF

METHODS.md, "Data, tests, metrics", "Evaluated".
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Final, Literal
from zlib import crc32

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from edge_sdk.training.client.client_round import exit_loss, start_of
from edge_sdk.training.client.personal_head import back_of
from edge_sdk.training.data.load import Array
from edge_sdk.training.formulas.evidence import concentration
from edge_sdk.training.protocol.weights import load_weights, parted
from server.training.recipe.partition import RhoTest, rho_tests
from server.training.report.metrics import Score
from server.training.run.run import Simulation

Path = Literal["full", "exits", "gated", "backs"]
Right = NDArray[np.bool_]

# nats, for 10 classes, from which the best is taken for each client (HARMONY's oracle choice); for
# other numbers of classes and other gates the same shares of the largest uncertainty
THRESHOLDS: Final = (0.05, 0.1, 0.2, 0.4, 0.8, 1.2, 1.6, 2.3)
BATCH: Final = 128  # 512 took 120 MiB more on cnn6 and was no faster
_FINETUNE: Final = 0x66696E65  # apart from every stream of training


@dataclass(frozen=True, slots=True)
class ClientScore:
    """One client on its test samples in (`inside`) and out of its distribution.

    Attributes:
        samples: those it trained on.
        threshold: in the unit of the method's gate, nats for entropy; exit_rate: on all its test
            samples. None unless gated.
    """

    client: str
    depth: int
    samples: int
    inside: Score
    outside: Score
    threshold: float | None = None
    exit_rate: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """As a report has it."""
        return {
            "client": self.client,
            "depth": self.depth,
            "samples": self.samples,
            "tested_id": self.inside.samples,
            "tested_ood": self.outside.samples,
            "accuracy_id": self.inside.accuracy,
            "accuracy_ood": self.outside.accuracy,
            "threshold": self.threshold,
            "exit_rate": self.exit_rate,
        }


class Evaluator:
    """Measures a run as it is when asked.

    Args:
        rho: of clients' tests; None for the recipe's.
    """

    def __init__(self, run: Simulation, rho: float | None = None) -> None:
        self._run = run
        self._tests = _tests(run, run.recipe.evaluate.rho if rho is None else rho)

    def path(self, *, supervised: bool) -> Path:
        """What the global test set is put through: exits while the server has never supervised."""
        method = self._run.method
        if method.server_step is not None and method.client.exit_head and not supervised:
            return "exits"
        return "backs" if self._run.method.client.own_back else "full"

    def answers(self, *, supervised: bool) -> Path:
        """How clients get their answers."""
        path = self.path(supervised=supervised)
        return "gated" if path != "exits" and self._run.method.share_exits else path

    def accuracy(self, *, supervised: bool) -> float:
        """On the global test set, by the path that was trained."""
        match self.path(supervised=supervised):
            case "full":
                each = self._right_of_wholes().values()
                # in whole numbers: networks that clients share change no bit of the mean
                return sum(int(right.sum()) for right in each) / sum(map(len, each))
            case "backs":
                return float(np.mean([right.mean() for right in self._right_of_backs().values()]))
            case _:
                return self.exit_accuracy()

    def exit_accuracy(self) -> float:
        """Of exits on the global test set: the mean over clients, each with its own head."""
        return float(np.mean([right.mean() for right in self._right_of_exits().values()]))

    def exits(self) -> dict[int, float]:
        """Accuracy of exits on the global test set by depth: mean over the clients of a depth."""
        if not self._run.method.client.exit_head:
            return {}
        by_depth: dict[int, list[float]] = {}
        for name, right in self._right_of_exits().items():
            by_depth.setdefault(self._run.plans[name].depth, []).append(float(right.mean()))
        return {depth: float(np.mean(each)) for depth, each in sorted(by_depth.items())}

    def clients(self, *, supervised: bool) -> list[ClientScore]:
        """Every client on its own test samples."""
        match self.answers(supervised=supervised):
            case "gated":
                return [self._gated(name) for name in self._tests]
            case "exits":
                right = self._right_of_exits()
                return [self._scored(name, right[name]) for name in self._tests]
            case "full":
                right = self._right_of_wholes()
                return [self._scored(name, right[name]) for name in self._tests]
            case "backs":
                right = self._right_of_backs()
                return [self._scored(name, right[name]) for name in self._tests]

    def _scored(self, name: str, right: Right) -> ClientScore:
        test = self._tests[name]
        return ClientScore(
            name,
            self._run.plans[name].depth,
            self._run.clients[name].samples,
            _score(right[test.id]),
            _score(right[test.ood]),
        )

    def _gated(self, name: str) -> ClientScore:
        """The client's own pair: exit below the threshold that is best for it, else the server."""
        run, test = self._run, self._tests[name]
        depth = run.plans[name].depth
        rows = np.concatenate([test.id, test.ood])
        labels = torch.from_numpy(run.y_test[rows])
        prefix, head = self._personalised(name)
        unsure, locally, remotely = [], [], []
        entropy = run.method.gate == "entropy"
        suffix = self._suffix(name)
        with _evaluating(suffix), _evaluating(prefix), _evaluating(head):
            for x in self._batches(rows):
                z = prefix(x)
                logits = head(z)
                unsure.append((_entropy if entropy else _vacuity)(logits).cpu())
                locally.append(logits.argmax(1).cpu())
                remotely.append(suffix(z).argmax(1).cpu())
        own, servers = (torch.cat(labelled) == labels for labelled in (locally, remotely))
        threshold, exits, right = _best_gate(
            torch.cat(unsure).numpy(),
            own.numpy(),
            servers.numpy(),
            (math.log(run.state.net.classes) if entropy else 1.0) / math.log(10),
        )
        return ClientScore(
            name,
            depth,
            run.clients[name].samples,
            _score(right[: len(test.id)]),
            _score(right[len(test.id) :]),
            threshold,
            float(exits.mean()),
        )

    def _suffix(self, name: str) -> nn.Module:
        """What answers where this client's exit does not: the server, or its own last layer."""
        run, plan = self._run, self._run.plans[name]
        suffix = run.state.trunk.suffix(plan.depth)
        if not self._run.method.client.own_back:
            return suffix
        back = back_of(plan, run.clients[name].personal).to(run.device)
        return nn.Sequential(suffix.neck, back)

    def _personalised(self, name: str) -> tuple[nn.Module, nn.Module]:
        """A client's prefix and exit head, fine-tuned on its own data as the method says."""
        run = self._run
        client, plan = run.clients[name], run.plans[name]
        prefix, head = self._pair(name)
        key = [plan.seed, _FINETUNE, crc32(name.encode())]
        generator = np.random.default_rng(key)
        parameters = [*prefix.parameters(), *head.parameters()]
        # HARMONY, Eq. 5: plain SGD on mini-batches of own data
        rate = run.method.finetune_rate or plan.training.learning_rate
        optimiser = torch.optim.SGD(parameters, rate)
        prefix.train()
        head.train()
        for _ in range(run.method.finetune_steps):
            rows = generator.permutation(client.samples)[: plan.training.batch]
            x = torch.from_numpy(np.ascontiguousarray(client.x[rows])).to(run.device)
            y = torch.from_numpy(client.y[rows]).to(run.device)
            optimiser.zero_grad(set_to_none=True)
            loss = exit_loss(plan, run.recipe.train.rounds, head(prefix(x)), y)
            loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
            optimiser.step()
        return prefix, head

    def _pair(self, name: str) -> tuple[nn.Module, nn.Module]:
        """Copies of a client's prefix and exit head, as it would start the next round."""
        run = self._run
        client, plan, net = run.clients[name], run.plans[name], run.state.net
        prefix, head = deepcopy(net.prefix(plan.depth)), deepcopy(net.exit_head(plan.depth))
        sent = run.state.weights(plan.depth, whole=False, exit_head=run.method.share_exits)
        stages, own = parted(start_of(plan, sent, client.personal), plan.depth)
        load_weights(prefix, stages)
        if own:
            load_weights(head, own)
        return prefix, head

    def _right_of_wholes(self) -> dict[str, Right]:
        """(n_test,) whether a client's prefix and the server together answer rightly, by client."""
        run, found = self._run, dict[int, Right]()
        # where the server has no stages of its own, every cut is of one network
        alike = run.state.trunk is run.state.net
        depths = {name: 0 if alike else plan.depth for name, plan in run.plans.items()}
        for depth in sorted(set(depths.values())):
            net = run.state.whole(depth) if depth else run.state.net
            with _evaluating(net):
                answers = [net(x).argmax(1).cpu() for x in self._batches()]
            found[depth] = torch.cat(answers).numpy() == run.y_test
        return {name: found[depth] for name, depth in depths.items()}

    def _right_of_exits(self) -> dict[str, Right]:
        """The same for each client's exit, by client."""
        right = {}
        for prefix, heads in self._exits():
            answers: dict[str, list[Tensor]] = {name: [] for name in heads}
            with _evaluating(prefix), _evaluating(nn.ModuleList(heads.values())):
                for x in self._batches():
                    z = prefix(x)
                    for name, head in heads.items():
                        answers[name].append(head(z).argmax(1).cpu())
            for name, each in answers.items():
                right[name] = torch.cat(each).numpy() == self._run.y_test
        return {name: right[name] for name in self._run.clients}

    def _right_of_backs(self) -> dict[str, Right]:
        """The same for the whole network with each client's own last layer, by client."""
        run, right = self._run, {}
        for depth in sorted({plan.depth for plan in run.plans.values()}):
            backs: dict[str, nn.Module] = {
                name: back_of(plan, run.clients[name].personal).to(run.device)
                for name, plan in run.plans.items()
                if plan.depth == depth
            }
            front, middle = (
                run.state.net.prefix(depth),
                run.state.trunk.suffix(depth).neck,
            )
            answers: dict[str, list[Tensor]] = {name: [] for name in backs}
            with _evaluating(front), _evaluating(middle):
                for x in self._batches():
                    embeddings = middle(front(x))
                    for name, back in backs.items():
                        answers[name].append(back(embeddings).argmax(1).cpu())
            for name, each in answers.items():
                right[name] = torch.cat(each).numpy() == run.y_test
        return {name: right[name] for name in run.clients}

    def _exits(self) -> Iterator[tuple[nn.Module, dict[str, nn.Module]]]:
        """Prefixes with the exit heads on them; one prefix a depth where nobody has its own."""
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

    def _batches(self, rows: NDArray[np.int64] | None = None) -> Iterator[Tensor]:
        """The test inputs, or `rows` of them, in order."""
        x: Array = self._run.x_test
        count = len(x) if rows is None else len(rows)
        for at in range(0, count, BATCH):
            some = x[at : at + BATCH] if rows is None else x[rows[at : at + BATCH]]
            yield torch.from_numpy(np.ascontiguousarray(some)).to(self._run.device)


def _tests(run: Simulation, rho: float) -> dict[str, RhoTest]:
    """Every client's test samples.

    A client that lacks few classes has fewer OOD samples than rho asks for: then all there are.
    Where tests are the clients' own, rho is the share of their drift; 1 is as many as its own.
    """
    if run.tests:
        return {
            name: RhoTest(test.id, test.ood[: round(rho * len(test.id))])
            for name, test in run.tests.items()
        }
    tests = {}
    for number, (name, client) in enumerate(run.clients.items()):
        known = np.isin(run.y_test, np.unique(client.y))
        inside, outside = int(known.sum()), int((~known).sum())
        most = outside / inside if inside else 0.0
        everything = [np.arange(client.samples)]
        seed = run.recipe.seed + number  # rho_tests keys its draw by the place in the list
        (tests[name],) = rho_tests(client.y, everything, run.y_test, min(rho, most), seed)
    return tests


def _best_gate(
    uncertainty: NDArray[np.float64], own: Right, servers: Right, scale: float
) -> tuple[float, Right, Right]:
    """The threshold of the grid with most right answers, the loosest of equals.

    Returns: the threshold, and by sample whether it exits and whether its answer is right.
    """
    best: tuple[float, Right, Right] | None = None
    for point in THRESHOLDS:
        exits: Right = uncertainty < point * scale
        right: Right = np.where(exits, own, servers)
        if best is None or right.sum() >= best[2].sum():
            best = (point * scale, exits, right)
    assert best is not None
    return best


def _entropy(logits: Tensor) -> Tensor:
    """Shannon entropy of the softmax in nats, (B,)."""
    logs = torch.log_softmax(logits.double(), 1)
    return -(logs.exp() * logs).sum(1)


def _vacuity(logits: Tensor) -> Tensor:
    """N / S of the Dirichlet that the logits stand for, (B,)."""
    return logits.shape[1] / concentration(logits).sum(1)


def _score(right: Right) -> Score:
    return Score(int(right.sum()), len(right))


@contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; the mode it had comes back."""
    training = module.training
    module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        module.train(training)
