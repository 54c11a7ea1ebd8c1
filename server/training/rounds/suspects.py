"""Clients that stand out, from the step in which they do until no late update of theirs counts."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

from edge_sdk.errors import FrameError
from server.training.core.server_state import ServerState
from server.training.methods.steps import ClientBatches
from server.training.rounds.outliers import ROUNDS_REMEMBERED, forget, outliers
from server.training.rounds.round import RoundSettings, RoundUnderWay


class Suspects:
    """Finds outliers where merges are robust, and remembers them by client and round.

    The caller holds the state's lock.
    """

    def __init__(self, state: ServerState, settings: RoundSettings) -> None:
        self._state = state
        self._settings = settings
        self._outlying: set[tuple[str, int]] = set()  # (client, round), while it may be late

    def open_round(self, number: int, clients: Container[str]) -> None:
        """Forget clients that left, and rounds of which no update can count any more."""
        limit = self._settings.staleness_max
        self._outlying = {(name, r) for name, r in self._outlying if number - r <= limit}
        # a client that began so long ago and is still at work is still known
        forget(self._state, clients, number - max(ROUNDS_REMEMBERED, limit))

    def find(self, now: RoundUnderWay, batches: ClientBatches) -> ClientBatches:
        """The batches of clients that stand out in this step; the round names these clients."""
        if not self._settings.trimmed:
            return {}
        found = outliers(self._state, batches, now.view, self._settings.clip_factor)
        self._outlying |= {(name, now.number) for name in found}
        for name, why in found.items():
            now.suspect(name, why)
        return {name: batch for name, batch in batches.items() if name in found}

    def exclude_late_outlier(self, now: RoundUnderWay, name: str, number: int) -> None:
        """Learn nothing from the late update of a client that stood out in its own round."""
        if (name, number) in self._outlying:
            now.suspect(name, f"stood out in round {number}, of which its update is")

    def state_dict(self) -> dict[str, Any]:
        """Outliers with late updates that may still come, as JSON for a checkpoint."""
        return {"outlying": sorted(self._outlying)} if self._outlying else {}

    def load_state_dict(self, fields: Mapping[str, Any]) -> None:
        """Take up what `state_dict` gave.

        Raises: FrameError for other fields.
        """
        try:
            found = {(str(name), int(number)) for name, number in fields.get("outlying", ())}
        except (TypeError, ValueError) as err:
            raise FrameError(f"checkpoint: outlying: expected names with rounds ({err})") from err
        self._outlying = found
