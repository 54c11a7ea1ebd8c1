"""The embedded broker as a child process of the server: started, configured, watched, restarted."""

from __future__ import annotations

import contextlib
import json
import logging
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from edge_sdk.errors import ConfigurationError, LinkError
from edge_sdk.wire.topics import PAYLOAD_BYTES
from server.broker.policy import Principal

_START_S: Final = 20.0  # importing amqtt takes about 1 s on one slow core
_ANSWER_S: Final = 5.0  # half of the 10 s in which a revocation must hold
_FIRST_BACKOFF_S: Final = 0.1
_LONGEST_BACKOFF_S: Final = 5.0
_HEALTHY_S: Final = 30.0  # a run this long makes the next crash a first one

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ListenSettings:
    """The child's address and its limits.

    Attributes:
        port: 0 takes a free one, which restarts keep.
        packet_bytes: longest message.
        certificate, key: PEM files for TLS, both or none.
    """

    host: str = "127.0.0.1"
    port: int = 0
    packet_bytes: int = PAYLOAD_BYTES
    certificate: Path | None = None
    key: Path | None = None

    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.key is None):
            raise ConfigurationError("broker: TLS needs a certificate and its key, got one of them")


class BrokerChild:
    """Runs `python -P -m server.broker`, and starts it again after a crash.

    Principals are kept here too, so a new process has the same port, and knows all principals
    before it listens. Every method may be called from any thread.
    """

    def __init__(self, settings: ListenSettings | None = None) -> None:
        self._settings = settings or ListenSettings()
        self._port = self._settings.port
        self._principals: dict[str, Principal] = {}
        self._changed = threading.Condition()  # guards the fields below and the table above
        self._process: subprocess.Popen[str] | None = None
        self._listening = False
        self._stopping = False
        self._error = ""
        self._started = False
        self._asked = 0
        self._done = 0
        self._watcher = threading.Thread(target=self._watch, name="broker-child", daemon=True)

    @property
    def port(self) -> int:
        """Port on which it listens; known once started."""
        return self._port

    @property
    def alive(self) -> bool:
        """Whether the broker accepts connections now."""
        with self._changed:
            return self._listening

    @property
    def pid(self) -> int | None:
        """Process id of the child; None while none runs."""
        with self._changed:
            return self._process.pid if self._process is not None else None

    def start(self) -> None:
        """Start the broker and wait until it listens.

        Raises: ConfigurationError if the address cannot be used; LinkError if it does not start.
        """
        self._watcher.start()
        with self._changed:
            self._changed.wait_for(lambda: self._listening or self._error, _START_S)
            up, error = self._listening, self._error
            self._started = up
        if not up:
            self.stop()
            if error:
                raise ConfigurationError(error)
            raise LinkError(f"broker: not listening after {_START_S:.0f} s; see its log above")

    def set_principal(self, principal: Principal) -> None:
        """Let `principal` log in, in force on return; a change cuts its connections.

        Raises: ConfigurationError for a device with the name of a backend, or the reverse;
            LinkError if the broker does not answer; then it is in force after the restart.
        """
        with self._changed:
            before = self._principals.get(principal.client_id, principal)
            if before.role != principal.role:
                raise ConfigurationError(
                    f"principal {principal.client_id}: already a {before.role}, choose another id"
                )
            self._principals[principal.client_id] = principal
            self._order(_set(principal))

    def remove_principal(self, client_id: str) -> None:
        """Cut `client_id` and refuse it from now on, in force on return.

        Raises: LinkError if the broker does not answer; it is killed then, so the revocation holds
            during and after the restart.
        """
        with self._changed:
            self._principals.pop(client_id, None)
            self._order({"op": "remove", "client_id": client_id})

    def stop(self) -> None:
        """Stop the broker and wait until it has ended."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
            process = self._process
            if process is not None and process.stdin is not None:
                with contextlib.suppress(OSError):  # it may have ended already
                    process.stdin.close()
        if process is not None:
            try:
                process.wait(_ANSWER_S)
            except subprocess.TimeoutExpired:
                process.kill()
        if self._watcher.is_alive():
            self._watcher.join()

    def _order(self, order: dict[str, Any]) -> None:
        """Send an order and wait until it is in force. The lock is held."""
        if self._process is None:
            return  # the next process gets the whole table before it listens
        self._asked += 1
        asked = self._asked
        self._write({**order, "seq": asked})
        if not self._changed.wait_for(self._is_done(asked), _ANSWER_S):
            logger.error("broker pid=%d does not answer, killed", self._process.pid)
            self._process.kill()
            if not self._changed.wait_for(self._is_done(asked), _START_S):
                raise LinkError("broker: it does not answer; see its log above")

    def _is_done(self, asked: int) -> Any:
        return lambda: self._stopping or self._done >= asked

    def _write(self, order: dict[str, Any]) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        # if it died between two lines, the watcher starts another one with the whole table
        with contextlib.suppress(OSError, ValueError):
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()

    def _watch(self) -> None:
        """Start the child, read its answers until it ends, start it again."""
        backoff_s = _FIRST_BACKOFF_S
        while True:
            began = time.monotonic()
            process = self._spawn()
            if process is None:
                return
            self._listen_to(process)
            process.wait()
            with self._changed:
                self._process = None
                self._listening = False
                self._changed.notify_all()
                if self._stopping:
                    return
            if time.monotonic() - began > _HEALTHY_S:
                backoff_s = _FIRST_BACKOFF_S
            logger.error("broker ended with %s, next in %.1f s", process.returncode, backoff_s)
            with self._changed:
                self._changed.wait_for(lambda: self._stopping, backoff_s)
            backoff_s = min(2 * backoff_s, _LONGEST_BACKOFF_S)

    def _spawn(self) -> subprocess.Popen[str] | None:
        """A new child with all orders written to it; None when stopping."""
        with self._changed:
            if self._stopping:
                return None
            # a session of its own: Ctrl-C ends the server, and then the child's input closes
            self._process = subprocess.Popen(
                self._command(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
            for principal in self._principals.values():
                self._write(_set(principal))
            self._write({"op": "listen", "seq": self._asked})
            return self._process

    def _command(self) -> list[str]:
        command = [sys.executable, "-P", "-m", "server.broker"]
        command += ["--host", self._settings.host, "--port", str(self._port)]
        command += ["--packet-bytes", str(self._settings.packet_bytes)]
        if self._settings.certificate is not None:
            command += ["--certificate", str(self._settings.certificate)]
            command += ["--key", str(self._settings.key)]
        return command

    def _listen_to(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        with process.stdout:
            for line in process.stdout:
                answer = json.loads(line)
                with self._changed:
                    if "port" in answer:
                        self._port = answer["port"]
                        self._listening = True
                    self._error = answer.get("error", "")
                    self._done = max(self._done, answer.get("done", 0))
                    self._changed.notify_all()
                if self._error and self._started:  # `start` raises it
                    logger.error("%s", self._error)


def _set(principal: Principal) -> dict[str, Any]:
    return {
        "op": "set",
        "client_id": principal.client_id,
        "role": principal.role,
        "fleet": principal.fleet,
        "credential_sha256": principal.credential_sha256,
    }
