"""One response of an HTTP API, as tests read it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson


@dataclass(frozen=True)
class Answer:
    """One HTTP response."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        """Its body."""
        return orjson.loads(self.body)

    @property
    def error(self) -> str:
        """Its error, which stands alone in the body."""
        assert list(self.json) == ["error"], self.json
        return str(self.json["error"])
