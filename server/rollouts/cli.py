"""`splitedge server rollout …`: bring a new version to one share of the devices after the other.

The commands change the registry; a running server follows within seconds and moves the devices.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from edge_sdk.cli.output import print_json, print_table
from edge_sdk.cli.times import ago, seconds
from server.options import STATE_DEFAULT, AsJson, State

if TYPE_CHECKING:
    from server.registry.database import Registry
    from server.registry.rollouts.records import Rollout
    from server.rollouts.overview import RolloutState

app = typer.Typer(
    help="Bring a new version to one share of the devices after the other, and back by itself.",
    epilog="Example: splitedge server rollout start digits 3 --share 10% --then 50%,100% "
    '--health "fallback<5%" --wait 10m --state ./server',
    no_args_is_help=True,
)

Number = Annotated[
    int | None,
    typer.Argument(help="Number of the roll-out; the newest one if it is left out."),
]


@app.command(
    epilog="Example: splitedge server rollout start digits 3 --share 10% --then 50%,100% "
    '--health "fallback<5%,agreement>0.97" --wait 10m'
)
def start(
    model: Annotated[str, typer.Argument(help="Name of the model, or MODEL/VERSION.")],
    version: Annotated[
        int | None, typer.Argument(help="Version that the devices get.", show_default=False)
    ] = None,
    share: Annotated[str, typer.Option(help="First share of the devices.")] = "10%",
    then: Annotated[
        str | None,
        typer.Option(
            help="The shares after it, ascending; the last one is 100%. Default: 50%,100%, as far "
            "as they are above the first one."
        ),
    ] = None,
    health: Annotated[
        str,
        typer.Option(
            help="Conditions on a share's devices: fallback<5%, offload<40%, exit>60%, "
            "agreement>0.97, latency<80ms, or in comparison with the devices that stayed: "
            "fallback<1.2x. Default: none; a device that refuses or leaves the version always "
            "counts.",
        ),
    ] = "",
    wait: Annotated[
        str, typer.Option(help="How long each share is watched: 90s, 10m, 1h30m, 1d.")
    ] = "10m",
    answers: Annotated[
        int, typer.Option(min=1, help="Answers of a share before its health is judged.")
    ] = 200,
    tolerate: Annotated[
        int, typer.Option(min=0, help="Devices that may refuse or leave the version.")
    ] = 0,
    fleet: Annotated[str | None, typer.Option(help="Devices of this fleet only.")] = None,
    tag: Annotated[str | None, typer.Option(help="Devices with this tag only.")] = None,
    device: Annotated[str | None, typer.Option(help="This device only.")] = None,
    state: State = STATE_DEFAULT,
    as_json: AsJson = False,
) -> None:
    """Start a roll-out: a share of the devices takes the version and is watched, then the next.

    If a device of the share refuses the version or goes back by itself, or if the share's health is
    worse than a condition, all its devices go back to what they ran. Devices that are pinned stay.
    """
    from server.registry.rollouts.records import RolloutPlan
    from server.registry.selection.selection import Selection
    from server.rollouts.start import start_rollout
    from server.state import existing_registry

    name, number = _named(model, version)
    plan = RolloutPlan(
        name,
        number,
        Selection(fleet, tag, device),
        _shares(share, then),
        health,
        seconds(wait),
        answers,
        tolerate,
    )
    with existing_registry(state) as registry:
        started = start_rollout(registry, plan)
        _print_one(registry, started, as_json)


@app.command("list", epilog="Example: splitedge server rollout list --state ./server")
def list_(state: State = STATE_DEFAULT, as_json: AsJson = False) -> None:
    """List the roll-outs, newest first."""
    from server.rollouts.overview import rollout_states
    from server.state import existing_registry

    with existing_registry(state) as registry:
        found = rollout_states(registry)
    if as_json:
        print_json([one.to_dict() for one in found])
        return
    if not found:
        typer.echo("no roll-outs yet; begin one with `splitedge server rollout start`")
        return
    table = Table("number", "version", "devices", "state", "share", "run it", "started")
    for one in found:
        share = f"{100 * one.share:g} %"
        run_it = f"{one.taken} of {one.joined}"
        started = ago(one.started_at)
        table.add_row(str(one.id), one.version, one.selection, one.state, share, run_it, started)
    print_table(table)


@app.command(epilog="Example: splitedge server rollout status 4 --state ./server")
def status(number: Number = None, state: State = STATE_DEFAULT, as_json: AsJson = False) -> None:
    """Show a roll-out: its share, its health, its devices, and what it waits for."""
    from server.rollouts.overview import rollout_state
    from server.state import existing_registry

    with existing_registry(state) as registry:
        found = rollout_state(registry, _chosen(registry, number))
    if as_json:
        print_json(found.to_dict())
        return
    _print_whole(found)


@app.command(epilog="Example: splitedge server rollout pause --state ./server")
def pause(number: Number = None, state: State = STATE_DEFAULT, as_json: AsJson = False) -> None:
    """Stop a roll-out where it is, until `resume`; its devices keep the version."""
    _turn("pause", number, state, as_json)


@app.command(epilog="Example: splitedge server rollout resume --state ./server")
def resume(number: Number = None, state: State = STATE_DEFAULT, as_json: AsJson = False) -> None:
    """Let a paused roll-out go on; its share is watched for the whole time again."""
    _turn("resume", number, state, as_json)


@app.command(epilog="Example: splitedge server rollout abort 4 --state ./server")
def abort(number: Number = None, state: State = STATE_DEFAULT, as_json: AsJson = False) -> None:
    """End a roll-out: its devices go back to what they ran before."""
    _turn("abort", number, state, as_json)


def _turn(what: str, number: int | None, state: Any, as_json: bool) -> None:
    from server.state import existing_registry

    with existing_registry(state) as registry:
        rollouts = registry.rollouts
        turn = {"pause": rollouts.pause, "resume": rollouts.resume, "abort": rollouts.abort}[what]
        _print_one(registry, turn(_chosen(registry, number)), as_json)


def _chosen(registry: Registry, number: int | None) -> int:
    """The number that was given, or that of the newest roll-out.

    Raises: UnknownRolloutError if there is none.
    """
    from server.errors import UnknownRolloutError

    if number is not None:
        return number
    newest = registry.rollouts.all()
    if not newest:
        raise UnknownRolloutError("no roll-outs yet; see `splitedge server rollout start --help`")
    live = [one for one in newest if one.live]
    return (live or newest)[0].id


def _print_one(registry: Registry, rollout: Rollout, as_json: bool) -> None:
    from server.rollouts.overview import rollout_state, summary

    found = rollout_state(registry, rollout.id)
    if as_json:
        print_json(found.to_dict())
    else:
        typer.echo(summary(found))


def _print_whole(found: RolloutState) -> None:
    from server.rollouts.overview import summary

    typer.echo(summary(found))
    shares = ", ".join(f"{100 * share:g} %" for share in found.shares)
    typer.echo(f"shares: {shares}; each is watched for {found.wait_s:g} s")
    for condition in found.health:
        value = "" if condition.value is None else f", is {condition.value:.4g}"
        typer.echo(f"health: {condition.condition}{value} {condition.verdict}".rstrip())
    if found.health and found.state == "running":
        typer.echo(f"answers of the share: {found.answers}, judged from {found.answers_min} on")
    if not found.members:
        return
    table = Table("device", "share", "state", "runs", "ran before", "last seen", "why")
    for one in found.members:
        table.add_row(
            one.device,
            f"{100 * one.share:g} %",
            one.state,
            one.runs or "not reported",
            one.before or "",
            ago(one.last_seen) or "never",
            one.why,
        )
    print_table(table)


def _named(model: str, version: int | None) -> tuple[str, int]:
    """Name and version of `MODEL VERSION` or `MODEL/VERSION`."""
    name, slash, text = model.partition("/")
    if slash and version is None and text.isdecimal():
        return name, int(text)
    if slash or version is None:
        raise typer.BadParameter(f"expected MODEL VERSION, such as digits 3, got {model!r}")
    return name, version


def _shares(first: str, then: str | None) -> tuple[float, ...]:
    """The shares of `--share` and `--then`."""
    begin = _share(first)
    if then is None:
        return (begin, *(share for share in (0.5, 1.0) if share > begin))
    return (begin, *(_share(text) for text in then.split(",") if text.strip()))


def _share(text: str) -> float:
    """A share such as `10%` or `0.1`."""
    number, percent = text.strip().removesuffix("%"), text.strip().endswith("%")
    try:
        value = float(number)
    except ValueError:
        raise typer.BadParameter(f"expected a share such as 10%, got {text!r}") from None
    return value / 100 if percent else value
