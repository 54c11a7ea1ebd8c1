"""Accuracy that each client would reach without the others: one side of SplitLPF's PC."""

from __future__ import annotations

from dataclasses import replace

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
    simulation = build_simulation(local_only_recipe(recipe), device)
    state, transport = simulation.state, MemoryTrimmingTransport(simulation.clients)
    first = state.read()
    evaluator = Evaluator(simulation)
    scores = []
    for place, (name, plan) in enumerate(simulation.plans.items()):
        state.write(first)
        loop = RoundLoop(simulation.method, {name: plan}, state, transport)
        for number in range(1, recipe.train.rounds + 1):
            loop.run_round(number, recipe.seed)
        scores.append(evaluator.clients(supervised=False)[place])
    return scores


def local_only_recipe(recipe: Recipe) -> Recipe:
    """The recipe of a client alone: the network is not split, and updates are not coded."""
    train = replace(recipe.train, update=UpdateCoding())
    return replace(recipe, method="fedavg", method_numbers={}, parts={}, train=train)
