"""How much of the inputs can be drawn out of what crosses the cut, with SCALA's guards and without.

    python -m benchmarks.inversion digits
    python -m benchmarks.inversion fashion-mnist --data DIR
    python -m benchmarks.inversion cifar-10 --data DIR

Each variant is trained by `simulate`'s engine; then an attacker who has its prefix and one half of
the test images trains a decoder and draws the clients' training images with it
(server.training.attacks.inversion).
Writes benchmarks/results/inversion-DATASET.json and .md.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import numpy as np
import orjson
import torch
import typer

from edge_sdk.durable import make_folder, write_atomic
from server.training.attacks.inversion import Attacker, Leak, attack
from server.training.recipe import read_recipe
from server.training.simulate import run_rounds
from server.training.world import build_world

RESULTS = Path(__file__).parent / "results"
VARIANTS: Final[Mapping[str, Mapping[str, Any]]] = {
    "SCALA": {},
    "with the bottleneck": {"bottleneck": 8},
    "with the guard": {"inversion": 0.3},
    "SCALA-PE, with both": {"bottleneck": 8, "inversion": 0.3},
}
# SCALA, Table VI: VGG-11 cut at 2; accuracy in %, MSE, SSIM, PSNR in dB
PAPER: Final = {
    "CIFAR-10, SCALA": (91.25, 0.0016, 0.9314, 28.20),
    "CIFAR-10, SCALA-PE": (89.08, 0.0051, 0.8142, 23.33),
    "CIFAR-100, SCALA": (67.35, 0.0048, 0.8632, 23.81),
    "CIFAR-100, SCALA-PE": (65.50, 0.0328, 0.5659, 15.84),
}


@dataclass(frozen=True, slots=True)
class Scale:
    """What one data set is tried on: a backbone cut at 2, so much training, so strong an attack."""

    backbone: str
    rounds: int
    train_max: int
    test_max: int
    attacker: Attacker


# an attacker of full strength takes minutes on one core
SCALES: Final = {
    "digits": Scale("tiny", 40, 1_400, 397, Attacker(width=32, blocks=1, epochs=30)),
    "fashion-mnist": Scale("cnn6", 30, 5_000, 2_000, Attacker(width=32, blocks=2, epochs=20)),
    "cifar-10": Scale("cnn6", 40, 5_000, 2_000, Attacker(width=32, blocks=2, epochs=20)),
}


@dataclass(frozen=True, slots=True)
class Trial:
    """One variant, one seed: what it is worth and what it leaks."""

    variant: str
    seed: int
    accuracy: float
    leak: Leak


def main(
    dataset: Annotated[
        Literal["digits", "fashion-mnist", "cifar-10"], typer.Argument(help="What is drawn.")
    ] = "digits",
    data: Annotated[Path | None, typer.Option(help="Folder of the data set's files.")] = None,
    seeds: Annotated[int, typer.Option(min=1, help="How many; they are 0, 1, ...")] = 3,
    images: Annotated[int, typer.Option(min=1, help="Of the clients, attacked.")] = 200,
    results: Path = RESULTS,
) -> None:
    """SCALA and its privacy-enhanced variant under an inversion attack (the paper's Table VI)."""
    trials: list[Trial] = []
    for seed in range(seeds):
        for variant in VARIANTS:
            trials.append(run_trial(variant, dataset, data, seed=seed, images=images))
            typer.echo(_line(variant, trials[-1:]))
        # after every seed: one takes minutes, and a run that is stopped keeps those it has
        _write(results / f"inversion-{dataset}", dataset, images, trials)
    typer.echo(f"\n{report(dataset, trials)}")


def run_trial(variant: str, dataset: str, data: Path | None, *, seed: int, images: int) -> Trial:
    """Train a variant and attack it.

    Args:
        images: at most so many of the clients' are drawn.
    """
    scale = SCALES[dataset]
    recipe = read_recipe(
        {
            "method": "scala",
            "method_numbers": VARIANTS[variant],
            "seed": seed,
            "data": {
                "name": dataset,
                "clients": 10,
                "train_max": scale.train_max,
                "test_max": scale.test_max,
            },
            "train": {
                "backbone": scale.backbone,
                "depth": 2,
                "rounds": scale.rounds,
                "iterations": 10,
                "batch": 160,
                "learning_rate": 0.05,
                "momentum": 0.9,
            },
            "evaluate": {"every": scale.rounds},
        }
    )
    world = build_world(replace(recipe, data=replace(recipe.data, folder=data)))
    rows: list[dict[str, Any]] = []
    for _ in run_rounds(world, rows):
        pass
    held = np.concatenate([client.x for client in world.clients.values()])
    private = held[np.random.default_rng(seed).permutation(len(held))[:images]]
    known = world.x_test[: len(world.x_test) // 2]
    leak = attack(world.state.net.prefix(2), known, private, replace(scale.attacker, seed=seed))
    return Trial(variant, seed, rows[-1]["accuracy"], leak)


def report(dataset: str, trials: Sequence[Trial]) -> str:
    """The table of a data set: our means over seeds, and the paper's figures beside them."""
    lines = [
        f"# What an attacker draws out of the smashed data: {dataset}",
        "",
        "Mean ± standard deviation over seeds. The lower SSIM and PSNR and the higher MSE, the",
        "less is given away; the blind guess is the mean image, which takes no smashed data.",
        "",
        "| variant | accuracy, % | MSE | SSIM | PSNR, dB |",
        "| --- | --- | --- | --- | --- |",
        *(_line(variant, [t for t in trials if t.variant == variant]) for variant in VARIANTS),
    ]
    blind = [trial.leak for trial in trials]
    mse, ssim = (
        statistics.mean(getattr(leak, name) for leak in blind)
        for name in ("mse_blind", "ssim_blind")
    )
    lines.append(f"| blind guess | | {mse:.4f} | {ssim:.3f} | |")
    for name, (accuracy, mse, ssim, psnr) in PAPER.items():
        lines.append(f"| paper: {name} | {accuracy:.2f} | {mse:.4f} | {ssim:.3f} | {psnr:.2f} |")
    return "\n".join([*lines, ""])


def _write(path: Path, dataset: str, images: int, trials: Sequence[Trial]) -> None:
    make_folder(path.parent)
    said = {
        "dataset": dataset,
        "scale": asdict(SCALES[dataset]),
        "images": images,
        "torch": torch.__version__,
        "trials": [asdict(trial) for trial in trials],
    }
    options = orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE
    write_atomic(path.with_suffix(".json"), orjson.dumps(said, option=options))
    write_atomic(path.with_suffix(".md"), report(dataset, trials).encode())


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
