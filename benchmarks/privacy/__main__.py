"""Attacks on inputs, labels and members, with what we ship against them and without.

    python -m benchmarks.privacy digits
    python -m benchmarks.privacy fashion-mnist --data DIR --seeds 1

Writes privacy-DATA.json, privacy-DATA.md and privacy-DATA.png into benchmarks/results/.
"""

from __future__ import annotations

import time
from typing import Annotated, Final

import torch
import typer

from benchmarks.privacy.images import Pictures, rebuilt_images
from benchmarks.privacy.labels import read_labels
from benchmarks.privacy.members import found_members
from benchmarks.privacy.report import write_report
from benchmarks.privacy.worlds import SCALES, DataName, Trial, World
from benchmarks.reports import RESULTS, Data, Results, Seeds, provenance

PARTS: Final = ("images", "labels", "members")


def privacy(
    name: Annotated[DataName, typer.Argument(metavar="DATA", help="digits or fashion-mnist.")],
    parts: Annotated[
        list[str] | None,
        typer.Option("--part", help="Only this attack; may be repeated: images, labels, members."),
    ] = None,
    data: Data = None,
    seeds: Seeds = 1,
    results: Results = RESULTS,
) -> None:
    """Rebuild images, read labels and find members; about 15 minutes a seed on one core."""
    unknown = sorted(set(parts or ()) - set(PARTS))
    if unknown:
        raise typer.BadParameter(
            f"{', '.join(unknown)}: expected some of {', '.join(PARTS)}", param_hint="--part"
        )
    words = [name, *(f"--part {part}" for part in parts or []), "--seeds", str(seeds)]
    if data is not None:
        words += ["--data", "DIR"]
    command = f"python -m benchmarks.privacy {' '.join(words)}"
    about = {"command": command} | provenance()
    trials: list[Trial] = []
    pictures = Pictures()
    for seed in range(seeds):
        world = World(name, SCALES[name], seed, data)
        attacks = {
            "images": rebuilt_images(world, pictures),
            "labels": read_labels(world),
            "members": found_members(world),
        }
        for part in parts or PARTS:
            for trial in attacks[part]:
                trials.append(trial)
                there = {key: value for key, value in trial.figures.items() if value is not None}
                shown = ", ".join(f"{key} {value:.3g}" for key, value in there.items())
                typer.echo(f"{time.strftime('%H:%M:%S')} seed {seed}, {trial.name}: {shown}")
            # after every part: a benchmark that is stopped keeps what it has measured
            write_report(results / f"privacy-{name}", about, world, trials, pictures)


if __name__ == "__main__":
    torch.set_num_threads(1)
    typer.run(privacy)
