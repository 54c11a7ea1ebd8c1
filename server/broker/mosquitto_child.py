"""An installed Mosquitto as a child process of the server."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Final

from edge_sdk.errors import ConfigurationError, LinkError
from edge_sdk.wire.broker_address import BrokerAddress
from server.broker.child import ListenSettings
from server.broker.mosquitto import MosquittoAdmin
from server.broker.mosquitto_files import BACKEND, find_mosquitto, find_plugin, write_managed
from server.broker.mosquitto_log import MosquittoLog
from server.broker.policy import Principal
from server.broker.watched_child import OnEvent, WatchedChild
from server.registry.credentials import mosquitto_hash

_START_S: Final = 10.0
_ANSWER_S: Final = 4.0  # with a restart below the 10 s in which a revocation must hold
_STOP_S: Final = 3.0
_RUNNING: Final = " running"
_TAKEN: Final = "Address already in use"
_AS_ROOT: Final = "should not be run as root"  # the server itself is

logger = logging.getLogger(__name__)


class MosquittoChild(WatchedChild):
    """Runs Mosquitto on a folder of its own, and starts it again after a crash.

    Principals are kept here, and written to Mosquitto's file before each start. A running one takes
    orders over MQTT, with the clear credential: it is told of a device that is known by its hash
    alone when that device next shows its credential (`set_principal`). Every method may be called
    from any thread.

    Args:
        folder: of Mosquitto's files, which belong to this object.
        credential: password of the server's own user, `backend`. It stays the same over restarts,
            so that unchanged files need not be written again.
        on_event: called in a thread of this object with each event of `MosquittoLog`.
    Raises: ConfigurationError if Mosquitto or its plugin is missing, or on another system than
        Linux, which alone ends a child with its parent.
    """

    def __init__(
        self,
        folder: Path,
        settings: ListenSettings | None = None,
        *,
        credential: str,
        on_event: OnEvent | None = None,
    ) -> None:
        self._settings = settings or ListenSettings()
        super().__init__("Mosquitto", self._settings.port, _STOP_S, on_event)
        self._program, self._plugin = installed()
        self._folder = folder.absolute()
        self._credential = credential
        self._principals: dict[str, Principal] = {}
        self._untold: frozenset[str] = frozenset()  # replaced whole: `waiting` takes no lock
        self._admin: MosquittoAdmin | None = None

    @property
    def waiting(self) -> frozenset[str]:
        """Devices that are let in once they show their credential, or Mosquitto starts again."""
        return self._untold

    def start(self) -> None:
        """Start Mosquitto and wait until it takes orders.

        Raises: ConfigurationError if the address or a file cannot be used; LinkError if it does not
            start; StorageError if its files cannot be written.
        """
        self._port = self._port or _free_port(self._settings.host)
        if self._watch_until_up(_START_S):
            with contextlib.ExitStack() as on_failure:
                on_failure.callback(self.stop)
                with self._changed:
                    self._admin = self._new_admin()
                    self._admin.start()
                    self._changed.notify_all()
                on_failure.pop_all()
            return
        with self._changed:
            error = self._error
        self.stop()
        if _TAKEN in error:
            raise ConfigurationError(
                f"broker: cannot listen on {self._settings.host} port {self._port}: {_TAKEN};"
                " choose another port"
            )
        raise LinkError(
            f"Mosquitto did not start: {error or f'it does not listen after {_START_S:.0f} s'}"
        )

    def set_principal(self, principal: Principal, credential: str | None = None) -> None:
        """Let a device log in, in force on return if `credential` is given.

        Without it, a running Mosquitto lets the device in once it is `waiting` no more.

        Raises: ConfigurationError for a device with the name of the backend; LinkError if Mosquitto
            does not answer; then it is in force after the restart.
        """
        name = principal.client_id
        if name == BACKEND:
            raise ConfigurationError(f"principal {name}: already a backend, choose another id")
        with self._changed:
            if credential is not None and principal.mosquitto_hash is None:
                principal = replace(principal, mosquitto_hash=mosquitto_hash(credential))
            before = self._principals.get(name)
            self._principals[name] = principal
            if self._process is None:
                return  # the next process finds it in its file
            if before is not None and _same(before, principal) and name not in self._untold:
                return
            if credential is None:
                self._untold |= {name}
                return
            fleet = str(principal.fleet)
            self._order(lambda admin: admin.set_device(fleet, name, credential))
            self._untold -= {name}

    def remove_principal(self, client_id: str) -> None:
        """Cut `client_id` and refuse it from now on, in force on return.

        Raises: LinkError if Mosquitto does not come back; it is killed if it does not answer, so
            the revocation holds during and after the restart.
        """
        with self._changed:
            gone = self._principals.pop(client_id, None)
            self._untold -= {client_id}
            fleet = None if gone is None else gone.fleet
            self._order(lambda admin: admin.remove_device(client_id, fleet))

    def _order(self, order: Callable[[MosquittoAdmin], None]) -> None:
        """Give an order that the running Mosquitto must carry out. The lock is held."""
        process = self._process
        if process is None or process.poll() is not None:
            return  # the next process gets the whole table in its file
        self._changed.wait_for(lambda: self._stopping or self._admin is not None, _START_S)
        if self._stopping or self._admin is None:
            return
        try:
            self._admin.wait_connected(_ANSWER_S)
            order(self._admin)
        except (LinkError, ConfigurationError) as err:
            if self._process is not process or process.poll() is not None:
                return  # it has ended meanwhile, and the next one has the table
            logger.warning("Mosquitto pid=%d does not obey, killed: %s", process.pid, err)
            process.kill()
            is_back = self._changed.wait_for(
                lambda: self._stopping or (self._listening and self._process is not process),
                _START_S,
            )
            if not is_back:
                raise LinkError("Mosquitto does not come back; see its log above") from err

    def _launch(self) -> subprocess.Popen[str]:
        """Start Mosquitto with all devices in its file.

        The kernel ends it with the thread that starts it. That is the watcher, which stays.
        """
        config = write_managed(
            self._folder,
            replace(self._settings, port=self._port),
            credential=self._credential,
            devices=self._principals.values(),
            plugin=self._plugin,
        )
        # a session of its own: Ctrl-C ends the server, which then ends Mosquitto in order
        process = subprocess.Popen(
            self._command(config),
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        hashless = (one for one in self._principals.values() if one.mosquitto_hash is None)
        self._untold = frozenset(one.client_id for one in hashless)
        return process

    def _ask_to_end(self, process: subprocess.Popen[str] | None) -> None:
        if self._admin is not None:
            self._admin.stop()
        if process is not None:
            process.terminate()

    def _command(self, config: Path) -> list[str]:
        launcher = [sys.executable, "-P", "-m", "server.broker.die_with_parent", str(os.getpid())]
        return [*launcher, str(self._program), "-c", str(config)]

    def _follow(self, process: subprocess.Popen[str]) -> None:
        assert process.stderr is not None
        log = MosquittoLog()
        with process.stderr:
            for line in process.stderr:
                text = line.strip()
                _log(text)
                event = log.read(text)
                if event is not None:
                    self._tell(event)
                elif text.startswith("Error:"):
                    self._error = self._error or text.removeprefix("Error:").strip()
                elif text.endswith(_RUNNING):
                    self._now_listening()

    def _new_admin(self) -> MosquittoAdmin:
        settings = self._settings
        pinned = settings.certificate
        host = reached_at(settings.host)
        return MosquittoAdmin(
            BrokerAddress(host, self._port, pinned is not None),
            credential=self._credential,
            pinned=None if pinned is None else str(pinned),
            timeout_s=_ANSWER_S,
            insecure=True,  # it is this machine, by whatever name
        )


def installed() -> tuple[Path, Path]:
    """Mosquitto's program and its plugin, as a server on this machine can run them.

    Raises: ConfigurationError saying what is missing.
    """
    if not sys.platform.startswith("linux"):
        raise ConfigurationError("Mosquitto is run by the server on Linux only")
    program = find_mosquitto()
    if program is None:
        raise ConfigurationError("Mosquitto is not installed (apt install mosquitto)")
    return program, find_plugin()


def reached_at(host: str) -> str:
    """The host by which this machine reaches what listens on `host`."""
    return "127.0.0.1" if host in ("0.0.0.0", "::") else host  # noqa: S104 - compared, not bound


def _same(one: Principal, other: Principal) -> bool:
    """Whether both log in with the same credential, in the same fleet."""
    return (one.fleet, one.credential_sha256) == (other.fleet, other.credential_sha256)


def _log(line: str) -> None:
    if line.startswith("Error:"):
        level = logging.ERROR
    elif line.startswith("Warning:") and _AS_ROOT not in line:
        level = logging.WARNING
    else:
        level = logging.DEBUG
    logger.log(level, "%s", line)


def _free_port(host: str) -> int:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port
