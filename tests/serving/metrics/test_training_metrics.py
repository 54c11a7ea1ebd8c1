"""Metrics of a training, and who may read them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from server.metrics.training import TrainingMetrics
from server.registry.credentials import secret_sha256
from server.registry.database import Registry
from server.registry.records import Device
from server.routes import errors
from tests.exposition import families_of, value_of

ROW = {
    "round": 1,
    "seconds": 12.5,
    "merged": True,
    "bytes_up": 1000,
    "bytes_down": 300,
    "participants": ["a", "b", "c", "d"],
    "missing": ["b"],
    "refused": {"c": "NaN"},
    "stale": {"e": 1},
    "loss": 0.7,
    "accuracy": None,
}


@dataclass
class Keys:
    """The part of a trainer that logins are checked with."""

    registry: Registry
    operator_sha256: str = secret_sha256("right")

    def logged_in(self, device: Device, credential: str) -> None:
        """Do nothing."""


@pytest.fixture
def keys(tmp_path: Path) -> Iterator[Keys]:
    registry = Registry.open(f"sqlite:///{tmp_path}/registry.db")
    yield Keys(registry)
    registry.close()


def client(keys: Keys, *, everyone: bool) -> tuple[TrainingMetrics, TestClient]:
    metrics = TrainingMetrics("digits", "supersfl", rounds=20, present=lambda: 3)
    app = FastAPI()
    errors.install(app)
    app.include_router(metrics.router(keys, everyone=everyone))
    return metrics, TestClient(app)


def test_rounds_are_counted_and_what_is_not_known_is_not_told(keys: Keys) -> None:
    metrics, http = client(keys, everyone=True)
    assert "splitedge_training_loss" not in families_of(http.get("/metrics").text)
    metrics.note_round(ROW)
    last: dict[str, Any] = {**ROW, "round": 2, "merged": False, "accuracy": 0.5, "loss": None}
    metrics.note_round(last)
    found = families_of(http.get("/metrics").text)
    prefix = "splitedge_training"
    assert value_of(found, f"{prefix}_info", recipe="digits", method="supersfl") == 1
    assert value_of(found, f"{prefix}_last_round") == 2
    assert value_of(found, f"{prefix}_rounds_planned") == 20
    assert value_of(found, f"{prefix}_devices") == 3
    assert value_of(found, f"{prefix}_idle_rounds_total") == 1
    assert value_of(found, f"{prefix}_round_duration_seconds_sum") == 25
    assert value_of(found, f"{prefix}_bytes_total", direction="up") == 2000
    counts = {"taken": 4, "late": 2, "missing": 2, "refused": 2}  # of a to d, and e, twice
    for outcome, count in counts.items():
        assert value_of(found, f"{prefix}_updates_total", outcome=outcome) == count
    assert value_of(found, f"{prefix}_loss") == 0.7
    assert value_of(found, f"{prefix}_accuracy_ratio") == 0.5


def test_beyond_loopback_the_scope_operate_is_asked_for(keys: Keys) -> None:
    _, http = client(keys, everyone=False)
    _, infer = keys.registry.keys.create(["infer"])
    _, operate = keys.registry.keys.create(["operate"], name="grafana")
    assert http.get("/metrics").status_code == 401
    for login, status in (("operator:right", 200), (infer, 403), (operate, 200)):
        reply = http.get("/metrics", headers={"Authorization": f"Bearer {login}"})
        assert reply.status_code == status, reply.text


def test_on_loopback_what_a_proxy_brings_needs_a_login(keys: Keys) -> None:
    _, http = client(keys, everyone=True)
    proxy = {"X-Forwarded-For": "203.0.113.7"}
    assert http.get("/metrics").status_code == 200
    assert http.get("/metrics", headers=proxy).status_code == 401
    operator = {**proxy, "Authorization": "Bearer operator:right"}
    assert http.get("/metrics", headers=operator).status_code == 200
