"""`splitedge agent install-service` and `uninstall-service`, and what the server shares of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

if TYPE_CHECKING:
    from edge_sdk.systemd.unit import ServiceUnit

Options = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="-- OPTIONS",
        help="Options of `run` for the service, behind two dashes; without any, those of an "
        "earlier installation stay.",
    ),
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Print the unit, and change and check nothing.")
]
User = Annotated[
    str | None,
    typer.Option(help="User of the service, made if it is missing; default: the service's name."),
]
MemoryMax = Annotated[
    str | None,
    typer.Option(
        show_default="that of an earlier installation, else 70% (agent), 80% (server)",
        help="Most memory of the service and its child processes: 512M, 2G, or a share such as "
        "70%; above it the kernel ends one of these processes, and systemd starts a service that "
        "ended.",
    ),
]
Take = Annotated[
    Path | None,
    typer.Option(help="State folder to move to the service's place, such as ./pi."),
]
Command = Annotated[
    str | None,
    typer.Option(help="Program to start; default: the `splitedge` of this installation."),
]
Write = Annotated[
    list[str] | None,
    typer.Option(
        "--write",
        metavar="DIR",
        help="Folder beside its state that the service may write into, for files of --sink or"
        " --keep; may be given several times. Its user needs the right to write there too.",
    ),
]
Root = Annotated[
    Path,
    typer.Option(help="System to install into, such as a mounted image; nothing is started there."),
]
NoStart = Annotated[
    bool,
    typer.Option(
        "--no-start", help="Enable the service, do not start it; one that runs is stopped."
    ),
]
Purge = Annotated[
    bool, typer.Option("--purge", help="Remove its state and settings too; this cannot be undone.")
]
HERE: Final = Path("/")

# what a camera, a serial port or a graphics processor is reached through
DEVICES: Final = (
    "char-video4linux rw",
    "char-ttyUSB rw",
    "char-ttyACM rw",
    "char-ttyAMA rw",
    "char-ttyS rw",
    "char-drm rw",
)
GROUPS: Final = ("video", "dialout", "render")
WATCHDOG_S: Final = 120
PRIVILEGED: Final = 1024
LISTENING: Final = ("--serve",)


def mount(app: typer.Typer, run: Callable[..., Any]) -> None:
    """Add the two commands to the agent's; the options of the service are those of `run`."""

    @app.command(
        "install-service",
        epilog="Example: splitedge agent install-service --take ./pi -- --serve 127.0.0.1:8080",
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
        """Install the agent as a service of systemd, which starts with the machine.

        Run it as root, with sudo. The device's state is in /var/lib/splitedge/agent, its settings
        are in /etc/splitedge.
        """
        from edge_sdk.identity import IDENTITY_NAME
        from edge_sdk.settings_file.template import SETTINGS_NAME, settings_template
        from edge_sdk.systemd.install import Installer

        words = checked_options(run, "agent", options)
        asked = Asked(user, memory_max, command, write)
        unit = asked.applied(_unit(), root)
        unit = with_ports(unit, words, root, LISTENING, _serve_address(take, root))
        if dry_run:
            typer.echo(unit.text(), nl=False)
            return
        installer = Installer(unit, root, IDENTITY_NAME)
        installer.check()
        settings = SETTINGS_NAME, settings_template()
        ready = installer.install(words, take=take, settings=settings)
        started = ready and not no_start and installer.start(typer.echo)
        report(unit, started=started, stopped=installer.stopped)
        if not ready:
            enrol = f"splitedge agent enroll --server URL --token TOKEN --state {unit.state}"
            typer.echo(
                f"next, enrol the device: sudo -u {unit.user} {enrol}\n"
                f"then start it: sudo systemctl start {unit.name}"
            )

    @app.command("uninstall-service", epilog="Example: splitedge agent uninstall-service")
    def uninstall_service(purge: Purge = False, root: Root = HERE) -> None:
        """Stop the agent's service and remove it; its state stays, unless --purge is given.

        Run it as root, with sudo.
        """
        uninstall(_unit(), root, purge=purge)


@dataclass(frozen=True, slots=True)
class Asked:
    """Options of `install-service` that an earlier installation answers where they are missing."""

    user: str | None
    memory_max: str | None
    command: str | None
    write: Sequence[str] | None

    def applied(self, unit: ServiceUnit, root: Path) -> ServiceUnit:
        """The unit with these options, else with what the unit that is installed there has."""
        from edge_sdk.systemd.install import old_unit

        old = old_unit(unit.kind, root)
        return replace(
            unit,
            user=self.user or old.user or unit.user,
            memory_max=self.memory_max or old.memory_max or unit.memory_max,
            command=[self.command] if self.command else old.command or unit.command,
            write=old.write if self.write is None else self.write,
            privileged_ports=old.privileged_ports,
        )


def with_ports(
    unit: ServiceUnit,
    words: Sequence[str] | None,
    root: Path,
    listening: Collection[str],
    configured: str | None = None,
) -> ServiceUnit:
    """The unit, which may listen below port 1024 if it is told to do so.

    Args:
        words: options of `run`; None takes those of an earlier installation.
        listening: the options whose value is an address to listen on.
        configured: such an address in the settings file, which counts where no option has one.
    Raises: ConfigurationError for options of an earlier installation that cannot be read.
    """
    from edge_sdk.systemd.install import old_options

    found = old_options(unit, root) if words is None else words
    if found is None:
        return unit
    values = [value for _, value in values_of(found, listening)]
    if not values and configured is not None:
        values = [configured]
    # with slashes it is the address of a broker elsewhere
    ports = [value.rpartition(":")[2] for value in values if "//" not in value]
    low = any(port.isdecimal() and 0 < int(port) < PRIVILEGED for port in ports)
    return replace(unit, privileged_ports=low)


def values_of(words: Sequence[str], options: Collection[str]) -> list[tuple[str, str]]:
    """Named options among the words, each with its value, which follows a space or `=`."""
    found = []
    for word, following in zip(words, [*words[1:], ""], strict=False):
        option, equals, value = word.partition("=")
        if option in options:
            found.append((option, value if equals else following))
    return found


def checked_options(
    run: Callable[..., Any], kind: str, words: Sequence[str] | None
) -> list[str] | None:
    """The options of a service, which `run` must have; None without any.

    Raises: ConfigurationError for a state folder; the command line's own error for what `run` does
        not take.
    """
    from typer.main import get_command

    from edge_sdk.errors import ConfigurationError

    if not words:
        return None
    if any(word == "--state" or word.startswith("--state=") for word in words):
        raise ConfigurationError(
            f"--state: the service has its own folder, /var/lib/splitedge/{kind}; --take DIR moves"
            " yours there"
        )
    if any(word == "--log" or word.startswith("--log=") for word in words):
        raise ConfigurationError(
            "--log: an option of the whole command, which the service has as a variable: put"
            f" SPLITEDGE_LOG=json into /etc/splitedge/{kind}.env"
        )
    if any(value == "-" for _, value in values_of(words, ("--source",))):
        raise ConfigurationError(
            "--source -: a service has no standard input; give a source that does not end, such as"
            " folder:DIR or camera:0"
        )
    app = typer.Typer(add_completion=False)
    app.command()(run)
    get_command(app).make_context(f"splitedge {kind} run", list(words))
    return list(words)


def report(unit: ServiceUnit, *, started: bool, stopped: bool) -> None:
    """Print what was installed, and how to see it.

    Args:
        stopped: whether the service ran before.
    """
    if stopped and not started:
        typer.echo(f"{unit.name} ran, and is stopped now: sudo systemctl start {unit.name}")
    typer.echo(
        f"{unit.name} {'runs' if started else 'is installed'}: state {unit.state}, options"
        f" {unit.options_path}, log: journalctl -u {unit.name}\n"
        f"it may write into {', '.join((unit.state, *unit.write))} alone; --write DIR adds a folder"
    )


def uninstall(unit: ServiceUnit, root: Path, *, purge: bool) -> None:
    """Remove a service, and say what is left."""
    from edge_sdk.systemd.install import Installer

    installer = Installer(unit, root)
    installer.check()
    installer.uninstall(purge=purge, say=typer.echo)


def _serve_address(take: Path | None, root: Path) -> str | None:
    """The address of [serve] in the settings that the service will have.

    Raises: ConfigurationError naming the file if it cannot be read as settings.
    """
    from edge_sdk.settings_file.settings_file import SettingsFile
    from edge_sdk.settings_file.template import SETTINGS_NAME

    folders = [root / "etc/splitedge", *([] if take is None else [take])]
    # one who only looks, by --dry-run, may not read them all
    there = [folder for folder in folders if os.access(folder / SETTINGS_NAME, os.R_OK)]
    return SettingsFile.load(there[-1]).serve.address if there else None


def _unit() -> ServiceUnit:
    from edge_sdk.systemd.install import this_command
    from edge_sdk.systemd.unit import ServiceUnit

    return ServiceUnit(
        kind="agent",
        command=this_command(),
        user="splitedge-agent",
        memory_max="70%",
        watchdog_s=WATCHDOG_S,
        about="answers on this device, and asks the server where it is not sure",
        groups=GROUPS,
        devices=DEVICES,
    )
