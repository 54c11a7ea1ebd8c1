"""What a running agent did is in its server's history and metrics, and in the Grafana dashboard."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson
import pytest
import urllib3

from edge_sdk import AgentSettings, EdgeAgent, api
from edge_sdk.bundles.update import update
from profiles import load_reference
from server.processes import ServerProcess
from server.registry.operator import load_or_create_operator_secret
from server.tokens import create_token
from tests.exposition import families_of, value_of
from tests.waiting import wait_until

if TYPE_CHECKING:
    from prometheus_client import Metric

    from tests.serving.conftest import Exported

pytestmark = [pytest.mark.broker, pytest.mark.deadline]

GRAFANA = Path(__file__).parents[2] / "examples" / "grafana" / "splitedge.json"


@dataclass(frozen=True)
class Watched:
    """A server, and what an agent counted that has ended."""

    url: str
    headers: dict[str, str]
    bundle: str
    counters: dict[str, int]
    answers: dict[str, Any]

    def get(self, path: str, headers: dict[str, str] | None = None) -> urllib3.BaseHTTPResponse:
        """One GET request, by default as the operator."""
        return urllib3.request(
            "GET",
            f"{self.url}{path}",
            timeout=10,
            headers=self.headers if headers is None else headers,
        )

    def points(self, path: str) -> list[dict[str, Any]]:
        """The points of a history."""
        reply = self.get(f"/api/v1/{path}")
        assert reply.status == 200, reply.data
        return list(orjson.loads(reply.data)["points"])

    def metrics(self) -> dict[str, Metric]:
        """The families of /metrics."""
        reply = self.get("/metrics", {})
        assert reply.status == 200, reply.data
        return families_of(reply.data.decode())


@pytest.fixture(scope="module")
def watched(exported: Exported, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    """A server whose device answered 200 samples and said goodbye; one query came over HTTP."""
    folder = tmp_path_factory.mktemp("watching")
    state, device = folder / "state", folder / "pi"
    exported.install(state / "models")
    server = ServerProcess(state)
    server.start(("--http", "127.0.0.1:0", "--mqtt", "embedded:127.0.0.1:0"))
    try:
        token = create_token(state)
        api.enroll(server.http, token, device, profile=load_reference("raspberry-pi-4"), name="pi")
        assert update(device).status == "installed"
        settings = AgentSettings(heartbeat_s=0.2, threshold=0.5)
        with EdgeAgent.open(device, settings) as agent:
            wait_until(
                lambda: agent.predict(exported.x[0], threshold=-1.0).source == "server",
                agent.status,
                30,
            )
            for x in exported.x[:200]:
                agent.predict(x)
            counters, answers = agent.status().counters, agent.telemetry()["answers"]
            bundle = agent.manifest.bundle
        x = exported.x[0]
        tensor = {
            "name": "x",
            "shape": [1, *x.shape],
            "datatype": "UINT8",
            "data": x.ravel().tolist(),
        }
        infer = f"{server.http}/v2/models/digits/infer"
        assert urllib3.request("POST", infer, json={"inputs": [tensor]}).status == 200
        login = f"Bearer operator:{load_or_create_operator_secret(state)}"
        yield Watched(
            server.http,
            {"Authorization": login},
            bundle,
            {
                "exits": counters.device,
                "offloads": counters.server,
                "fallbacks": counters.fallback,
            },
            answers,
        )
    finally:
        server.stop()


def sums(watched: Watched) -> dict[str, int]:
    found: Counter[str] = Counter()
    for point in watched.points("devices/pi/telemetry"):
        for name in watched.counters:
            found[name] += point[name]
    return dict(found)


def test_the_history_has_every_answer(watched: Watched) -> None:
    # a device that says goodbye waits for no turn
    wait_until(lambda: sums(watched) == watched.counters, lambda: sums(watched), 5)
    points = watched.points("devices/pi/telemetry")
    last = points[-1]
    uncertainty = [sum(counts) for counts in zip(*(p["uncertainty"] for p in points), strict=True)]
    assert uncertainty == watched.answers["uncertainty"]
    assert (last["bundle"], last["presence"]) == (watched.bundle, "present")
    assert last["threshold"] == 0.5
    assert last["round_trip_ms"] > 0
    assert last["memory_bytes"] > 10_000_000
    exits = [point["latency"]["device"] for point in points if "device" in point["latency"]]
    assert sum(one["answers"] for one in exits) == watched.counters["exits"]
    assert all(one["p50_ms"] <= one["p95_ms"] <= one["p99_ms"] for one in exits)
    fleet = watched.points("telemetry?fleet=default")
    assert sum(point["exits"] for point in fleet) == watched.counters["exits"]


def test_the_history_is_for_the_operator_and_the_device_itself(watched: Watched) -> None:
    for path, status in (("devices/pi/telemetry?since_s=0", 400), ("devices/no/telemetry", 404)):
        assert watched.get(f"/api/v1/{path}").status == status
    for headers in ({}, {"Authorization": "Bearer operator:wrong"}):
        assert watched.get("/api/v1/telemetry", headers).status == 401


def test_the_metrics_tell_what_devices_and_the_engine_did(watched: Watched) -> None:
    def answered() -> bool:
        found = watched.metrics()["splitedge_device_answers"].samples
        return sum(sample.value for sample in found) >= sum(watched.counters.values())

    wait_until(answered, "the points of the device", 5)
    found = watched.metrics()
    model = {"model": "digits", "version": "1"}
    for source, name in (("device", "exits"), ("server", "offloads"), ("fallback", "fallbacks")):
        labels = {"fleet": "default", "source": source}
        count = watched.counters[name]
        assert value_of(found, "splitedge_device_answers_total", **labels) == count
        seconds = "splitedge_device_answer_duration_seconds"
        if count:
            assert value_of(found, f"{seconds}_count", **labels) == count
            total_ms = watched.answers["latency_ms"][source]
            assert value_of(found, f"{seconds}_sum", **labels) == pytest.approx(
                total_ms / 1e3, rel=0.01
            )
    share = "splitedge_device_uncertainty_ratio_count"
    assert value_of(found, share, fleet="default") == sum(watched.counters.values())
    # offloads, fallbacks that the server answered too late, and the query over HTTP
    queries = value_of(found, "splitedge_queries_total", outcome="answered", **model)
    assert queries >= watched.counters["offloads"] + 1
    assert value_of(found, "splitedge_query_duration_seconds_count", **model) == queries
    assert value_of(found, "splitedge_batch_samples_sum", **model) >= queries
    assert value_of(found, "splitedge_queue_wait_seconds_count", **model) >= queries
    assert value_of(found, "splitedge_devices", fleet="default", state="online") == 1
    assert value_of(found, "splitedge_devices_running", **model) == 1
    assert value_of(found, "splitedge_alerts", kind="silent", level="warning") == 0
    assert value_of(found, "splitedge_broker_up") == 1
    assert value_of(found, "splitedge_registry_up") == 1
    assert value_of(found, "splitedge_queue_limit_queries") == 256
    assert value_of(found, "splitedge_expiry_timestamp_seconds", what="root") > 1.8e9
    devices = {text for one in found.values() for s in one.samples for text in s.labels.values()}
    assert "pi" not in devices, "a device is no label: there may be thousands"


def test_openmetrics_is_given_to_who_asks_for_it(watched: Watched) -> None:
    asked = watched.get("/metrics", {"Accept": "application/openmetrics-text; version=1.0.0"})
    assert asked.headers["content-type"].startswith("application/openmetrics-text")
    assert asked.data.endswith(b"# EOF\n")


def test_every_metric_of_the_grafana_dashboard_is_there(watched: Watched) -> None:
    names = {
        sample.name for family in watched.metrics().values() for sample in family.samples
    } | set(ON_OCCASION)
    asked = {
        name
        for expression in _expressions(orjson.loads(GRAFANA.read_bytes()))
        for name in re.findall(r"\b(?:splitedge|process)_\w+", expression)
    }
    assert len(asked) > 15
    assert asked <= names, asked - names


# metrics that a fleet of this test's kind does not have
ON_OCCASION = (
    "splitedge_device_disagreement_bound_ratio",
    "splitedge_devices_without_bound",
    "splitedge_device_budget_spent_total",
    "splitedge_device_budget_earned_total",
)


def _expressions(value: Any) -> list[str]:
    """Every query in a dashboard."""
    if isinstance(value, dict):
        own = [value["expr"]] if isinstance(value.get("expr"), str) else []
        return own + [one for inner in value.values() for one in _expressions(inner)]
    if isinstance(value, list):
        return [one for inner in value for one in _expressions(inner)]
    return []
