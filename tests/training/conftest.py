"""One thread: other test folders share the cores, and the last bits depend on the thread count.

And a small fleet in training: a trainer's mailbox behind real sockets, devices in threads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from edge_sdk.identity import Identity
from edge_sdk.training.client import TrainingClient
from edge_sdk.training.driver import Driver
from edge_sdk.training.link import TrainerLink
from server.registry.credentials import new_secret, secret_sha256
from server.registry.database import Registry, open_registry
from server.settings import Address
from server.training.app import Welcome, create_app
from server.training.listener import Listener
from server.training.mailbox import Hello, HttpTransport, Mailbox

PROFILE: dict[str, Any] = {
    "name": "pi",
    "arch": "aarch64",
    "cores": 4,
    "memory_total_bytes": 4_000_000_000,
    "memory_available_bytes": 3_000_000_000,
    "accelerator": None,
    "compute_score_gflops": 2.5,
    "link_latency_ms": None,
    "link_bandwidth_mbps": None,
}


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


@dataclass
class Keys:
    """What logins are checked against."""

    registry: Registry
    operator_sha256: str


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
    drivers: dict[str, Driver] = field(default_factory=dict)
    threads: list[threading.Thread] = field(default_factory=list)

    @property
    def transport(self) -> HttpTransport:
        """For an engine."""
        return HttpTransport(self.mailbox)

    def enrol(self, name: str) -> Identity:
        """A device of that name, with its credential."""
        device, credential = self.registry.redeem_token(self.registry.create_token(), name, PROFILE)
        return Identity("http://127.0.0.1:1", device.id, device.fleet, credential)

    def link(self, identity: Identity) -> TrainerLink:
        """A connection of that device."""
        link = TrainerLink(identity, self.url)
        self.stack.callback(link.close)
        return link

    def join(
        self, clients: Mapping[str, TrainingClient], *, ca: Path | None = None, **more: Any
    ) -> None:
        """Have each client trained by a driver in a thread of its own, and wait until all are
        there.
        """
        for name, client in clients.items():
            driver = Driver(client, self.link(replace(self.enrol(name), ca=ca)), **more)
            thread = threading.Thread(target=driver.run, daemon=True)
            thread.start()
            self.drivers[name] = driver
            self.threads.append(thread)
        there = self.mailbox.wait_there(len(clients), 20)
        assert there == sorted(clients)

    def close(self) -> None:
        """End the training; every device is told."""
        self.mailbox.end(5 if self.threads else 0)  # one driven by hand does not ask
        for thread in self.threads:
            thread.join(10)
            assert not thread.is_alive(), "a device does not end with the training"


@pytest.fixture
def make_trainer(tmp_path: Path) -> Iterator[Callable[..., Trainer]]:
    """Starts trainers: `make_trainer(input_shape, classes, no_reply_s=...)`; tls: certificate
    and key.
    """
    with ExitStack() as stack:
        registry = open_registry(tmp_path)
        stack.callback(registry.close)

        def make(
            input_shape: tuple[int, ...] = (1, 8, 8),
            classes: int = 10,
            *,
            no_reply_s: float = 10.0,
            fetch_s: float = 5.0,
            reply_bytes_max: int = 64_000_000,
            tls: tuple[Path | None, Path | None] = (None, None),
        ) -> Trainer:
            operator = new_secret()
            mailbox = Mailbox(fetch_s=fetch_s)
            app = create_app(
                mailbox,
                Keys(registry, secret_sha256(operator)),
                Welcome(training="test", no_reply_s=no_reply_s),
                Hello(1, input_shape, classes),
                reply_bytes_max=reply_bytes_max,
            )
            listener = stack.enter_context(Listener(app, Address("127.0.0.1", 0), *tls))
            trainer = Trainer(mailbox, registry, listener.url, operator, stack)
            stack.callback(trainer.close)
            return trainer

        yield make
