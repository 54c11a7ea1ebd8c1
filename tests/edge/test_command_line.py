"""The `splitedge` command itself: version, missing extras, tab completion, tables and times."""

from __future__ import annotations

import os
import pty
import re
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from edge_sdk import __version__
from edge_sdk.cli.main import application
from edge_sdk.cli.times import length_in, seconds
from tests.commands import Splitedge

NAME = "workshop-camera-by-the-window-of-the-second-floor-0123456789abc"
COMMAND = (sys.executable, "-P", "-m", "edge_sdk.cli")
BIN = Path(sys.executable).parent


def test_version_is_one_line(splitedge: Splitedge) -> None:
    for words in (["--version"], ["--debug", "--version"], ["--version", "--debug"]):
        called = splitedge(*words)
        assert (called.status, called.out) == (0, f"splitedge {__version__}\n")


def test_debug_alone_shows_the_help_as_no_word_at_all_does(splitedge: Splitedge) -> None:
    alone, nothing = splitedge("--debug"), splitedge()
    assert alone.status == nothing.status == 2
    for called in (alone, nothing):
        assert "Example: splitedge demo" in called.out + called.err
        assert "Missing command" not in called.out + called.err


@pytest.mark.deadline
@pytest.mark.parametrize(
    ("words", "module", "extra"),
    [
        (("agent", "train", "--data", "digits"), "torch", "train"),
        (("simulate", "recipe.toml"), "torch", "server"),
        (("server", "devices"), "sqlalchemy", "server"),
    ],
)
def test_a_missing_extra_is_the_one_that_the_command_needs(
    words: tuple[str, ...], module: str, extra: str, tmp_path: Path
) -> None:
    """A device needs torch to train, and nothing of the server."""
    code = (
        f"import sys; sys.modules[{module!r}] = None; sys.argv = ['splitedge', *{words!r}];"
        "from edge_sdk.cli.main import main; main()"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    install = f"{sys.executable} -m pip install 'splitedge[{extra}]'"
    expected = f"error: this command needs {module}: {install}"
    assert done.stderr.splitlines()[-1] == expected


def completed(shell: str, words: str) -> list[str]:
    """What a shell is offered after these words, by the protocol of its script."""
    env = {**os.environ, "_SPLITEDGE_COMPLETE": f"complete_{shell}"}
    if shell == "bash":
        env |= {"COMP_WORDS": words, "COMP_CWORD": str(len(words.split(" ")) - 1)}
    else:
        env |= {"_TYPER_COMPLETE_ARGS": words}
    done = subprocess.run(
        [BIN / "splitedge"], env=env, capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout.split("\n")


@pytest.mark.deadline
def test_bash_completes_commands_and_options_of_every_package(tmp_path: Path) -> None:
    """The script that `--install-completion` writes, in a real bash."""
    home = {**os.environ, "HOME": str(tmp_path), "PATH": f"{BIN}:{os.environ['PATH']}"}
    install = ["bash", "-c", "splitedge --install-completion; exit $?"]
    subprocess.run(install, env=home, check=True, capture_output=True, timeout=60)
    assert "splitedge" in (tmp_path / ".bashrc").read_text()
    ask = (
        'source "$HOME/.bashrc"; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1));'
        ' "$(complete -p splitedge | sed "s/.* -F \\([^ ]*\\) .*/\\1/")" splitedge; '
        'echo "${COMPREPLY[@]}"'
    )

    def offered(*words: str) -> list[str]:
        command = ["bash", "--norc", "-c", ask, "bash", *words]
        done = subprocess.run(
            command, env=home, check=True, capture_output=True, text=True, timeout=60
        )
        return done.stdout.split()

    assert {"agent", "server", "train"} <= set(offered("splitedge", ""))
    assert offered("splitedge", "server", "devices", "app") == ["approve"]
    assert offered("splitedge", "agent", "enroll", "--prof") == ["--profile"]


def test_zsh_is_offered_the_commands_with_their_help() -> None:
    (line,) = [line for line in completed("zsh", "splitedge agent ") if '"status":' in line]
    assert "this device''s identity" in line  # as zsh quotes it


def test_no_table_cuts_a_name_on_a_narrow_terminal() -> None:
    """A terminal of 60 columns gets all of a name of 63 letters, on several lines."""
    code = (
        "from rich.table import Table; from edge_sdk.cli.output import print_table;"
        "table = Table('device', 'fleet', 'wants'); "
        f"table.add_row('{NAME}', 'default', 'digits/1/d2'); print_table(table)"
    )
    shown = on_terminal(code, columns=60)
    rows = [line.split("│") for line in shown.splitlines() if line.startswith("│")]
    assert "".join(row[1].strip() for row in rows) == NAME
    assert "…" not in shown


def test_no_help_cuts_a_name_or_a_sentence_on_a_narrow_terminal() -> None:
    """Every option and every command stands whole in the help, however long its name is."""
    app = application([])
    asked: list[tuple[str, ...]] = []

    def ask(command: Any, words: tuple[str, ...]) -> None:
        asked.append(words)
        result = CliRunner().invoke(app, [*words, "--help"], env={"COLUMNS": "60"})
        assert result.exit_code == 0, words
        assert "…" not in result.output
        assert "..." not in result.output.partition("Commands:")[2], words
        usage = result.output.partition("\n")[0]
        assert not re.search(r"\.\.\.}|\[\[", usage), usage  # as in {NAME...}...
        shown = result.output.split()
        for parameter in command.params:
            if not parameter.hidden and parameter.param_type_name == "option":
                assert {*parameter.opts, *parameter.secondary_opts} <= set(shown), words
        for word, inner in getattr(command, "commands", {}).items():
            if not inner.hidden:
                assert word in shown
                ask(inner, (*words, word))

    ask(typer.main.get_command(app), ())
    assert ("server", "run") in asked


def test_enrolling_imports_what_it_needs_and_no_more(tmp_path: Path) -> None:
    """It would take longer than the command, and a script may enrol 200 devices."""
    code = (
        "import sys; sys.argv = ['splitedge', 'agent', 'enroll', '--token', 'T',"
        " '--server', 'http://127.0.0.1:1', '--profile', 'raspberry-pi-4', '--state', 'none']\n"
        "from edge_sdk.cli.main import main\n"
        "try: main()\n"
        "except SystemExit: print(sorted({'edge_sdk.settings', 'numpy', 'paho', 'rich'}"
        " & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.stdout.splitlines()[-1] == "[]", done.stderr


def on_terminal(code: str, *, columns: int) -> str:
    """The output of Python code on a real terminal of that width."""
    child, shown = pty.openpty()
    env = {**os.environ, "COLUMNS": str(columns), "TERM": "xterm", "NO_COLOR": "1"}
    running = subprocess.Popen([sys.executable, "-c", code], stdout=shown, stderr=shown, env=env)
    os.close(shown)
    read, end = b"", time.monotonic() + 30
    while time.monotonic() < end and select.select([child], [], [], 30)[0]:
        try:
            read += os.read(child, 4096)
        except OSError:  # how Linux says that the other end is closed
            break
    os.close(child)
    assert running.wait(30) == 0, read
    return read.decode()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("90s", 90),
        ("10m", 600),
        ("1h30m", 5_400),
        ("0.5h", 1_800),
        ("7d", 604_800),
        ("2w", 1_209_600),
    ],
)
def test_a_length_of_time_is_read_as_people_write_it(text: str, expected: float) -> None:
    assert seconds(text) == expected


@pytest.mark.parametrize("text", ["", "7", "d", "7 d", "-1h", "1y", "1hh", "nan", "1e3s"])
def test_another_text_is_no_length_of_time(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="expected a time such as 90s, 30m, 1h30m or 7d"):
        seconds(text)


def test_a_plain_number_is_in_the_unit_that_the_option_names() -> None:
    minutes = length_in("m", least=1)
    assert [minutes(text) for text in ("5", "300s", "2h", 5.0)] == [5, 5, 120, 5]
    for wrong in ("0", "30s", "nan", "inf"):
        with pytest.raises(typer.BadParameter, match="expected at least 1m"):
            minutes(wrong)
