"""The page of all commands, from the help that the commands give themselves."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, Final

import typer

from edge_sdk.cli.main import GROUP, application

ROOT: Final = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class Parameter:
    """An argument or an option of a command.

    Attributes:
        names: `--http`, or the word of an argument in the usage line.
        flag: whether it takes no value.
    """

    names: tuple[str, ...]
    value: str
    help: str
    default: str
    required: bool
    flag: bool
    option: bool


@dataclass(frozen=True, slots=True)
class Command:
    """A command that does something: no group of commands."""

    name: str
    help: str
    examples: tuple[str, ...]
    parameters: tuple[Parameter, ...]

    @property
    def options(self) -> dict[str, Parameter]:
        """Its options by each of their names."""
        return {name: each for each in self.parameters if each.option for name in each.names}


@cache
def all_commands() -> Mapping[str, Command]:
    """Every command of `splitedge` by its name, as in `splitedge server run`."""
    root: Any = typer.main.get_command(application([], _entries()))
    return {command.name: command for command in _below("splitedge", root)}


def _entries() -> list[EntryPoint]:
    """The commands of this checkout, which an installation may be older than."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [
        EntryPoint(name, value, GROUP) for name, value in project["entry-points"][GROUP].items()
    ]


def page() -> str:
    """The page in markdown."""
    lines = [
        "# Commands",
        "",
        "Each command explains itself with `--help`; this page is made from that.",
        "`--debug`, in any place, shows tracebacks and the full log.",
        "",
    ]
    for command in all_commands().values():
        lines += [f"## `{command.name}`", "", command.help, ""]
        for example in command.examples:
            lines += ["```sh", example, "```", ""]
        if command.parameters:
            lines += ["| | | default |", "| --- | --- | --- |"]
            lines += [_row(each) for each in command.parameters]
            lines.append("")
    return "\n".join(lines)


def _below(name: str, command: Any) -> Iterator[Command]:
    inner: Mapping[str, Any] = getattr(command, "commands", {})
    # `splitedge server devices` lists devices, and `splitedge server devices approve` is below it
    if not inner or (command.invoke_without_command and not command.no_args_is_help):
        shown = [each for each in command.params if not (_is_help(each) or _is_hidden(each))]
        parameters = tuple(_parameter(each) for each in shown)
        yield Command(name, _line(command.help), _examples(command.epilog), parameters)
    for word, each in inner.items():
        if not each.hidden:
            yield from _below(f"{name} {word}", each)


def _is_help(parameter: Any) -> bool:
    return "--help" in parameter.opts


def _is_hidden(parameter: Any) -> bool:
    return bool(getattr(parameter, "hidden", False))


def _examples(epilog: str | None) -> tuple[str, ...]:
    """The command lines below a help: `Example: ...`, and in further paragraphs `Or: ...`."""
    paragraphs = [_line(each) for each in (epilog or "").split("\n\n")]
    return tuple(each.removeprefix("Example: ").removeprefix("Or: ") for each in paragraphs if each)


def _parameter(parameter: Any) -> Parameter:
    option = parameter.param_type_name == "option"
    flag = bool(getattr(parameter, "is_flag", False))
    default = parameter.default
    shown = "" if default is None or default == () or callable(default) else f"{default}"
    if flag:
        shown = "yes" if default else ""
    return Parameter(
        names=(*parameter.opts, *parameter.secondary_opts) if option else (_word(parameter),),
        value="" if flag or not option else _word(parameter),
        help=_line(parameter.help),
        default=shown if parameter.show_default is True else str(parameter.show_default or ""),
        required=parameter.required,
        flag=flag,
        option=option,
    )


def _word(parameter: Any) -> str:
    """The word that stands for a value in the usage line."""
    kind = parameter.type_descriptor
    if kind.is_choice and parameter.metavar is None:
        return "\\|".join(str(getattr(each, "value", each)) for each in kind.choices)
    word = str(parameter.metavar or parameter.name).upper()
    return word[1:-1] if word.startswith("[") and word.endswith("]") else word


def _row(parameter: Parameter) -> str:
    names = ", ".join(f"`{name}`" for name in parameter.names)
    value = f" {parameter.value}" if parameter.value else ""
    default = "required" if parameter.required else parameter.default
    return f"| {names}{value} | {_cell(parameter.help)} | {_cell(default)} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def _line(text: str | None) -> str:
    """A text of the help without its line breaks."""
    return " ".join((text or "").split())
