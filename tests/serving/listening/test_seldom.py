"""Log lines that strangers cause are few."""

from __future__ import annotations

import logging

from server.listening.seldom import SeldomFilter


def record(text: str, *arguments: object) -> logging.LogRecord:
    """A record as a logger makes it."""
    return logging.LogRecord("server", logging.WARNING, "", 0, text, arguments, None)


def test_each_kind_is_written_once_a_second_with_a_count_of_the_others() -> None:
    now = 0.0
    seldom = SeldomFilter(clock=lambda: now)
    assert seldom.filter(record("from %s", "a"))
    assert not seldom.filter(record("from %s", "b"))
    assert not seldom.filter(record("from %s", "c"))
    assert seldom.filter(record("another"))
    now = 1.0
    last = record("from %s", "d")
    assert seldom.filter(last)
    assert last.getMessage() == "from d (2 more like this)"
    now = 2.0
    last = record("from %s", "e")
    assert seldom.filter(last)
    assert last.getMessage() == "from e"
