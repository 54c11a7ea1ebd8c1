"""One thread: other test folders share the cores, and the last bits depend on the thread count.

And a small fleet in training: a trainer's mailbox behind real sockets, devices in threads; or
trainer and devices as processes that may be killed and frozen.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any, Final, cast

import pytest
import torch

from edge_sdk.identity import Identity
from edge_sdk.service.listening import listen
from edge_sdk.training.client import TrainingClient
from edge_sdk.training.device.session import TrainingSession
from edge_sdk.training.device.trainer_client import TrainerClient
from edge_sdk.training.protocol.http import Welcome
from edge_sdk.wire.address import Address
from server.http_server import HttpServer
from server.registry.credentials import new_secret, secret_sha256
from server.registry.database import Registry, open_registry
from server.registry.records import Device
from server.training.fleet.api import create_app
from server.training.fleet.mailbox import Mailbox
from tests.training.worlds import PROFILE

# for a command to say what is waited for, on a machine that has much else to do
START_S: Final = 180.0


# Imports torch once and forks for each order, a line of JSON, so that a process costs no seconds:
#   {"what": "device", "log": FILE, ...}    participate(...);  answered with its process id
#   {"what": "trainer", "log": FILE, ...}   train(...), by the recipe's name
#   {"wait": PID}                           answered with its wait status: 9 killed, 0 done
#   {"poll": PID}                           the same, or -1 while it runs
# "kill": [CALL, N] kills it as it makes the N-th call of that name.
FORK_SERVER = """
import json, logging, os, signal, sys
from pathlib import Path

import sqlalchemy.dialects.sqlite
import torch
import uvicorn.lifespan.on
import uvicorn.loops.auto
import uvicorn.protocols.http.auto
import uvicorn.protocols.websockets.auto

from edge_sdk.training.client import TrainingClient
from edge_sdk.training.data.load import load_dataset
from edge_sdk.training.device.session import TrainingSession
from edge_sdk.training.device.participate import participate
from edge_sdk.training.device.warmup import warm_up
from edge_sdk.wire.address import Address
from server.training.fleet import trainer as real_trainer
from server.training.fleet.mailbox import Mailbox
from server.training.fleet.settings import TrainerSettings
from server.training.recipe.recipe import load_recipe
from server.training.run import record

CALLS = {
    "handle": (TrainingClient, "handle"),
    "hand_in": (TrainingSession, "_hand_in"),
    "reply": (Mailbox, "reply"),
    "save": (record, "save_checkpoint"),
}

def kill_at(name, number):
    owner, attribute = CALLS[name]
    plain = getattr(owner, attribute)
    left = number
    def counting(*arguments, **more):
        nonlocal left
        left -= 1
        if not left:
            os.kill(os.getpid(), signal.SIGKILL)
        return plain(*arguments, **more)
    setattr(owner, attribute, counting)

def say(line):
    print(line, flush=True)

def device(state, data, trainer, folder=".", backbone=None):
    # a test gives the very samples to train on
    os.chdir(folder)
    more = {"trainer": trainer, "backbone": backbone, "held_out": 0, "say": say}
    participate(Path(state), data, **more)

def trainer(state, recipe, port, **more):
    file = Path(recipe)
    settings = TrainerSettings(Path(state), file.stem, Address("127.0.0.1", port), **more)
    real_trainer.train(load_recipe(file), settings, say=say, on_round=say)

torch.set_num_threads(1)
warm_up()
load_dataset("digits")
say("{}")
for line in sys.stdin:
    order = json.loads(line)
    if "wait" in order:
        say(os.waitpid(order["wait"], 0)[1])
        continue
    if "poll" in order:
        ended, status = os.waitpid(order["poll"], os.WNOHANG)
        say(status if ended else -1)
        continue
    child = os.fork()
    if child:
        say(child)
        continue
    log = os.open(order.pop("log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for number in (1, 2):
        os.dup2(log, number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    what, kill = order.pop("what"), order.pop("kill", None)
    if kill is not None:
        kill_at(*kill)
    try:
        {"device": device, "trainer": trainer}[what](**order)
    except BaseException:
        logging.exception("ended")
        os._exit(1)
    os._exit(0)
"""


class Process:
    """A trainer or a device in a process of its own, forked by a fork server."""

    def __init__(self, fork_server: ForkServer, pid: int, log: Path) -> None:
        self._fork_server = fork_server
        self._status: int | None = None
        self.pid = pid
        self.log = log

    def signal(self, number: int) -> None:
        """Send it a signal."""
        os.kill(self.pid, number)

    def wait(self) -> int:
        """Its wait status: 9 where it was killed, 0 where it came to its end."""
        if self._status is None:
            self._status = self._fork_server.order({"wait": self.pid})
        return self._status

    def poll(self) -> int | None:
        """The same; None while it runs."""
        if self._status is None:
            status = self._fork_server.order({"poll": self.pid})
            self._status = None if status == -1 else status
        return self._status

    def end(self) -> None:
        """Kill it where it still runs."""
        if self._status is None:
            self.signal(signal.SIGKILL)
            self.wait()


class ForkServer:
    """Forks processes that a test kills or freezes."""

    def __init__(self, folder: Path) -> None:
        command = [sys.executable, "-P", "-c", FORK_SERVER]
        self._folder = folder
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._processes: list[Process] = []
        self._read()

    def order(self, words: Mapping[str, Any]) -> int:
        """What it answers to an order."""
        orders = cast("IO[str]", self._process.stdin)
        orders.write(json.dumps(words) + "\n")
        orders.flush()
        return int(self._read())

    def start(self, what: str, *, kill: tuple[str, int] | None = None, **words: Any) -> Process:
        """A `device` or a `trainer`, killed as it makes the N-th call of a name."""
        log = self._folder / f"{what}-{len(self._processes)}.log"
        log.touch()
        pid = self.order({"what": what, "kill": kill, "log": str(log), **words})
        self._processes.append(Process(self, pid, log))
        return self._processes[-1]

    def end_all(self) -> None:
        """End every process that still runs."""
        for process in self._processes:
            process.end()

    def close(self) -> None:
        """End the fork server and its processes."""
        self.end_all()
        self._process.kill()
        self._process.communicate()

    def _read(self) -> str:
        line = cast("IO[str]", self._process.stdout).readline()
        assert line, "the fork server ended"
        return line


class Command:
    """`splitedge …` as a process whose lines are waited for."""

    def __init__(self, folder: Path, name: str, *words: str) -> None:
        self.log = folder / f"{name}.log"
        with self.log.open("a") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "edge_sdk.cli", *words],
                cwd=folder,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                bufsize=1,
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
            )

    def until(self, word: str) -> str:
        """The first line from now on that holds `word`."""
        assert self.process.stdout is not None
        timer = threading.Timer(START_S, self.process.kill)
        timer.start()
        try:
            for line in self.process.stdout:
                if word in line:
                    return line
        finally:
            timer.cancel()
        raise AssertionError(f"{word!r} was not printed; {self.log.read_text()[-2000:]}")

    def rest(self) -> str:
        """What else it says to its end."""
        out: IO[str] | None = self.process.stdout
        assert out is not None
        timer = threading.Timer(START_S, self.process.kill)
        timer.start()
        printed = out.read()
        timer.cancel()
        self.process.wait(10)
        return printed

    def end(self) -> None:
        """Kill it where it still runs."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(10)
        if self.process.stdout is not None:
            self.process.stdout.close()


class Commands:
    """Starts commands in a folder, and ends those still running.

    Args:
        folder: where they run and log.
        stack: at whose end they are ended.
    """

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder = folder
        self._stack = stack

    def __call__(self, name: str, *words: str) -> Command:
        """Start `splitedge WORDS`; its complaints go to NAME.log."""
        command = Command(self.folder, name, *words)
        self._stack.callback(command.end)
        return command


@pytest.fixture
def commands(tmp_path: Path) -> Iterator[Commands]:
    """Starts commands in the test's folder, and ends those still running."""
    with ExitStack() as stack:
        yield Commands(tmp_path, stack)


@pytest.fixture(scope="module")
def lasting_commands(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Commands]:
    """The same in a folder of the file's, for as long as its tests."""
    with ExitStack() as stack:
        yield Commands(tmp_path_factory.mktemp("commands"), stack)


@pytest.fixture(scope="session")
def _fork_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    fork_server = ForkServer(tmp_path_factory.mktemp("processes"))
    yield fork_server
    fork_server.close()


@pytest.fixture
def fork_server(_fork_server: ForkServer) -> Iterator[ForkServer]:
    """Starts trainers and devices as processes, and ends them."""
    yield _fork_server
    _fork_server.end_all()


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


@dataclass
class Keys:
    """What logins are checked against."""

    registry: Registry
    operator_sha256: str

    def logged_in(self, device: Device, credential: str) -> None:
        """Do nothing, as the trainer."""


@dataclass
class Trainer:
    """A mailbox behind HTTP, and the devices that poll it.

    Attributes:
        operator: the operator's secret.
    """

    mailbox: Mailbox
    registry: Registry
    url: str
    operator: str
    stack: ExitStack = field(repr=False)
    sessions: dict[str, TrainingSession] = field(default_factory=dict)
    threads: list[threading.Thread] = field(default_factory=list)

    @property
    def transport(self) -> Mailbox:
        """The transport of a round loop."""
        return self.mailbox

    def enrol(self, name: str) -> Identity:
        """A device of that name, with its credential."""
        device, credential = self.registry.redeem_token(self.registry.create_token(), name, PROFILE)
        return Identity("http://127.0.0.1:1", device.id, device.fleet, credential)

    def link(self, identity: Identity) -> TrainerClient:
        """A connection of that device."""
        link = TrainerClient(identity, self.url)
        self.stack.callback(link.close)
        return link

    def join(
        self, clients: Mapping[str, TrainingClient], *, ca: Path | None = None, **more: Any
    ) -> None:
        """Have each client trained by a session in a thread of its own, and wait until all are
        there.
        """
        for name, client in clients.items():
            session = TrainingSession(client, self.link(replace(self.enrol(name), ca=ca)), **more)
            thread = threading.Thread(target=session.run, daemon=True)
            thread.start()
            self.sessions[name] = session
            self.threads.append(thread)
        there = self.mailbox.wait_for_devices(len(clients), 20)
        assert there == sorted(clients)

    def close(self) -> None:
        """End the training; every device is told."""
        self.mailbox.end(5 if self.threads else 0)  # one driven by hand does not ask
        for thread in self.threads:
            thread.join(10)
            assert not thread.is_alive(), "a device does not end with the training"


@pytest.fixture
def make_trainer(tmp_path: Path) -> Iterator[Callable[..., Trainer]]:
    """Starts trainers: `make_trainer(input_shape, no_reply_s=...)`; tls: certificate
    and key.
    """
    with ExitStack() as stack:
        registry = open_registry(tmp_path)
        stack.callback(registry.close)

        def make(
            input_shape: tuple[int, ...] = (1, 8, 8),
            *,
            no_reply_s: float = 10.0,
            fetch_s: float = 5.0,
            silence_s: float = 15.0,
            reply_bytes_max: int = 64_000_000,
            tls: tuple[Path | None, Path | None] = (None, None),
            run: str = "first",
            samples_max: int | None = None,
            lockstep: bool = True,
            class_names: tuple[str, ...] = (),
        ) -> Trainer:
            operator = new_secret()
            mailbox = Mailbox(lockstep=lockstep, fetch_s=fetch_s, silence_s=silence_s)
            app = create_app(
                mailbox,
                Keys(registry, secret_sha256(operator)),
                Welcome(
                    training="test",
                    run=run,
                    no_reply_s=no_reply_s,
                    alive_s=silence_s / 4,
                    class_names=class_names,
                ),
                input_shape,
                reply_bytes_max=reply_bytes_max,
                samples_max=samples_max,
            )
            server = HttpServer(app, listen(Address("127.0.0.1", 0)), *tls)
            stack.enter_context(server)
            trainer = Trainer(mailbox, registry, server.url, operator, stack)
            stack.callback(trainer.close)
            return trainer

        yield make
