"""Log lines that nobody but this program can write.

A message may quote a peer: a reason, a path, a name. A newline in it would begin a line that looks
like one of ours, and an escape sequence would colour or erase lines on a terminal. So control
characters are written as escapes, and the lines of a traceback are indented.
"""

from __future__ import annotations

import logging
import os
import sys
from types import TracebackType
from typing import Final

from edge_sdk.errors import ConfigurationError
from edge_sdk.logs.json_format import JsonFormatter

FORM: Final = "%(asctime)s %(levelname)s %(name)s: %(message)s"
# a child's lines stand in the log of its parent, which has the time
CHILD_FORM: Final = "%(levelname)s %(name)s: %(message)s"
INDENT: Final = "  "
LOG_VARIABLE: Final = "SPLITEDGE_LOG"
FORMS: Final = ("text", "json")

_ExcInfo = tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]


class LineFormatter(logging.Formatter):
    """Formats a record as one line; a traceback follows on indented lines."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        """The line, with the message's control characters escaped."""
        record.message = escaped(record.message)
        return super().formatMessage(record)

    def formatException(self, ei: _ExcInfo) -> str:  # noqa: N802
        """The traceback, whose last lines quote the error's own text."""
        return _indented(super().formatException(ei))

    def formatStack(self, stack_info: str) -> str:  # noqa: N802
        """The stack."""
        return _indented(super().formatStack(stack_info))


def log_to_stderr(level: int, form: str = FORM, *, text: bool = False) -> None:
    """Write records of that level and above to standard error.

    They are JSON if the environment variable LOG_VARIABLE says so, which children inherit.

    Args:
        text: whether they are text all the same, for a parent that reads them.
    Raises: ConfigurationError if the variable says neither `text` nor `json`.
    """
    handler = logging.StreamHandler(sys.stderr)
    as_json = not text and log_form() == "json"
    handler.setFormatter(JsonFormatter() if as_json else LineFormatter(form))
    logging.basicConfig(level=level, handlers=[handler])
    logging.captureWarnings(as_json)  # they would be lines of another form


def log_form() -> str:
    """Form of the log: `text` or `json`.

    Raises: ConfigurationError for another word.
    """
    form = os.environ.get(LOG_VARIABLE) or FORMS[0]
    if form not in FORMS:
        raise ConfigurationError(
            f"--log, {LOG_VARIABLE}: expected {' or '.join(FORMS)}, got {form}"
        )
    return form


def escaped(text: str) -> str:
    """The text with escapes, such as `\\n`, for what is not printable."""
    if text.isprintable():
        return text
    return "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode("ascii")
        for letter in text
    )


def _indented(text: str) -> str:
    return "\n".join(f"{INDENT}{escaped(line)}" for line in text.split("\n"))
