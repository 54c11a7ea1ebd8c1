"""One real model, trained for seconds and exported once, and servers and brokers to serve it."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import orjson
import psutil
import pytest
import torch
import urllib3
from numpy.typing import NDArray

from edge_sdk.manifest import BundleManifest, ModelManifest
from edge_sdk.mqtt.link import MqttLink
from edge_sdk.mqtt.messages import Message
from edge_sdk.nets import Supernet, build
from edge_sdk.training.data.load import load_dataset
from edge_sdk.wire.broker_address import BrokerAddress
from edge_sdk.wire.frames import Tensor, unpack
from edge_sdk.wire.messages import Query, Reply, pack_query, read_reply
from edge_sdk.wire.topics import Kind, Topic
from exporters.model import export_model
from tests.serving.postgresql import PostgreSql, running_postgresql
from tests.waiting import is_listening, wait_until

Array = NDArray[Any]
T = TypeVar("T")

CUTS = (1, 2, 4)
START_S = 60.0


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


@dataclass(frozen=True)
class Exported:
    """`digits/1` under `root`, and the network it was exported from.

    x, y: raw samples (n, 1, 8, 8) and labels that it was not trained on.
    """

    net: Supernet
    root: Path
    x: Array
    y: Array

    @property
    def folder(self) -> Path:
        """Folder of version 1."""
        return self.root / "digits" / "1"

    @property
    def manifest(self) -> ModelManifest:
        """Manifest of version 1."""
        return ModelManifest.load(self.folder)

    def install(
        self,
        models: Path,
        *,
        name: str = "digits",
        version: int = 1,
        bad: bool = False,
        threshold: float | None = None,
    ) -> Path:
        """Put a copy under `models` in one rename, as an export does; returns its folder.

        Args:
            name, version: of the copy. bad: put a graph into its bundles that does not load.
            threshold: of the bundles' gate, in place of the measured one.
        """
        target = models / name / str(version)
        work = target.with_name(f".{version}-copy")
        shutil.copytree(self.folder, work)
        model = replace(self.manifest, name=name, version=str(version))
        (work / "model.json").write_bytes(model.to_json())
        for variant in model.variants:
            folder = work / "bundles" / variant
            bundle = replace(BundleManifest.load(folder), bundle=f"{name}/{version}/{variant}")
            if threshold is not None:
                bundle = replace(bundle, gate=replace(bundle.gate, threshold=threshold))
            (folder / "manifest.json").write_bytes(bundle.to_json())
            if bad:
                (folder / "exit.onnx").write_bytes(b"no graph")
        work.rename(target)
        return target

    def smashed(self, depth: int, x: Array) -> Array:
        """torch's output of the first `depth` stages; x itself for 0."""
        return x if depth == 0 else self._torch(self.net.prefix(depth), x)

    def logits(self, x: Array) -> Array:
        """torch's output of the whole network."""
        return self._torch(self.net, x)

    def suffix(self, depth: int, z: Array) -> Array:
        """torch's output of the stages after `depth`, for what entered there."""
        return self._torch(self.net if depth == 0 else self.net.suffix(depth), z)

    def query(self, depth: int, array: Array, **more: Any) -> Query:
        """A query for this model with `array` at `depth`; `id`, `deadline_ms`... by keyword."""
        fields: dict[str, Any] = {"id": "q", "model": "digits", "version": None, **more}
        return Query(tensor=Tensor(f"z{depth}" if depth else "x", array), **fields)

    @staticmethod
    def _torch(module: torch.nn.Module, given: Array) -> Array:
        with torch.inference_mode():
            out: Array = module(torch.from_numpy(given.copy())).numpy()
        return out


@pytest.fixture(scope="session")
def exported(
    tmp_path_factory: pytest.TempPathFactory, train_centrally: Callable[..., None]
) -> Exported:
    """A network trained until its answers differ from sample to sample, and its export."""
    data = load_dataset("digits")
    net = build("tiny", mean=data.mean, std=data.std, seed=0)
    # the pixels are whole numbers from 0 to 16: bytes, as a camera gives them
    x_train, x_test = data.x_train[:1000].astype(np.uint8), data.x_test.astype(np.uint8)
    train_centrally(net, x_train, data.y_train[:1000], epochs=3, learning_rate=3e-3)
    net.eval()
    root = tmp_path_factory.mktemp("exported")
    export_model(
        net,
        x_test[:100],
        data.y_test[:100],
        root,
        name="digits",
        version=1,
        class_names=[str(digit) for digit in range(10)],
        depths=CUTS,
        int8="never",
    )
    return Exported(net, root, x_test, data.y_test)


class Device:
    """A device's link to a broker, without an agent: it sends what a test says."""

    def __init__(self, address: BrokerAddress, name: str, credential: str) -> None:
        self._arrived = threading.Condition()
        self._name = name
        self.replies: list[Reply] = []
        self.qualities: list[int] = []  # QoS of the replies
        self.commands: list[dict[str, Any]] = []
        self.link = MqttLink(address, client_id=name, password=credential)
        self.link.subscribe(self.topic(Kind.REPLY), self._reply)
        self.link.subscribe(self.topic(Kind.COMMAND), self._command)
        self.link.start()
        self.link.wait_connected(10)

    def topic(self, kind: Kind) -> str:
        """Topic of that kind of this device."""
        return str(Topic("default", self._name, kind))

    def send(self, payload: bytes) -> None:
        """Publish on the query topic, once the link takes it."""
        wait_until(
            lambda: self.link.publish(self.topic(Kind.QUERY), payload),
            lambda: self.link.last_error,
        )

    def ask(self, query: Query) -> Reply:
        """Send a query and wait for the reply with its id."""
        self.send(pack_query(query))
        return self.wait(lambda: [r for r in self.replies if r.id == query.id])[0]

    def wait(self, found: Callable[[], list[T]], timeout_s: float = 20.0) -> list[T]:
        """Wait until `found` finds something among what arrived, and return it."""
        with self._arrived:
            assert self._arrived.wait_for(found, timeout_s), f"last: {self.replies[-3:]}"
            return found()

    def _reply(self, message: Message) -> None:
        with self._arrived:
            self.qualities.append(message.qos)
            self.replies.append(read_reply(unpack(message.payload)))
            self._arrived.notify_all()

    def _command(self, message: Message) -> None:
        with self._arrived:
            self.commands.append(orjson.loads(message.payload))
            self._arrived.notify_all()


@pytest.fixture
def device() -> Iterator[Callable[..., Device]]:
    """Makes devices and disconnects them: `device(address, name, credential)`."""
    made: list[Device] = []

    def connect(address: BrokerAddress, name: str = "pi-1", credential: str = "") -> Device:
        made.append(Device(address, name, credential))
        return made[-1]

    yield connect
    for one in made:
        one.link.stop()


@pytest.fixture(scope="session")
def mosquitto() -> Iterator[BrokerAddress]:
    """A real Mosquitto without logins. The tests fail if it is not installed."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "mosquitto.conf"
        lines = f"listener {port} 127.0.0.1", "allow_anonymous true", "set_tcp_nodelay true"
        config.write_text("\n".join((*lines, "log_type none", "")))
        program = shutil.which("mosquitto", path=f"{os.environ['PATH']}:/usr/sbin")
        assert program is not None, "install Mosquitto 2.0 or newer to run the broker tests"
        process = subprocess.Popen([program, "-c", str(config)])
        try:
            wait_until(lambda: is_listening(port), "Mosquitto does not listen")
            yield BrokerAddress("127.0.0.1", port)
        finally:
            process.terminate()
            process.wait(10)


@pytest.fixture(scope="session")
def postgresql() -> Iterator[PostgreSql]:
    """A real PostgreSQL. The tests fail if it is not installed."""
    with running_postgresql() as instance:
        yield instance


@pytest.fixture(params=["sqlite", "postgresql"])
def registry_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The URL of an empty registry, on each kind of database."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path}/registry.db"
        return
    instance: PostgreSql = request.getfixturevalue("postgresql")
    name = instance.new_database()
    yield instance.url(name)
    instance.drop(name)


class ServerRun:
    """`splitedge server run` as a process of its own, or another role of the server.

    Attributes:
        http: URL, once `wait_ready` returned. mqtt: the broker's address. told: its first line.
    """

    def __init__(
        self, state: Path, options: Sequence[str], log: Path, *, role: str = "run"
    ) -> None:
        self._log = log
        command = [sys.executable, "-P", "-m", "edge_sdk.cli", "server", role]
        with log.open("w") as stderr:
            self.process = subprocess.Popen(
                [*command, "--state", str(state), *options],
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
            )
        self.http = ""
        self.mqtt = BrokerAddress("", 0)
        self.told = ""

    def wait_ready(self) -> ServerRun:
        """Wait for its one line that says where it listens."""
        self.told = self.read_line()
        words = self.told.split()
        assert "(broker)," in words, self.stderr
        self.http = words[words.index("(broker),") - 3]
        self.mqtt = BrokerAddress.parse(words[words.index("(broker),") - 1])
        return self

    def read_line(self) -> str:
        """The next line that it prints; it is killed if none comes."""
        assert self.process.stdout is not None
        timer = threading.Timer(START_S, self.process.kill)
        timer.start()
        try:
            return self.process.stdout.readline()
        finally:
            timer.cancel()

    @property
    def stderr(self) -> str:
        """Its standard error."""
        return self._log.read_text()

    @property
    def family(self) -> list[psutil.Process]:
        """It and its children, as they are now."""
        server = psutil.Process(self.process.pid)
        return [server, *server.children(recursive=True)]

    def call(self, method: str, path: str, **more: Any) -> urllib3.BaseHTTPResponse:
        """One HTTP request."""
        return urllib3.request(method, f"{self.http}{path}", timeout=10, retries=False, **more)

    def end(self, number: int = signal.SIGTERM) -> int:
        """Send a signal and wait; its exit status."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        status = self.process.wait(20)
        if self.process.stdout is not None:
            self.process.stdout.close()
        return status


@pytest.fixture
def run_server(tmp_path: Path) -> Iterator[Callable[..., ServerRun]]:
    """Starts servers, on free ports unless told others, and ends those still running."""
    started: list[ServerRun] = []
    free = ("--http", "127.0.0.1:0", "--mqtt", "embedded:127.0.0.1:0")

    def run(state: Path, options: Sequence[str] = free) -> ServerRun:
        started.append(ServerRun(state, options, tmp_path / f"server-{len(started)}.log"))
        return started[-1]

    yield run
    for server in started:
        server.end(signal.SIGKILL)
