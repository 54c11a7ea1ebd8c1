"""Log lines that quote a peer."""

from __future__ import annotations

import io
import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_sdk.logs.json_format import JsonFormatter
from edge_sdk.logs.line_format import FORM, LineFormatter, escaped

FORGED = "no time\n2026-11-23 02:20:15 INFO server.run: all is well\x1b[2K\x1b[1A\r\u202e"


def written(
    *arguments: object,
    error: Exception | None = None,
    formatter: logging.Formatter | None = None,
) -> str:
    """What a handler with our formatter writes for one record."""
    out = io.StringIO()
    handler = logging.StreamHandler(out)
    handler.setFormatter(formatter or LineFormatter(FORM))
    record = logging.LogRecord("server", logging.INFO, "", 0, "device=%s", arguments, None)
    if error is not None:
        record.exc_info = (type(error), error, error.__traceback__)
    handler.emit(record)
    return out.getvalue()


def test_a_peers_newlines_and_escape_sequences_are_written_as_text() -> None:
    """FAULTS row 26: a line, a colour or a cleared line that a device sends."""
    line = written(FORGED)
    assert line.count("\n") == 1
    assert line.rstrip("\n").isprintable()
    assert r"no time\n2026-11-23" in line
    assert r"\x1b[2K" in line


def test_error_text_in_a_traceback_begins_no_line() -> None:
    try:
        int(FORGED)
    except ValueError as err:
        lines = written("pi", error=ValueError(FORGED)).splitlines()
        lines += written("pi", error=err).splitlines()[1:]
    assert all(line.startswith("  ") for line in lines[1:])
    assert all(line.isprintable() for line in lines)


@given(st.text())
def test_whatever_is_logged_is_one_printable_line(text: str) -> None:
    assert escaped(text).isprintable()
    assert written(text).count("\n") == 1


def test_words_of_people_stay_as_they_are() -> None:
    assert escaped("Küche: 21 °C, 台所") == "Küche: 21 °C, 台所"


# as JSON


@given(st.text())
def test_whatever_is_logged_is_one_line_of_json_that_gives_it_back(text: str) -> None:
    line = written(text, formatter=JsonFormatter())
    assert line.count("\n") == 1
    assert line.isascii()
    assert line.rstrip("\n").isprintable()
    found = json.loads(line)
    assert found["message"] == f"device={text}"
    assert (found["level"], found["logger"]) == ("info", "server")


def test_half_a_character_and_a_traceback_are_fields_of_sound_json() -> None:
    try:
        int(FORGED)
    except ValueError as err:
        line = written("\ud800", error=err, formatter=JsonFormatter())
    found = json.loads(line)
    assert found["message"] == "device=\\ud800"
    assert "ValueError" in found["traceback"]
    line.encode("utf-8")


@pytest.mark.parametrize("place", ["front", "back", "environment"])
def test_a_command_that_fails_says_so_in_the_form_that_was_asked_for(
    place: str, tmp_path: Path
) -> None:
    words = ["agent", "status", "--state", str(tmp_path / "none")]
    words = {"front": ["--log", "json", *words], "back": [*words, "--log=json"]}.get(place, words)
    environment = {**os.environ, **({"SPLITEDGE_LOG": "json"} if place == "environment" else {})}
    command = [sys.executable, "-P", "-m", "edge_sdk.cli", *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    found = json.loads(done.stderr)
    assert found["level"] == "error"
    assert "splitedge agent enroll" in found["message"]


def test_another_form_is_refused_by_name() -> None:
    command = [sys.executable, "-P", "-m", "edge_sdk.cli", "--log", "xml", "agent", "status"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "expected text or json, got xml" in done.stderr
