"""A collector of OpenTelemetry: a real HTTP server that decodes the protobuf which it is sent."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

from tests.waiting import wait_until

# an export every second, on a machine that may be three times slower
ARRIVE_S = 60.0


@dataclass(frozen=True)
class Received:
    """One span as it arrived. Ids are hexadecimal; `parent` is empty for the first of a trace."""

    name: str
    kind: int
    trace: str
    span: str
    parent: str
    begin_ns: int
    end_ns: int
    attributes: Mapping[str, Any]
    links: Sequence[tuple[str, str]]
    error: str
    resource: Mapping[str, Any]

    @property
    def service(self) -> str:
        """The program that made it."""
        return str(self.resource["service.name"])


class Collector:
    """Listens at a free port, or at one that was used before, until `stop`.

    Attributes:
        busy: True takes nothing, and answers 503.
        spans: all that arrived. paths: that were asked for. headers: of the last request.
    """

    def __init__(self, port: int = 0) -> None:
        self.busy = False
        self.spans: list[Received] = []
        self.paths: set[str] = set()
        self.headers: Mapping[str, str] = {}
        collector = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if collector.busy:
                    self.send_error(503)
                    return
                collector.paths.add(self.path)
                collector.headers = dict(self.headers)
                collector.spans += _decoded(body)
                answer = ExportTraceServiceResponse().SerializeToString()
                self.send_response(200)
                self.send_header("Content-Type", "application/x-protobuf")
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *about: object) -> None:
                """Say nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self._server.daemon_threads = True
        self.port: int = self._server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def wait(self, count: int = 1, **fields: Any) -> list[Received]:
        """Wait for `count` spans with these fields, such as `name`; all of them, in order."""

        def found() -> list[Received]:
            matching = [
                span
                for span in self.spans
                if all(getattr(span, name) == value for name, value in fields.items())
            ]
            return matching if len(matching) >= count else []

        return wait_until(found, lambda: f"{count} of {fields} in {self.spans}", ARRIVE_S)

    def stop(self) -> None:
        """Listen no more."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()


def _decoded(body: bytes) -> list[Received]:
    request = ExportTraceServiceRequest.FromString(body)
    return [
        Received(
            span.name,
            span.kind,
            span.trace_id.hex(),
            span.span_id.hex(),
            span.parent_span_id.hex(),
            span.start_time_unix_nano,
            span.end_time_unix_nano,
            _values(span.attributes),
            [(link.trace_id.hex(), link.span_id.hex()) for link in span.links],
            span.status.message,
            _values(of.resource.attributes),
        )
        for of in request.resource_spans
        for scope in of.scope_spans
        for span in scope.spans
    ]


def _values(pairs: Any) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in pairs}
