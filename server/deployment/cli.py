"""`splitedge server models …`: what is published, which version is active, what each fleet runs.

The commands change the registry; a running server follows within seconds and tells the devices.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from edge_sdk.cli.output import print_json, print_table
from edge_sdk.cli.times import ago
from server.options import STATE_DEFAULT, AsJson, PassphraseFile, State

if TYPE_CHECKING:
    from server.registry.catalogue import ModelCatalogue
    from server.registry.records import FleetModel

app = typer.Typer(
    help="The models of a server: versions, and the model of each fleet.",
    epilog="Example: splitedge server models list --state ./server",
    no_args_is_help=True,
)


@app.command("list", epilog="Example: splitedge server models list --state ./server --json")
def list_(state: State = STATE_DEFAULT, as_json: AsJson = False) -> None:
    """List versions and fleets: what devices run, want and refused."""
    from server.deployment.overview import version_states
    from server.deployment.unserved import unserved
    from server.state import existing_registry

    with existing_registry(state) as registry:
        versions = version_states(registry)
        fleets = registry.catalogue.fleets()
        published = {f"{one.model}/{one.version}" for one in versions}
        # what was published has been loaded: only the others are, which are few
        bad = list(unserved(state / "models", registry.catalogue, published))
    if as_json:
        print_json(
            {
                "models": [asdict(one) for one in versions],
                "fleets": [asdict(one) for one in fleets],
                "not_loaded": [
                    {"model": folder.parent.name, "version": folder.name, "why": why}
                    for folder, why in bad
                ],
            }
        )
        return
    for folder, why in bad:
        typer.echo(f"warning: {folder} cannot be loaded, so it is not served: {why}", err=True)
    if not versions:
        if not bad:
            typer.echo(
                f"no models yet: `splitedge export` or `adopt` with --out {state / 'models'}"
            )
        return
    table = Table("version", "state", "published", "fleets", "wanted by", "run by", "refused by")
    for one in versions:
        table.add_row(
            f"{one.model}/{one.version}",
            "active" if one.active else "",
            ago(one.published_at),
            ", ".join(f"{name} (pinned)" if name in one.pinned else name for name in one.fleets),
            str(len(one.wanted_by)),
            str(len(one.run_by)),
            ", ".join(refusal.device for refusal in one.refused_by),
        )
    print_table(table)
    for one in versions:
        for refusal in one.refused_by:
            typer.echo(f"{refusal.device} refused {one.model}/{one.version}: {refusal.why}")


@app.command(epilog="Example: splitedge server models activate digits/2 --state ./server")
def activate(
    version: Annotated[str, typer.Argument(metavar="MODEL/VERSION", help="Version to activate.")],
    state: State = STATE_DEFAULT,
    as_json: AsJson = False,
) -> None:
    """Make a version the active one of its model; its fleets move to it.

    Fleets that are pinned to a version stay there.
    """
    from server.state import existing_registry

    name, number = _named(version, exact=True)
    with existing_registry(state) as registry:
        registry.catalogue.activate(name, _exact(number))
        _print_move(registry.catalogue, name, None, as_json)


@app.command(epilog="Example: splitedge server models rollback digits --state ./server")
def rollback(
    model: Annotated[str, typer.Argument(help="Name of the model.")],
    state: State = STATE_DEFAULT,
    as_json: AsJson = False,
) -> None:
    """Activate the version that was active before; its fleets move back.

    Run it again to go further back. Fleets that are pinned to a version stay there.
    """
    from server.state import existing_registry

    with existing_registry(state) as registry:
        _, left = registry.catalogue.roll_back(model)
        _print_move(registry.catalogue, model, str(left), as_json)


@app.command(epilog="Example: splitedge server models assign kitchen digits --state ./server")
def assign(
    fleet: Annotated[str, typer.Argument(help="Name of the fleet.")],
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL[/VERSION]",
            help="The model whose active version the fleet follows; with a version the fleet is "
            "pinned to it.",
            show_default=False,
        ),
    ] = None,
    default: Annotated[
        bool,
        typer.Option("--default", help="Follow the model that was exported first, as new fleets."),
    ] = False,
    state: State = STATE_DEFAULT,
    as_json: AsJson = False,
) -> None:
    """Give a fleet a model, or pin it to a version."""
    from server.state import existing_registry

    if (model is None) != default:
        raise typer.BadParameter("give MODEL[/VERSION] or --default, one of them")
    with existing_registry(state) as registry:
        if model is None:
            assigned = registry.catalogue.unassign(fleet)
        else:
            assigned = registry.catalogue.assign(fleet, *_named(model))
        devices = sum(device.active for device in registry.devices(fleet))
    if as_json:
        print_json({**asdict(assigned), "devices": devices})
    else:
        known = "" if devices else " (it has no devices yet)"
        typer.echo(f"fleet {fleet}{known} {_described(assigned)}")


@app.command(epilog="Example: splitedge server models remove digits/1 --state ./server")
def remove(
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL[/VERSION]", help="Version to remove, or a whole model."),
    ],
    force: Annotated[
        bool,
        typer.Option(
            "--force",
            help="Remove it although devices still run it; their offloads get no answer until "
            "they have moved.",
        ),
    ] = False,
    state: State = STATE_DEFAULT,
    key_passphrase_file: PassphraseFile = None,
    as_json: AsJson = False,
) -> None:
    """Remove a version and its files; its number is never used again.

    The active version of a model and what a fleet should run are not removed.
    """
    from server.deployment.removal import ModelRemoval
    from server.signing.artifacts import ArtifactRepository
    from server.signing.keys import read_passphrase
    from server.state import existing_registry

    artifacts = ArtifactRepository(state, passphrase=read_passphrase(key_passphrase_file))
    with existing_registry(state) as registry:
        removal = ModelRemoval(registry, artifacts, state / "models")
        removed = [str(one) for one in removal.remove(*_named(model), force=force)]
    if as_json:
        print_json({"removed": removed})
    else:
        typer.echo(f"removed {', '.join(removed)}")


def _named(text: str, *, exact: bool = False) -> tuple[str, int | None]:
    """Name and version of `MODEL[/VERSION]`."""
    name, slash, version = text.partition("/")
    fits = version.isdecimal() if slash else not exact
    if not name or not fits:
        form = "MODEL/VERSION" if exact else "MODEL or MODEL/VERSION"
        raise typer.BadParameter(f"expected {form}, such as digits/2, got {text!r}")
    return name, int(version) if slash else None


def _exact(version: int | None) -> int:
    assert version is not None  # `_named` has seen to it
    return version


def _print_move(catalogue: ModelCatalogue, name: str, left: str | None, as_json: bool) -> None:
    """Print the version of a name that is active now, who follows it, and who does not."""
    active = next(str(one) for one in catalogue.versions() if one.active and one.name == name)
    of_name = [one for one in catalogue.fleets() if one.model == name]
    following = [one.fleet for one in of_name if not one.pinned]
    pinned = {one.fleet: f"{name}/{one.version}" for one in of_name if one.pinned}
    if as_json:
        shown: dict[str, Any] = {"active": active, "left": left}
        print_json({**shown, "fleets": following, "pinned": pinned})
        return
    who = (
        f"fleets that follow it: {', '.join(following)}" if following else "no fleet follows it yet"
    )
    typer.echo(f"{active} is active; {who}")
    for fleet, version in pinned.items():
        typer.echo(f"fleet {fleet} stays at {version}, to which it is pinned")


def _described(fleet: FleetModel) -> str:
    if fleet.model is None:
        return "has no model yet; it gets the first that is exported"
    version = f"{fleet.model}/{fleet.version}"
    if fleet.pinned:
        return f"is pinned to {version}"
    how = "follows" if fleet.assigned else "has the model that was exported first: it follows"
    return f"{how} {fleet.model}, which is at {version}"
