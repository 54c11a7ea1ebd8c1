"""An API and two backends on a real Mosquitto: shared queries, one registry, a backend killed."""

from __future__ import annotations

import re
import shlex
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson
import pytest
import urllib3

from edge_sdk.errors import ConfigurationError
from edge_sdk.wire.address import Address
from edge_sdk.wire.broker_address import BrokerAddress
from edge_sdk.wire.messages import pack_query
from profiles.reference import load_reference
from server.broker.child import BrokerChild
from server.broker.mosquitto_files import BACKEND
from server.broker.policy import Principal, credential_sha256
from server.registry.database import Registry, open_registry
from server.registry.location import RegistryLocation
from server.roles.backend import Backend
from server.settings import ServerSettings
from tests.reader import Document
from tests.serving.conftest import Device, ServerRun
from tests.waiting import wait_until

if TYPE_CHECKING:
    from tests.serving.conftest import Exported

pytestmark = [pytest.mark.broker, pytest.mark.long]

FREE = ("--http", "127.0.0.1:0")
FOLLOWS_S = 10.0
DEADLINE_S = 6.0
TOLERANCE = 1e-4  # float32 sums in another order, see test_ladder


@dataclass(frozen=True)
class World:
    """One API and its backends on one state folder.

    Attributes:
        empty: first line of a backend that found no model.
    """

    state: Path
    api: ServerRun
    backends: list[ServerRun]
    empty: str

    def device(self, name: str) -> Device:
        """A device that has enrolled."""
        token = self.registry(lambda registry: registry.create_token())
        body = {"token": token, "name": name, "profile": load_reference("raspberry-pi-4").to_dict()}
        answer = self.api.call("POST", "/api/v1/enroll", json=body)
        assert answer.status == 201, answer.data
        enrolled = answer.json()
        return Device(self.api.mqtt, enrolled["device"], enrolled["credential"])

    def registry(self, act: Callable[[Registry], Any]) -> Any:
        """What `act` returns for the registry, as a command in another process."""
        registry = open_registry(self.state)
        try:
            return act(registry)
        finally:
            registry.close()


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, exported: Exported) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("roles")
    state = folder / "server"
    started = typed("api", state, folder)
    try:
        api = started[0].wait_ready()
        started += typed("backends", state, folder)
        backends = [one.wait_ready() for one in started[1:]]
        exported.install(state / "models")
        wait_until(lambda: all(map(is_ready, backends)), "a backend is not ready", 30)
        yield World(state, api, backends, backends[0].told)
    finally:
        for one in started:
            one.end(signal.SIGKILL)


def typed(block: str, state: Path, folder: Path) -> list[ServerRun]:
    """The processes that a block of docs/scaling.md starts, on free ports and this state folder."""
    started = []
    for number, line in enumerate(Document("docs/scaling.md").snippet(block).splitlines()):
        _, _, role, *options = shlex.split(line.removesuffix("&"))
        options[options.index("--state") + 1] = str(state)
        free = [re.sub(r"^127.0.0.1:\d+$", "127.0.0.1:0", word) for word in options]
        if role == "api":
            free[free.index("mosquitto")] += ":127.0.0.1:0"
            free += FREE
        log = folder / f"{role}-{number}.log"
        started.append(ServerRun(state, free, log, role=role))
    return started


def is_ready(server: ServerRun) -> bool:
    return server.call("GET", "/v2/health/ready").status == 200


def counted(backend: ServerRun) -> int:
    stats = backend.call("GET", "/v2/models/digits/stats").json()["model_stats"]
    return sum(one["inference_count"] for one in stats)


def asked(server: ServerRun, x: np.ndarray) -> dict[str, Any]:
    """The answer over HTTP to one sample."""
    tensor = {
        "name": "x", "datatype": "UINT8", "shape": [1, *x.shape], "data": x.ravel().tolist(),
    }  # fmt: skip
    answer: urllib3.BaseHTTPResponse = server.call(
        "POST", "/v2/models/digits/infer", body=orjson.dumps({"inputs": [tensor]})
    )
    assert answer.status == 200, answer.data
    found: dict[str, Any] = answer.json()
    return found


def lost(device: Device, exported: Exported, during: threading.Timer, at_least: int) -> list[str]:
    """Ids of the queries that had no answer within their deadline, of a load that lasts until
    `during` has ended.

    Each query is sent once more, with the same id, when half its time is gone, because the broker
    delivers nothing again that a killed backend held (docs/decisions/0068).
    """
    open_until: dict[str, float] = {}
    payloads: dict[str, bytes] = {}  # of those that may be sent once more
    expired: list[str] = []
    count = 0
    during.start()
    while open_until or during.is_alive() or count < at_least:
        now = time.monotonic()
        answered = {reply.id for reply in device.replies[-200:] if reply.problem is None}
        expired += [one for one, end in open_until.items() if end < now and one not in answered]
        open_until = {
            one: end for one, end in open_until.items() if end >= now and one not in answered
        }
        if len(open_until) < 8 and (during.is_alive() or count < at_least):
            name, row = f"{during.name}-{count}", count % len(exported.x)
            query = exported.query(
                0, exported.x[row : row + 1], id=name, deadline_ms=1e3 * DEADLINE_S
            )
            count += 1
            open_until[name], payloads[name] = now + DEADLINE_S, pack_query(query)
            device.send(payloads[name])
        for one, end in open_until.items():
            if one in payloads and end - now < DEADLINE_S / 2:
                device.send(payloads.pop(one))
        time.sleep(0.002)
    return expired


def test_a_backend_without_models_says_so_and_starts_once_there_is_one(world: World) -> None:
    assert "models none yet in" in world.empty
    assert "it takes no queries" in world.empty
    assert all(is_ready(backend) for backend in world.backends)


@pytest.mark.deadline
def test_backends_share_the_queries_and_the_api_takes_none(
    world: World, exported: Exported
) -> None:
    device = world.device("sharing")
    before = [counted(backend) for backend in world.backends]
    for i in range(20):
        reply = device.ask(exported.query(0, exported.x[i : i + 1], id=f"shared-{i}"))
        logits = reply.tensors["logits"]
        assert np.allclose(logits, exported.logits(exported.x[i : i + 1]), atol=TOLERANCE)
    device.link.stop()
    after = [counted(backend) - b for backend, b in zip(world.backends, before, strict=True)]
    assert sum(after) == 20, "each query is computed once"
    assert min(after) >= 5, "Mosquitto deals them out in turn"


@pytest.mark.deadline
def test_processes_behind_a_balancer_give_the_same_answers_over_http(
    world: World, exported: Exported
) -> None:
    """Requests of one client go to the API and both backends in turn; none keeps a state of it."""
    answers = [asked(one, exported.x[3])["outputs"] for one in (world.api, *world.backends)]
    assert answers[0] == answers[1] == answers[2]


@pytest.mark.deadline
def test_every_backend_follows_the_registry_to_another_version_and_back(
    world: World, exported: Exported
) -> None:
    def versions() -> list[str]:
        return [asked(one, exported.x[0])["model_version"] for one in (world.api, *world.backends)]

    exported.install(world.state / "models", version=2)
    wait_until(lambda: versions() == ["2"] * 3, versions, FOLLOWS_S)
    world.registry(lambda registry: registry.catalogue.roll_back("digits"))
    wait_until(lambda: versions() == ["1"] * 3, versions, FOLLOWS_S)
    world.registry(lambda registry: registry.catalogue.activate("digits", 2))
    wait_until(lambda: versions() == ["2"] * 3, versions, FOLLOWS_S)


@pytest.mark.deadline
def test_a_backend_that_is_told_to_stop_loses_no_query(world: World, exported: Exported) -> None:
    device = world.device("orderly")
    third = ServerRun(world.state, FREE, world.state / "third.log", role="backend").wait_ready()
    assert not lost(device, exported, threading.Timer(0.5, third.end), 100)
    device.link.stop()
    assert third.process.returncode == 0, third.stderr


@pytest.mark.deadline
def test_a_backend_killed_under_load_loses_no_query_that_has_time_left(
    world: World, exported: Exported
) -> None:
    device = world.device("killed")
    end = threading.Timer(0.5, world.backends[1].end, (signal.SIGKILL,))
    assert not lost(device, exported, end, 100)
    device.link.stop()
    assert world.backends[1].process.returncode == -signal.SIGKILL
    assert is_ready(world.backends[0])


def test_a_broker_without_shared_subscriptions_is_refused_with_the_next_step(
    tmp_path: Path, exported: Exported
) -> None:
    child = BrokerChild()
    child.set_principal(Principal(BACKEND, "backend", None, credential_sha256("secret")))
    child.start()
    location = RegistryLocation.in_folder(tmp_path)
    Registry.open(location.address).close()
    exported.install(tmp_path / "models")
    address = BrokerAddress("127.0.0.1", child.port, username=BACKEND, password="secret")
    settings = ServerSettings(tmp_path, Address("127.0.0.1", 0), address, threads=1, role="backend")
    backend = Backend(settings, location)
    try:
        with pytest.raises(ConfigurationError, match="splitedge server api --mqtt mosquitto"):
            backend.start()
    finally:
        backend.stop()
        child.stop()
