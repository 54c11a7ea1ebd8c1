"""What each client would reach without the others: the other side of SplitLPF's PC."""

from __future__ import annotations

from dataclasses import replace

from edge_sdk.training.protocol.update_codec import UpdateCoding
from server.training.recipe.recipe import Recipe
from server.training.report.evaluate import ClientScore, Evaluator
from server.training.rounds.loop import RoundLoop
from server.training.simulation.build import build_simulation
from server.training.simulation.transport import MemoryTrimmingTransport


def stand_alone(recipe: Recipe, device: str = "cpu") -> list[ClientScore]:
    """Every client's whole network, trained on its own data alone, on its own test samples.

    With the recipe's budget: as many rounds, epochs and batches at its rates, from the same first
    weights. Its test samples are those of a run of the recipe, so that the two can be compared
    (benchmarks.paper.measures.pearson).

    Args:
        recipe: of any method.
    """
    world = build_simulation(by_itself(recipe), device)
    first = world.state.read()
    evaluator = Evaluator(world)
    scores = []
    for place, name in enumerate(world.clients):
        world.state.write(first)
        loop = RoundLoop(
            world.method,
            {name: world.plans[name]},
            world.state,
            MemoryTrimmingTransport(world.clients),
        )
        for number in range(1, recipe.train.rounds + 1):
            loop.run_round(number, recipe.seed)
        scores.append(evaluator.clients(supervised=False)[place])
    return scores


def by_itself(recipe: Recipe) -> Recipe:
    """The recipe of a client alone: nothing is split, nothing travels, its budget stays."""
    train = replace(recipe.train, update=UpdateCoding())
    return replace(recipe, method="fedavg", method_numbers={}, parts={}, train=train)
