"""`splitedge simulate` and `splitedge train`: train by a recipe, here or with real devices."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from edge_sdk.cli.data_options import Resize
from edge_sdk.cli.main import stop_on_sigterm
from edge_sdk.cli.output import check_report, resumable
from edge_sdk.cli.times import length_in, plural
from edge_sdk.errors import ConfigurationError
from exporters.run.next_step import export_command
from exporters.run.record import read_run

if TYPE_CHECKING:  # torch takes seconds to import, and --help needs none of it
    from server.training.cluster.ray_cluster import RayCluster
    from server.training.recipe.recipe import Recipe

simulate_app = typer.Typer(add_completion=False)
train_app = typer.Typer(add_completion=False)

RecipeFile = Annotated[
    Path, typer.Argument(help="TOML file with a method, its numbers and the data.")
]
ReportFile = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Write the report to this file too.")
]


Data = Annotated[
    str | None,
    typer.Option(
        metavar="DATA",
        show_default="the recipe's",
        help="Labelled samples in place of the recipe's: digits, fashion-mnist=DIR, a folder of"
        " pictures, FILE.npz, csv:FILE?..., module:function (docs/data.md); or the folder with the"
        " files of the recipe's data set.",
    ),
]


Engine = Annotated[
    Literal["local", "ray"],
    typer.Option(help="Where work is shared out: processes of this machine, or a Ray cluster."),
]
RayAddress = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT",
        show_default="a cluster that is started here, and ended again",
        help="A Ray cluster that runs already, and of which this machine is a node.",
    ),
]


@simulate_app.command(
    epilog="Example: splitedge simulate examples/recipes/supersfl-digits.toml --report run.json"
)
def simulate(
    recipe: RecipeFile,
    *,
    report: ReportFile = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue after the last round in OUT.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace a finished run in OUT.")] = False,
    device: Annotated[
        Literal["cpu", "cuda"], typer.Option(help="Device that holds networks and batches.")
    ] = "cpu",
    seed: Annotated[
        int | None,
        typer.Option(min=0, show_default="the recipe's", help="Seed of all random draws."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            show_default="splitedge-runs/RECIPE-SEED",
            help="Folder for checkpoints, log, plots and report.",
        ),
    ] = None,
    data: Data = None,
    resize: Resize = None,
    threads: Annotated[
        int,
        typer.Option(
            min=1, help="Torch threads; another number changes the last bits of the weights."
        ),
    ] = 1,
    workers: Annotated[
        int | None,
        typer.Option(
            min=0,
            show_default="0; with --engine ray one for each processor",
            help="Processes that train the clients; every number gives the same weights. 0 trains"
            " them in this process.",
        ),
    ] = None,
    engine: Engine = "local",
    ray_address: RayAddress = None,
) -> None:
    """Train by a recipe with simulated clients: rounds, checkpoints, a report and plots.

    A run that was stopped and continued with --resume ends with the same weights, bit for bit;
    so does a run with any number of workers, on either engine.
    """
    check_report(report)
    stop_on_sigterm()
    console = Console()
    with console.status("loading torch"):
        import torch

        from server.training.recipe.recipe import load_recipe
        from server.training.report.report import write_report
        from server.training.simulation.run import simulate as run

    torch.set_num_threads(threads)
    found = changed(load_recipe(recipe), seed, data, resize)
    folder = out or Path("splitedge-runs") / f"{recipe.stem}-{found.seed}"
    with (
        resumable(),
        cluster_of(engine, ray_address, workers) as cluster,
        _progress(console, found.train.rounds) as on_round,
    ):
        count = workers or 0
        if cluster is not None and not workers:
            count = min(cluster.cpus, found.data.clients)
        result = run(
            found,
            folder,
            resume=resume,
            force=force,
            device=device,
            workers=count,
            cluster=cluster,
            on_round=on_round,
            note=partial(typer.echo, err=True),
        )
    if report is not None:
        write_report(report, result)
    _print_summary(console, result, folder)
    typer.echo(f"Next: {export_command(read_run(folder), folder, Path('server/models'))}")


@train_app.command(
    epilog="Example: splitedge train examples/recipes/supersfl-digits.toml --state ./server"
)
def train(
    recipe: RecipeFile,
    *,
    state: Annotated[
        Path, typer.Option(metavar="DIR", help="State folder of the server with the devices.")
    ] = Path("splitedge-server"),
    data: Data = None,
    resize: Resize = None,
    report: ReportFile = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue after the last saved round.")
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Replace a finished training of the recipe's name.")
    ] = False,
    min_devices: Annotated[
        int | None,
        typer.Option(
            min=1, show_default="the recipe's clients", help="Devices needed for the first round."
        ),
    ] = None,
    join_minutes: Annotated[
        float,
        typer.Option(
            metavar="MINUTES",
            parser=length_in("m"),
            help="Minutes (or 90s, 2h) to wait for devices before giving up.",
        ),
    ] = 10.0,
    silence: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            parser=length_in("s"),
            help="Seconds (or 2m) without a heartbeat after which a device is away.",
        ),
    ] = 15.0,
    http: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Address of the trainer.")
    ] = "127.0.0.1:8100",
    threads: Annotated[int, typer.Option(min=1, help="Torch threads.")] = 1,
    tls_cert: Annotated[
        Path | None, typer.Option(metavar="FILE", help="PEM certificate of the server.")
    ] = None,
    tls_key: Annotated[
        Path | None, typer.Option(metavar="FILE", help="PEM key of the certificate.")
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Allow unencrypted connections from other machines.")
    ] = False,
    host_name: Annotated[
        list[str] | None,
        typer.Option(
            help="Name by which requests may call a trainer on loopback, for a proxy in front of "
            "it; may be repeated. With it, /metrics needs a login."
        ),
    ] = None,
) -> None:
    """Train by a recipe with the enrolled devices; their inputs stay on them.

    The running server invites the devices; `splitedge agent train` on each waits for that. What
    devices send in place of their inputs: docs/privacy.md.
    """
    check_report(report)
    console = Console(stderr=True)
    with console.status("loading torch"):
        import torch

        from edge_sdk.wire.address import Address
        from server.run import Addresses
        from server.training.fleet.settings import TrainerSettings
        from server.training.fleet.trainer import train as run
        from server.training.recipe.recipe import load_recipe
        from server.training.report.report import write_report

    torch.set_num_threads(threads)
    stop_on_sigterm()
    if logging.getLogger().level > logging.INFO:
        logging.getLogger("server").setLevel(logging.INFO)
    known = Addresses.load(state)
    scheme = "http" if tls_cert is None else "https"
    settings = TrainerSettings(
        state=state,
        name=recipe.stem,
        http=Address.parse(http, "--http"),
        min_devices=min_devices,
        join_s=60 * join_minutes,
        silence_s=silence,
        resume=resume,
        force=force,
        server=None if known is None else f"{scheme}://{known.http}",
        tls_cert=tls_cert,
        tls_key=tls_key,
        insecure=insecure,
        host_names=tuple(host_name or ()),
    )
    with resumable():
        result = run(
            changed(load_recipe(recipe), None, data, resize),
            settings,
            say=typer.echo,
            on_round=_print_round,
            note=partial(typer.echo, err=True),
        )
    if report is not None:
        write_report(report, result)
    folder = settings.folder
    typer.echo(_of_devices(result))
    typer.echo(f"Next: {export_command(read_run(folder), folder, state / 'models')}")


@contextmanager
def cluster_of(
    engine: Literal["local", "ray"], address: str | None, cpus: int | None
) -> Iterator[RayCluster | None]:
    """The Ray cluster of a command while the block runs; None for processes of this machine.

    Args:
        cpus: processors of a cluster that is started here; None or 0 for all.
    Raises: ConfigurationError for an address without `--engine ray`, or one of no cluster.
    """
    if engine == "local":
        if address is not None:
            raise ConfigurationError(
                f"--ray-address {address}: expected --engine ray beside it, got --engine local"
            )
        yield None
        return
    from server.training.cluster.ray_cluster import connected

    console = Console(stderr=True)
    with ExitStack() as stack:
        with console.status("starting Ray" if address is None else f"connecting to {address}"):
            cluster = stack.enter_context(connected(address, cpus or None))
        yield cluster


def changed(recipe: Recipe, seed: int | None, data: str | None, resize: str | None) -> Recipe:
    """The recipe with what the options say in its place; None leaves the recipe's."""
    from edge_sdk.training.data.load import with_resize

    if seed is not None:
        recipe = replace(recipe, seed=seed)
    if data is not None:
        recipe = replace(recipe, data=recipe.data.taken_from(data))
    if resize is not None:
        word = with_resize(recipe.data.word, resize)
        recipe = replace(recipe, data=replace(recipe.data, name=word, folder=None))
    return recipe


@contextmanager
def _progress(console: Console, rounds: int) -> Iterator[Callable[[Mapping[str, Any]], None]]:
    """A progress line that is updated after each round."""
    columns = (
        TextColumn("round {task.completed}/{task.total}"),
        BarColumn(bar_width=20),
        TextColumn("{task.fields[figures]}"),
        TimeRemainingColumn(compact=True),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=rounds, figures="")
        moved = 0
        accuracy = "-"

        def on_round(row: Mapping[str, Any]) -> None:
            nonlocal moved, accuracy
            moved += row["bytes_up"] + row["bytes_down"]
            if row["accuracy"] is not None:
                accuracy = f"{row['accuracy']:.1%}"
            loss = "-" if row["loss"] is None else f"{row['loss']:.3f}"
            figures = f"accuracy {accuracy}  loss {loss}  {moved / 1e6:.1f} MB"
            progress.update(task, completed=row["round"], figures=figures)

        yield on_round


def _print_summary(console: Console, result: Mapping[str, Any], folder: Path) -> None:
    """Print the report of a simulation in a few lines."""
    rows, final = result["rounds"], result["final"]
    up, down = (sum(row[f"bytes_{way}"] for row in rows) for way in ("up", "down"))
    seconds = sum(row["seconds"] for row in rows)
    path = "the clients' exits alone" if final["path"] == "exits" else "the whole network"
    console.print(
        f"[bold]{result['method']}[/] on {result['dataset']}, {result['clients']} clients, "
        f"{len(rows)} rounds in {seconds:.1f} s, {up / 1e6:.1f} MB up, {down / 1e6:.1f} MB down"
    )
    console.print(f"accuracy on the test part: [bold]{final['accuracy']:.1%}[/] ({path})")
    others = final["accuracy_ood"]
    unseen = "" if math.isnan(others) else f", {_percent(others)} of other classes"
    console.print(
        f"mean accuracy of clients on test samples: {_percent(final['accuracy_id'])} of classes"
        f" they have{unseen}; standard deviation {_percent(final['std'])}"
    )
    if final["by_threshold"]:
        _print_thresholds(console, final["by_threshold"])
    if final["exits"]:
        each = ", ".join(f"{depth}: {value:.1%}" for depth, value in final["exits"].items())
        console.print(f"accuracy of exits on the test part, by depth: {each}")
    lost = sum(len(row["missing"]) + len(row["refused"]) for row in rows)
    if lost:
        console.print(f"[yellow]{lost} updates are missing or refused[/]; the report says why")
    idle = [row["round"] for row in rows if not row["merged"]]
    if idle:
        noise = "; the noise of [privacy] may be too strong" if result["privacy"] else ""
        console.print(
            f"[yellow]{len(idle)} of {len(rows)} rounds did not merge[/] (first: {idle[0]}): fewer"
            " valid updates than round.quorum asks for, so the weights did not change"
            f"{escape(noise)}"
        )
    typer.echo(f"written to {folder}")


def _print_thresholds(console: Console, found: Mapping[str, Mapping[str, Any]]) -> None:
    """Print how the thresholds of clients' gates were chosen, and what other choices give."""
    figures = {choice: _percent(each["accuracy_clients"]) for choice, each in found.items()}
    if "held_out" not in found:
        console.print(
            "each client has the threshold that is best for those very samples, an upper bound for"
            " deployed gates: the recipe holds nothing out to choose by (held_out = 0)"
        )
        return
    console.print(
        f"accuracy of the gated clients: {figures['held_out']} with thresholds that were chosen on"
        f" their held-out samples, {figures['fleet']} with one threshold for all,"
        f" {figures['oracle']} with the best for the test samples, an upper bound"
    )


def _of_devices(result: Mapping[str, Any]) -> str:
    """The report of a training with devices in a line."""
    final = result["final"]
    if final["accuracy"] is not None:
        accuracy = f"accuracy on the test part {final['accuracy']:.1%}"
    elif not math.isnan(final["accuracy_id"]):  # their last layers are their own
        accuracy = f"mean accuracy of devices on their own test samples {final['accuracy_id']:.1%}"
    else:
        accuracy = "no accuracy, since devices keep the last layer and did not score"
    counts = f"{plural(len(result['rounds']), 'round')} with {plural(result['clients'], 'device')}"
    return f"{counts}, {accuracy}: {result['weights']}"


def _percent(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.1%}"


def _print_round(row: Mapping[str, Any]) -> None:
    accuracy = "" if row["accuracy"] is None else f", accuracy {row['accuracy']:.1%}"
    why = row["missing_why"]
    names = [f"{name} ({why[name]})" if name in why else name for name in row["missing"]]
    missing = f", missing: {', '.join(names)}" if names else ""
    stale = f", late updates from: {', '.join(row['stale'])}" if row["stale"] else ""
    typer.echo(
        f"round {row['round']}: {plural(len(row['participants']), 'device')}{accuracy},"
        f" {row['seconds']:.1f} s{missing}{stale}"
    )
