"""The command line as a user calls it, in this process: the fixture `splitedge` runs it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Called:
    """Result of a command."""

    status: int
    out: str
    err: str

    @property
    def refusal(self) -> str:
        """Its one line on stderr; a server that was starting has logged before."""
        assert (self.status, self.out) == (1, ""), (self.out, self.err)
        *logged, last = self.err.splitlines()
        assert last.startswith("error: ")
        assert all(" INFO server." in line for line in logged)
        return last

    @property
    def json(self) -> Any:
        """Its stdout, which is JSON and nothing else."""
        assert self.status == 0, self.err
        return json.loads(self.out)


Splitedge = Callable[..., Called]
