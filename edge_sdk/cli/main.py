"""The `splitedge` command: loads the subcommand that is called, and prints an error as one line."""

from __future__ import annotations

import logging
import os
import sys
from importlib.metadata import EntryPoint, entry_points
from typing import Annotated, Final

import typer

from edge_sdk.errors import SplitedgeError
from edge_sdk.installation import require_package
from profiles.errors import ProfileError

GROUP: Final = "splitedge.commands"
SERVER: Final = (  # modules that the base install leaves out
    "alembic", "amqtt", "fastapi", "fsspec", "matplotlib", "onnx", "onnxscript",
    "prometheus_client", "pydantic", "safetensors", "sklearn", "sqlalchemy", "torch", "uvicorn",
)  # fmt: skip
EXTRAS: Final = {**dict.fromkeys(SERVER, "server"), "h11": "serve"}
DEBUG: Final = "--debug"
HELP: Final = (
    "Run the front of a neural network on a small device and the rest on a server.\n\n"
    "Example: splitedge demo"
)


def main() -> None:
    """Run the command line."""
    arguments = sys.argv[1:]
    debug = DEBUG in arguments
    if debug:  # an option of the whole command, in any place
        arguments = [DEBUG, *(word for word in arguments if word != DEBUG)]
    try:
        _app(arguments)(arguments)
    except (SplitedgeError, ProfileError) as err:
        if debug:
            raise
        _fail(" ".join(str(err).split()))
    except ModuleNotFoundError as err:
        extra = EXTRAS.get((err.name or "").partition(".")[0])
        if debug or extra is None:
            raise
        _fail(f"this command needs {err.name}: pip install 'splitedge[{extra}]'")
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


def _app(arguments: list[str]) -> typer.Typer:
    app = typer.Typer(
        help=HELP, no_args_is_help=True, pretty_exceptions_enable=False, add_completion=False
    )
    app.callback()(_options)
    commands = {entry.name: entry for entry in entry_points(group=GROUP)}
    called = next((word for word in arguments if not word.startswith("-")), "")
    for entry in [commands[called]] if called in commands else commands.values():
        _mount(app, entry)
    return app


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


def _options(
    debug: Annotated[bool, typer.Option(DEBUG, help="Show tracebacks and the full log.")] = False,
    version: Annotated[bool, typer.Option("--version", help="Show the version.")] = False,
) -> None:
    if version:
        from edge_sdk import __version__

        typer.echo(f"splitedge {__version__}")
        raise typer.Exit
    logging.basicConfig(
        level=logging.DEBUG if debug else logging.WARNING,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )


def _fail(text: str) -> None:
    typer.echo(f"error: {text}", err=True)
    sys.exit(1)
