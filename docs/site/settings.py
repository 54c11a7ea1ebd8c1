"""The pages of recipe keys and of `agent.toml`, from the records that read them."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, get_type_hints

from edge_sdk.records import describe_type, prefix_of
from edge_sdk.settings_file.template import settings_template
from server.training.recipe.recipe import Recipe

# "        name, other: text", and lines that go on with it
_ATTRIBUTE: Final = re.compile(r"^    (\w+(?:, \w+)*): (.*(?:\n(?:     +.*|))*)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Key:
    """A key of a recipe.

    Attributes:
        table: name of its table; empty at the top of the file.
    """

    table: str
    name: str
    kind: str
    default: str
    meaning: str


def recipe_keys() -> list[Key]:
    """Every key that a recipe may have, in the order of the tables."""
    return sorted(_keys(Recipe, ""), key=lambda key: key.table != "")


def recipe_page() -> str:
    """The page of recipe keys in markdown."""
    lines = [
        "# Recipe keys",
        "",
        "A recipe is a TOML file. `[method_numbers]` are on the page of",
        "[each method](../methods/index.md). `splitedge simulate` and `splitedge train` name a key",
        "that is unknown or has a wrong value, and what they expected.",
    ]
    table = None
    for key in recipe_keys():
        if key.table != table:
            table = key.table
            title = f"`[{table}]`" if table else "At the top of the file"
            lines += [
                "",
                f"## {title}",
                "",
                "| key | type | default | |",
                "| --- | --- | --- | --- |",
            ]
        meaning = key.meaning.replace("|", "\\|")
        lines.append(f"| `{key.name}` | {key.kind} | {key.default} | {meaning} |")
    return "\n".join([*lines, ""])


def agent_page() -> str:
    """The page of `agent.toml` in markdown."""
    text = settings_template()
    about = "`splitedge agent enroll` writes this file into the state of the device."
    return f"# agent.toml\n\n{about}\n\n```toml\n{text}```\n"


def _keys(record: Any, table: str, prefix: str = "") -> Iterator[Key]:
    meanings, types = _meanings(record), get_type_hints(record)
    for field in dataclasses.fields(record):
        inner = types[field.name]
        if dataclasses.is_dataclass(inner):
            inline = prefix_of(field)
            if inline is None:
                yield from _keys(inner, field.name)
            else:
                yield from _keys(inner, table, prefix + inline)
        else:
            kind = describe_type(inner).replace("|", "or")
            meaning = meanings.get(field.name, "")
            yield Key(table, prefix + field.name, kind, _default(field), meaning)


def _meanings(record: Any) -> dict[str, str]:
    """What the docstring's `Attributes:` say of each field."""
    _, _, text = inspect.cleandoc(record.__doc__ or "").partition("Attributes:\n")
    return {
        name: " ".join(meaning.split())
        for names, meaning in _ATTRIBUTE.findall(text)
        for name in names.split(", ")
    }


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default is not dataclasses.MISSING:
        return _toml(field.default)
    if field.default_factory is not dataclasses.MISSING:
        return _toml(field.default_factory())
    return "required"


def _toml(value: Any) -> str:
    """A default as a recipe has it."""
    if value is None:
        return "not set"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, tuple):
        return f"`{list(value)}`"
    return f'`"{value}"`' if isinstance(value, str) else f"`{value}`"
