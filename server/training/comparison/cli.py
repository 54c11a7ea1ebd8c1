"""`splitedge compare`: recipes side by side, over several seeds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import typer

from edge_sdk.cli.data_options import Resize
from edge_sdk.cli.main import stop_on_sigterm
from edge_sdk.cli.output import (
    Progress,
    check_report,
    check_target,
    print_rows,
    progress,
    resumable,
)
from edge_sdk.cli.times import plural
from edge_sdk.errors import ConfigurationError
from server.training.commands import Data, ReportFile, changed

if TYPE_CHECKING:  # torch takes seconds to import, and --help needs none of it
    from server.training.comparison.comparison import Training
    from server.training.comparison.tuning import Trial
    from server.training.recipe.recipe import Recipe

OUT: Final = Path("splitedge-runs/compare")

app = typer.Typer(add_completion=False)


@app.command(
    epilog="Example: splitedge compare examples/recipes/fedavg-digits.toml"
    " examples/recipes/supersfl-digits.toml --seeds 3"
)
def compare(
    recipes: Annotated[
        list[Path],
        typer.Argument(help="TOML files of two or more recipes; the first is the reference."),
    ],
    *,
    seeds: Annotated[
        int, typer.Option(min=1, metavar="N", help="Train each with the seeds 0 to N - 1.")
    ] = 3,
    out: Annotated[
        Path, typer.Option(metavar="DIR", help="Folder of the trainings, the table and the plot.")
    ] = OUT,
    report: ReportFile = None,
    values: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="NAME=VALUE",
            help="A value for every recipe, such as train.rounds=10; may be repeated.",
        ),
    ] = None,
    tune: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE,...",
            help="Try these values with every recipe first, such as train.learning_rate=0.05,0.1,"
            " and take its best; several give every combination.",
        ),
    ] = None,
    measure: Annotated[
        Literal["accuracy", "accuracy_clients"],
        typer.Option(
            help="What --tune goes by, on held-out samples: the whole network's accuracy, or the"
            " mean over clients on their own classes."
        ),
    ] = "accuracy",
    target: Annotated[
        str | None,
        typer.Option(metavar="SHARE", help="Show the cost up to this accuracy too, such as 90%."),
    ] = None,
    data: Data = None,
    resize: Resize = None,
    force: Annotated[bool, typer.Option("--force", help="Train again what --out holds.")] = False,
    device: Annotated[
        Literal["cpu", "cuda"], typer.Option(help="Device that holds networks and batches.")
    ] = "cpu",
    threads: Annotated[int, typer.Option(min=1, help="Torch threads.")] = 1,
    workers: Annotated[
        int, typer.Option(min=0, help="Processes that train the clients; 0 for none.")
    ] = 0,
) -> None:
    """Compare recipes over several seeds: table, plot, and differences with 95 % intervals.

    Trainings that are done are kept, and one that was stopped goes on: give the same command again.
    """
    check_report(report)
    check_target("--out", out, folder=True)
    reached = None if target is None else _share(target)
    stop_on_sigterm()
    with progress("loading torch") as say:
        import torch

        from server.training.comparison.comparison import Watcher
        from server.training.comparison.comparison import compare as run
        from server.training.comparison.report import Comparison

        torch.set_num_threads(threads)
        found = _read_recipes(recipes, values or (), data, resize)
        teller = _Teller(say, len(found) * seeds)
        with resumable("give the same command to go on"):
            trials = _tune(found, tune or (), out, measure, device, teller)
            chosen = _with_best(found, trials)
            trainings = run(
                chosen,
                range(seeds),
                out,
                force=force,
                device=device,
                workers=workers,
                watcher=Watcher(teller.round, teller.training),
            )
    comparison = Comparison(chosen, trainings, reached, trials)
    comparison.write(out, report)
    print_rows(comparison.table())
    for note in comparison.notes():
        typer.echo(note)
    typer.echo(f"written to {out}: comparison.md, comparison.json, accuracy.png")


@dataclass(slots=True)
class _Teller:
    """Tells how far the trainings are."""

    say: Progress
    trainings: int
    done: int = field(default=0, init=False)

    def trial(self, name: str, values: Mapping[str, Any], row: Mapping[str, Any]) -> None:
        words = ", ".join(f"{key}={value}" for key, value in values.items())
        self.say.step(f"tuning {name}, {words}: round {row['round']}")

    def round(self, name: str, seed: int, row: Mapping[str, Any]) -> None:
        accuracy = "" if row["accuracy"] is None else f", accuracy {row['accuracy']:.1%}"
        which = f"training {self.done + 1} of {self.trainings}"
        self.say.step(f"{which}: {name}, seed {seed}, round {row['round']}{accuracy}")

    def training(self, training: Training, before: bool) -> None:
        self.done += 1
        known = " (was done before)" if before else f" in {training.seconds:.0f} s"
        self.say(
            f"{self.done} of {self.trainings}: {training.name}, seed {training.seed}: accuracy"
            f" {training.accuracy:.1%}{known}"
        )


def _read_recipes(
    files: Sequence[Path], values: Iterable[str], data: str | None, resize: str | None
) -> dict[str, Recipe]:
    """The recipes by the names of their files, with the options' values."""
    from server.training.comparison.values import read_values, with_values
    from server.training.recipe.recipe import load_recipe

    names = [file.stem for file in files]
    twice = next((name for name in names if names.count(name) > 1), None)
    if len(files) < 2 or twice is not None:
        got = f"{twice} twice" if twice else plural(len(files), "recipe")
        raise ConfigurationError(
            f"compare: expected two or more recipes whose files have names of their own, got {got}"
        )
    one = dict(_one_value(text, *read_values("--set", text)) for text in values)
    found = {}
    for file in files:
        recipe = changed(load_recipe(file), None, data, resize)
        try:
            found[file.stem] = with_values(recipe, one) if one else recipe
        except ConfigurationError as err:
            raise ConfigurationError(f"--set, for {file}: {err}") from err
    return found


def _one_value(text: str, name: str, values: Sequence[Any]) -> tuple[str, Any]:
    if len(values) != 1:
        raise ConfigurationError(
            f"--set {text}: expected one value, got {len(values)}; --tune tries several, and a list"
            " is written as [1, 2]"
        )
    return name, values[0]


def _tune(
    recipes: Mapping[str, Recipe],
    texts: Iterable[str],
    out: Path,
    measure: Literal["accuracy", "accuracy_clients"],
    device: str,
    teller: _Teller,
) -> dict[str, list[Trial]]:
    """The trials of every recipe; none without --tune."""
    from server.training.comparison.tuning import tune
    from server.training.comparison.values import read_values

    grid = dict(read_values("--tune", text) for text in texts)
    found: dict[str, list[Trial]] = {}
    for name, recipe in recipes.items() if grid else ():
        try:
            found[name] = tune(
                name,
                recipe,
                grid,
                out,
                measure=measure,
                device=device,
                on_round=partial(teller.trial, name),
            )
        except ConfigurationError as err:
            raise ConfigurationError(f"--tune, for {name}: {err}") from err
    return found


def _with_best(
    recipes: Mapping[str, Recipe], trials: Mapping[str, Sequence[Trial]]
) -> dict[str, Recipe]:
    from server.training.comparison.tuning import best
    from server.training.comparison.values import with_values

    return {
        name: with_values(recipe, best(trials[name]).values) if name in trials else recipe
        for name, recipe in recipes.items()
    }


def _share(text: str) -> float:
    """An accuracy such as `90%` or `0.9`."""
    percent = text.endswith("%")
    try:
        value = float(text.removesuffix("%")) / (100 if percent else 1)
    except ValueError:
        value = -1.0
    if not 0 < value <= 1:
        raise ConfigurationError(f"--target {text}: expected an accuracy such as 90% or 0.9")
    return value
