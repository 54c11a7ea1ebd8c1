"""Metrics of a training with real devices: the trainer is a process with a /metrics of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from fastapi import APIRouter, Request, Response
from prometheus_client import Counter, Gauge, Histogram

from server.errors import ForbiddenError
from server.metrics.exposition import exposition, new_registry
from server.routes.authentication import FORWARDED, CredentialStore, authenticate

# a round takes seconds on a laptop's loopback, and hours over slow links
_ROUND_S: Final = (0.1, 1.0, 10.0, 30.0, 60.0, 300.0, 600.0, 1800.0, 3600.0, 7200.0, 21600.0)


class TrainingMetrics:
    """Counts of one training, the rounds of resumed runs included.

    Args:
        recipe, method: names, which tell trainings apart.
        rounds: number that the recipe asks for.
        present: counts the devices that are there now.
    """

    def __init__(
        self, recipe: str, method: str, *, rounds: int, present: Callable[[], int]
    ) -> None:
        registry = self._registry = new_registry("trainer")

        def gauge(name: str, about: str) -> Gauge:
            return Gauge(f"splitedge_training_{name}", about, registry=registry)

        def counter(name: str, about: str, *labels: str) -> Counter:
            return Counter(f"splitedge_training_{name}", about, labels, registry=registry)

        about = Gauge(
            "splitedge_training_info",
            "Recipe and method.",
            ("recipe", "method"),
            registry=registry,
        )
        about.labels(recipe, method).set(1)
        gauge("devices", "Devices that are there now.").set_function(present)
        gauge("rounds_planned", "Rounds that the recipe asks for.").set(rounds)
        self._last = gauge("last_round", "Number of the last round that ended.")
        self._seconds = Histogram(
            "splitedge_training_round_duration_seconds",
            "Time of a round.",
            buckets=_ROUND_S,
            registry=registry,
        )
        self._idle = counter("idle_rounds", "Rounds that changed nothing for want of updates.")
        self._bytes = counter(
            "bytes", "Messages to devices (down) and from them (up).", "direction"
        )
        self._updates = counter(
            "updates",
            "Devices asked in a round, by outcome: taken, late, missing, refused.",
            "outcome",
        )
        self._loss: Gauge | None = None
        self._accuracy: Gauge | None = None
        self._gauge = gauge

    def note_round(self, row: Mapping[str, Any]) -> None:
        """Count a round, as the report has it."""
        self._last.set(row["round"])
        self._seconds.observe(row["seconds"])
        self._idle.inc(not row["merged"])
        for direction in ("up", "down"):
            self._bytes.labels(direction).inc(row[f"bytes_{direction}"])
        lost = {*row["missing"], *row["refused"]}
        for outcome, count in (
            ("taken", len(set(row["participants"]) - lost)),
            ("late", len(row["stale"])),
            ("missing", len(row["missing"])),
            ("refused", len(row["refused"])),
        ):
            self._updates.labels(outcome).inc(count)
        if row["loss"] is not None:
            self._loss = self._loss or self._gauge("loss", "Mean loss of the last round.")
            self._loss.set(row["loss"])
        if row["accuracy"] is not None:
            text = "Accuracy on the test part, when last measured."
            self._accuracy = self._accuracy or self._gauge("accuracy_ratio", text)
            self._accuracy.set(row["accuracy"])

    def router(self, keys: CredentialStore, *, everyone: bool) -> APIRouter:
        """The route `GET /metrics`.

        Args:
            everyone: whether it asks for no login, on loopback; else, and for what a proxy brings,
                for the scope operate.
        """
        routes = APIRouter(include_in_schema=False)

        @routes.get("/metrics", response_class=Response)
        def metrics(request: Request) -> Response:
            """Metrics in the text format of Prometheus, or as OpenMetrics."""
            fields = {name for name, _ in request.scope["headers"]}
            is_open = everyone and fields.isdisjoint(FORWARDED)
            if not is_open and not authenticate(keys, request).has("operate"):
                raise ForbiddenError("expected the operator, or a key of the scope operate")
            accept = request.headers.get("accept", "")
            body, content_type = exposition(self._registry, accept)
            return Response(body, media_type=content_type)

        return routes
