"""The Open Inference Protocol v2 over a real server: ours by hand, and NVIDIA's client."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import orjson
import pytest
import tritonclient.http as triton

from tests.serving.routes.v2.inference_site import INFER, LENGTH, TOLERANCE, Site, as_json, binary

if TYPE_CHECKING:
    from tests.serving.conftest import Exported


pytestmark = pytest.mark.broker  # the services start the embedded broker

# health and what there is


def test_health_and_server_metadata(site: Site) -> None:
    assert site.call("GET", "/v2/health/live").status == 200
    assert site.call("GET", "/v2/health/ready").json == {"ready": True}
    assert site.call("GET", "/v2").json["name"] == "splitedge"
    assert "binary_tensor_data" in site.call("GET", "/v2").json["extensions"]


def test_repository_index_and_model_metadata(site: Site) -> None:
    assert site.call("POST", "/v2/repository/index").json == [
        {"name": "digits", "version": "1", "state": "READY", "reason": ""}
    ]
    for path in ("/v2/models/digits", "/v2/models/digits/versions/1"):
        assert site.call("GET", f"{path}/ready").status == 200
        model = site.call("GET", path).json
        assert (model["name"], model["versions"]) == ("digits", ["1"])
        assert [(i["name"], i["datatype"], i["shape"]) for i in model["inputs"]] == [
            ("x", "UINT8", [-1, 1, 8, 8]),
            ("z1", "FP32", [-1, 8, 8, 8]),
            ("z2", "FP32", [-1, 16, 4, 4]),
            ("z4", "FP32", [-1, 32, 2, 2]),
        ]
        assert [(o["name"], o["datatype"], o["shape"]) for o in model["outputs"]] == [
            ("logits", "FP32", [-1, 10]),
            ("probabilities", "FP32", [-1, 10]),
            ("label", "INT64", [-1]),
        ]


def test_live_without_a_model_but_not_ready(tmp_path: Path) -> None:
    site = Site(tmp_path)
    try:
        assert site.call("GET", "/v2/health/live").status == 200
        ready = site.call("GET", "/v2/health/ready")
        assert (ready.status, ready.json) == (503, {"ready": False})
        answer = site.infer({"inputs": [as_json("x", np.zeros((1, 1, 8, 8), np.uint8))]})
        assert answer.status == 503
        assert "publish" in answer.json["error"]
        assert site.call("POST", "/v2/repository/index").json == []
    finally:
        site.close()


# inference


def test_json_in_and_out(site: Site, exported: Exported) -> None:
    x = exported.x[:3]
    nested = {**as_json("x", x), "data": x.tolist()}
    for described in (as_json("x", x), nested):
        answer = site.infer({"id": "abc", "inputs": [described]})
        assert answer.headers["content-type"] == "application/json"
        assert LENGTH not in answer.headers
        header = answer.json
        names = header["id"], header["model_name"], header["model_version"]
        assert names == ("abc", "digits", "1")
        expected = exported.logits(x).astype(np.float64)
        odds = np.exp(expected)
        outputs = answer.outputs
        np.testing.assert_allclose(outputs["logits"], expected, atol=TOLERANCE)
        probabilities = odds / odds.sum(axis=1, keepdims=True)
        np.testing.assert_allclose(outputs["probabilities"], probabilities, atol=TOLERANCE)
        assert outputs["label"].tolist() == expected.argmax(axis=1).tolist()


@pytest.mark.parametrize("depth", [0, 1, 2, 4])
def test_binary_from_every_depth(site: Site, exported: Exported, depth: int) -> None:
    z = exported.smashed(depth, exported.x[5:9])
    outputs = [{"name": "logits", "parameters": {"binary_data": True}}]
    answer = site.infer_binary(f"z{depth}" if depth else "x", z, outputs=outputs)
    assert answer.headers["content-type"] == "application/octet-stream"
    assert list(answer.outputs) == ["logits"]
    expected = exported.suffix(depth, z)
    np.testing.assert_allclose(answer.outputs["logits"], expected, atol=TOLERANCE)


def test_half_precision_from_a_device(site: Site, exported: Exported) -> None:
    z = exported.smashed(2, exported.x[:2]).astype(np.float16)
    expected = exported.suffix(2, z.astype(np.float32))
    logits = site.infer_binary("z2", z).outputs["logits"]
    np.testing.assert_allclose(logits, expected, atol=TOLERANCE)


def test_int8_from_a_device_is_read_by_its_scale_and_zero_point(
    site: Site, exported: Exported
) -> None:
    z = exported.smashed(4, exported.x[:2])
    scale = float(np.float32(z.max() / 200))
    steps = np.round(z / scale + 30).clip(0, 255).astype(np.uint8)
    expected = exported.suffix(4, (steps.astype(np.float32) - 30) * np.float32(scale))
    answer = site.infer_binary("z4", steps, {"scale": scale, "zero_point": 30})
    np.testing.assert_allclose(answer.outputs["logits"], expected, atol=TOLERANCE)
    # in JSON as well
    described = {**as_json("z4", steps), "parameters": {"scale": scale, "zero_point": 30}}
    logits = site.infer({"inputs": [described]}).outputs["logits"]
    np.testing.assert_allclose(logits, expected, atol=TOLERANCE)


@pytest.mark.parametrize(
    "kind", [None, "application/json", "application/octet-stream", "text/plain", "image/png"]
)
def test_the_content_type_does_not_matter(site: Site, exported: Exported, kind: str | None) -> None:
    x = exported.x[:1]
    headers = {} if kind is None else {"Content-Type": kind}
    text, raw = binary("x", x)
    answers = [
        site.call("POST", INFER, text + raw, {LENGTH: str(len(text)), **headers}),
        site.call("POST", INFER, orjson.dumps({"inputs": [as_json("x", x)]}), headers),
    ]
    for answer in answers:
        expected = exported.logits(x)
        np.testing.assert_allclose(answer.outputs["logits"], expected, atol=TOLERANCE)


def test_outputs_are_mixed_as_they_are_asked_for(site: Site, exported: Exported) -> None:
    x = exported.x[:2]
    outputs = [
        {"name": "label", "parameters": {"binary_data": False}},
        {"name": "logits", "parameters": {"binary_data": True}},
    ]
    answer = site.infer_binary("x", x, outputs=outputs)
    assert set(answer.outputs) == {"label", "logits"}
    np.testing.assert_allclose(answer.outputs["logits"], exported.logits(x), atol=TOLERANCE)
    everything = site.infer_binary("x", x, outputs=[])
    assert set(everything.outputs) == {"label", "logits", "probabilities"}
    text, raw = binary("x", x)
    whole = orjson.dumps({**orjson.loads(text), "parameters": {"binary_data_output": True}})
    answer = site.call("POST", INFER, whole + raw, {LENGTH: str(len(whole))})
    assert int(answer.headers[LENGTH]) < len(answer.body)
    assert set(answer.outputs) == {"label", "logits", "probabilities"}


# an independent client


@pytest.fixture
def client(site: Site) -> Iterator[triton.InferenceServerClient]:
    client = triton.InferenceServerClient(f"127.0.0.1:{site.port}")
    yield client
    client.close()


def test_triton_client_sees_the_server(client: triton.InferenceServerClient) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("digits")
    assert client.is_model_ready("digits", "1")
    assert not client.is_model_ready("digits", "2")
    assert client.get_server_metadata()["name"] == "splitedge"
    assert client.get_model_metadata("digits")["inputs"][0]["name"] == "x"
    assert client.get_model_repository_index()[0]["state"] == "READY"


@pytest.mark.parametrize("binary_in", [True, False])
@pytest.mark.parametrize("binary_out", [True, False])
@pytest.mark.parametrize(("depth", "datatype"), [(0, "UINT8"), (2, "FP32")])
def test_triton_client_gets_torchs_answers(
    client: triton.InferenceServerClient,
    exported: Exported,
    binary_in: bool,
    binary_out: bool,
    depth: int,
    datatype: str,
) -> None:
    z = exported.smashed(depth, exported.x[10:13])
    given = triton.InferInput(f"z{depth}" if depth else "x", list(z.shape), datatype)
    given.set_data_from_numpy(z, binary_data=binary_in)
    wanted = [
        triton.InferRequestedOutput(name, binary_data=binary_out) for name in ("logits", "label")
    ]
    result = client.infer("digits", [given], outputs=wanted, request_id="t1")
    expected = exported.suffix(depth, z)
    np.testing.assert_allclose(result.as_numpy("logits"), expected, atol=TOLERANCE)
    assert result.as_numpy("label").tolist() == expected.argmax(axis=1).tolist()
    assert result.get_response()["id"] == "t1"


def test_triton_client_without_outputs_gets_all(
    client: triton.InferenceServerClient, exported: Exported
) -> None:
    given = triton.InferInput("x", [1, 1, 8, 8], "UINT8")
    given.set_data_from_numpy(exported.x[:1])
    result = client.infer("digits", [given], model_version="1")
    expected = exported.logits(exported.x[:1])
    np.testing.assert_allclose(result.as_numpy("logits"), expected, atol=TOLERANCE)
    assert result.as_numpy("probabilities").shape == (1, 10)


def test_triton_client_reads_our_errors(
    client: triton.InferenceServerClient, exported: Exported
) -> None:
    given = triton.InferInput("x", [1, 1, 8, 8], "FP32")
    given.set_data_from_numpy(exported.x[:1].astype(np.float32))
    with pytest.raises(triton.InferenceServerException, match="expected uint8, got float32"):
        client.infer("digits", [given])
