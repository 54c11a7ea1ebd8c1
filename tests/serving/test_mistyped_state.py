"""A mistyped `--state` is told by every command, and no folder is made for it."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
import typer

from tests.commands import Splitedge

ROOT = Path(__file__).parents[2]
# These make a state, or need none.
MAKERS = {
    ("agent", "enroll"),
    ("agent", "profile"),
    ("demo",),
    ("server", "restore"),
    ("server", "run"),
    ("server", "api"),
}
# What commands ask for beside it.
VALUES = {
    "bundle": "digits/1/d1",
    "data": "digits",
    "depth": "2",
    "device": "pi-4",
    "files": "x.npy",
    "fleet": "yard",
    "folder": "keys",
    "model": "digits",
    "out": "backup.tar",
    "recipe": str(ROOT / "examples/recipes/default-digits.toml"),
    "rule": "allow",
    "tag": "canary",
    "tags": "canary",
    "version": "digits/1",
}
ONE_OF = {
    ("server", "pin"): ["--depth", "2"],
    ("server", "models", "assign"): ["digits"],
    ("server", "rollout", "start"): ["3"],
}


def leaves(command: Any, words: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    members = getattr(command, "commands", {})
    if not members:
        yield words, command
    for name, member in members.items():
        yield from leaves(member, (*words, name))


def with_a_state() -> list[tuple[tuple[str, ...], Any]]:
    found = []
    for entry in entry_points(group="splitedge.commands"):
        for words, command in leaves(typer.main.get_command(entry.load()), (entry.name,)):
            named = [option for each in command.params for option in each.opts]
            if "--state" in named and words not in MAKERS:
                found.append((words, command))
    return found


@pytest.mark.parametrize(
    ("words", "command"), [pytest.param(*each, id=" ".join(each[0])) for each in with_a_state()]
)
def test_no_folder_is_made_for_a_mistyped_state(
    words: tuple[str, ...],
    command: Any,
    tmp_path: Path,
    splitedge: Splitedge,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    given: list[str] = []
    for each in command.params:
        if each.required:
            value = "1h" if each.metavar == "TIME" else VALUES.get(each.name, "1")
            given += [value] if each.param_type_name == "argument" else [each.opts[0], value]
    typo = tmp_path / "typo"
    called = splitedge(*words, *given, *ONE_OF.get(words, []), "--state", typo)
    assert called.status == 1, called.err
    assert str(typo) in called.err
    assert list(tmp_path.iterdir()) == []


def test_the_walk_finds_the_commands() -> None:
    found = {words for words, _ in with_a_state()}
    assert len(found) > 30
    assert {("train",), ("server", "token", "create"), ("agent", "kept", "list")} <= found
