"""`splitedge server install-service` and `uninstall-service`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import typer

from edge_sdk.systemd.cli import (
    HERE,
    Asked,
    Command,
    DryRun,
    MemoryMax,
    NoStart,
    Options,
    Purge,
    Root,
    Take,
    User,
    Write,
    checked_options,
    report,
    uninstall,
    with_ports,
)

if TYPE_CHECKING:
    from edge_sdk.systemd.unit import ServiceUnit

# a batch of a large model, or a database that is away for a while, takes its time
WATCHDOG_S: Final = 180
LISTENING: Final = ("--http", "--mqtt")
CONFIGURATION: Final = "/etc/splitedge"


def mount(app: typer.Typer, run: Callable[..., Any]) -> None:
    """Add the two commands to the server's; the options of the service are those of `run`."""

    @app.command(
        "install-service",
        epilog="Example: splitedge server install-service -- --http 0.0.0.0:8000 --mqtt"
        " auto:0.0.0.0:8883 --tls-cert /etc/splitedge/cert.pem --tls-key /etc/splitedge/key.pem",
    )
    def install_service(
        options: Options = None,
        dry_run: DryRun = False,
        user: User = None,
        memory_max: MemoryMax = None,
        take: Take = None,
        command: Command = None,
        write: Write = None,
        root: Root = HERE,
        no_start: NoStart = False,
    ) -> None:
        """Install the server as a service of systemd, which starts with the machine.

        Run it as root, with sudo. Its state is in /var/lib/splitedge/server, its options are in
        /etc/splitedge/server.env.
        """
        from edge_sdk.systemd.install import Installer, old_options
        from edge_sdk.systemd.users import SystemUser
        from server.systemd.options import broker_note, unreadable_files

        words = checked_options(run, "server", options)
        asked = Asked(user, memory_max, command, write)
        unit = with_ports(asked.applied(_unit(), root), words, root, LISTENING)
        if dry_run:
            typer.echo(unit.text(), nl=False)
            return
        installer = Installer(unit, root)
        installer.check()
        installer.install(words, take=take)
        options = old_options(unit, root) or []
        missing = unreadable_files(unit, options, SystemUser.find(unit.user, root), root)
        started = not missing and not no_start and installer.start(typer.echo)
        report(unit, started=started, stopped=installer.stopped)
        if missing:
            typer.echo(
                "\n".join(missing)
                + f"\nput each file where {unit.user} can read it, such as: sudo install -m 640 -g"
                f" {unit.user} FILE {CONFIGURATION}/\n"
                f"then start it: sudo systemctl start {unit.name}"
            )
        if note := broker_note(options, root / unit.state.lstrip("/")):
            typer.echo(note)
        typer.echo(
            f"a token for a device: sudo -u {unit.user} splitedge server token create --state"
            f" {unit.state}"
        )

    @app.command("uninstall-service", epilog="Example: splitedge server uninstall-service")
    def uninstall_service(purge: Purge = False, root: Root = HERE) -> None:
        """Stop the server's service and remove it; its state stays, unless --purge is given.

        Run it as root, with sudo.
        """
        uninstall(_unit(), root, purge=purge)


def _unit() -> ServiceUnit:
    from edge_sdk.systemd.install import this_command
    from edge_sdk.systemd.unit import ServiceUnit

    return ServiceUnit(
        kind="server",
        command=this_command(),
        user="splitedge-server",
        memory_max="80%",
        watchdog_s=WATCHDOG_S,
        about="API, models and broker of a fleet",
    )
