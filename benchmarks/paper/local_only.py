"""Accuracy that each client would reach without the others: one side of SplitLPF's PC."""

from __future__ import annotations

import contextlib
import hashlib
from dataclasses import dataclass, replace
from pathlib import Path

import orjson

from benchmarks.jobs.clock import Clock
from edge_sdk.durable import locked_folder, make_folder, write_atomic
from edge_sdk.errors import StateInUseError
from edge_sdk.state import StateLock
from edge_sdk.training.protocol.update_codec import UpdateCoding
from server.training.recipe.recipe import Recipe
from server.training.report.client_scores import ClientScore
from server.training.report.evaluate import Evaluator
from server.training.rounds.loop import RoundLoop
from server.training.simulation.build import build_simulation
from server.training.simulation.transport import MemoryTrimmingTransport


def local_only_scores(recipe: Recipe, device: str = "cpu") -> list[ClientScore]:
    """Scores of every client's whole network, trained on its own data alone.

    A client has the recipe's budget: as many rounds, epochs and batches at the recipe's rates, from
    the same first weights. It is tested on the samples that a run of the recipe tests it on, so
    that the two can be compared (benchmarks.paper.measures.pearson).

    Args:
        recipe: of any method.
    """
    alone = _Alone(recipe, device)
    return [alone.score(name, Clock()) for name in alone.names]


def local_only_accuracies(recipe: Recipe, device: str = "cpu") -> list[float]:
    """Accuracy of each client alone on its test samples, of both kinds together."""
    return [score.accuracy for score in local_only_scores(recipe, device)]


@dataclass(frozen=True, slots=True)
class KeptAlone:
    """Accuracies of clients alone that outlast a process: one file of all clients a recipe.

    A training of all clients takes as long as a row. Each client is kept as soon as it is trained;
    a second process begins with the last client, so that two meet in the middle.

    Attributes:
        recipe: of any method; its rates and rounds are those of a client alone.
        folder: of the files, which reports keep.
        work: for the locks.
    """

    recipe: Recipe
    device: str
    folder: Path
    work: Path
    clock: Clock

    def accuracies(self) -> list[float]:
        """Accuracy of each client alone; those that no call has trained are trained now.

        Raises: OutOfTimeError between two clients, or two rounds of one.
        """
        table = local_only_recipe(self.recipe).to_dict()
        table["data"] = {k: v for k, v in table["data"].items() if k != "folder"}
        digest = hashlib.sha256(orjson.dumps(table, option=orjson.OPT_SORT_KEYS)).hexdigest()[:12]
        path = self.folder / f"{digest}.json"
        found = self._read(path)
        if len(found) < self.recipe.data.clients:
            trained = _Alone(self.recipe, self.device)
            with contextlib.ExitStack() as stack:
                names = list(trained.names)
                try:
                    stack.enter_context(StateLock(self.work / f"alone-{digest}", "simulation"))
                except StateInUseError:
                    names.reverse()
                for name in names:
                    if name not in (found := self._read(path)):
                        score = trained.score(name, self.clock)
                        found = self._add(path, name, score.accuracy)
        return [found[name] for name in sorted(found)]

    @staticmethod
    def _read(path: Path) -> dict[str, float]:
        if not path.is_file():
            return {}
        found: dict[str, float] = orjson.loads(path.read_bytes())
        return found

    def _add(self, path: Path, name: str, accuracy: float) -> dict[str, float]:
        make_folder(self.folder)
        with locked_folder(self.folder):
            found = self._read(path) | {name: accuracy}
            raw = orjson.dumps(found, option=orjson.OPT_INDENT_2 | orjson.OPT_SORT_KEYS)
            write_atomic(path, raw + b"\n")
        return found


class _Alone:
    """Clients of a recipe that are trained one by one, each from the same first weights."""

    def __init__(self, recipe: Recipe, device: str) -> None:
        self._run = build_simulation(local_only_recipe(recipe), device)
        self._transport = MemoryTrimmingTransport(self._run.clients)
        self._first = self._run.state.read()
        self._evaluator = Evaluator(self._run)
        self.names = list(self._run.plans)

    def score(self, name: str, clock: Clock) -> ClientScore:
        """Train one client for the recipe's rounds, and test it.

        Raises: OutOfTimeError.
        """
        run, recipe = self._run, self._run.recipe
        run.state.write(self._first)
        loop = RoundLoop(run.method, {name: run.plans[name]}, run.state, self._transport)
        for number in range(1, recipe.train.rounds + 1):
            clock.check()
            loop.run_round(number, recipe.seed)
        return self._evaluator.clients(supervised=False)[self.names.index(name)]


def local_only_recipe(recipe: Recipe) -> Recipe:
    """The recipe of a client alone: the network is not split, and updates are not coded."""
    train = replace(recipe.train, update=UpdateCoding())
    return replace(recipe, method="fedavg", method_numbers={}, parts={}, train=train)
