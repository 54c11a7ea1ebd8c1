"""A small world for bundles: exports of real ONNX graphs, a signed repository, a faulty server."""

from __future__ import annotations

import asyncio
import shutil
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import orjson
import psutil
import pytest
from hypothesis import settings
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from edge_sdk import api
from edge_sdk.bundles.run_update import run_update
from edge_sdk.bundles.update import update
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
from edge_sdk.wire.frames import Tensor, pack_request, unpack
from edge_sdk.wire.topics import PAYLOAD_BYTES
from profiles import load_reference
from server.processes import ServerProcess
from server.registry.artifacts import ArtifactRepository
from server.tokens import create_token

Array = NDArray[Any]

INPUT = TensorSpec("float32", (4,))
LOGITS = TensorSpec("float32", (3,))
INPUT_8X8 = TensorSpec("float32", (1, 8, 8))
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
        else:
            self._file()

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


@pytest.fixture
def export(tmp_path: Path) -> Export:
    """A place for exports."""
    return Export(tmp_path / "exports")


@pytest.fixture
def depot(tmp_path: Path) -> Iterator[Depot]:
    """A server without bundles."""
    depot = Depot(tmp_path / "server")
    yield depot
    depot.close()


@pytest.fixture(scope="session")
def thorough() -> bool:
    """Whether this run is `make faults`, which leaves nothing out."""
    return settings.get_current_profile_name() == "faults"


@pytest.fixture(scope="session")
def _furnished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made once: a device that runs tiny/1/d2, a server that has tiny/2/d2 as well."""
    folder = tmp_path_factory.mktemp("furnished")
    export = Export(folder / "exports")
    depot = Depot(folder / "server")
    depot.enrol(folder / "device")
    depot.repository.publish_bundles(export.write(1))
    assert update(folder / "device", "tiny/1/d2").status == "installed"
    depot.repository.publish_bundles(export.write(2))
    depot.close()
    return folder


@pytest.fixture
def installed(_furnished: Path, depot: Depot, tmp_path: Path) -> Path:
    """The state folder of a device that runs tiny/1/d2, while `depot` has tiny/2/d2 too."""
    for folder in (tmp_path / "server" / "keys", tmp_path / "server" / "tuf"):
        shutil.rmtree(folder)
        shutil.copytree(_furnished / "server" / folder.name, folder)
    shutil.copytree(_furnished / "device", tmp_path / "device", symlinks=True)
    depot.enrol(tmp_path / "device")
    return tmp_path / "device"


@pytest.fixture
def state(tmp_path: Path, depot: Depot) -> Path:
    """The state folder of a device enrolled at `depot`."""
    folder = tmp_path / "device"
    depot.enrol(folder)
    return folder


@dataclass(frozen=True)
class Digits:
    """A small network on the digits and its exports.

    Attributes:
        net: tiny, cut at depth 2 alone.
        x: (n, 1, 8, 8) float32 raw inputs that it was not trained on.
        models: the server's folder: `digits/1` (one graph on the device), `pair/1` (an exit with an
            extractor of its own, so `exit` and `prefix`), `triple/1` (`back` as well: the server
            stops at the features of its last layer), and nothing else.
        exit_logits, pair_logits, logits: (n, 10) by torch: of the exit head at depth 2, of the
            auxiliary exit of `pair` and `triple`, and of the whole network.
    """

    net: Any
    x: Array
    models: Path
    exit_logits: Array
    pair_logits: Array
    logits: Array


@pytest.fixture(scope="session")
def digits(
    tmp_path_factory: pytest.TempPathFactory, train_centrally: Callable[..., None]
) -> Digits:
    """Trained and exported once: some 8 s."""
    import torch

    from edge_sdk.nets import build
    from edge_sdk.training.data.load import load_dataset
    from exporters.graphs import DeviceGraphs, own_exit
    from exporters.model import export_model

    torch.set_num_threads(1)
    models = tmp_path_factory.mktemp("digits") / "models"
    data = load_dataset("digits").head(600, 200)
    shape = data.x_train.shape[1:]
    net: Any = build("tiny", classes=10, input_shape=shape, mean=data.mean, std=data.std, seed=0)
    train_centrally(net, data.x_train, data.y_train, epochs=10, learning_rate=1e-2)
    layers = torch.nn.Flatten(), torch.nn.Linear(64, 16), torch.nn.ReLU()
    extractor = torch.nn.Sequential(net.normalise, *layers)
    head = torch.nn.Linear(16, 10)
    optimiser = torch.optim.Adam([*layers[1].parameters(), *head.parameters()], 0.02)
    for _ in range(60):
        optimiser.zero_grad()
        logits = head(extractor(torch.from_numpy(data.x_train)))
        loss: Any = torch.nn.functional.cross_entropy(logits, torch.from_numpy(data.y_train))
        loss.backward()
        optimiser.step()

    export_model(
        net,
        data.x_test,
        data.y_test,
        models,
        name="digits",
        version=1,
        class_names=data.class_names,
        depths=(2,),
        int8="never",
    )
    pair = own_exit(net, 2, extractor.eval(), head.eval())
    triple = DeviceGraphs(
        pair.exit, pair.prefix, back=net.head[-1], features=(net.head[-1].in_features,)
    )
    copy_version(models / "digits" / "1", models / "triple" / "1", graphs=triple)
    copy_version(models / "triple" / "1", models / "pair" / "1", drop="back")
    _stop_at_features(models / "triple" / "1" / "segments" / "2-end.onnx")
    with torch.no_grad():
        x = torch.from_numpy(data.x_test)
        z = net.prefix(2)(x)
        return Digits(
            net=net,
            x=data.x_test,
            models=models,
            exit_logits=net.exit_head(2)(z).numpy(),
            pair_logits=head(extractor(x)).numpy(),
            logits=net(x).numpy(),
        )


def copy_version(
    source: Path, target: Path, *, graphs: Any = None, drop: str = "", threshold: float = 0.0
) -> None:
    """The export at `source`, of one bundle, under the name and version that `target` says.

    Args:
        graphs: DeviceGraphs to run in place of the bundle's. drop: one of its graphs to leave out.
        threshold: of its gate, 0 for the one it has.
    """
    shutil.copytree(source, target)
    name, version = target.parts[-2:]
    model = target / "model.json"
    model.write_bytes(_edited(model, name=name, version=version))
    manifest = target / "bundles" / "d2" / "manifest.json"
    manifest.write_bytes(_edited(manifest, bundle=f"{name}/{version}/d2"))
    fields = orjson.loads(manifest.read_bytes())
    if graphs is not None:
        _write_graphs(graphs, fields, manifest.parent)
    if drop:
        (manifest.parent / fields["graphs"].pop(drop)["file"]).unlink()
    fields["gate"]["threshold"] = threshold or fields["gate"]["threshold"]
    manifest.write_bytes(orjson.dumps(fields))


def _edited(path: Path, **fields: str) -> bytes:
    return orjson.dumps(orjson.loads(path.read_bytes()) | fields)


def _write_graphs(graphs: Any, manifest: dict[str, Any], folder: Path) -> None:
    """Put other graphs into a bundle, with the logits that torch gives for its golden inputs."""
    import torch

    from exporters.graphs import write_device_graphs

    specs = write_device_graphs(graphs, INPUT_8X8, folder)
    manifest["graphs"] = {graph: asdict(spec) for graph, spec in specs.items()}
    x = unpack((folder / manifest["golden"]).read_bytes()).tensor("x").array
    with torch.no_grad():
        logits = graphs.exit(torch.tensor(x)).numpy()
    golden = pack_request({}, [Tensor("x", x), Tensor("logits", logits)])
    (folder / manifest["golden"]).write_bytes(golden)


def _stop_at_features(segment: Path) -> None:
    """Take the last layer off a server segment: its input becomes the output `features`."""
    model = onnx.load(segment)
    graph = model.graph
    last = graph.node.pop()
    assert last.op_type == "Gemm"
    for node in graph.node:
        node.output[:] = ["features" if name == last.input[0] else name for name in node.output]
    del graph.output[:]
    features = helper.make_tensor_value_info("features", TensorProto.FLOAT, None)
    graph.output.append(features)
    onnx.save(model, segment)


class FaultProxy:
    """A TCP proxy that can hold everything back, be slow, cut connections and refuse new ones."""

    def __init__(self, target: int) -> None:
        self.latency_s = 0.0
        self._target = target
        self._writers: set[asyncio.StreamWriter] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._flowing = asyncio.Event()
        self._flowing.set()
        self.port = self._call(self._listen())

    def hole(self) -> None:
        """Take everything and pass nothing on, without a word."""
        self._loop.call_soon_threadsafe(self._flowing.clear)

    def lift(self) -> None:
        """Pass on again, first what was held back."""
        self._loop.call_soon_threadsafe(self._flowing.set)

    def reset(self) -> None:
        """Cut every connection with a TCP reset."""
        self._call(self._abort())

    def close(self) -> None:
        """Refuse and cut everything."""
        try:
            self._call(self._shut())
        finally:  # a loop that went on would keep pytest from ending
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def _call(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(10)

    async def _listen(self) -> int:
        self._server = await asyncio.start_server(self._connect, "127.0.0.1", 0)
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there, back = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:
            writer.transport.abort()
            return
        ends = {writer, back}
        self._writers |= ends
        pumps = [self._pump(reader, back), self._pump(there, writer)]
        await asyncio.gather(*pumps, return_exceptions=True)
        for end in ends:
            end.transport.abort()
        self._writers -= ends

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            await asyncio.sleep(self.latency_s)
            await self._flowing.wait()
            writer.write(data)
            await writer.drain()
        writer.transport.abort()

    async def _abort(self) -> None:
        for writer in self._writers:
            sock = writer.get_extra_info("socket")
            if sock.fileno() >= 0:  # one side may have closed a moment ago
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()

    async def _shut(self) -> None:
        self._server.close()
        self._flowing.set()
        await self._abort()
        await asyncio.sleep(0.05)


class Fleet:
    """A real server as a process, and devices enrolled at it."""

    def __init__(self, folder: Path, models: Path) -> None:
        shutil.copytree(models, folder / "server" / "models")
        self.state = folder / "server"
        self._devices = folder / "devices"
        self._installed = folder / "installed"
        self._server = ServerProcess(self.state)
        self._server.start(("--http", "127.0.0.1:0", "--mqtt", "embedded:127.0.0.1:0"))

    @property
    def pid(self) -> int:
        """Process id of the server; the broker is its child."""
        process = self._server._process
        assert process is not None
        return process.pid

    @property
    def http(self) -> str:
        """URL of its API."""
        return self._server.http

    def kill_broker(self) -> None:
        """kill -9; the server starts another one."""
        for child in psutil.Process(self.pid).children():
            with suppress(psutil.NoSuchProcess):
                if "server.broker" in child.cmdline():
                    child.kill()

    @property
    def broker_port(self) -> int:
        """Where the broker listens."""
        addresses = orjson.loads((self.state / "addresses.json").read_bytes())
        return int(addresses["mqtt"].rpartition(":")[2])

    def restart(self) -> None:
        """Stop the server as a whole, and start it on the same ports."""
        self._server.stop()
        self._server.start()

    def stop(self) -> None:
        """Stop the server."""
        self._server.stop()

    def device(
        self,
        name: str,
        bundle: str = "digits/1/d2",
        *,
        broker_port: int | None = None,
        max_packet_bytes: int = PAYLOAD_BYTES,
    ) -> Path:
        """The state folder of a new device with that bundle, told that the broker is at the port
        (of a proxy, say) and takes messages of that size.
        """
        state = self._devices / name
        shutil.rmtree(state, ignore_errors=True)  # of a first try of the same test
        token = create_token(self.state)
        profile = load_reference("raspberry-pi-4")
        api.enroll(self._server.http, token, state, profile=profile, name=name)
        kept = self._installed / bundle.replace("/", "-")
        if not kept.exists():
            assert run_update(state, bundle).status == "installed"
            kept.mkdir(parents=True)
            shutil.copytree(state / "slots", kept / "slots", symlinks=True)
            shutil.copy(state / "active.json", kept)
        else:
            shutil.copytree(kept, state, symlinks=True, dirs_exist_ok=True)
        url = f"mqtt://127.0.0.1:{self.broker_port if broker_port is None else broker_port}"
        broker = {"url": url, "max_packet_bytes": max_packet_bytes}
        (state / "connection.json").write_bytes(orjson.dumps({"broker": broker}))
        return state


@pytest.fixture(scope="session")
def fleet(digits: Digits, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """A server that no test disturbs for longer than itself."""
    fleet = Fleet(tmp_path_factory.mktemp("fleet"), digits.models)
    yield fleet
    fleet.stop()


@pytest.fixture
def proxy(fleet: Fleet) -> Iterator[FaultProxy]:
    """Between a device and the broker."""
    proxy = FaultProxy(fleet.broker_port)
    yield proxy
    proxy.close()


@pytest.fixture
def make_proxy() -> Iterator[Callable[[int], FaultProxy]]:
    """Makes a proxy before the port it is given."""
    made: list[FaultProxy] = []

    def make(port: int) -> FaultProxy:
        made.append(FaultProxy(port))
        return made[-1]

    yield make
    for proxy in made:
        proxy.close()


@pytest.fixture(name="copy_version")
def _copy_version() -> Callable[..., None]:
    """Copies an export to another name and version."""
    return copy_version
