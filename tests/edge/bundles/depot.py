"""A small world for bundles: exports of real ONNX graphs, a signed repository, a faulty server."""

from __future__ import annotations

import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import orjson
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from edge_sdk.identity import Identity
from edge_sdk.manifest import (
    BundleManifest,
    GateSpec,
    GraphSpec,
    ModelManifest,
    SegmentSpec,
    SmashedSpec,
    TensorSpec,
)
from edge_sdk.wire.frames import Tensor, pack_request
from server.signing.artifacts import ArtifactRepository

Array = NDArray[Any]
INPUT = TensorSpec("float32", (4,))
LOGITS = TensorSpec("float32", (3,))
SAMPLES = 5
CREDENTIAL = "c0ffee" * 10


@dataclass
class Export:
    """Writes model exports with one bundle: z = relu(x W), logits = z V.

    The graphs are built with onnx.helper and the golden logits with numpy: no code of ours.
    """

    root: Path

    def write(
        self,
        version: int = 1,
        *,
        width: int = 8,
        model: Callable[[onnx.ModelProto], bytes] = onnx.ModelProto.SerializeToString,
        golden_error: float = 0.0,
        manifest: Callable[[bytes], bytes] = bytes,
    ) -> Path:
        """The folder of model `tiny`, with the bundle `tiny/{version}/d2`.

        Args:
            width: of z; the exit graph is about 28 * width bytes.
            model: what to write as exit.onnx for a good graph.
            golden_error: added to the golden logits.
            manifest: what to write as manifest.json for a good one.
        """
        z = TensorSpec("float32", (width,))
        random = np.random.default_rng(version)
        w = random.normal(size=(4, width)).astype(np.float32)
        v = (random.normal(size=(width, 3)) / width).astype(np.float32)
        folder = self.root / "tiny" / str(version)
        bundle = folder / "bundles" / "d2"
        bundle.mkdir(parents=True)
        (bundle / "exit.onnx").write_bytes(model(exit_graph(w, v)))
        x = random.normal(size=(SAMPLES, 4)).astype(np.float32)
        logits = np.maximum(x @ w, 0) @ v + np.float32(golden_error)
        (bundle / "golden.bin").write_bytes(
            pack_request({}, [Tensor("x", x), Tensor("logits", logits)])
        )
        raw = BundleManifest(
            bundle=f"tiny/{version}/d2",
            backbone="tiny",
            depth=2,
            class_names=("ant", "bee", "cat"),
            input=INPUT,
            graphs={
                "exit": GraphSpec("exit.onnx", "fp32", {"x": INPUT}, {"z": z, "logits": LOGITS})
            },
            smashed=SmashedSpec("z2", (width,), "fp16"),
            gate=GateSpec("entropy", 0.5),
            golden="golden.bin",
            parity={},
        ).to_json()
        (bundle / "manifest.json").write_bytes(manifest(raw))
        (folder / "model.json").write_bytes(
            ModelManifest(
                name="tiny",
                version=str(version),
                backbone="tiny",
                stages=3,
                cuts=(2,),
                class_names=("ant", "bee", "cat"),
                input=INPUT,
                segments=(SegmentSpec("all.onnx", 0, None, INPUT, LOGITS),),
                variants=("d2",),
                cost={},
            ).to_json()
        )
        return folder


def exit_graph(w: Array, v: Array) -> onnx.ModelProto:
    """z = relu(x W), logits = z V, batch 1."""
    width = w.shape[1]
    graph = helper.make_graph(
        [
            helper.make_node("MatMul", ["x", "w"], ["xw"]),
            helper.make_node("Relu", ["xw"], ["z"]),
            helper.make_node("MatMul", ["z", "v"], ["logits"]),
        ],
        "exit",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 4])],
        [
            helper.make_tensor_value_info("z", TensorProto.FLOAT, [1, width]),
            helper.make_tensor_value_info("logits", TensorProto.FLOAT, [1, 3]),
        ],
        [numpy_helper.from_array(w, "w"), numpy_helper.from_array(v, "v")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


@dataclass(frozen=True)
class Served:
    """One request as the server saw it: path, Range header, status, bytes of body it sent."""

    path: str
    range: str | None
    status: int
    sent: int


@dataclass
class Faults:
    """What the server does wrong, by the end of the path."""

    replace: dict[str, bytes] = field(default_factory=dict)  # serve this instead
    cuts: dict[str, list[int]] = field(default_factory=dict)  # close after so many bytes each time
    endless: set[str] = field(default_factory=set)  # go on until the peer leaves
    no_ranges: bool = False  # answer every Range with the whole file
    chunk_delay_s: float = 0.0  # between pieces of 8 KB of a target
    before_target: Callable[[], None] | None = None  # called before a target is sent


class Depot:
    """A repository served as the real server does: static files with ranges, and assignments."""

    def __init__(self, folder: Path, tls: ssl.SSLContext | None = None) -> None:
        self.repository = ArtifactRepository(folder)
        self.repository.open_or_create()
        self.faults = Faults()
        self.assigned: str | None = None
        self.smaller: str | None = None  # assigned once a bundle ran out of memory
        self.unmeasured: list[str] | None = None  # None as a server of an older release
        self.served: list[Served] = []
        handler = type("Handler", (_Handler,), {"depot": self})
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        if tls is not None:
            self._http.socket = tls.wrap_socket(self._http.socket, server_side=True)
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()
        scheme = "http" if tls is None else "https"
        self.url = f"{scheme}://127.0.0.1:{self._http.server_port}"

    def enrol(self, state: Path, ca: Path | None = None) -> None:
        """What enrolment leaves on a device."""
        Identity(self.url, "pi-4", "default", CREDENTIAL, ca).save(state)
        (state / "tuf").mkdir(exist_ok=True)
        (state / "tuf" / "root.json").write_bytes(self.repository.root_bytes)

    def sent(self, ending: str) -> int:
        """Bytes of body sent for paths with that ending."""
        return sum(served.sent for served in self.served if served.path.endswith(ending))

    def close(self) -> None:
        """Be away from here on: connections are refused."""
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()


class _Handler(BaseHTTPRequestHandler):
    depot: Depot
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        if self.headers.get("Authorization") != f"Bearer pi-4:{CREDENTIAL}":
            self._reply(401, b"")
        elif self.path == "/api/v1/devices/pi-4/assignment":
            found = self.depot.assigned is not None
            self._reply(200 if found else 404, orjson.dumps({"bundle": self.depot.assigned}))
        elif self.path.endswith("/pi-4/unmeasured") and self.depot.unmeasured is not None:
            self._reply(200, orjson.dumps({"bundles": self.depot.unmeasured}))
        else:
            self._file()

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        failed = self.path == "/api/v1/devices/pi-4/failures" and self.depot.smaller is not None
        if failed:
            self.depot.assigned = self.depot.smaller
        self._reply(200 if failed else 404, orjson.dumps({"bundle": self.depot.assigned}))

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 (the base's name)
        pass

    def _file(self) -> None:
        tuf = self.depot.repository.metadata_folder.parent
        replaced = self._fault(self.depot.faults.replace)
        path = tuf / self.path.removeprefix("/tuf/")
        if replaced is None and not (self.path.startswith("/tuf/") and path.is_file()):
            self._reply(404, b"")
            return
        if "/targets/" in self.path and self.depot.faults.before_target is not None:
            self.depot.faults.before_target()
        self._reply(200, path.read_bytes() if replaced is None else replaced)

    def _fault(self, faults: dict[str, Any]) -> Any:
        return next((value for end, value in faults.items() if self.path.endswith(end)), None)

    def _reply(self, status: int, body: bytes) -> None:
        wanted = self.headers.get("Range")
        start = int(wanted.removeprefix("bytes=").removesuffix("-")) if wanted else 0
        start = 0 if self.depot.faults.no_ranges else start
        endless = any(self.path.endswith(end) for end in self.depot.faults.endless)
        if start and status == 200:
            status = 206
        self.send_response(status)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
        if not endless:
            self.send_header("Content-Length", str(len(body) - start))
        self.send_header("Connection", "close")
        self.end_headers()
        sent = 0
        with suppress(OSError):  # a peer that leaves is part of the play
            for piece in self._pieces(body[start:], endless=endless):
                self.wfile.write(piece)
                sent += len(piece)
        self.close_connection = True
        self.depot.served.append(Served(self.path, wanted, status, sent))

    def _pieces(self, body: bytes, *, endless: bool) -> Iterator[bytes]:
        cuts = self._fault(self.depot.faults.cuts)
        body = body[: cuts.pop(0)] if cuts else body
        for start in range(0, len(body), 8192):
            yield body[start : start + 8192]
            if self.depot.faults.chunk_delay_s and "/targets/" in self.path:
                time.sleep(self.depot.faults.chunk_delay_s)
        while endless:
            yield bytes(65536)
