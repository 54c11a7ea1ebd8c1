"""What the README says to type, typed: only ports and paths are put in."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from edge_sdk.nets import Supernet, build
from edge_sdk.training.data.load import load_dataset
from tests.reader import ROOT, Document, Reader, environment, free_ports, started_server

README = Document("README.md")


@pytest.fixture(scope="module")
def place(
    tmp_path_factory: pytest.TempPathFactory, train_centrally: Callable[..., None]
) -> Iterator[Reader]:
    """The server snippet, run in an empty folder that has trained weights."""
    folder = tmp_path_factory.mktemp("readme")
    left = folder / "splitedge-demo" / "server" / "training" / "digits"  # by the demo
    left.mkdir(parents=True)
    save_file(_trained(train_centrally).state_dict(), left / "weights.safetensors")
    with started_server(folder, README.snippet("server")) as reader:
        yield reader


def _trained(train_centrally: Callable[..., None]) -> Supernet:
    torch.set_num_threads(1)
    data = load_dataset("digits")
    net = build("tiny", mean=data.mean, std=data.std, seed=0)
    train_centrally(net, data.x_train, data.y_train, epochs=5, learning_rate=5e-3)
    return net


def test_curl_is_answered_with_the_digit_that_is_drawn(place: Reader) -> None:
    answer = json.loads(place.shell(README.snippet("curl")))
    label, probabilities = answer["outputs"]
    assert (label["name"], label["data"]) == ("label", [0])
    assert (probabilities["name"], probabilities["shape"]) == ("probabilities", [1, 10])
    assert np.argmax(probabilities["data"]) == 0


def test_device_enrols_and_classifies_that_digit(place: Reader) -> None:
    output = place.shell(README.snippet("enroll"))
    assert "digits/1/" in output
    drawn = re.search(r'"data": \[(.*?)\]', README.snippet("curl"), re.DOTALL)
    assert drawn is not None
    pixels = np.array([float(value) for value in drawn[1].split(",")], np.float32)
    np.save(place.folder / "digit.npy", pixels.reshape(1, 8, 8))
    (place.folder / "classify.py").write_text(README.snippet("device"))
    answer = place.shell("python classify.py")
    assert re.fullmatch(r"0 (device|server|fallback) \d+\.\d\d ms\n", answer), answer


def test_two_machines_are_joined_under_a_certificate(place: Reader) -> None:
    """The block of the README, both machines being this one."""
    http, mqtt = free_ports(2)
    changes = {
        "192.168.1.10": "127.0.0.1",
        "0.0.0.0": "127.0.0.1",
        "8000": str(http),
        "8883": str(mqtt),
        "./server": "./tls-server",
        "./pi": "./tls-pi",
    }
    run, enroll = README.snippet("certificate"), README.snippet("enroll-tls")
    for there, here in changes.items():
        run, enroll = run.replace(there, here), enroll.replace(there, here)
    certificate, _, serve = run.partition("splitedge server run")
    place.shell(certificate)
    server = subprocess.Popen(
        ["bash", "-euc", f"exec splitedge server run{serve}"],
        cwd=place.folder,
        env=environment(),
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert server.stdout is not None
        assert f"https://127.0.0.1:{http}" in server.stdout.readline()
        token = place.shell("splitedge server token create --state ./tls-server").strip()
        output = place.shell(enroll.replace("TOKEN", token))
        assert "enrolled as" in output
    finally:
        server.terminate()
        server.wait(20)
        assert server.stdout is not None
        server.stdout.close()


def test_map_of_the_folders_is_that_of_the_repository() -> None:
    named = re.findall(r"^\| `([a-z_/]+)/` \|", README.text, re.MULTILINE)
    assert all((ROOT / folder).is_dir() for folder in named)
    packages = {path.parent.name for path in ROOT.glob("*/py.typed")}
    assert packages <= set(named)


def test_commands_in_the_text_are_commands(place: Reader) -> None:
    commands = re.findall(r"`(splitedge [a-z -]*?)(?: --[^`]*)?`", README.text)
    assert len(commands) >= 3
    for command in commands:
        assert "Usage: splitedge" in place.shell(f"{command} --help")
