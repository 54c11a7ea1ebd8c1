"""Training over https: devices and the inviter check the server's certificate."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from fastapi import FastAPI, Request

from edge_sdk.errors import ConfigurationError, LinkError
from edge_sdk.service.listening import listen
from edge_sdk.training.client import TrainingClient
from edge_sdk.training.protocol.plan import network_of
from edge_sdk.training.protocol.training import Training
from edge_sdk.wire.address import Address
from server.http_server import HttpServer
from server.registry.database import Registry
from server.training.core.server_state import ServerState
from server.training.fleet.invite import Inviter
from server.training.fleet.mailbox import Mailbox
from server.training.methods.splitfed import splitfed_v1
from server.training.recipe.recipe import read_recipe
from server.training.rounds.loop import RoundLoop
from server.training.run.build import load_data, plan_of

RECIPE = {
    "method": "splitfed-v1",
    "data": {"name": "digits", "clients": 2},
    "train": {
        "backbone": "tiny",
        "rounds": 1,
        "batch": 32,
        "learning_rate": 0.05,
        "depth": 1,
    },
}


@dataclass(frozen=True)
class Certified:
    """An authority, and what a server has of it."""

    ca: Path
    cert: Path
    key: Path


def certify(folder: Path, names: str) -> Certified:
    """A certificate for `names`, by an authority of its own, as openssl makes them."""
    folder.mkdir()
    ca, cert, key = (folder / name for name in ("ca.pem", "server.pem", "server.key"))
    ca_key, request, extra = (folder / name for name in ("ca.key", "server.csr", "extra"))
    extra.write_text(f"subjectAltName={names}\n")
    fresh = ["req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    signed = ["x509", "-req", "-days", "2", "-CAcreateserial"]
    for words in (
        [*fresh, "-x509", "-days", "2", "-subj", "/CN=ours", "-keyout", ca_key, "-out", ca],
        [*fresh, "-subj", "/CN=hub", "-keyout", key, "-out", request],
        [*signed, "-in", request, "-CA", ca, "-CAkey", ca_key, "-extfile", extra, "-out", cert],
    ):
        subprocess.run(["openssl", *map(str, words)], check=True, capture_output=True)
    return Certified(ca, cert, key)


def test_two_devices_train_a_round_over_https(
    make_trainer: Callable[..., Any], tmp_path: Path
) -> None:
    hub = certify(tmp_path / "hub", "IP:127.0.0.1")
    other = certify(tmp_path / "other", "IP:127.0.0.1")
    recipe = read_recipe(RECIPE)
    data = load_data(recipe)
    plan = plan_of(recipe, recipe.built_method, data, 1)
    # built before threads want it
    state = ServerState(deepcopy(network_of(plan)), Training(0.05, 8))
    trainer = make_trainer(tls=(hub.cert, hub.key))
    assert trainer.url.startswith("https://127.0.0.1:")
    clients = {
        name: TrainingClient(name, data.x_train[at:200:2], data.y_train[at:200:2])
        for at, name in enumerate(("ada", "bob"))
    }
    trainer.join(clients, ca=hub.ca)
    loop = RoundLoop(splitfed_v1(), dict.fromkeys(clients, plan), state, trainer.transport)
    result = loop.run_round(1, 0)
    assert (result.participants, result.missed_steps) == (("ada", "bob"), {})
    assert all(torch.isfinite(tensor).all() for tensor in state.read().values())

    identity = trainer.enrol("eve")
    for ca in (other.ca, None):  # None: the system's authorities, none of which is ours
        with pytest.raises(LinkError, match="certificate verify failed"):
            trainer.link(replace(identity, ca=ca)).join(30, (1, 8, 8))
    missing = tmp_path / "no.pem"
    with pytest.raises(ConfigurationError, match=r"no\.pem: cannot be used to verify the server"):
        trainer.link(replace(identity, ca=missing))


def test_running_server_is_known_by_its_certificate_whatever_names_are_in_it(
    tmp_path: Path,
) -> None:
    hub = certify(tmp_path / "hub", "IP:192.0.2.10")  # as devices know it, not this process
    other = certify(tmp_path / "other", "IP:127.0.0.1")
    app = FastAPI()
    asked: list[tuple[str, Any]] = []

    @app.post("/api/v1/devices/{device}/command", status_code=202)
    async def command(device: str, request: Request) -> None:
        asked.append((device, await request.json()))

    registry = SimpleNamespace(devices=lambda: [SimpleNamespace(id="pi", active=True)])
    with HttpServer(app, listen(Address("127.0.0.1", 0)), hub.cert, hub.key) as server:
        for pinned in (other.cert, hub.cert):
            inviter = Inviter(server.url, "secret", "https://hub:8100", pinned)
            inviter.invite_missing(cast("Registry", registry), Mailbox())
    assert asked == [("pi", {"op": "train", "url": "https://hub:8100"})]
