"""`splitedge demo`: server, training and devices on this machine, in about a minute."""

from __future__ import annotations

import contextlib
import shlex
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console
from rich.table import Table

from edge_sdk.cli.data_options import Resize
from edge_sdk.cli.main import stop_on_sigterm
from edge_sdk.cli.output import check_report, print_table
from edge_sdk.durable import make_folder

if TYPE_CHECKING:
    from server.demo.run import DemoReport

app = typer.Typer(add_completion=False)


@app.command(epilog="Example: splitedge demo --data fashion-mnist=./data --report r.json")
def demo(
    dataset: Annotated[
        Literal["digits", "fashion-mnist"], typer.Option(help="Data set, where --data names none.")
    ] = "digits",
    data: Annotated[
        str | None,
        typer.Option(
            metavar="DATA",
            help="Labelled square pictures to learn and classify: a folder with a folder for each"
            " class, fashion-mnist=DIR, cifar-10=DIR, FILE.npz, ... (docs/data.md); with --dataset"
            " fashion-mnist the folder with its files.",
        ),
    ] = None,
    resize: Resize = None,
    state: Annotated[
        Path, typer.Option(help="Folder for the server and the devices, kept for further use.")
    ] = Path("splitedge-demo"),
    samples: Annotated[
        int | None,
        typer.Option(min=100, help="Training samples at most; fewer is faster."),
    ] = None,
    report: Annotated[Path | None, typer.Option(help="File for the figures as JSON.")] = None,
) -> None:
    """Train a small network with three devices, deploy it to them, and survive an outage.

    The devices are a Raspberry Pi Zero 2 W, a Raspberry Pi 4 and a Jetson Orin Nano from the
    catalogue. Each one trains and runs as many stages as SuperSFL's rule gives it, on samples of
    its own. It sends their smashed data and labels, not the samples. Every process and every
    message is real.
    """
    from edge_sdk.training.data.load import data_word, with_resize
    from edge_sdk.training.data.pictures import holds_pictures
    from server.demo.run import run_demo

    check_report(report)
    # SIGTERM ends the child processes too, as Ctrl-C does
    stop_on_sigterm()
    word = dataset if data is None else data
    if data is not None and dataset == "fashion-mnist" and "=" not in data:
        folder = Path(data)
        word = data if folder.is_dir() and holds_pictures(folder) else data_word(dataset, folder)
    word = with_resize(word, resize)
    console = Console()
    result = run_demo(word, state, _progress(console), train_max=samples)
    if report is not None:
        make_folder(report.parent)
        report.write_bytes(result.to_json())
    _show(console, result, state)


def _progress(
    console: Console,
) -> Callable[[str], contextlib.AbstractContextManager[Callable[[str], None]]]:
    @contextlib.contextmanager
    def step(title: str) -> Iterator[Callable[[str], None]]:
        start = time.monotonic()
        with console.status(title) as status:
            yield lambda line: status.update(f"{title} · {line}")
        console.print(f"[green]✓[/] {title} [dim]{time.monotonic() - start:.1f} s[/]")

    return step


def _show(console: Console, report: DemoReport, state: Path) -> None:
    table = Table(title=f"{report.tested_on} test samples of {report.dataset} on each device")
    for column in ("device", "stages", "exits", "accuracy", "p50/p99 ms", "bytes"):
        table.add_column(column, justify="left" if column == "device" else "right")
    for device in report.devices:
        table.add_row(
            device.name,
            str(device.depth),
            _percent(device.exit_rate),
            _percent(device.accuracy),
            f"{device.p50_ms:.2f}/{device.p99_ms:.1f}",
            "-" if device.bytes_per_offload is None else f"{device.bytes_per_offload:.0f}",
        )
    print_table(table)
    trained, away = report.training, report.outage
    back = "did not recover" if away.recovered_s is None else f"{away.recovered_s:.2f} s"
    console.print(
        "exits: answered on the device; bytes: of one offload",
        style="dim",
    )
    console.print(
        f"training: {trained.rounds} rounds of {trained.method} in {trained.seconds:.0f} s,"
        f" {trained.bytes_up / 1e6:.0f} MB up, {trained.bytes_down / 1e6:.0f} MB down\n"
        f"accuracy: {_percent(report.accuracy_all_on_device)} all on the devices, "
        f"[bold]{_percent(report.accuracy_hybrid)} hybrid[/], "
        f"{_percent(report.accuracy_all_on_server)} all on the server\n"
        f"outage: {away.predictions} predictions while the server was away, {away.errors} errors, "
        f"{away.late} late; the server was asked again after {back}\n"
        f"whole demo: {report.seconds:.0f} s. Go on with it:"
    )
    # printed by typer, because the console would break long lines
    used = state / "devices" / report.devices[0].name
    for words in (
        ["server", "run", "--state", str(state / "server")],
        ["agent", "predict", str(state / "samples.npy"), "--state", str(used)],
    ):
        typer.echo(f"  {shlex.join(['splitedge', *words])}")


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"
