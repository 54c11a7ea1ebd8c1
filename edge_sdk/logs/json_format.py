"""Log lines as JSON, one object a line, for programs that collect logs.

    {"time": "2026-11-23T07:45:12.345Z", "level": "warning", "logger": "server.services",
     "message": "device=pi-1 refused m/2/d1", "pid": 812}

A traceback is the field `traceback`. The text is ASCII, so whatever a peer said begins no line and
moves no cursor; a JSON reader gives it back as it was.
"""

from __future__ import annotations

import json
import logging
import os
from datetime import UTC, datetime


class JsonFormatter(logging.Formatter):
    """Formats a record as one JSON object."""

    def format(self, record: logging.LogRecord) -> str:
        """The object, on one line."""
        at = datetime.fromtimestamp(record.created, UTC)
        fields: dict[str, str | int] = {
            "time": f"{at:%Y-%m-%dT%H:%M:%S}.{at.microsecond // 1000:03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            "pid": record.process or os.getpid(),
        }
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        if record.stack_info:
            fields["stack"] = self.formatStack(record.stack_info)
        # half a surrogate pair is no text, and strict readers refuse it
        whole = {
            key: value.encode("utf-8", "backslashreplace").decode()
            if isinstance(value, str)
            else value
            for key, value in fields.items()
        }
        return json.dumps(whole)
