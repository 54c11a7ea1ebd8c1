"""Extensions of the v2 protocol, asked by NVIDIA's client."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson
import pytest
import tritonclient.http as triton

from server.registry.operator import load_operator_secret
from server.routes.v2.encodings import accepted
from tests.serving.routes.v2.inference_site import INFER, LENGTH, Site, as_json, binary
from tests.waiting import wait_until

if TYPE_CHECKING:
    from pathlib import Path

    from tests.serving.conftest import Exported

pytestmark = pytest.mark.broker  # the services start the embedded broker


class Place:
    """A server with the models digits and other, and NVIDIA's client of it."""

    def __init__(self, state: Path) -> None:
        self.site = Site(state)
        self.client = triton.InferenceServerClient(f"127.0.0.1:{self.site.port}")
        self.operator = {"Authorization": f"Bearer operator:{load_operator_secret(state)}"}

    def infer(self, exported: Exported, model: str = "digits", **more: Any) -> Any:
        """The answer to sixteen samples."""
        x = exported.x[:16]
        given = triton.InferInput("x", list(x.shape), "UINT8")
        given.set_data_from_numpy(x)
        return self.client.infer(model, [given], **more)

    def states(self) -> dict[str, tuple[str, str]]:
        """State and reason of each model."""
        listed = self.client.get_model_repository_index()
        return {one["name"]: (one["state"], one["reason"]) for one in listed}


@pytest.fixture(scope="module")
def place(exported: Exported, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    state = tmp_path_factory.mktemp("extensions")
    exported.install(state / "models")
    exported.install(state / "models", name="other")
    made = Place(state)
    yield made
    made.site.close()


def test_configuration_names_inputs_and_outputs_as_triton_does(place: Place) -> None:
    config = place.client.get_model_config("digits")
    assert (config["name"], config["max_batch_size"]) == ("digits", 32)
    described = place.client.get_model_metadata("digits")
    assert [one["name"] for one in config["input"]] == [one["name"] for one in described["inputs"]]
    assert config["input"][0] == {
        "name": "x",
        "data_type": "TYPE_UINT8",
        "dims": [1, 8, 8],
        "optional": True,
    }
    assert {"name": "label", "data_type": "TYPE_INT64", "dims": [1]} in config["output"]
    assert place.client.get_model_config("digits", "1") == config
    known = place.client.get_server_metadata()["extensions"]
    assert {"model_configuration", "statistics"} <= set(known)


@pytest.mark.deadline
def test_statistics_count_queries_samples_and_batches(place: Place, exported: Exported) -> None:
    def counted() -> dict[str, Any]:
        (found,) = place.client.get_inference_statistics("other")["model_stats"]
        return dict(found)

    assert counted()["inference_count"] == 0
    for _ in range(3):
        place.infer(exported, "other")
    with pytest.raises(triton.InferenceServerException):
        place.client.infer(
            "other",
            [
                triton.InferInput("z9", [1, 8], "FP32").set_data_from_numpy(
                    np.zeros((1, 8), np.float32)
                )
            ],
        )
    wait_until(lambda: counted()["execution_count"] == 3, "batches are not counted")
    found = counted()
    assert (found["version"], found["inference_count"]) == ("1", 48)
    of = found["inference_stats"]
    assert {name: of[name]["count"] for name in ("success", "fail", "queue", "compute_infer")} == {
        "success": 3,
        "fail": 1,
        "queue": 3,
        "compute_infer": 3,
    }
    assert 0 < of["compute_infer"]["ns"] <= of["success"]["ns"]
    (batch,) = found["batch_stats"]
    assert (batch["batch_size"], batch["compute_infer"]["count"]) == (16, 3)
    every = place.client.get_inference_statistics()["model_stats"]
    assert {one["name"] for one in every} == {"digits", "other"}


@pytest.mark.deadline
def test_model_is_unloaded_and_loaded_and_devices_keep_theirs(
    place: Place, exported: Exported
) -> None:
    services = place.site.services
    wait_until(lambda: services.publisher.wanted("default"), "nothing is published")
    place.client.unload_model("digits", headers=place.operator)
    assert place.states() == {"digits": ("UNAVAILABLE", "unloaded"), "other": ("READY", "")}
    assert not place.client.is_model_ready("digits")
    with pytest.raises(triton.InferenceServerException, match="unloaded by the operator"):
        place.infer(exported)
    services.publisher.refresh(again=True)  # as housekeeping does
    assert place.states()["digits"][0] == "UNAVAILABLE"
    wanted = services.publisher.wanted("default")
    assert wanted is not None
    assert wanted.manifest.name == "digits"  # what devices are given has not changed
    assert place.infer(exported, "other").as_numpy("label").shape == (16,)

    place.client.load_model("digits", headers=place.operator)
    assert place.infer(exported).as_numpy("label").shape == (16,)
    whats = {one.what for one in services.registry.trail.entries() if one.detail == "digits"}
    assert {"model.load", "model.unload"} <= whats


def test_a_key_of_one_model_is_not_told_of_the_others(place: Place) -> None:
    _, key = place.site.services.registry.keys.create(["infer"], models=["digits"])
    with pytest.raises(triton.InferenceServerException) as caught:
        place.client.get_model_metadata("digits", "99", headers={"Authorization": f"Bearer {key}"})
    assert "available: digits version 1" in str(caught.value)
    assert "other" not in str(caught.value)


def test_loading_is_the_operators_and_names_what_is_wrong(place: Place) -> None:
    with pytest.raises(triton.InferenceServerException) as caught:
        place.client.unload_model("digits")
    assert caught.value.status() == "401"
    for change in (place.client.load_model, place.client.unload_model):
        with pytest.raises(triton.InferenceServerException, match="available: digits"):
            change("none", headers=place.operator)
    with pytest.raises(triton.InferenceServerException, match="splitedge export"):
        place.client.load_model("digits", headers=place.operator, config=json.dumps({}))


def test_model_whose_files_are_damaged_is_not_loaded(exported: Exported, tmp_path: Path) -> None:
    exported.install(tmp_path / "models")
    place = Place(tmp_path)
    try:
        place.client.unload_model("digits", headers=place.operator)
        assert not place.client.is_server_ready()  # it was the only one
        with pytest.raises(triton.InferenceServerException, match="unloaded by the operator"):
            place.infer(exported)
        (tmp_path / "models" / "digits" / "1" / "model.json").write_text("{}")
        with pytest.raises(triton.InferenceServerException, match="cannot be loaded"):
            place.client.load_model("digits", headers=place.operator)
        assert place.states()["digits"][0] == "UNAVAILABLE"
    finally:
        place.site.close()


@pytest.mark.parametrize("algorithm", ["gzip", "deflate"])
def test_bodies_are_compressed_both_ways(place: Place, exported: Exported, algorithm: str) -> None:
    plain = place.infer(exported)
    packed = place.infer(
        exported,
        request_compression_algorithm=algorithm,
        response_compression_algorithm=algorithm,
    )
    for name in ("label", "logits"):
        np.testing.assert_array_equal(packed.as_numpy(name), plain.as_numpy(name))


def test_answer_is_compressed_for_who_takes_that(place: Place, exported: Exported) -> None:
    body = orjson.dumps({"inputs": [as_json("x", exported.x[:16])]})
    answer = place.site.call("POST", INFER, body, {"Accept-Encoding": "gzip"})
    # the client under it inflates what says that it is compressed
    assert (answer.status, answer.headers["Content-Encoding"]) == (200, "gzip")
    assert int(answer.headers["Content-Length"]) < len(answer.body)
    assert answer.outputs["label"].shape == (16,)
    plain = place.site.call("POST", INFER, body, {"Accept-Encoding": "gzip;q=0, br"})
    assert "Content-Encoding" not in plain.headers


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        ("", None),
        ("gzip", "gzip"),
        ("deflate, gzip;q=0.5", "deflate"),
        ("br;q=1.0, *;q=0.1", "gzip"),
        ("*;q=0", None),
        ("identity", None),
        ("GZIP;q=x", None),
    ],
)
def test_client_gets_the_encoding_that_it_likes_best(header: str, expected: str | None) -> None:
    assert accepted(header) == expected


def test_bomb_is_refused_before_it_is_inflated(place: Place, exported: Exported) -> None:
    """FAULTS row 26: 16 MB stand in 16 kB; a query may have as much, and JSON a sixteenth."""
    text, raw = binary("x", exported.x[:1])
    for encoding, bomb in {
        "gzip": gzip.compress(text + raw + bytes(20_000_000)),
        "deflate": zlib.compress(b"[" * 2_000_000),
    }.items():
        headers = {"Content-Encoding": encoding}
        if encoding == "gzip":
            headers[LENGTH] = str(len(text))
        answer = place.site.call("POST", INFER, bomb, headers)
        assert answer.status == 413, answer.body
        assert b"inflated" in answer.body


@pytest.mark.parametrize(
    ("encoding", "body", "said"),
    [
        ("br", b"x", b"expected gzip, deflate"),
        ("gzip", b"no gzip", b"is not gzip"),
        ("gzip", gzip.compress(b"{}", mtime=0)[:-4], b"no end"),
        ("gzip", gzip.compress(b"{}", mtime=0) * 2, b"after its end"),
        ("deflate", gzip.compress(b"{}", mtime=0), b"is not deflate"),
        ("gzip", b"", b"no end"),
    ],
)
def test_body_of_another_encoding_is_refused(
    place: Place, encoding: str, body: bytes, said: bytes
) -> None:
    answer = place.site.call("POST", INFER, body, {"Content-Encoding": encoding})
    assert answer.status == 400
    assert said in answer.body
