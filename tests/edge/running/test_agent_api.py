"""The v2 protocol of a running agent, by hand and by NVIDIA's client, over both of its doors."""

from __future__ import annotations

import shutil
import subprocess
import threading
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import orjson
import pytest
import tritonclient.http as triton

from edge_sdk import EdgeAgent, Prediction
from edge_sdk.answers.observer import Answered, AnswerObserver
from edge_sdk.errors import LinkError
from edge_sdk.service.agent_api import AgentApi
from edge_sdk.service.client import RunningAgent
from edge_sdk.service.messages import Request
from edge_sdk.service.service import AgentService
from edge_sdk.settings_file.serve_table import ServeTable
from tests.edge.hungry import hungry
from tests.edge.running.conftest import INFER, SAMPLES, Site, described

DOORS = ["http", "local"]
LENGTH = "Inference-Header-Content-Length"


@pytest.mark.parametrize("door", DOORS)
def test_health_models_and_what_there_is(site: Site, door: str) -> None:
    def get(path: str) -> Any:
        answer = site.call("GET", path, door=door)
        assert answer.status == 200
        return answer.json

    assert get("/v2/health/live") == {"live": True}
    assert get("/v2/health/ready") == {"ready": True}
    assert get("/v2")["extensions"] == ["binary_tensor_data", "model_repository"]
    for path in ("/v2/models/bench-tiny", "/v2/models/bench-tiny/versions/1"):
        assert get(f"{path}/ready") == {"ready": True}
        model = get(path)
        assert (model["name"], model["versions"]) == ("bench-tiny", ["1"])
        assert model["inputs"] == [{"name": "x", "datatype": "FP32", "shape": [-1, 1, 8, 8]}]
        assert [output["name"] for output in model["outputs"]] == ["label", "probabilities"]
        assert model["parameters"]["bundle"] == "bench-tiny/1/d2"
    index = site.call("POST", "/v2/repository/index", door=door).json
    assert index == [{"name": "bench-tiny", "version": "1", "state": "READY", "reason": ""}]


@pytest.mark.parametrize("door", DOORS)
def test_one_row_has_its_origin_in_the_parameters(site: Site, door: str) -> None:
    expected = site.agent.predict(SAMPLES[0])
    answer = site.call("POST", INFER, described(SAMPLES[:1], id="q-1"), door=door).json
    names = answer["id"], answer["model_name"], answer["model_version"]
    assert names == ("q-1", "bench-tiny", "1")
    label, probabilities = answer["outputs"]
    assert (label["name"], label["datatype"], label["data"]) == ("label", "INT64", [expected.label])
    assert (probabilities["datatype"], probabilities["shape"]) == ("FP32", [1, 10])
    assert probabilities["data"] == expected.probabilities.tolist()
    parameters = answer["parameters"]
    assert parameters.pop("latency_ms") > 0
    assert parameters == {
        "source": "device",
        "uncertainty": expected.uncertainty,
        "threshold": expected.threshold,
        "class_name": expected.class_name,
        "bytes_up": 0,
        "bytes_down": 0,
    }


@pytest.mark.parametrize("door", DOORS)
def test_several_rows_have_their_origins_as_outputs(site: Site, door: str) -> None:
    expected = list(site.agent.predict_many(SAMPLES))
    answer = site.call("POST", INFER, described(SAMPLES), door=door).json
    assert "parameters" not in answer
    outputs = {output["name"]: output for output in answer["outputs"]}
    assert {name: output["datatype"] for name, output in outputs.items()} == {
        "label": "INT64", "probabilities": "FP32", "source": "BYTES", "uncertainty": "FP64",
        "threshold": "FP64", "latency_ms": "FP64",
    }  # fmt: skip
    assert outputs["label"]["data"] == [one.label for one in expected]
    assert outputs["source"]["data"] == ["device"] * 5
    assert outputs["uncertainty"]["data"] == [one.uncertainty for one in expected]


def test_triton_s_client_asks_in_binary(site: Site) -> None:
    client = triton.InferenceServerClient(f"127.0.0.1:{site.port}")
    try:
        assert client.is_server_live()
        assert client.is_server_ready()
        assert client.is_model_ready("bench-tiny")
        assert client.get_model_repository_index()[0]["name"] == "bench-tiny"
        tensor = triton.InferInput("x", [5, 1, 8, 8], "FP32")
        tensor.set_data_from_numpy(SAMPLES, binary_data=True)
        names = ("label", "probabilities", "source", "uncertainty", "class_name")
        wanted = [triton.InferRequestedOutput(name, binary_data=True) for name in names]
        answer = client.infer("bench-tiny", [tensor], outputs=wanted)
    finally:
        client.close()
    expected = list(site.agent.predict_many(SAMPLES))
    assert answer.as_numpy("label").tolist() == [one.label for one in expected]
    np.testing.assert_array_equal(
        answer.as_numpy("probabilities"), np.stack([one.probabilities for one in expected])
    )
    assert answer.as_numpy("source").tolist() == [b"device"] * 5
    assert answer.as_numpy("class_name").tolist() == [one.class_name.encode() for one in expected]
    assert answer.as_numpy("uncertainty").tolist() == [one.uncertainty for one in expected]


def test_settings_of_one_request(site: Site) -> None:
    parameters = {"threshold": -1.5, "deadline_ms": 250, "local": True}
    answer = site.call("POST", INFER, described(SAMPLES[:1], parameters=parameters)).json
    assert answer["parameters"]["threshold"] == -1.5
    assert answer["parameters"]["source"] == "device"
    again = site.call("POST", INFER, described(SAMPLES[:1])).json
    assert again["parameters"]["threshold"] == site.agent.status().threshold


def tensor(**changes: Any) -> bytes:
    good = {"name": "x", "shape": [1, 1, 8, 8], "datatype": "FP32", "data": [0.0] * 64}
    return orjson.dumps({"inputs": [{**good, **changes}]})


FORM = "inputs: expected x of FP32 [n, 1, 8, 8] with 1 to 4096 rows, got "


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (tensor(name="z2"), 400, FORM + "z2 of FP32 [1, 1, 8, 8]"),
        (tensor(shape=[1, 8, 8]), 400, FORM + "x of FP32 [1, 8, 8]"),
        (tensor(shape=[1, 64]), 400, FORM + "x of FP32 [1, 64]"),
        (tensor(datatype="INT64", data=[0] * 64), 400, FORM + "x of INT64 [1, 1, 8, 8]"),
        (tensor(shape=[0, 1, 8, 8], data=[]), 400, FORM + "x of FP32 [0, 1, 8, 8]"),
        (tensor(data=[1e300] * 64), 400, "expected finite values"),
        (tensor(datatype="FP64"), 400, "expected one of FP32, FP16"),
        (b"", 400, "not JSON"),
        (b"[]", 400, "expected a JSON object"),
        (b"{}", 400, "inputs: expected one tensor, got 0"),
        (described(SAMPLES[:1], parameters={"threshold": "low"}), 400, "threshold: expected a num"),
        (described(SAMPLES[:1], parameters={"local": 1}), 400, "local: expected true or false"),
        (described(SAMPLES[:1], parameters={"deadline_ms": -1}), 400, "deadline_ms: expected"),
        (described(SAMPLES[:1], outputs=[{"name": "logits"}]), 400, "expected one of label, prob"),
        (b" " * 4_000_001, 413, "expected at most 4000000 bytes"),
    ],
)
def test_bad_requests_say_what_was_expected(
    site: Site, door: str, body: bytes, status: int, message: str
) -> None:
    answer = site.call("POST", INFER, body, door=door)
    assert answer.status == status
    assert message in answer.error


@pytest.mark.parametrize(
    ("method", "path", "status", "message"),
    [
        ("POST", "/v2/models/cats/infer", 404, "this device has bench-tiny version 1"),
        ("POST", "/v2/models/bench-tiny/versions/9/infer", 404, "bench-tiny version 9"),
        ("GET", "/v2/models/cats", 404, "this device has bench-tiny"),
        ("GET", "/v2/models/cats/ready", 404, "this device has bench-tiny"),
        ("GET", INFER, 405, "expected POST, got GET"),
        ("POST", "/v2", 405, "expected GET, got POST"),
        ("GET", "/", 404, "no such path"),
        ("GET", "/v2/models/bench-tiny/stats", 404, "no such path"),
        ("GET", "/agent", 404, "no such path"),
        # of the command line's own door
        ("POST", "/agent/refresh", 404, "no such path"),
        ("POST", "/agent/predict", 404, "no such path"),
    ],
)
def test_what_is_not_there_is_told(
    site: Site, method: str, path: str, status: int, message: str
) -> None:
    answer = site.call(method, path, described(SAMPLES[:1]) if method == "POST" else None)
    assert answer.status == status
    assert message in answer.error


def test_status_counts_what_was_asked(site: Site) -> None:
    before = site.call("GET", "/agent/status").json["counters"]["device"]
    site.call("POST", INFER, described(SAMPLES))
    status = site.call("GET", "/agent/status").json
    assert status["counters"]["device"] == before + 5
    assert status["bundle"] == "bench-tiny/1/d2"


def test_corrections_and_late_answers_need_their_setting(site: Site) -> None:
    body = orjson.dumps({"id": "a", "label": 3})
    assert "takes corrections" in site.call("POST", "/agent/correct", body, door="local").error
    assert "late_answers" in site.call("GET", "/agent/late", door="local").error
    assert site.call("POST", "/agent/correct", b"{}", door="local").error == (
        'expected {"id": ..., "label": ...} with the id as a text'
    )


def test_other_users_change_nothing_without_the_secret(site: Site) -> None:
    for method, path in [
        ("POST", "/agent/correct"),
        ("GET", "/agent/late"),
        ("POST", "/agent/late/acknowledge"),
        ("POST", "/agent/offloading"),
    ]:
        answer = site.call(method, path, b"{}" if method == "POST" else None)
        assert answer.status == 403
        assert "ask over the socket in the state folder" in answer.error


def test_offloading_is_turned_by_true_and_false(site: Site) -> None:
    def post(body: bytes) -> Any:
        return site.call("POST", "/agent/offloading", body, door="local")

    assert post(b'{"offloading": false}').json == {"device": "", "offloading": False}
    assert "expected true or false, got 'off'" in post(b'{"offloading": "off"}').error
    assert post(b"{}").error == 'expected {"offloading": ...}'
    assert "opened without a server" in post(b'{"offloading": true}').error  # this agent has none


class Corrections(AnswerObserver):
    """The corrections that reach an agent's observers."""

    name = "corrections"

    def __init__(self) -> None:
        self.seen: list[int] = []
        self.remembers = frozenset({"x"})

    def answered(self, answered: Answered) -> None:
        """Nothing to do: corrections alone are of interest."""

    def corrected(self, answered: Answered, label: int) -> None:
        self.seen.append(label)


def test_an_answer_is_corrected_by_its_id(bundle: Path) -> None:
    corrections = Corrections()
    with EdgeAgent.from_bundle(bundle, observers=[corrections]) as agent:
        api = AgentApi(in_flight=1)
        api.agent = agent

        def post(path: str, body: bytes) -> Any:
            answer = api.answer(Request("POST", path, body=body), local=False, trusted=True)
            return answer.status, orjson.loads(answer.body)

        identifier = post(INFER, described(SAMPLES[:1]))[1]["parameters"]["id"]
        body = orjson.dumps({"id": identifier, "label": "3"})
        assert post("/agent/correct", body) == (200, {"corrected": True})
        assert post("/agent/correct", body) == (200, {"corrected": False})
        status, refused = post("/agent/correct", orjson.dumps({"id": "a", "label": 99}))
        assert (status, "label: expected 0 to 9" in refused["error"]) == (400, True)
    assert corrections.seen == [3]


def test_agent_that_starts_is_live_and_not_ready() -> None:
    api = AgentApi(in_flight=1)

    def get(path: str, method: str = "GET") -> tuple[int, Any]:
        answer = api.answer(Request(method, path), local=True, trusted=True)
        return answer.status, orjson.loads(answer.body)

    assert get("/v2/health/live") == (200, {"live": True})
    assert get("/v2/health/ready") == (503, {"ready": False})
    assert get("/v2/repository/index", "POST") == (200, [])
    starting = api.answer(Request("POST", INFER), local=True, trusted=True)
    assert (starting.status, starting.headers["Retry-After"]) == (503, "1")


class HeldAgent(EdgeAgent):
    """An agent that waits before it predicts, as one with a large model does."""

    entered: threading.Event
    leave: threading.Event

    def predict(self, x: Any, **options: Any) -> Prediction:
        self.entered.set()
        assert self.leave.wait(20)
        return super().predict(x, **options)


def test_more_requests_than_places_are_told_to_come_again(bundle: Path) -> None:
    api = AgentApi(in_flight=1)
    slow = HeldAgent.from_bundle(bundle)
    assert isinstance(slow, HeldAgent)
    slow.entered, slow.leave = threading.Event(), threading.Event()
    api.agent = slow
    request = Request("POST", INFER, body=described(SAMPLES[:1]))
    first: list[int] = []
    thread = threading.Thread(
        target=lambda: first.append(api.answer(request, local=False, trusted=False).status)
    )
    thread.start()
    assert slow.entered.wait(10)
    refused = api.answer(request, local=False, trusted=False)
    assert (refused.status, refused.headers["Retry-After"]) == (429, "1")
    # probes do not wait behind inference
    assert api.answer(Request("GET", "/v2/health/ready"), local=False, trusted=False).status == 200
    slow.leave.set()
    thread.join(10)
    assert first == [200]
    assert api.answer(request, local=False, trusted=False).status == 200


def test_a_device_without_memory_for_its_bundle_tells_when_to_ask_again(
    bundle: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(bundle, tmp_path / "d2")
    path = folder / "exit.onnx"
    path.write_bytes(hungry(onnx.load(path), values=10**15))  # more than any machine has
    api = AgentApi(in_flight=1)
    with EdgeAgent.from_bundle(folder) as agent:
        api.agent = agent
        for sample, status in ((np.full_like(SAMPLES[:1], 2e6), 503), (SAMPLES[:1], 200)):
            for path_, body in ((INFER, described(sample)), ("/agent/predict", described(sample))):
                answer = api.answer(Request("POST", path_, body=body), local=True, trusted=True)
                assert answer.status == status, answer.body
                if status == 503:
                    assert answer.headers["Retry-After"] == "5"
                    assert b"ask again in 5 s" in answer.body


@pytest.mark.deadline
@pytest.mark.parametrize("door", DOORS)
def test_curl_asks_it(site: Site, door: str, tmp_path: Path) -> None:
    body = tmp_path / "request.json"
    body.write_bytes(described(np.tile(SAMPLES, (400, 1, 1, 1))))  # curl waits for 100 Continue
    assert body.stat().st_size > 500_000
    where = [f"http://127.0.0.1:{site.port}{INFER}"]
    if door == "local":
        where = ["--unix-socket", str(site.state / "agent.sock"), f"http://localhost{INFER}"]
    done = subprocess.run(
        ["curl", "-sS", "-H", "Expect: 100-continue", "--data-binary", f"@{body}", *where],
        capture_output=True, timeout=30, check=True,
    )  # fmt: skip
    outputs = {output["name"]: output for output in orjson.loads(done.stdout)["outputs"]}
    assert outputs["label"]["shape"] == [2000]


def test_an_agent_that_is_ending_says_so_to_the_command_line(bundle: Path, tmp_path: Path) -> None:
    with (
        AgentService(tmp_path, ServeTable()) as service,
        EdgeAgent.from_bundle(bundle) as agent,
        service.answering(agent),
    ):
        running = RunningAgent.find(tmp_path)
        assert running is not None
        assert running.input().shape == agent.manifest.input.shape
        service._forget()
        with pytest.raises(LinkError, match="is starting or ending"):
            running.input()
