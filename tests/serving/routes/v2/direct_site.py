"""Services behind two servers, of which one answers queries from their connections."""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import orjson
from numpy.typing import NDArray
from starlette.types import ASGIApp, Receive, Scope, Send

from edge_sdk.service.listening import listen
from edge_sdk.wire.address import Address
from server.app import create_app
from server.http_server import HttpServer
from server.routes.host_names import checked, own_names
from server.routes.v2.direct import DirectQueries
from server.services import Services
from server.settings import ServerSettings

Array = NDArray[Any]
INFER = "/v2/models/digits/infer"
LENGTH = "Inference-Header-Content-Length"
FREE = Address("127.0.0.1", 0)


class DirectSite:
    """Services behind two servers: one answers short queries from their connections.

    Attributes:
        direct, other: URLs without scheme. reached: paths that came to the application of `direct`.
    """

    def __init__(self, state: Path, **more: Any) -> None:
        self.stack = ExitStack()
        settings = ServerSettings(state, FREE, FREE, threads=1, **more)
        self.services = Services(settings)
        self.services.start()
        self.stack.callback(self.services.stop)
        names = own_names(FREE, None)
        app = checked(create_app(self.services), names)
        queries = DirectQueries(
            self.services.inference,
            names,
            loopback=settings.local,
            logins=self.services.recent_logins,
        )
        self.reached: list[str] = []
        self.server = HttpServer(self._noted(app), listen(FREE), tick_s=0.05, direct=queries)
        other = self.stack.enter_context(HttpServer(app, listen(FREE)))
        self.stack.enter_context(self.server)
        self.direct = self.server.url.partition("://")[2]
        self.other = other.url.partition("://")[2]

    def _noted(self, app: ASGIApp) -> ASGIApp:
        async def noted(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] == "http":
                self.reached.append(scope["path"])
            await app(scope, receive, send)

        return noted

    def went_direct(self, raw: bytes, source: str = "127.0.0.1") -> tuple[bytes, bool]:
        """The answer to a request, and whether the application did not see it."""
        before = len(self.reached)
        answer = ask(self.direct, raw, source)
        return answer, len(self.reached) == before


def body_of(x: Array, **more: Any) -> bytes:
    """A query in JSON."""
    described = {"name": "x", "shape": x.shape, "datatype": "UINT8", "data": x.ravel().tolist()}
    return orjson.dumps({"inputs": [described], **more})


def binary_of(x: Array, **more: Any) -> tuple[bytes, dict[str, str]]:
    """A query in bytes, and the header that goes with it."""
    parameters = {"binary_data_size": x.nbytes}
    described = {"name": "x", "shape": x.shape, "datatype": "UINT8", "parameters": parameters}
    text = orjson.dumps({"inputs": [described], **more})
    return text + x.tobytes(), {LENGTH: str(len(text))}


def request_of(
    body: bytes,
    headers: Mapping[str, str] | None = None,
    *,
    path: str = INFER,
    version: str = "1.1",
    host: str = "127.0.0.1",
) -> bytes:
    """The bytes of a request."""
    fields = {"Host": host, "Content-Length": str(len(body)), **(headers or {})}
    lines = [f"POST {path} HTTP/{version}", *(f"{name}: {fields[name]}" for name in fields)]
    return "\r\n".join([*lines, "", ""]).encode() + body


def connect(address: str, source: str = "127.0.0.1") -> socket.socket:
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=20, source_address=(source, 0))


def read_answer(peer: socket.socket, raw: bytes = b"") -> tuple[bytes, bytes]:
    """One answer with a length, and what came behind it."""
    while b"\r\n\r\n" not in raw:
        part = peer.recv(65_536)
        assert part, raw
        raw += part
    head, _, rest = raw.partition(b"\r\n\r\n")
    found = re.search(rb"content-length: (\d+)", head)
    assert found, head
    size = int(found[1])
    while len(rest) < size:
        part = peer.recv(65_536)
        assert part, raw
        rest += part
    return head + b"\r\n\r\n" + rest[:size], rest[size:]


def ask(address: str, raw: bytes, source: str = "127.0.0.1") -> bytes:
    """The answer to a request on a connection of its own."""
    with connect(address, source) as peer:
        peer.sendall(raw)
        return read_answer(peer)[0]


def undated(answer: bytes) -> bytes:
    """An answer without its time."""
    return re.sub(rb"\r\ndate: [^\r]+", b"", answer)


def outputs_of(answer: bytes) -> dict[str, Any]:
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n"), answer
    outputs = orjson.loads(answer.partition(b"\r\n\r\n")[2])["outputs"]
    return {output["name"]: output["data"] for output in outputs}
