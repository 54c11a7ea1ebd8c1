"""A bundle of random weights, and a running agent that other programs ask."""

from __future__ import annotations

import http.client
import socket
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
import torch
from numpy.typing import NDArray

from edge_sdk import EdgeAgent
from edge_sdk.service.service import AgentService
from edge_sdk.settings_file.serve_table import ServeTable
from server.bench.models import export_random
from tests.answer import Answer

Array = NDArray[Any]
SAMPLES: Array = np.random.default_rng(7).integers(0, 17, (5, 1, 8, 8)).astype(np.float32)
INFER = "/v2/models/bench-tiny/infer"


@dataclass(frozen=True)
class Site:
    """A service that answers for an agent in this process."""

    state: Path
    agent: EdgeAgent
    service: AgentService

    @property
    def port(self) -> int:
        assert self.service.url is not None
        return int(self.service.url.rpartition(":")[2])

    def connect(self, door: str) -> http.client.HTTPConnection:
        """A connection to its socket in the state folder (`local`), or over TCP (`http`)."""
        if door == "http":
            return http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        connection = http.client.HTTPConnection("localhost", timeout=20)
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.connect(str(self.state / "agent.sock"))
        return connection

    def call(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        *,
        door: str = "http",
    ) -> Answer:
        with closing(self.connect(door)) as connection:
            return call(connection, method, path, body, headers)


def call(
    connection: http.client.HTTPConnection,
    method: str,
    path: str,
    body: bytes | None = None,
    headers: Mapping[str, str] | None = None,
) -> Answer:
    """One request on a connection that stays open."""
    connection.request(method, path, body, dict(headers or {}))
    response = connection.getresponse()
    return Answer(response.status, dict(response.getheaders()), response.read())


def described(x: Array, **more: Any) -> bytes:
    """An inference request in JSON, written out by the protocol's text."""
    shape, values = list(x.shape), x.ravel().tolist()
    tensor = {"name": "x", "shape": shape, "datatype": "FP32", "data": values}
    return orjson.dumps({"inputs": [tensor], **more})


@pytest.fixture(scope="session")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a bundle, of random weights."""
    torch.set_num_threads(1)
    models = tmp_path_factory.mktemp("running") / "models"
    export_random("tiny", (1, 8, 8), (2,), models)
    return models / "bench-tiny" / "1" / "bundles" / "d2"


@pytest.fixture(scope="session")
def site(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """An agent that answers on both doors."""
    state = tmp_path_factory.mktemp("site")
    table = ServeTable(address="127.0.0.1:0")
    with (
        AgentService(state, table) as service,
        EdgeAgent.from_bundle(bundle) as agent,
        service.answering(agent),
    ):
        yield Site(state, agent, service)
