"""The commands in the documents are run by tests, and their options exist."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from itertools import takewhile
from pathlib import Path

import pytest

from docs.site.commands import Command, all_commands

ROOT = Path(__file__).parents[2]
DOCUMENTS = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
# why a test cannot type a block as it stands
REASONS = {
    "another machine",
    "your own broker",
    "your own database",
    "root",
    "a container runtime",
    "hardware",
    "a large installation",
    "hours",
    "a form",  # with names to put in the place of words in capitals
}
BLOCK = re.compile(
    r"(?:<!-- (snippet|not run): ([^>]+?) -->\n)?```(?:sh|bash)\n(.*?)```", re.DOTALL
)
INDENTED = re.compile(r"^ {4}(splitedge .*(?:\\\n.*)*)", re.MULTILINE)
INLINE = re.compile(r"`(splitedge [^`]+)`")
# where a shell reads the name of a command: at the start, behind `$(`, a pipe, a variable, ...
CALL = re.compile(
    r"(?:^|[`$(|;&]|\b[A-Z_]+=\S+|\bexec|\bsudo(?: -u \w+)?) *splitedge (?!\w+: )", re.MULTILINE
)
WORD = re.compile(r'"[^"]*"|\'[^\']*\'|[^\s"\']+')
END = re.compile(r"[|&;<>#)\\]")


def invocations(text: str) -> Iterator[list[str]]:
    """Words of each call of `splitedge` in a text, up to a pipe, a comment or the like."""
    text = re.sub(r"\\\n\s*", " ", text)
    for found in CALL.finditer(text):
        line = text[found.end() :].partition("\n")[0]
        words = takewhile(lambda word: word != "--" and not END.match(word), WORD.findall(line))
        yield [word.rstrip(")`,.:") if word[0] not in "\"'" else word for word in words]


@cache
def texts_of_tests() -> tuple[str, ...]:
    """The text of every test module."""
    return tuple(path.read_text() for path in (ROOT / "tests").rglob("*.py"))


@cache
def groups() -> set[str]:
    """Commands that only hold others, `splitedge server` for one."""
    names = [name.split() for name in all_commands()]
    return {" ".join(words[:count]) for words in names for count in range(1, len(words))}


def faults(words: list[str]) -> Iterator[str]:
    """What is wrong with a call; words that show a choice, `pin|unpin`, stand for each of it."""
    name, rest = "splitedge", list(words)
    while rest and name in groups() and not rest[0].startswith("-"):
        word = rest.pop(0)
        if word in {"...", ""}:
            return
        for each in word.split("|"):
            if f"{name} {each}" not in groups() | all_commands().keys():
                yield f"{name} {each}: no such command"
                return
        name = f"{name} {word.split('|')[0]}"
    command = all_commands().get(name)
    if command is not None:
        yield from unknown_options(command, rest)


def unknown_options(command: Command, words: list[str]) -> Iterator[str]:
    """Options that a command does not have."""
    known = {*command.options, "--help", "--debug", "--log", "--version"}
    for word in words:
        for option in re.findall(r"^--[a-z][\w-]*", word):
            if option not in known:
                yield f"{command.name}: no option {option}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_call_names_commands_and_options_that_exist(document: Path) -> None:
    text = document.read_text()
    parts = [body for _, _, body in BLOCK.findall(text)]
    parts += INDENTED.findall(text) + INLINE.findall(text)
    wrong = [fault for part in parts for words in invocations(part) for fault in faults(words)]
    assert not wrong


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_block_of_commands_is_run_or_says_why_not(document: Path) -> None:
    name = str(document.relative_to(ROOT))
    of_document = "".join(text for text in texts_of_tests() if f'"{name}"' in text)
    typed = set(re.findall(r"""["']([\w-]+)["']""", of_document))
    wrong = []
    for kind, about, body in BLOCK.findall(document.read_text()):
        if kind == "snippet" and about not in typed:
            wrong.append(f"no test types the snippet {about}")
        elif kind == "not run" and about not in REASONS:
            wrong.append(f"{about}: no reason of {sorted(REASONS)}")
        elif not kind:
            wrong.append(f"neither a snippet nor a reason: {body.splitlines()[0]}")
    assert not wrong


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("splitedge demo --data x | head", ["demo", "--data", "x"]),
        ("splitedge agent \\\n    run --state s &", ["agent", "run", "--state", "s"]),
        ("FOO=1 splitedge demo  # comment", ["demo"]),
        ("it is `splitedge demo`.", ["demo"]),
        ("splitedge server run -- --of-another", ["server", "run"]),
        ("run --state ./splitedge demo", None),
    ],
)
def test_a_call_is_found_in_a_text(text: str, words: list[str] | None) -> None:
    assert list(invocations(text)) == ([] if words is None else [words])


@pytest.mark.parametrize(
    ("call", "fault"),
    [
        ("server run --state s", None),
        ("server pin|unpin", None),
        ("server", None),
        ("server runn", "splitedge server runn: no such command"),
        ("server run --stat s", "splitedge server run: no option --stat"),
        ("agent predict x.png --threshold -1", None),
    ],
)
def test_a_wrong_call_is_named(call: str, fault: str | None) -> None:
    assert list(faults(call.split())) == ([] if fault is None else [fault])
