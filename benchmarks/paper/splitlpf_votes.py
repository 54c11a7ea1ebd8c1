"""Votes that SplitLPF's equal clients lose to noise, by the dead zone of their cosines.

    python -m benchmarks.paper.splitlpf_votes

Ten clients share the digits; the seed is none of the tables'. The figure is the number of clients
that a round's weights leave without a vote: it needs no label. Writes splitlpf-votes.json and .md.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Annotated, Any, Final

import torch
import typer

from benchmarks.paper.tables.table import over
from benchmarks.reports import RESULTS, Results, made_by, provenance, write
from server.training.recipe.recipe import read_recipe
from server.training.simulation.build import build_simulation

SEED: Final = 200  # the sweep has 100, tables have 0, 1, ...
ZONES: Final = (0.0, 0.1, 0.2, 0.4)
PARTITIONS: Final[Mapping[str, Mapping[str, Any]]] = {
    "iid": {},
    "uds": {"numbers": {"smallest": 55}},
    "udd": {},
}
BASE: Final[Mapping[str, Any]] = {
    "method": "splitlpf",
    "data": {"name": "digits", "clients": 10, "held_out": 0},
    "train": {
        "backbone": "tiny",
        "depth": 2,
        "rounds": 40,
        "epochs": 2,
        "batch": 16,
        "learning_rate": 0.05,
        "momentum": 0.9,
    },
    "seed": SEED,
}

app = typer.Typer(add_completion=False)


def lost_votes(partition: str, zone: float, rounds: int) -> float:
    """Clients of ten without a vote, mean over the rounds that have a direction to compare with."""
    changes = {
        "method_numbers": {"dead_zone": zone},
        "data": {"partition": partition, **PARTITIONS[partition]},
        "train": {"rounds": rounds},
    }
    run = build_simulation(read_recipe(over(BASE, changes)))
    results = [run.loop.run_round(number, SEED) for number in range(1, rounds + 1)]
    return statistics.fmean(sum(w == 0 for w in each.weights.values()) for each in results[1:])


@app.command(epilog="Example: python -m benchmarks.paper.splitlpf_votes --rounds 40")
def votes(
    rounds: Annotated[int, typer.Option(min=2, help="Rounds of each training.")] = 40,
    results: Results = RESULTS,
) -> None:
    """Count the clients without a vote by partition and dead zone."""
    torch.set_num_threads(1)
    found: dict[str, dict[str, float]] = {f"{zone:g}": {} for zone in ZONES}
    for partition in PARTITIONS:
        for zone in ZONES:
            lost = found[f"{zone:g}"][partition] = lost_votes(partition, zone, rounds)
            typer.echo(f"{partition}, dead zone {zone:g}: {lost:.1f} of 10 clients without a vote")
    about = {
        "command": f"python -m benchmarks.paper.splitlpf_votes --rounds {rounds}",
        **provenance(),
    }
    names = " | ".join(partition.upper() for partition in PARTITIONS)
    lines = [f"| dead zone | {names} |", f"| --- |{' --- |' * len(PARTITIONS)}"]
    lines += [
        f"| {zone} | {' | '.join(f'{lost:.1f}' for lost in row.values())} |"
        for zone, row in found.items()
    ]
    text = (
        f"Digits, ten clients, {rounds} rounds, seed {SEED}: clients of ten without a vote in a"
        " round, mean over the rounds after the first. All are honest."
    )
    path = results / "splitlpf-votes"
    blocks = ["# SplitLPF: votes lost to noise", text, "\n".join(lines), made_by(about)]
    write(path, about | {"recipe": BASE, "lost": found}, blocks)
    typer.echo(f"see {path.with_suffix('.md')}")


if __name__ == "__main__":
    app()
