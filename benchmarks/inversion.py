"""Inversion attacks: how well smashed data give inputs away, with SCALA's guards or without.

    python -m benchmarks.inversion digits
    python -m benchmarks.inversion fashion-mnist --data DIR
    python -m benchmarks.inversion cifar-10 --data DIR
    python -m benchmarks.inversion digits --rounds 40 --epochs 60    longer, against a better attack

Each variant is trained in simulation. An attacker with its prefix and one half of the test images
then trains a decoder and rebuilds the clients' training images with it
(benchmarks.attacks.inversion). All variants are cut after stage 2, SCALA and SCALA-PE also
elsewhere.
Writes benchmarks/results/inversion-DATASET.json and .md.
"""

from __future__ import annotations

import shlex
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import numpy as np
import torch
import typer

from benchmarks.attacks.inversion import Attacker, Leak, attack
from benchmarks.compare import train
from benchmarks.reports import RESULTS, Data, Results, Seeds, made_by, provenance, write
from server.training.recipe.recipe import Recipe, read_recipe

PLAIN: Final = "SCALA"
ENHANCED: Final = "SCALA-PE, with both"
VARIANTS: Final[Mapping[str, Mapping[str, Any]]] = {
    PLAIN: {},
    "with the bottleneck": {"bottleneck": 8},
    "with the guard": {"inversion": 0.3},
    ENHANCED: {"bottleneck": 8, "inversion": 0.3},
}
DEPTH: Final = 2
# SCALA, Table VI: VGG-11 cut at 2; accuracy in %, MSE, SSIM, PSNR in dB
PAPER: Final = {
    "CIFAR-10, SCALA": (91.25, 0.0016, 0.9314, 28.20),
    "CIFAR-10, SCALA-PE": (89.08, 0.0051, 0.8142, 23.33),
    "CIFAR-100, SCALA": (67.35, 0.0048, 0.8632, 23.81),
    "CIFAR-100, SCALA-PE": (65.50, 0.0328, 0.5659, 15.84),
}


@dataclass(frozen=True, slots=True)
class Scale:
    """Scale of one data set: backbone, amount of training and strength of the attack.

    Attributes:
        cuts: other than DEPTH, at which SCALA and SCALA-PE are tried too; with more channels than
            the bottleneck leaves.
    """

    backbone: str
    rounds: int
    train_max: int
    test_max: int
    attacker: Attacker
    cuts: tuple[int, ...] = ()


# For one core: some nine minutes on the digits, where the guard makes training take three times as
# long and a guarded network has learnt nothing after 25 rounds; on Fashion-MNIST 20 epochs of the
# attacker took 25 s a variant, 30 plain rounds 19 s.
SCALES: Final = {
    "digits": Scale("tiny", 40, 1_400, 397, Attacker(width=32, blocks=1, epochs=30), (3,)),
    "fashion-mnist": Scale("cnn6", 10, 5_000, 2_000, Attacker(width=32, blocks=2, epochs=8)),
    "cifar-10": Scale("cnn6", 10, 5_000, 2_000, Attacker(width=32, blocks=2, epochs=8)),
}


@dataclass(frozen=True, slots=True)
class Trial:
    """One variant, one cut, one seed: its accuracy and what it leaks."""

    variant: str
    depth: int
    seed: int
    accuracy: float
    leak: Leak


def main(  # noqa: PLR0917 - a command's options
    dataset: Annotated[
        Literal["digits", "fashion-mnist", "cifar-10"], typer.Argument(help="Data set to attack.")
    ] = "digits",
    data: Data = None,
    seeds: Seeds = 3,
    images: Annotated[int, typer.Option(min=1, help="Number of attacked images.")] = 200,
    rounds: Annotated[
        int | None, typer.Option(min=1, show_default="the data set's", help="Rounds of training.")
    ] = None,
    epochs: Annotated[
        int | None,
        typer.Option(min=1, show_default="the data set's", help="Epochs of the attacker."),
    ] = None,
    results: Results = RESULTS,
) -> None:
    """SCALA and its privacy-enhanced variant under an inversion attack (the paper's Table VI)."""
    scale = SCALES[dataset]
    words = [dataset, "--seeds", str(seeds), "--images", str(images)]
    if data is not None:
        words += ["--data", "DIR"]
    if rounds is not None:
        scale = replace(scale, rounds=rounds)
        words += ["--rounds", str(rounds)]
    if epochs is not None:
        scale = replace(scale, attacker=replace(scale.attacker, epochs=epochs))
        words += ["--epochs", str(epochs)]
    about = {
        "dataset": dataset,
        "command": f"python -m benchmarks.inversion {shlex.join(words)}",
        "scale": asdict(scale),
        "images": images,
    } | provenance()
    tried = [(variant, DEPTH) for variant in VARIANTS]
    tried += [(variant, depth) for depth in scale.cuts for variant in (PLAIN, ENHANCED)]
    trials: list[Trial] = []
    for seed in range(seeds):
        for variant, depth in tried:
            recipe = recipe_of(variant, depth, dataset, scale, seed)
            recipe = replace(recipe, data=replace(recipe.data, folder=data))
            trials.append(run_trial(variant, recipe, scale.attacker, images))
            now = time.strftime("%H:%M:%S")
            typer.echo(f"{now} cut {depth} {_line(variant, trials[-1:])}")
        # after every seed: one takes minutes, and a benchmark that is stopped keeps finished ones
        _write(results / f"inversion-{dataset}", about, trials)
    typer.echo(f"\n{report(dataset, trials)}")


def recipe_of(variant: str, depth: int, dataset: str, scale: Scale, seed: int) -> Recipe:
    """Recipe of a variant cut at that depth."""
    return read_recipe(
        {
            "method": "scala",
            "method_numbers": VARIANTS[variant],
            "seed": seed,
            "data": {
                "name": dataset,
                "clients": 10,
                "held_out": 0,
                "train_max": scale.train_max,
                "test_max": scale.test_max,
            },
            "train": {
                "backbone": scale.backbone,
                "depth": depth,
                "rounds": scale.rounds,
                "iterations": 10,
                "batch": 160,
                "learning_rate": 0.05,
                "momentum": 0.9,
            },
            "evaluate": {"every": scale.rounds},
        }
    )


def run_trial(variant: str, recipe: Recipe, attacker: Attacker, images: int) -> Trial:
    """Train a variant and attack it.

    Args:
        images: largest number of clients' images to attack.
    """
    simulation, rows = train(recipe)
    depth, seed = recipe.train.depth or DEPTH, recipe.seed
    held = np.concatenate([client.x for client in simulation.clients.values()])
    private = held[np.random.default_rng(seed).permutation(len(held))[:images]]
    known = simulation.x_test[: len(simulation.x_test) // 2]
    prefix = simulation.state.net.prefix(depth)
    leak = attack(prefix, known, private, replace(attacker, seed=seed))
    return Trial(variant, depth, seed, rows[-1]["accuracy"], leak)


def report(dataset: str, trials: Sequence[Trial], ran: str = "") -> str:
    """The tables of a data set: our means over seeds, and the paper's figures.

    Args:
        ran: a line on how the figures were made.
    """
    heads = ["| variant | accuracy, % | MSE | SSIM | PSNR, dB |", "| --- | --- | --- | --- | --- |"]
    here = [trial for trial in trials if trial.depth == DEPTH]
    lines = [
        f"# What an attacker rebuilds from smashed data: {dataset}",
        "",
        *([ran, ""] if ran else []),
        "Mean ± standard deviation over seeds. A low SSIM or PSNR and a high MSE mean that little",
        "leaks. The blind guess is the mean image, which needs no smashed data.",
        "",
        f"## Cut after stage {DEPTH}",
        "",
        *heads,
        *(_line(variant, [t for t in here if t.variant == variant]) for variant in VARIANTS),
    ]
    blind = [trial.leak for trial in here]
    mse, ssim = (
        statistics.mean(getattr(leak, name) for leak in blind)
        for name in ("mse_blind", "ssim_blind")
    )
    lines.append(f"| blind guess | | {mse:.4f} | {ssim:.3f} | |")
    for name, (accuracy, mse, ssim, psnr) in PAPER.items():
        lines.append(f"| paper: {name} | {accuracy:.2f} | {mse:.4f} | {ssim:.3f} | {psnr:.2f} |")
    cuts = sorted({trial.depth for trial in trials})
    if cuts == [DEPTH]:
        return "\n".join([*lines, ""])
    lines += ["", "## By split point", "", *heads]
    for depth in cuts:
        for variant in (PLAIN, ENHANCED):
            own = [t for t in trials if (t.variant, t.depth) == (variant, depth)]
            lines.append(_line(f"{variant}, cut after stage {depth}", own))
    return "\n".join([*lines, ""])


def _write(path: Path, about: Mapping[str, Any], trials: Sequence[Trial]) -> None:
    scale: Mapping[str, Any] = about["scale"]
    attacker = scale["attacker"]
    ran = (
        f"{made_by(about)} `{scale['backbone']}`,"
        f" {scale['rounds']} rounds; seeds {', '.join(str(s) for s in _seeds(trials))};"
        f" {about['images']} images attacked by a decoder of {attacker['width']} channels and"
        f" {attacker['blocks']} residual blocks, {attacker['epochs']} epochs on half of the test"
        " images."
    )
    found = dict(about) | {"trials": [asdict(trial) for trial in trials]}
    write(path, found, [report(about["dataset"], trials, ran).rstrip("\n")])


def _seeds(trials: Sequence[Trial]) -> list[int]:
    return sorted({trial.seed for trial in trials})


def _line(variant: str, trials: Sequence[Trial]) -> str:
    leaks = [trial.leak for trial in trials]
    cells = [
        _spread([100 * trial.accuracy for trial in trials], 1),
        _spread([leak.mse for leak in leaks], 4),
        _spread([leak.ssim for leak in leaks], 3),
        _spread([leak.psnr for leak in leaks], 1),
    ]
    return f"| {' | '.join([variant, *cells])} |"


def _spread(values: Sequence[float], digits: int) -> str:
    mean = f"{statistics.mean(values):.{digits}f}"
    return mean if len(values) < 2 else f"{mean} ± {statistics.stdev(values):.{digits}f}"


if __name__ == "__main__":
    torch.set_num_threads(1)
    typer.run(main)
