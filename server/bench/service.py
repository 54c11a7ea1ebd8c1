"""A running agent asked by another program, against FastAPI with onnxruntime inline."""

from __future__ import annotations

import http.client
import socket
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import orjson
from fastapi import FastAPI, Request, Response

from edge_sdk import AgentSettings, EdgeAgent
from edge_sdk.service.listening import connect_in, listen
from edge_sdk.service.service import AgentService
from edge_sdk.settings_file.serve_table import ServeTable
from edge_sdk.wire.address import Address
from server.bench.measure import Row, at_most, take_turns
from server.bench.models import export_random
from server.http_server import HttpServer

SHAPE = (1, 28, 28)
ANY_PORT = "127.0.0.1:0"
ALWAYS = 1e9  # every answer exits
GOAL = 1.1


def run(work: Path, *, quick: bool) -> list[Row]:
    """Median of a request in JSON, one in flight, as a ratio; goal 1.1 for each door."""
    folder, manifest = export_random("cnn6", SHAPE, (2,), work)
    bundle = folder / "bundles" / "d2"
    x = np.random.default_rng(1).normal(size=(1, *SHAPE)).astype(np.float32)
    tensor = {"name": "x", "shape": x.shape, "datatype": "FP32", "data": x.ravel().tolist()}
    body = orjson.dumps({"inputs": [tensor]})
    path = f"/v2/models/{manifest.name}/infer"
    plain = HttpServer(_plain(bundle, path), listen(Address.parse(ANY_PORT, "bench")))
    with (
        plain,
        AgentService(work, ServeTable(address=ANY_PORT)) as service,
        EdgeAgent.from_bundle(bundle, AgentSettings(threshold=ALWAYS, offload=False)) as agent,
        service.answering(agent),
        closing(_tcp(plain.url)) as reference,
        closing(_tcp(service.url or "")) as over_http,
        closing(_local(work)) as over_socket,
    ):
        asked = [_asks(each, path, body) for each in (reference, over_http, over_socket)]
        plain_s, http_s, socket_s = take_turns(asked, rounds=7 if quick else 31, calls=100)
    name = "agent asked in JSON, cnn6, one in flight"
    return [
        at_most(f"{name}: HTTP to plain FastAPI", http_s / plain_s, "x", GOAL, plain_s * 1e6),
        at_most(f"{name}: socket to plain FastAPI", socket_s / plain_s, "x", GOAL, plain_s * 1e6),
    ]


def _plain(bundle: Path, path: str) -> FastAPI:
    """The least that answers the same request: no gate, no checks."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(
        str(bundle / "exit.onnx"), options, providers=["CPUExecutionProvider"]
    )
    app = FastAPI()

    @app.post(path)
    async def infer(request: Request) -> Response:
        described = orjson.loads(await request.body())["inputs"][0]
        x = np.array(described["data"], np.float32).reshape(described["shape"])
        logits = session.run(["logits"], {"x": x})[0]
        output: dict[str, Any] = {"name": "logits", "datatype": "FP32", "shape": logits.shape}
        answer = {"outputs": [{**output, "data": logits.ravel().tolist()}]}
        return Response(orjson.dumps(answer), media_type="application/json")

    return app


def _tcp(url: str) -> http.client.HTTPConnection:
    connection = http.client.HTTPConnection(url.removeprefix("http://"))
    connection.connect()
    connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def _local(state: Path) -> http.client.HTTPConnection:
    connection = http.client.HTTPConnection("localhost")
    connection.sock = connect_in(state)
    return connection


def _asks(connection: http.client.HTTPConnection, path: str, body: bytes) -> Callable[[], object]:
    """A function that makes one request and reads its answer."""

    def ask() -> None:
        connection.request("POST", path, body)
        response = connection.getresponse()
        raw = response.read()
        if response.status != 200:
            raise ValueError(f"{path}: expected an answer, got {response.status}: {raw[:200]!r}")

    return ask
