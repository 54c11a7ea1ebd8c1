"""`splitedge export-report`: reports of trainings in the formats of TensorBoard and MLflow."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from edge_sdk.cli.output import progress
from edge_sdk.cli.times import plural
from edge_sdk.errors import ConfigurationError

app = typer.Typer(add_completion=False)


@app.command(
    epilog="Example: splitedge export-report splitedge-runs/compare --tensorboard events"
    " --mlflow sqlite:///mlflow.db"
)
def export_report(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN", help="Folders of trainings, or folders that hold such folders."
        ),
    ],
    *,
    tensorboard: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Write TensorBoard's event files into DIR/NAME."),
    ] = None,
    mlflow: Annotated[
        str | None,
        typer.Option(
            metavar="URI", help="Log runs to an MLflow server or database: sqlite:///mlflow.db."
        ),
    ] = None,
    experiment: Annotated[
        str, typer.Option(metavar="NAME", help="MLflow's experiment; it is made if needed.")
    ] = "splitedge",
) -> None:
    """Export the reports of trainings to TensorBoard, to MLflow, or to both.

    A report may be exported again: TensorBoard's file is replaced, and MLflow keeps the run that it
    has.
    """
    if tensorboard is None and mlflow is None:
        raise ConfigurationError("export-report: expected --tensorboard DIR, --mlflow URI or both")
    with progress("loading torch") as say:
        from server.training.trackers.runs import find_runs
        from server.training.trackers.to_mlflow import log_run
        from server.training.trackers.to_tensorboard import write_events

        found = [run for folder in runs for run in find_runs(folder)]
        names = [run.name for run in found]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ConfigurationError(
                "export-report: expected trainings whose folders have names of their own, got"
                f" {twice} twice; export them one after another"
            )
        for run in found:
            say.step(f"exporting {run.name}")
            rounds = plural(len(run.rounds), "round")
            if tensorboard is not None:
                say(f"{run.name}: {rounds} written to {write_events(run, tensorboard)}")
            if mlflow is not None:
                new = log_run(run, mlflow, experiment)
                say(f"{run.name}: {rounds} logged" if new else f"{run.name}: MLflow has it already")
    if tensorboard is not None:
        typer.echo(f"Next: tensorboard --logdir {tensorboard}")
    if mlflow is not None and mlflow.startswith("http"):
        typer.echo(f"Next: open {mlflow}")
    elif mlflow is not None:
        typer.echo(f"Next: pip install mlflow, then mlflow ui --backend-store-uri {mlflow}")
