"""Codecs of updates: the bytes they save, the error they make, and their effect on accuracy.

    python -m benchmarks.update_codecs --rounds 10 --seeds 3

Trained on the digits: SplitLPF, with updates of two stages, and FedAvg, with updates of the whole
network. The recipes are those of examples/recipes, except for the codec and the rounds.
Writes benchmarks/results/update-codecs.json and .md.
"""

from __future__ import annotations

import shlex
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Final

import torch
import typer

from benchmarks.compare import train
from benchmarks.reports import RECIPES, RESULTS, Results, Seeds, made_by, provenance, write
from edge_sdk.training.protocol.update_codec import UpdateCoding
from server.training.comparison.intervals import mean_interval
from server.training.recipe.recipe import Recipe, load_recipe

METHODS: Final = ("splitlpf", "fedavg")
PLAIN: Final = "fp32"
CODECS: Final[Mapping[str, Mapping[str, Any]]] = {
    PLAIN: {"update_codec": "fp32"},
    "fp16": {"update_codec": "fp16"},
    "int8": {"update_codec": "int8"},
    "top-k, 5 %": {"update_codec": "top-k", "update_share": 0.05},
    "top-k, 1 %": {"update_codec": "top-k", "update_share": 0.01},
    "synthetic, 2 samples": {"update_codec": "synthetic", "update_samples": 2},
    "synthetic, 8 samples": {"update_codec": "synthetic", "update_samples": 8},
}


@dataclass(frozen=True, slots=True)
class Trial:
    """One codec, one seed.

    Attributes:
        accuracy: after the last round, in %.
        update_bytes, bytes: of a round's updates, and of all its messages; means over rounds.
        error: |decoded - raw| / |raw change|, mean over updates and rounds; cosine likewise.
        seconds: of a round, mean.
    """

    method: str
    codec: str
    seed: int
    accuracy: float
    update_bytes: float
    bytes: float
    error: float
    cosine: float
    seconds: float


def main(
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of each training.")] = 10,
    seeds: Seeds = 3,
    method: Annotated[
        list[str] | None, typer.Option(help="Only this method; may be repeated.")
    ] = None,
    results: Results = RESULTS,
) -> None:
    """Train with every codec of updates and compare them."""
    chosen = method or list(METHODS)
    unknown = sorted(set(chosen) - set(METHODS))
    if unknown:
        raise typer.BadParameter(f"--method: expected some of {', '.join(METHODS)}, got {unknown}")
    words = ["--rounds", str(rounds), "--seeds", str(seeds)]
    for name in method or []:
        words += ["--method", name]
    about = {
        "title": "Codecs of updates on the digits",
        "command": f"python -m benchmarks.update_codecs {shlex.join(words)}",
        "rounds": rounds,
        "seeds": list(range(seeds)),
    } | provenance()
    trials: list[Trial] = []
    for name in chosen:
        for seed in range(seeds):
            for codec in CODECS:
                trials.append(run_trial(recipe_of(name, codec, rounds, seed), name, codec))
                typer.echo(f"{time.strftime('%H:%M:%S')} {_told(trials[-1])}")
    tables = {name: table(name, trials) for name in chosen}
    _write(results / "update-codecs", about, trials, tables)
    typer.echo("\n\n".join(tables.values()))


def recipe_of(method: str, codec: str, rounds: int, seed: int) -> Recipe:
    """A method's recipe with a codec."""
    recipe = load_recipe(RECIPES / f"{method}-digits.toml")
    numbers = {key.removeprefix("update_"): value for key, value in CODECS[codec].items()}
    return replace(
        recipe,
        seed=seed,
        data=replace(recipe.data, held_out=0),
        train=replace(recipe.train, rounds=rounds, update=UpdateCoding(**numbers)),
        evaluate=replace(recipe.evaluate, every=rounds),
    )


def run_trial(recipe: Recipe, method: str, codec: str) -> Trial:
    """Train by a recipe and measure its updates."""
    _, rows = train(recipe)
    # without a codec there is no error to measure
    codings = [row["update_coding"] or {"error": 0.0, "cosine": 1.0} for row in rows]
    return Trial(
        method,
        codec,
        recipe.seed,
        100 * rows[-1]["accuracy"],
        statistics.mean(row["bytes_by_kind"]["up weights"] for row in rows),
        statistics.mean(row["bytes_up"] + row["bytes_down"] for row in rows),
        statistics.mean(coding["error"] for coding in codings),
        statistics.mean(coding["cosine"] for coding in codings),
        statistics.mean(row["seconds"] for row in rows),
    )


def table(method: str, trials: Sequence[Trial]) -> str:
    """One method's codecs: means over seeds, and bytes as a share of fp32's."""
    heads = ["codec", "updates, kB a round", "of fp32", "all, kB a round", "of fp32"]
    heads += ["error, %", "cosine", "accuracy, %", "less than fp32", "s a round"]
    lines = [f"| {' | '.join(heads)} |", f"| ---{' | ---' * (len(heads) - 1)} |"]
    plain = _of(trials, method, PLAIN)
    for codec in CODECS:
        own = _of(trials, method, codec)
        updates, everything = (_mean(own, name) for name in ("update_bytes", "bytes"))
        # compared within a seed: partitions differ more from seed to seed than codecs do
        lost = [p.accuracy - t.accuracy for p, t in zip(plain, own, strict=True)]
        cells = [
            codec,
            f"{updates / 1e3:.2f}",
            f"{updates / _mean(plain, 'update_bytes'):.4f}",
            f"{everything / 1e3:.1f}",
            f"{everything / _mean(plain, 'bytes'):.4f}",
            f"{100 * _mean(own, 'error'):.2f}",
            f"{_mean(own, 'cosine'):.4f}",
            _interval([trial.accuracy for trial in own]),
            _interval(lost),
            f"{_mean(own, 'seconds'):.2f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _of(trials: Sequence[Trial], method: str, codec: str) -> list[Trial]:
    return [trial for trial in trials if (trial.method, trial.codec) == (method, codec)]


def _mean(trials: Sequence[Trial], name: str) -> float:
    values: list[float] = [getattr(trial, name) for trial in trials]
    return statistics.mean(values)


def _interval(values: Sequence[float]) -> str:
    found = mean_interval(values)
    return f"{found.mean:.2f}" if found.seeds == 1 else str(found)


def _told(trial: Trial) -> str:
    return (
        f"{trial.method}, {trial.codec}, seed {trial.seed}: {trial.accuracy:.2f} %,"
        f" error {100 * trial.error:.2f} %, {trial.update_bytes / 1e3:.2f} kB"
    )


def _write(
    path: Path, about: Mapping[str, Any], trials: Sequence[Trial], tables: Mapping[str, str]
) -> None:
    codecs = {name: dict(train) for name, train in CODECS.items()}
    report = dict(about) | {"codecs": codecs, "trials": [asdict(trial) for trial in trials]}
    values = (
        f"{about['rounds']} rounds, seeds {', '.join(map(str, about['seeds']))}; accuracy after the"
        " last round, mean ± half width of the 95 % interval. Error: |decoded - raw| / |raw change|"
        " of an update, mean over updates and rounds. Less than fp32: points of the same seed."
    )
    blocks = [f"# {about['title']}", made_by(about), values]
    for name, lines in tables.items():
        blocks += [f"## `{name}-digits.toml`", lines]
    write(path, report, blocks)


if __name__ == "__main__":
    torch.set_num_threads(1)
    typer.run(main)
