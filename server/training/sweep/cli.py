"""`splitedge sweep`: values of a recipe tried in every combination, and one chosen."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
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
from edge_sdk.errors import ConfigurationError
from exporters.run.next_step import export_command
from exporters.run.record import read_run
from profiles.control_groups import usable_cores
from server.training.commands import (
    Data,
    Engine,
    RayAddress,
    RecipeFile,
    ReportFile,
    changed,
    cluster_of,
)

if TYPE_CHECKING:  # torch takes seconds to import, and --help needs none of it
    from server.training.sweep.grid import Task
    from server.training.sweep.places import Places
    from server.training.sweep.run import Result

RUNS: Final = Path("splitedge-runs")

app = typer.Typer(add_completion=False)


@app.command(
    epilog="Example: splitedge sweep examples/recipes/fedavg-digits.toml"
    " --set train.learning_rate=0.05,0.1 --set train.momentum=0.0,0.9 --seeds 3"
)
def sweep(
    recipe: RecipeFile,
    *,
    values: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="NAME=VALUE,...",
            help="Values to try, such as train.learning_rate=0.05,0.1; several give every"
            " combination.",
        ),
    ] = None,
    seeds: Annotated[
        int, typer.Option(min=1, metavar="N", help="Train each with the seeds 0 to N - 1.")
    ] = 1,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            show_default="splitedge-runs/sweep-RECIPE",
            help="Folder of the runs, the table and the figures.",
        ),
    ] = None,
    report: ReportFile = None,
    measure: Annotated[
        Literal["accuracy", "accuracy_clients"],
        typer.Option(
            help="What the choice goes by, on held-out samples: the whole network's accuracy, or"
            " the mean over clients on their own classes."
        ),
    ] = "accuracy",
    jobs: Annotated[
        int | None,
        typer.Option(min=1, show_default="one a processor", help="Runs at the same time."),
    ] = None,
    engine: Engine = "local",
    ray_address: RayAddress = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Keep what --out holds, and go on with the rest.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Train again what is in OUT.")] = False,
    data: Data = None,
    resize: Resize = None,
) -> None:
    """Try values of a recipe in every combination; choose by held-out samples.

    Each combination and seed is a run of its own, as `splitedge simulate` leaves it. A sweep that
    was stopped, by a kill too, goes on with --resume: finished runs are kept, others go on from
    their last round. More values and seeds may be added.
    """
    check_report(report)
    folder = out or RUNS / f"sweep-{recipe.stem}"
    check_target("--out", folder, folder=True)
    stop_on_sigterm()
    with progress("loading torch") as say:
        from server.training.comparison.values import read_values
        from server.training.recipe.recipe import load_recipe
        from server.training.sweep.grid import choices_of, tasks_of
        from server.training.sweep.report import SweepReport
        from server.training.sweep.sweep import prepare, run_tasks

        base = changed(load_recipe(recipe), None, data, resize)
        choices = choices_of(base, _grid(read_values("--set", text) for text in values or ()))
        tasks = tasks_of(choices, seeds, folder)
        results = prepare(tasks, folder, measure, resume=resume, force=force)
        teller = _Teller(say, len(tasks))
        for result in results:
            teller.result(result, before=True)
        done = {result.task.folder for result in results}
        left = [task for task in tasks if task.folder not in done]
        with ExitStack() as stack:
            stack.enter_context(resumable("give the same command with --resume to go on"))
            places = _places(stack, left, engine, ray_address, jobs, measure)

            def on_result(result: Result) -> None:
                results.append(result)
                teller.result(result)

            run_tasks(left, places, measure, on_result=on_result, on_wait=teller.wait)
    found = SweepReport(base, choices, results, measure)
    found.write(folder, report)
    print_rows(found.table())
    for note in found.notes():
        typer.echo(note)
    typer.echo(f"written to {folder}: sweep.md, sweep.json; the runs in folders of their own")
    best = next(each.task.folder for each in found.of(found.chosen))
    if found.is_made:
        typer.echo(f"Next: {export_command(read_run(best), best, Path('server/models'))}")


class _Teller:
    """Tells how far the runs are."""

    def __init__(self, say: Progress, tasks: int) -> None:
        self._say, self._tasks, self._done = say, tasks, 0

    def result(self, result: Result, *, before: bool = False) -> None:
        self._done += 1
        how = "diverged" if result.training is None else f"held-out {result.score:.1%}"
        known = " (was done before)" if before else ""
        self._say(f"{self._done} of {self._tasks}: {result.task.name}: {how}{known}")

    def wait(self, under_way: Sequence[Task]) -> None:
        from server.training.sweep.sweep import rounds_done

        each = "; ".join(
            f"{task.name}, round {rounds_done(task)} of {task.recipe.train.rounds}"
            for task in under_way
        )
        self._say.step(f"{self._done} of {self._tasks} done; {each}")


def _grid(pairs: Iterable[tuple[str, Sequence[Any]]]) -> dict[str, Sequence[Any]]:
    """The values by name, each name once.

    Raises: ConfigurationError.
    """
    grid: dict[str, Sequence[Any]] = {}
    for name, found in pairs:
        if name in grid:
            raise ConfigurationError(
                f"--set {name}: expected all its values in one option, as in {name}=1,2; got it"
                " twice"
            )
        grid[name] = found
    return grid


def _places(
    stack: ExitStack,
    left: Sequence[Task],
    engine: Literal["local", "ray"],
    address: str | None,
    jobs: int | None,
    measure: Literal["accuracy", "accuracy_clients"],
) -> Places:
    """Places for the runs; the stack closes them, and a cluster that was started for them."""
    from server.training.sweep.places import ProcessPlaces, RayPlaces

    places: Places
    most = max(1, len(left))
    with_ray = stack.enter_context(cluster_of(engine if left else "local", address, jobs))
    if with_ray is None:
        places = ProcessPlaces(min(jobs or usable_cores(), most), measure)
    else:
        places = RayPlaces(with_ray, min(jobs or with_ray.cpus, most), measure)
    stack.callback(places.close)
    return places
