"""The embedded broker as a child process of the server."""

from __future__ import annotations

import contextlib
import json
import logging
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from edge_sdk.errors import ConfigurationError, LinkError
from edge_sdk.wire.topics import PAYLOAD_BYTES
from server.broker.policy import Principal
from server.broker.watched_child import OnEvent, WatchedChild

_START_S: Final = 20.0
_ANSWER_S: Final = 5.0  # half of the 10 s in which a revocation must hold

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


class BrokerChild(WatchedChild):
    """Runs `python -P -m server.broker`, and starts it again after a crash.

    Principals are kept here too, so a new process has the same port, and knows all principals
    before it listens. Every method may be called from any thread.

    Args:
        on_event: called in a thread of this class with each login and refusal, as the child tells
            it (server.broker.__main__); it must not block.
    """

    def __init__(
        self, settings: ListenSettings | None = None, on_event: OnEvent | None = None
    ) -> None:
        self._settings = settings or ListenSettings()
        super().__init__("broker", self._settings.port, _ANSWER_S, on_event)
        self._principals: dict[str, Principal] = {}
        self._unusable = ""  # what the child says of its address or its files
        self._asked = 0
        self._done = 0

    def start(self) -> None:
        """Start the broker and wait until it listens.

        Raises: ConfigurationError if the address cannot be used; LinkError if it does not start.
        """
        if self._watch_until_up(_START_S):
            return
        with self._changed:
            unusable, ended = self._unusable, self._error
        self.stop()
        if unusable:
            raise ConfigurationError(unusable)
        if ended:
            raise LinkError(
                f"broker: its process did not start: {ended}; what it wrote to the log above says"
                " why. Start the server again; if that does not help, start it with `--mqtt"
                " mosquitto` or with the URL of another broker"
            )
        raise LinkError(
            f"broker: its process runs, but did not listen within {_START_S:.0f} s: this machine is"
            " too busy, or too slow. Start the server again when less runs beside it"
        )

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

    def _launch(self) -> subprocess.Popen[str]:
        """Start a child, and write all orders to it."""
        # a session of its own: Ctrl-C ends the server, and then the child's input closes
        process = self._process = subprocess.Popen(
            self._command(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        for principal in self._principals.values():
            self._write(_set(principal))
        self._write({"op": "listen", "seq": self._asked})
        return process

    def _ask_to_end(self, process: subprocess.Popen[str] | None) -> None:
        if process is not None and process.stdin is not None:
            with self._changed, contextlib.suppress(OSError):  # it may have ended already
                process.stdin.close()

    def _command(self) -> list[str]:
        command = [sys.executable, "-P", "-m", "server.broker"]
        command += ["--host", self._settings.host, "--port", str(self._port)]
        command += ["--packet-bytes", str(self._settings.packet_bytes)]
        if self._settings.certificate is not None:
            command += ["--certificate", str(self._settings.certificate)]
            command += ["--key", str(self._settings.key)]
        return command

    def _follow(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        with process.stdout:
            for line in process.stdout:
                answer = json.loads(line)
                if "event" in answer:
                    self._tell(answer)
                    continue
                with self._changed:
                    if "error" in answer:
                        self._error = self._unusable = answer["error"]
                    if "port" in answer:
                        self._port = answer["port"]
                        self._now_listening()
                    self._done = max(self._done, answer.get("done", 0))
                    self._changed.notify_all()


def _set(principal: Principal) -> dict[str, Any]:
    return {
        "op": "set",
        "client_id": principal.client_id,
        "role": principal.role,
        "fleet": principal.fleet,
        "credential_sha256": principal.credential_sha256,
    }
