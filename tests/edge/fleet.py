"""A real server as a process, and its devices."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from contextlib import closing, suppress
from pathlib import Path

import orjson
import psutil

from edge_sdk import api
from edge_sdk.bundles.run_update import run_update
from edge_sdk.wire.topics import PAYLOAD_BYTES
from profiles import load_reference
from server.processes import ServerProcess
from server.registry.database import open_registry
from server.tokens import create_token


class Fleet:
    """A real server as a process, and devices enrolled at it.

    Args:
        options: further options of `splitedge server run`.
    """

    def __init__(self, folder: Path, models: Path, options: Sequence[str] = ()) -> None:
        shutil.copytree(models, folder / "server" / "models")
        self.state = folder / "server"
        self._devices = folder / "devices"
        self._installed = folder / "installed"
        self._server = ServerProcess(self.state)
        free = ("--http", "127.0.0.1:0", "--mqtt", "embedded:127.0.0.1:0")
        self._server.start((*free, *options))

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
        """Kill the broker with signal 9; the server starts another one."""
        for child in psutil.Process(self.pid).children():
            with suppress(psutil.NoSuchProcess):
                if "server.broker" in child.cmdline():
                    child.kill()

    @property
    def broker_port(self) -> int:
        """Port of the broker."""
        addresses = orjson.loads((self.state / "addresses.json").read_bytes())
        return int(addresses["mqtt"].rpartition(":")[2])

    def restart(self) -> None:
        """Stop the server as a whole, and start it on the same ports."""
        self._server.stop()
        self._server.start()

    def stop(self) -> None:
        """Stop the server."""
        self._server.stop()

    def assign(self, model: str) -> None:
        """Give the devices that model; they follow its newest version."""
        with closing(open_registry(self.state)) as registry:
            registry.catalogue.assign("default", model)

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
        shutil.rmtree(state, ignore_errors=True)  # left by a first run of the same test
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
