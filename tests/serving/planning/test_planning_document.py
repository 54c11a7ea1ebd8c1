"""What docs/planning.md says to type, typed."""

from __future__ import annotations

import shlex

import pytest

from tests.commands import Splitedge
from tests.reader import Document

PAGE = Document("docs/planning.md")


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("plan", "10,000 devices: "),
        ("own", "2,500 devices: "),
        ("price", "At your prices "),
    ],
)
def test_the_commands_of_the_page_tell_a_plan(splitedge: Splitedge, name: str, told: str) -> None:
    program, *words = shlex.split(PAGE.snippet(name).replace("\\\n", ""))
    assert program == "splitedge"
    called = splitedge(*words)
    assert called.status == 0
    assert told in called.out
