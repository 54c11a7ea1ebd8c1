"""Scores of each client's own networks, as a round left them, before they are averaged.

SplitLPF's printed levels lie between these and those of the averages, so its tables have both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from server.training.core.weighted_mean import merge
from server.training.report.client_scores import ClientScore, summary_of
from server.training.report.evaluate import Evaluator
from server.training.rounds.round import RoundUnderWay
from server.training.run.run import Simulation


def local_scores(run: Simulation, now: RoundUnderWay, *, supervised: bool) -> list[ClientScore]:
    """Score every participant on its own test samples, by the path that the run answers by.

    A client's networks are what a merge of its contribution alone would give: its stages, its exit
    head, its copy of the server's stages (or the server's own, where all share it), and its last
    layer as it was trained, without a refit.

    Args:
        now: a round whose contributions are not merged yet; the state is as it was afterwards.
        supervised: whether the server has ever answered features.
    """
    tests, server = Evaluator(run).tests, run.state.read()
    method = replace(run.method, refit_epochs=0)
    scores = []
    try:
        for name, contribution in now.contributions.items():
            run.state.write(merge({name: contribution}, {name: 1.0}, server, 0.0))
            alone = replace(
                run,
                method=method,
                plans={name: run.plans[name]},
                clients={name: run.clients[name]},
                tests={name: tests[name]},
            )
            scores += Evaluator(alone).clients(supervised=supervised)
    finally:
        run.state.write(server)
    return scores


def local_figures(scores: Sequence[ClientScore]) -> dict[str, Any]:
    """The scores as a report has them: means over clients, and each client's accuracy."""
    summary = summary_of(scores)
    return {
        "accuracy_clients": summary.accuracy,
        "jain": summary.jain,
        "std": summary.std,
        "each": {score.client: score.accuracy for score in scores},
    }
