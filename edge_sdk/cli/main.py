"""The `splitedge` command: loads the subcommand that is called, and prints an error as one line."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Iterable
from importlib.metadata import EntryPoint, entry_points
from types import FrameType
from typing import Annotated, Final

import typer

from edge_sdk.errors import ConfigurationError, SplitedgeError
from edge_sdk.installation import install_command, require_package
from edge_sdk.logs.line_format import LOG_VARIABLE, escaped, log_form, log_to_stderr
from profiles.errors import ProfileError

GROUP: Final = "splitedge.commands"
SERVER: Final = (  # modules that the base install leaves out
    "alembic", "fastapi", "matplotlib", "onnx", "onnxscript",
    "prometheus_client", "psycopg", "pydantic", "safetensors", "scipy", "sklearn", "sqlalchemy",
    "torch", "uvicorn",
)  # fmt: skip
EXTRAS: Final = {
    **dict.fromkeys(SERVER, "server"), "h11": "serve",
    "ifaddr": "discovery", "zeroconf": "discovery",
    "mlflow": "mlflow", "ray": "ray", "tensorboard": "tensorboard",
}  # fmt: skip
TRAIN: Final = frozenset({"safetensors", "torch"})  # all that a device needs to train
DEBUG: Final = "--debug"
LOG: Final = "--log"
COMPLETING: Final = "_SPLITEDGE_COMPLETE"
# what the scripts of the shells tell: bash the one, zsh and fish the other
COMPLETED: Final = ("COMP_WORDS", "_TYPER_COMPLETE_ARGS")
HELP: Final = (
    "Run the front of a neural network on a small device and the rest on a server.\n\n"
    "Example: splitedge demo"
)


logger = logging.getLogger(__name__)


def stop_on_sigterm() -> None:
    """Let SIGTERM end the command in order: what it started is stopped, and the status is 0."""

    def stop(_number: int, _frame: FrameType | None) -> None:
        raise SystemExit(0)

    signal.signal(signal.SIGTERM, stop)


def main() -> None:
    """Run the command line."""
    arguments = sys.argv[1:]
    # behind two dashes are the words of a service
    end = arguments.index("--") if "--" in arguments else len(arguments)
    arguments, behind = arguments[:end], arguments[end:]
    debug = DEBUG in arguments
    if debug:  # an option of the whole command, in any place
        arguments = [DEBUG, *(word for word in arguments if word != DEBUG)]
    arguments = [*_with_log_first(arguments), *behind]
    try:
        application(arguments)(arguments)
    except (SplitedgeError, ProfileError) as err:
        if debug:
            raise
        _fail(" ".join(str(err).split()))
    except ModuleNotFoundError as err:
        extra = _extra((err.name or "").partition(".")[0], arguments)
        if debug or extra is None:
            raise
        _fail(f"this command needs {err.name}: {install_command(extra)}")
    except BrokenPipeError:
        # the reader of a pipe closed it, as `| head` does: no error of ours
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except OSError as err:
        if debug:
            raise
        where = "" if err.filename is None else f"{err.filename}: "
        _fail(f"{where}{err.strerror or err}; use --debug for the traceback")
    except KeyboardInterrupt:
        sys.exit(130)


def application(arguments: list[str], entries: Iterable[EntryPoint] | None = None) -> typer.Typer:
    """The commands: only the one that the arguments call, if they call one, else all.

    Args:
        entries: of the commands; None for those of the installed packages.
    """
    app = typer.Typer(
        help=HELP,
        no_args_is_help=True,
        invoke_without_command=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,  # its boxes cut the names of long options, and take 60 ms to import
    )
    app.callback()(_options)
    if entries is None:
        entries = entry_points(group=GROUP)
    commands = {entry.name: entry for entry in entries}
    called = _called(_completed() if COMPLETING in os.environ else arguments)
    for entry in [commands[called]] if called in commands else commands.values():
        _mount(app, entry)
    _tell_in_full(app)
    return app


def _tell_in_full(app: typer.Typer) -> None:
    """Let lists of commands show the first sentence of each, which is cut at 45 letters else."""
    for command in app.registered_commands:
        assert command.callback is not None
        command.short_help = _first_sentence(command.help or command.callback.__doc__)
    for group in app.registered_groups:
        assert group.typer_instance is not None
        group.short_help = _first_sentence(group.typer_instance.info.help)
        _tell_in_full(group.typer_instance)


def _first_sentence(text: object) -> str | None:
    if not isinstance(text, str):
        return None
    paragraph = " ".join(text.strip().split("\n\n")[0].split())
    return f"{paragraph.split('. ')[0].rstrip('.')}."


def _with_log_first(words: list[str]) -> list[str]:
    """The words with `--log FORM`, an option of the whole command in any place, as `--log=FORM`."""
    found, rest = [], []
    left = iter(words)
    for word in left:
        if word == LOG:
            form = next(left, None)
            if form is None:
                rest.append(word)  # the parser says what is missing
            else:
                found.append(f"{LOG}={form}")
        elif word.startswith(f"{LOG}="):
            found.append(word)
        else:
            rest.append(word)
    return [*found, *rest]


def _called(words: list[str]) -> str:
    """The subcommand that these words call; empty where they call none."""
    return next((word for word in words if not word.startswith("-")), "")


def _completed() -> list[str]:
    """The words of the command line that a shell asks to complete."""
    text = next((text for name in COMPLETED if (text := os.environ.get(name))), "")
    return text.split()[1:]


def _extra(module: str, arguments: list[str]) -> str | None:
    """The extra to install for a module that is missing; None for a module of no extra."""
    if module in TRAIN and _called(arguments) == "agent":
        return "train"
    return EXTRAS.get(module)


def _mount(app: typer.Typer, entry: EntryPoint) -> None:
    require_package(entry.module.partition(".")[0])
    command: typer.Typer = entry.load()
    if len(command.registered_commands) == 1 and not command.registered_groups:
        # mounted as a command, not as a group with one command
        only = command.registered_commands[0]
        assert only.callback is not None
        app.command(entry.name, help=only.help, epilog=only.epilog)(only.callback)
    else:
        app.add_typer(command, name=entry.name)


def _show_version(asked: bool) -> None:
    if asked:
        from edge_sdk import __version__

        typer.echo(f"splitedge {__version__}")
        raise typer.Exit


def _options(
    context: typer.Context,
    debug: Annotated[bool, typer.Option(DEBUG, help="Show tracebacks and the full log.")] = False,
    log: Annotated[
        str | None,
        typer.Option(
            LOG,
            metavar="FORM",
            show_default=f"${LOG_VARIABLE}, else text",
            help="Form of log lines on standard error: text, or json, one object a line.",
        ),
    ] = None,
    _version: Annotated[
        bool,
        typer.Option("--version", help="Show the version.", callback=_show_version, is_eager=True),
    ] = False,
) -> None:
    if log:
        os.environ[LOG_VARIABLE] = log  # the children's too
    log_to_stderr(logging.DEBUG if debug else logging.WARNING)
    if context.invoked_subcommand is None:  # an option alone, such as --debug
        typer.echo(context.get_help())
        raise typer.Exit(2)


def _fail(text: str) -> None:
    try:
        as_json = log_form() == "json"
    except ConfigurationError:  # which is the very failure that is told
        as_json = False
    if as_json:
        log_to_stderr(logging.WARNING)  # in case the error came before the options were read
        logger.error("%s", text)
    else:
        typer.echo(f"error: {escaped(text)}", err=True)
    sys.exit(1)
