"""A server of the v2 protocol in a thread of this process, and requests written by hand."""

from __future__ import annotations

import socket
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import urllib3
import uvicorn
from numpy.typing import NDArray

from edge_sdk.wire.address import Address
from server.app import create_app
from server.services import Services
from server.settings import ServerSettings
from tests.answer import Answer

Array = NDArray[Any]
LENGTH = "Inference-Header-Content-Length"
INFER = "/v2/models/digits/infer"
QUEUE = 4
TOLERANCE = 1e-4  # float32 sums in another order, see test_ladder
NUMPY_OF = {"FP32": "<f4", "INT64": "<i8"}
DATATYPE_OF = {"float32": "FP32", "float16": "FP16", "uint8": "UINT8"}


class Inference(Answer):
    """The response of the v2 protocol to an inference request."""

    @property
    def outputs(self) -> dict[str, Array]:
        """By name, JSON and binary alike."""
        assert self.status == 200, self.body
        size = int(self.headers.get(LENGTH, len(self.body)))
        header, at = orjson.loads(self.body[:size]), size
        found = {}
        for output in header["outputs"]:
            dtype = np.dtype(NUMPY_OF[output["datatype"]])
            if "data" in output:
                array = np.array(output["data"], dtype)
            else:
                end = at + output["parameters"]["binary_data_size"]
                array = np.frombuffer(self.body[at:end], dtype)
                at = end
            found[output["name"]] = array.reshape(output["shape"])
        assert at == len(self.body)
        return found


class Site:
    """Services and their HTTP server in a thread of this process."""

    def __init__(self, state: Path, *, http: Address | None = None, **more: Any) -> None:
        free = Address("127.0.0.1", 0)
        settings = ServerSettings(state, http or free, free, queue_max=QUEUE, threads=1, **more)
        self.services = Services(settings)
        self.services.start()
        listener = socket.create_server(("127.0.0.1", 0))
        # asyncio sets it only on sockets made for TCP by number; 40 ms a request without
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.port: int = listener.getsockname()[1]
        config = uvicorn.Config(create_app(self.services), log_config=None)
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, args=([listener],), daemon=True)
        self._thread.start()
        self._pool = urllib3.HTTPConnectionPool("127.0.0.1", self.port, maxsize=8, timeout=20)

    def call(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Inference:
        response = self._pool.request(method, path, body=body, headers=headers, retries=1)
        return Inference(response.status, response.headers, response.data)

    def infer(self, request: Mapping[str, Any], path: str = INFER) -> Inference:
        """All in JSON."""
        return self.call("POST", path, orjson.dumps(request))

    def infer_binary(
        self, name: str, array: Array, parameters: Mapping[str, Any] | None = None, **more: Any
    ) -> Inference:
        """One binary input; `more` is added to its JSON."""
        text, raw = binary(name, array, parameters, **more)
        return self.call("POST", INFER, text + raw, {LENGTH: str(len(text))})

    def close(self) -> None:
        self._pool.close()
        self._server.should_exit = True
        self._thread.join(10)
        self.services.stop()


def binary(
    name: str, array: Array, parameters: Mapping[str, Any] | None = None, **more: Any
) -> tuple[bytes, bytes]:
    """The JSON and the bytes of a request with one tensor, written out by the protocol's text."""
    described = {
        "name": name,
        "shape": array.shape,
        "datatype": DATATYPE_OF[str(array.dtype)],
        "parameters": {**(parameters or {}), "binary_data_size": array.nbytes},
    }
    return orjson.dumps({"inputs": [described], **more}), array.tobytes()


def as_json(name: str, array: Array) -> dict[str, Any]:
    return {
        "name": name,
        "shape": array.shape,
        "datatype": DATATYPE_OF[str(array.dtype)],
        "data": array.ravel().tolist(),
    }
