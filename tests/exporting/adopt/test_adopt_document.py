"""What docs/adopt.md says to type, typed: a real server, an agent that enrols and answers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnxruntime
import orjson
import pytest
import torch
import urllib3
from PIL import Image
from torch import nn

from edge_sdk import AgentSettings, EdgeAgent
from edge_sdk.training.data.load import Dataset
from tests.exporting.adopt.conftest import export
from tests.exporting.adopt.test_adopt_command import Tenths
from tests.reader import Document, Reader, started_server

DOCUMENT = Document("docs/adopt.md")
PICTURES = 500


@dataclass(frozen=True)
class Adopted(Reader):
    """A reader who adopted a model; `printed` is what the command printed."""

    printed: str = ""


def picture(x: np.ndarray, path: Path) -> None:
    pixels = np.round(x[0] * 255 / 16).astype(np.uint8)
    Image.fromarray(pixels).save(path)


@pytest.fixture(scope="module")
def place(
    small: nn.Module, digits: Dataset, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Adopted]:
    folder = tmp_path_factory.mktemp("reader")
    export(Tenths(small), torch.zeros(2, 1, 8, 8), folder / "model.onnx")
    (folder / "pictures").mkdir()
    for row in range(PICTURES):
        picture(digits.x_train[row], folder / "pictures" / f"{row}.png")
    picture(digits.x_test[0], folder / "new.png")
    printed = Reader(folder).shell(DOCUMENT.snippet("adopt"))
    with started_server(folder, DOCUMENT.snippet("serve")) as reader:
        yield Adopted(folder, reader.http, reader.token, printed)


def test_file_and_pictures_become_an_answering_device(place: Adopted, digits: Dataset) -> None:
    assert "Next: splitedge server run --state server" in place.printed
    printed = place.shell(DOCUMENT.snippet("device"))
    assert "things/1/" in printed
    assert re.search(r"\b(device|server)\b", printed.partition("new.png")[2])
    file = onnxruntime.InferenceSession(
        str(place.folder / "model.onnx"), providers=["CPUExecutionProvider"]
    )
    rows = digits.x_test[:60]
    whole = file.run(None, {"image": rows / np.float32(16)})[0].argmax(axis=1)
    with EdgeAgent.open(place.folder / "device", AgentSettings(deadline_s=20.0)) as agent:
        answers = [agent.predict(x) for x in np.round(rows * (255 / 16)).astype(np.float32)]
    assert {answer.source for answer in answers} <= {"device", "server"}
    assert (np.array([answer.label for answer in answers]) == whole).mean() >= 0.95
    # with every input offloaded the answers are the whole model's
    asking = AgentSettings(deadline_s=20.0, threshold=-1.0)
    with EdgeAgent.open(place.folder / "device", asking) as agent:
        answers = [agent.predict(x) for x in np.round(rows * (255 / 16)).astype(np.float32)]
    assert {answer.source for answer in answers} == {"server"}
    assert (np.array([answer.label for answer in answers]) == whole).mean() >= 0.98


def test_server_answers_every_raw_input_as_the_file_does(place: Adopted, digits: Dataset) -> None:
    rows = np.round(digits.x_test[:8] * (255 / 16)).astype(np.float32)
    body = {
        "inputs": [
            {
                "name": "x",
                "datatype": "FP32",
                "shape": list(rows.shape),
                "data": rows.ravel().tolist(),
            }
        ],
        "outputs": [{"name": "logits"}],
    }
    answer = urllib3.request(
        "POST", f"{place.http}/v2/models/things/infer", body=orjson.dumps(body)
    )
    assert answer.status == 200, answer.data
    (logits,) = answer.json()["outputs"]
    file = onnxruntime.InferenceSession(
        str(place.folder / "model.onnx"), providers=["CPUExecutionProvider"]
    )
    expected = file.run(None, {"image": rows / np.float32(255)})[0]
    given = np.array(logits["data"], np.float32).reshape(expected.shape)
    np.testing.assert_allclose(given, expected, atol=1e-4 * np.abs(expected).max())
