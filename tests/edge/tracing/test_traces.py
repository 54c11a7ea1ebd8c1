"""Traces: one offload from `predict` over the server's batch and back, at a real collector."""

from __future__ import annotations

import logging
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson
import pytest
import urllib3

from edge_sdk import AgentSettings, EdgeAgent
from edge_sdk.errors import ConfigurationError
from edge_sdk.settings import Traces
from edge_sdk.tracing.span_queue import QUEUE_MAX
from tests.collector import Collector, Received
from tests.edge.fleet import Fleet
from tests.exposition import families_of, value_of
from tests.reader import Document, environment
from tests.waiting import wait_until

if TYPE_CHECKING:
    from edge_sdk.answers.prediction import Prediction
    from tests.edge.digits import Digits

pytestmark = pytest.mark.broker

DOCUMENT = Document("docs/traces.md")
COLLECTOR = "http://127.0.0.1:4318"  # of the document
PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
CLIENT, SERVER = 3, 2  # kinds of spans, as the protocol numbers them
WITHIN_S = 20.0  # of predictions that take milliseconds


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with Collector() as collector:
        yield collector


@pytest.fixture(scope="module")
def traced(
    digits: Digits, collector: Collector, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Fleet]:
    """A server that traces every query."""
    words = DOCUMENT.snippet("server").replace(COLLECTOR, collector.url).split()
    options = words[words.index("--traces") :]
    assert options == ["--traces", collector.url, "--traces-share", "1"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")  # seconds that a batch is tried
        fleet = Fleet(tmp_path_factory.mktemp("traced"), digits.models, options)
    yield fleet
    fleet.stop()


def tree_of(collector: Collector, trace: str) -> dict[str, Received]:
    """The spans of a trace by name; each name once."""
    spans = [span for span in collector.spans if span.trace == trace]
    tree = {span.name: span for span in spans}
    assert len(tree) == len(spans), spans
    return tree


def check_offload(collector: Collector, device: str) -> dict[str, Received]:
    """Wait for the one offload of a device, and check its whole tree; the spans by name."""
    resource = {"service.instance.id": device}
    predict = wait_until(
        lambda: [
            span
            for span in collector.spans
            if span.name == "predict" and resource.items() <= span.resource.items()
        ],
        lambda: collector.spans,
        60,
    )[0]
    query = collector.wait(name="query", trace=predict.trace)[0]
    tree = tree_of(collector, predict.trace)
    parents = {name: span.parent for name, span in tree.items()}
    offload = tree["offload"]
    assert parents == {
        "predict": "",
        "offload": predict.span,
        "query": offload.span,
        "wait": query.span,
        "compute": query.span,
        "reply": query.span,
    }
    assert (offload.kind, query.kind) == (CLIENT, SERVER)
    for name in ("wait", "compute", "reply"):
        assert query.begin_ns <= tree[name].begin_ns <= tree[name].end_ns <= query.end_ns
    # one machine has one clock; the agent's was looked at some microseconds later
    assert predict.begin_ns <= offload.begin_ns <= query.begin_ns
    assert offload.end_ns <= predict.end_ns
    batch = collector.wait(name="batch", trace=tree["compute"].links[0][0])[0]
    assert batch.trace != predict.trace
    assert list(tree["compute"].links) == [(batch.trace, batch.span)]
    assert list(batch.links) == [(predict.trace, tree["compute"].span)]
    services = {name: span.service for name, span in tree.items()}
    assert services == {
        name: "splitedge-agent" if name in ("predict", "offload") else "splitedge-server"
        for name in tree
    }
    return {**tree, "batch": batch}


def test_a_commands_offload_is_one_trace_from_end_to_end(
    traced: Fleet, collector: Collector, digits: Digits, tmp_path: Path
) -> None:
    state = traced.device("typed")
    (tmp_path / "pi").symlink_to(state)
    np.save(tmp_path / "x.npy", digits.x[0])
    words = DOCUMENT.snippet("agent").replace(COLLECTOR, collector.url).split()
    assert words[:3] == ["splitedge", "agent", "run"]
    command = [sys.executable, "-P", "-m", "edge_sdk.cli"]
    agent = subprocess.Popen(
        [*command, *words[1:]], cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, text=True
    )
    try:
        assert agent.stdout is not None
        assert "runs digits/1/d2" in agent.stdout.readline()
        ask = ["agent", "predict", "x.npy", "--state", "./pi", "--json"]
        ask += ["--threshold", "-1", "--deadline", "20"]
        done = subprocess.run(
            [*command, *ask], cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, check=True
        )
        assert orjson.loads(done.stdout)[0]["source"] == "server"
        tree = check_offload(collector, "typed")
    finally:
        agent.send_signal(signal.SIGTERM)
        agent.communicate()
    predict = dict(tree["predict"].attributes)
    assert predict.pop("splitedge.uncertainty") >= 0
    assert predict == {
        "splitedge.model": "digits",
        "splitedge.version": "1",
        "splitedge.depth": 2,
        "splitedge.threshold": -1.0,
        "splitedge.source": "server",
    }
    assert tree["query"].attributes == {
        "splitedge.sender": "typed",
        "splitedge.input": "z2",
        "splitedge.rows": 1,
        "splitedge.model": "digits",
        "splitedge.version": "1",
    }
    assert tree["batch"].attributes == {
        "splitedge.model": "digits",
        "splitedge.version": "1",
        "splitedge.queries": 1,
        "splitedge.rows": 1,
    }
    assert set(tree["offload"].attributes) == {"splitedge.bytes_up", "splitedge.bytes_down"}
    assert collector.paths == {"/v1/traces"}


def test_the_settings_file_traces_and_http_carries_the_trace_too(
    traced: Fleet, collector: Collector, digits: Digits
) -> None:
    # a message limit below every query: it goes over HTTP
    state = traced.device("large", max_packet_bytes=200)
    (state / "agent.toml").write_text(
        f'[agent]\ndeadline_s = 20.0\n[traces]\nurl = "{collector.url}"\nshare = 1\n'
    )
    with EdgeAgent.open(state) as agent:
        # the digit is told by no span
        answer = agent.predict(digits.x[1], threshold=-1)
        assert answer.source == "server"
        exited = agent.predict(digits.x[1], threshold=1e9)
        assert exited.source == "device"
        tree = check_offload(collector, "large")
        resource = tree["predict"].resource
        alone = collector.wait(2, name="predict", resource=resource)[1]
    assert tree["query"].attributes["splitedge.sender"] == "large"
    assert alone.attributes["splitedge.source"] == "device"
    assert set(tree_of(collector, alone.trace)) == {"predict"}


def infer(
    fleet: Fleet, x: Any, traceparent: str, shape: tuple[int, ...] = (1, 1, 8, 8)
) -> urllib3.BaseHTTPResponse:
    """Ask the server over HTTP, as an existing v2 client does."""
    tensor = {"name": "x", "shape": shape, "datatype": "FP32", "data": x.ravel().tolist()}
    return urllib3.request(
        "POST",
        f"{fleet.http}/v2/models/digits/infer",
        body=orjson.dumps({"id": "mine", "inputs": [tensor]}),
        headers={"traceparent": traceparent},
        timeout=20,
        retries=False,
    )


def test_a_v2_client_brings_its_own_trace(
    traced: Fleet, collector: Collector, digits: Digits
) -> None:
    assert infer(traced, digits.x[0], PARENT).status == 200
    query = collector.wait(name="query", parent=PARENT[36:52])[0]
    assert query.trace == PARENT[3:35]


def test_a_refused_query_says_why(traced: Fleet, collector: Collector, digits: Digits) -> None:
    parent = PARENT.replace("4bf9", "5555")
    response = infer(traced, digits.x[0], parent, (1, 64))
    assert response.status == 400
    query = collector.wait(name="query", trace=parent[3:35])[0]
    assert query.error
    assert query.error in orjson.loads(response.data)["error"]
    assert set(tree_of(collector, query.trace)) == {"query"}


def test_what_a_client_does_not_record_is_not_recorded_here(
    traced: Fleet, collector: Collector, digits: Digits
) -> None:
    unsampled = "00-11112f3577b34da6a3ce929d0e0e4736-00f067aa0ba90222-00"
    assert infer(traced, digits.x[0], unsampled).status == 200
    later = PARENT.replace("4bf9", "2222").replace("00f0", "0aaa")
    assert infer(traced, digits.x[0], later).status == 200
    collector.wait(name="query", trace=later[3:35])  # what came before it has arrived, too
    assert all(span.trace != unsampled[3:35] for span in collector.spans)


@pytest.mark.deadline
def test_a_program_that_asks_the_device_has_its_trace_go_on_to_the_server(
    traced: Fleet, collector: Collector, digits: Digits, tmp_path: Path, free_port: int
) -> None:
    """The agent's own share is 0: whoever asks with a trace has chosen."""
    state = traced.device("asked")
    address = f"127.0.0.1:{free_port}"
    command = [sys.executable, "-P", "-m", "edge_sdk.cli", "agent", "run", "--serve", address]
    command += ["--state", str(state), "--traces", collector.url, "--traces-share", "0"]
    tensor = {"name": "x", "shape": [1, 1, 8, 8], "datatype": "FP32"}
    inputs = [{**tensor, "data": digits.x[0].ravel().tolist()}]

    def ask(traceparent: str, threshold: float) -> str:
        parameters = {"threshold": threshold, "deadline_ms": 20_000}
        response = urllib3.request(
            "POST",
            f"http://{address}/v2/models/digits/infer",
            body=orjson.dumps({"inputs": inputs, "parameters": parameters}),
            headers={"traceparent": traceparent},
            timeout=30,
            retries=False,
        )
        assert response.status == 200, response.data
        return str(response.json()["parameters"]["source"])

    own = {"offloaded": "3333", "exited": "4444", "unsampled": "6666", "invalid": ""}
    callers = {name: PARENT.replace("4bf9", digits4) for name, digits4 in own.items()}
    callers["unsampled"] = callers["unsampled"][:-1] + "0"
    agent = subprocess.Popen(
        command, cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, text=True
    )
    try:
        assert agent.stdout is not None
        assert "runs digits/1/d2" in agent.stdout.readline()
        assert ask(callers["unsampled"], 99) == "device"
        assert ask(callers["invalid"], 99) == "device"
        assert ask(callers["offloaded"], -1) == "server"
        assert ask(callers["exited"], 99) == "device"
    finally:
        agent.send_signal(signal.SIGTERM)  # it sends its last spans
        agent.communicate()
    offloaded, exited = callers["offloaded"][3:35], callers["exited"][3:35]
    collector.wait(name="query", trace=offloaded)
    collector.wait(name="predict", trace=exited)
    tree = tree_of(collector, offloaded)
    assert {"predict", "offload", "query", "wait", "compute", "reply"} == set(tree)
    assert (tree["predict"].parent, tree["predict"].kind) == (PARENT[36:52], SERVER)
    assert tree["offload"].parent == tree["predict"].span
    assert tree["query"].parent == tree["offload"].span
    assert set(tree_of(collector, exited)) == {"predict"}
    mine = {"service.instance.id": "asked"}
    traces = {span.trace for span in collector.spans if mine.items() <= span.resource.items()}
    assert traces == {offloaded, exited}


@pytest.mark.parametrize(
    "text",
    ["", "00-0-0-01", f"{PARENT}-more", "x" * 5000, "00-é-01"],
    ids=["empty", "short", "more", "long", "latin"],
)
def test_a_hostile_traceparent_costs_no_answer(
    traced: Fleet, collector: Collector, digits: Digits, text: str
) -> None:
    before = len([span for span in collector.spans if span.name == "query"])
    response = infer(traced, digits.x[0], text)
    assert response.status == 200
    assert orjson.loads(response.data)["id"] == "mine"
    newest = collector.wait(name="query", count=before + 1)[-1]
    assert newest.parent == ""  # a trace of the server's own: it traces every query


def test_a_device_without_traces_is_answered_by_a_server_with(
    traced: Fleet, collector: Collector, digits: Digits
) -> None:
    state = traced.device("plain")
    with EdgeAgent.open(state, AgentSettings(deadline_s=20.0)) as agent:
        answer = agent.predict(digits.x[0], threshold=-1)
        assert answer.source == "server"
        assert "traces" not in agent.status().reports

    def of_plain() -> list[Received]:
        return [
            span for span in collector.spans if span.attributes.get("splitedge.sender") == "plain"
        ]

    query = wait_until(of_plain, "the query of `plain`", 60)[0]
    assert (query.name, query.parent) == ("query", "")
    assert set(tree_of(collector, query.trace)) == {"query", "wait", "compute", "reply"}


def test_a_device_with_traces_is_answered_by_a_server_without(fleet: Fleet, digits: Digits) -> None:
    state = fleet.device("ahead")
    with Collector() as own:
        settings = AgentSettings(deadline_s=20.0, traces=Traces(own.url, 1))
        with EdgeAgent.open(state, settings) as agent:
            assert agent.predict(digits.x[0], threshold=-1).source == "server"
            predict = own.wait(name="predict")[0]
        assert set(tree_of(own, predict.trace)) == {"predict", "offload"}


def bundle_of(digits: Digits) -> Path:
    return digits.models / "digits" / "1" / "bundles" / "d2"


def test_a_fallback_says_why(fleet: Fleet, digits: Digits, free_port: int) -> None:
    state = fleet.device("cut", broker_port=free_port)
    with Collector() as own:
        settings = AgentSettings(deadline_s=0.3, traces=Traces(own.url, 1))
        with EdgeAgent.open(state, settings) as agent:
            answer = agent.predict(digits.x[0], threshold=-1)
            assert answer.source == "fallback"
            predict = own.wait(name="predict")[0]
            offload = own.wait(name="offload")[0]
    assert predict.attributes["splitedge.source"] == "fallback"
    assert predict.attributes["splitedge.reason"] == answer.reason[:200]
    assert offload.error == answer.reason[:200]


def test_the_share_is_kept(digits: Digits) -> None:
    with Collector() as own:
        settings = AgentSettings(offload=False, traces=Traces(own.url, 0.2))
        with EdgeAgent.from_bundle(bundle_of(digits), settings) as agent:
            for _ in range(1000):
                agent.predict(digits.x[0])
            # binomial: 200 expected, standard deviation 12.6; six of them are a chance of 1 in 10^9
            own.wait(124, name="predict")
            assert agent.status().reports["traces"]["dropped"] == 0
        assert len(own.spans) <= 276


def test_traces_without_opentelemetry_name_the_extra(
    digits: Digits, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "edge_sdk.tracing.otlp", None)  # as where it cannot be loaded
    settings = AgentSettings(offload=False, traces=Traces("env"))
    with pytest.raises(ConfigurationError, match=r"pip install 'splitedge\[traces\]'"):
        EdgeAgent.from_bundle(bundle_of(digits), settings)


def test_an_environment_without_a_collector_is_refused(
    digits: Digits, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    settings = AgentSettings(offload=False, traces=Traces("env"))
    with pytest.raises(ConfigurationError, match="set OTEL_EXPORTER_OTLP_ENDPOINT"):
        EdgeAgent.from_bundle(bundle_of(digits), settings)


class Silent:
    """A collector that takes connections and never answers."""

    def __enter__(self) -> str:
        self._socket = socket.create_server(("127.0.0.1", 0))
        return f"http://127.0.0.1:{self._socket.getsockname()[1]}"

    def __exit__(self, *exception: object) -> None:
        self._socket.close()


def predict_all(agent: EdgeAgent, x: Any, count: int) -> list[Prediction]:
    return [agent.predict(x) for _ in range(count)]


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.message for each in caplog.records if each.levelno >= logging.WARNING]


@pytest.mark.deadline
def test_a_silent_collector_keeps_nobody_waiting(
    digits: Digits, caplog: pytest.LogCaptureFixture
) -> None:
    with Silent() as url:
        settings = AgentSettings(offload=False, traces=Traces(url, 1))
        begin = time.monotonic()
        with EdgeAgent.from_bundle(bundle_of(digits), settings) as agent:
            answers = predict_all(agent, digits.x[0], QUEUE_MAX + 1000)
            report = agent.status().reports["traces"]
        took_s = time.monotonic() - begin
    assert all(answer.source == "device" for answer in answers)
    # the queue is full, and at most one batch of 512 is on its way
    assert report["dropped"] >= 1000 - 512
    assert report["sent"] == 0
    assert took_s < WITHIN_S
    (line,) = said(caplog)
    assert "spans are dropped" in line


@pytest.mark.deadline
def test_a_collector_that_is_down_is_said_once_and_found_again(
    digits: Digits,
    free_port: int,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caplog.set_level(logging.INFO, "edge_sdk")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")  # seconds that a batch is tried
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{free_port}/")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-scope=mine")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "door")
    settings = AgentSettings(offload=False, traces=Traces("env", 1))
    with EdgeAgent.from_bundle(bundle_of(digits), settings) as agent:

        def dropped() -> int:
            agent.predict(digits.x[0])
            return int(agent.status().reports["traces"]["dropped"])

        wait_until(dropped, "a batch given up", 60)
        before = dropped()
        wait_until(lambda: dropped() > before, "a second one", 60)
        (line,) = said(caplog)
        assert f"127.0.0.1:{free_port}" in line
        with Collector(free_port) as own:
            agent.predict(digits.x[0])
            assert own.wait(name="predict")[0].service == "door"
            assert own.headers["x-scope"] == "mine"
            wait_until(
                lambda: any("spans arrive again" in each.message for each in caplog.records),
                "that they arrive again",
            )
    assert len(said(caplog)) == 1


@pytest.mark.deadline
def test_a_server_answers_while_its_collector_takes_nothing(
    traced: Fleet, collector: Collector, digits: Digits
) -> None:
    def log() -> str:
        return traced.state.with_name("server.log").read_text()

    def dropped() -> float:
        assert infer(traced, digits.x[0], "").status == 200
        text = urllib3.request("GET", f"{traced.http}/metrics", timeout=20).data.decode()
        return value_of(families_of(text), "splitedge_trace_spans_total", outcome="dropped")

    before, said_before = dropped(), log().count("spans are dropped")
    collector.busy = True
    try:
        first = wait_until(lambda: max(0, dropped() - before), "a batch given up", 60)
        wait_until(lambda: dropped() - before > first, "a second one", 60)
    finally:
        collector.busy = False
    assert log().count("spans are dropped") == said_before + 1
    assert "opentelemetry" not in log()
    assert infer(traced, digits.x[0], PARENT.replace("4bf9", "7777")).status == 200
    collector.wait(name="query", trace=PARENT[3:35].replace("4bf9", "7777"))
